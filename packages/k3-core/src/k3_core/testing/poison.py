"""Memory that shows who touched it.

An :class:`Arena` puts every tensor of a call into one allocation, with guard bands between them and gaps between padded
rows and cache pages, all filled with bytes 0xFF: NaN in every floating type, -1 in every integer, 255 (NaN) as an e8m0
scale. After the call every byte that the operator had no business with must be what it was. :func:`poisoned_empty` does
the same for memory that the operator allocates itself. (NaN in fresh memory is flash-linear-attention's test idea.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ALIGN = 256
_MIN_GUARD = 1024
_MAX_GUARD = 1 << 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: equality of bits, NaN included."""
    return x.view(_BITS[x.element_size()])


@dataclass
class _Block:
    name: str
    value: Tensor
    stride: tuple[int, ...]
    begin: int = 0
    end: int = 0


@dataclass
class Arena:
    """Tensors of one call in one poisoned allocation.

    add() all of them, build() once, then views[name]; violations() after a call; reset() restores every byte.
    """

    device: torch.device
    _blocks: list[_Block] = field(default_factory=list)
    views: dict[str, Tensor] = field(default_factory=dict)
    _buffer: Tensor = field(init=False)
    _before: Tensor = field(init=False)

    def add(self, name: str, value: Tensor, stride: Sequence[int] | None = None) -> None:
        """Registers a tensor; stride in elements, contiguous if None. The value is copied at build()."""
        dense = torch.empty(value.shape, device="meta").stride()
        self._blocks.append(_Block(name, value, tuple(dense if stride is None else stride)))

    def build(self) -> None:
        """Allocates, poisons, fills in the values and remembers every byte."""
        cursor = _MAX_GUARD if self._blocks else _MIN_GUARD
        for b in self._blocks:
            size = b.value.element_size()
            row = b.stride[0] * size if b.stride else size
            extent = 1 + sum((n - 1) * s for n, s in zip(b.value.shape, b.stride, strict=True))
            b.begin = -(-cursor // _ALIGN) * _ALIGN
            b.end = b.begin + (extent * size if b.value.numel() else 0)
            cursor = b.end + min(max(row, _MIN_GUARD), _MAX_GUARD)
        self._buffer = torch.full((-(-cursor // _ALIGN) * _ALIGN,), 0xFF, dtype=torch.uint8, device=self.device)
        for b in self._blocks:
            if b.value.numel():
                self.views[b.name] = self._view(self._buffer, b)
                self.views[b.name].copy_(b.value)
            else:
                self.views[b.name] = b.value.to(self.device)
        self._before = self._buffer.clone()

    @staticmethod
    def _view(buffer: Tensor, b: _Block) -> Tensor:
        elements = buffer.view(b.value.dtype)
        return elements.as_strided(b.value.shape, b.stride, b.begin // b.value.element_size())

    def reset(self) -> None:
        """Every byte as after build()."""
        self._buffer.copy_(self._before)

    def snapshot(self) -> Tensor:
        """A copy of all bytes, to compare repeated runs."""
        return self._buffer.clone()

    def violations(self, allowed: Mapping[str, Tensor | bool]) -> list[str]:
        """What changed and had not to: one sentence a tensor or guard band.

        allowed: per tensor a mask (broadcast to its shape) of elements that may change, or True for all of them.
        """
        restored = self._buffer.clone()
        for b in self._blocks:
            mask = allowed.get(b.name, False)
            if mask is False or not b.value.numel():
                continue
            new, old = bits(self._view(restored, b)), bits(self._view(self._before, b))
            keep = torch.ones((), dtype=torch.bool) if mask is True else mask
            new.copy_(torch.where(torch.as_tensor(keep, device=self.device).expand(new.shape), old, new))
        changed = (restored != self._before).nonzero().flatten()
        return self._describe(changed) if len(changed) else []

    def _describe(self, changed: Tensor) -> list[str]:
        """One sentence for the first byte of each place, at most one a tensor."""
        found: dict[str, str] = {}
        for byte in changed[:4096].tolist():
            where = self._where(byte)
            found.setdefault(where.split("[")[0], f"wrote into {where} (arena byte {byte})")
        return [f"{text}; {len(changed)} bytes in all" for text in found.values()]

    def _where(self, byte: int) -> str:
        previous = "the start"
        for b in self._blocks:
            if byte < b.begin:
                return f"the guard band between {previous} and {b.name}"
            if byte < b.end:
                return self._element(b, (byte - b.begin) // b.value.element_size())
            previous = b.name
        return f"the guard band behind {previous}"

    @staticmethod
    def _element(b: _Block, offset: int) -> str:
        """The element at an offset, or the gap it lies in; axes in order of falling stride."""
        index = [0] * len(b.stride)
        for axis in sorted(range(len(b.stride)), key=lambda a: -b.stride[a]):
            index[axis], offset = divmod(offset, b.stride[axis]) if b.stride[axis] else (0, offset)
        inside = offset == 0 and all(i < n for i, n in zip(index, b.value.shape, strict=True))
        return f"{b.name}{index}, which must not change" if inside else f"the padding of {b.name} near {index}"


def _poison(x: Any) -> Any:
    fillable = isinstance(x, Tensor) and x.numel() and x.layout == torch.strided and x.device.type != "meta"
    if fillable and x.element_size() in _BITS:
        bits(x).fill_(255 if x.element_size() == 1 else -1)
    return x


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """torch.empty and its relatives give NaN (integers -1 or 255) while this is active; Python callers only."""

    def wrapped(function: Any) -> Any:
        return lambda *args, **kwargs: _poison(function(*args, **kwargs))

    owners: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")]
    owners += [(Tensor, "new_empty"), (Tensor, "new_empty_strided")]
    saved = [(owner, name, getattr(owner, name), name in owner.__dict__) for owner, name in owners]
    try:
        for owner, name in owners:
            setattr(owner, name, wrapped(getattr(owner, name)))
        yield
    finally:
        for owner, name, original, own in saved:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
