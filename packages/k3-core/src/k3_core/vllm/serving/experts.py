"""Where the routed experts of one layer and rank live, in the layout of the implementation that computes with them.

Storage is allocated once, in its final layout, and filled expert by expert while the checkpoint streams by: no second
copy of a layer's experts exists at any time. A few experts wait in host memory for their copy to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from k3_core.contracts.mxfp4 import GROUP_SIZE
from k3_core.operators import ExpertWeights

#: What one expert has in the checkpoint, by (matrix, kind).
PACKED = tuple((matrix, kind) for matrix in ("w1", "w2", "w3") for kind in ("weight_packed", "weight_scale"))
PLAIN = tuple((matrix, "weight") for matrix in ("w1", "w2", "w3"))


class Store(Protocol):
    """Storage of ``count`` experts.

    A store that takes an expert in another form than the released ones says so in ``expected``, like ``PACKED``.
    """

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """Take one expert: (matrix, kind) -> this rank's part of the tensor."""

    def weights(self) -> Any:
        """The object that the implementation's launcher takes."""

    def tensors(self) -> dict[str, Tensor]:
        """All storage by name."""


class ReleasedStore:
    """The released layout, gate rows (w1) before up rows (w3): for the contracts, and for plain weights."""

    def __init__(self, count: int, width: int, latent: int, quantised: bool) -> None:
        dtype = torch.uint8 if quantised else torch.get_default_dtype()
        codes = 2 if quantised else 1
        # Zeros: with --load-format dummy nothing is put here, and other bytes may mean NaN.
        self.width = width
        self._weights = ExpertWeights(
            w13=torch.zeros(count, 2 * width, latent // codes, dtype=dtype),
            w13_scale=torch.zeros(count, 2 * width, latent // GROUP_SIZE, dtype=dtype) if quantised else None,
            w2=torch.zeros(count, latent, width // codes, dtype=dtype),
            w2_scale=torch.zeros(count, latent, width // GROUP_SIZE, dtype=dtype) if quantised else None,
        )

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """Copy one expert into its place."""
        for (matrix, kind), part in parts.items():
            scale = kind == "weight_scale"
            if matrix == "w2":
                stack = self._weights.w2_scale if scale else self._weights.w2
                assert stack is not None
                stack[index].copy_(part)
                continue
            stack = self._weights.w13_scale if scale else self._weights.w13
            assert stack is not None
            rows = stack[index, : self.width] if matrix == "w1" else stack[index, self.width :]
            rows.copy_(part)

    def weights(self) -> ExpertWeights:
        """The weights as they are."""
        return self._weights

    def tensors(self) -> dict[str, Tensor]:
        """Weights and, where there are any, scales."""
        return {name: tensor for name, tensor in self._weights._asdict().items() if tensor is not None}


class Staging:
    """A ring of pinned host memory that experts pass on their way to a device.

    Copies from it are queued: the host waits for the device only when it has come around the ring, not at every one of
    an expert's six tensors. slot: bytes of the largest expert; a larger one makes the ring anew.
    """

    #: Of a ring: as many slots as these bytes hold, within these bounds (an expert of one TP16 rank has 1.4 MB, a whole
    #: one 17.5).
    BYTES, FEWEST, MOST = 64 << 20, 2, 32
    ALIGNMENT = 256

    def __init__(self, slot: int = 0, *, pinned: bool = True, event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._pinned, self._event = pinned, event
        self._make(slot)

    def _make(self, slot: int) -> None:
        self._slot = slot
        self.slots = min(max(self.BYTES // max(slot, 1), self.FEWEST), self.MOST)
        # Not the default device, which may be the accelerator while a model is made.
        self._memory = torch.empty(self.slots, slot, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        self._events: list[Any] = [None] * self.slots
        self._next = 0

    def hold(self, parts: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        """The same bytes (uint8 tensors) in the next slot, which must be free: waits for what was copied from it."""
        starts, end = {}, 0
        for key, part in parts.items():
            starts[key] = end
            end += -(-part.numel() // self.ALIGNMENT) * self.ALIGNMENT
        if end > self._slot:
            self.wait()
            self._make(end)
        if self._events[self._next] is not None:
            self._events[self._next].synchronize()
        row = self._memory[self._next]
        held = {key: row[starts[key] :][: part.numel()].view(part.shape) for key, part in parts.items()}
        for key, part in parts.items():
            held[key].copy_(part)
        return held

    def sent(self) -> None:
        """All copies from the slot last held are queued on the current stream."""
        event = self._event()
        event.record()
        self._events[self._next] = event
        self._next = (self._next + 1) % self.slots

    def wait(self) -> None:
        """Until nothing is copied from here any more."""
        for event in self._events:
            if event is not None:
                event.synchronize()


_staging: list[Staging] = []


def release_staging() -> None:
    """Give the pinned memory back: loading is over."""
    while _staging:
        _staging.pop().wait()


class RearrangedStore:
    """MXFP4 codes in the layout of a wheel's kernels, packed as they come; padding is part of the layout.

    experts: the wheel's storage, with codes w13, w2 and scales s13, s2. pack(experts, index, gate, up, down) writes one
    expert there, each matrix as (packed, scale) in host memory, which it may still be copying when it returns.
    """

    def __init__(self, experts: Any, pack: Callable[..., None]) -> None:
        self._experts, self._pack = experts, pack

    def put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        """Re-arrange one expert into its place."""
        if self._experts.w13.device.type != "cuda":
            self._put(index, parts)
            return
        if not _staging:
            _staging.append(Staging())
        self._put(index, _staging[0].hold(parts))
        _staging[0].sent()

    def _put(self, index: int, parts: dict[tuple[str, str], Tensor]) -> None:
        matrices = [(parts[name, "weight_packed"], parts[name, "weight_scale"]) for name in ("w1", "w3", "w2")]
        self._pack(self._experts, index, *matrices)

    def weights(self) -> Any:
        """The experts as the kernels take them."""
        return self._experts

    def tensors(self) -> dict[str, Tensor]:
        """Codes and scales."""
        e = self._experts
        return {"w13": e.w13, "s13": e.s13, "w2": e.w2, "s2": e.s2}

    def variant_key(self) -> Hashable:
        """Everything of the wheel's storage that is no tensor: sizes, form, whether scales are wide."""
        values = vars(self._experts).items()
        return tuple((name, value) for name, value in values if not isinstance(value, Tensor))


class RoutedExperts(nn.Module):
    """The routed experts of one rank, and which global ids they have.

    Storage is kept as non-persistent buffers: vLLM accounts for it and moves it with the module, and ``--load-format
    dummy`` does not fill codes and scales with arbitrary bytes (which may mean NaN).
    """

    def __init__(self, store: Store, ids: range, quantised: bool) -> None:
        super().__init__()
        self.ids, self.quantised, self.store = ids, quantised, store
        self.expected: int = len(getattr(store, "expected", PACKED if quantised else PLAIN))
        for name, tensor in self.store.tensors().items():
            self.register_buffer(name, tensor, persistent=False)
        self._pending: dict[int, dict[tuple[str, str], Tensor]] = {}
        self._missing = set(ids)

    def put(self, expert: int, matrix: str, kind: str, part: Tensor) -> None:
        """Take one tensor of a global expert id; the expert is stored when its last tensor has come."""
        parts = self._pending.setdefault(expert, {})
        # A copy, as the checkpoint's mapping may go away before the expert is complete. Files keep experts together.
        parts[matrix, kind] = part.clone()
        if len(parts) == self.expected:
            self.store.put(expert - self.ids.start, self._pending.pop(expert))
            self._missing.discard(expert)

    def missing(self) -> list[int]:
        """Global ids of experts that are not complete."""
        return sorted(self._missing)

    def weights(self) -> Any:
        """The object that the implementation's launcher takes."""
        return self.store.weights()

    def variant_key(self) -> Hashable:
        """What the kernels are compiled for and no tensor's shape tells: how the store says it, if it does."""
        key: Hashable = self.store.variant_key() if isinstance(self.store, RearrangedStore) else ()
        return key
