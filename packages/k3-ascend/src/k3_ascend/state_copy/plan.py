"""The published plan of one layer: gather initial states, scatter final states.

Serving is a fail-closed look-up: a sealed table of compiled variants that belongs to exactly one layout. What does not
fit is refused before launch with a RuntimeError that names the layer, never served by a slower path. A plan keeps no
tensor, no stream and no address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from k3_ascend.state_copy import layout as _layout
from k3_ascend.state_copy.compiler import Direction, Launch
from k3_ascend.state_copy.layout import ALIGNMENT, Layout, PlanKind


@dataclass
class Table:
    """Compiled variants of one (plan kind, layout), shared by the layers that have it.

    sealed: set once, after every check of the start-up; nothing is launched before.
    """

    kind: PlanKind
    layout: Layout
    max_rows: int
    launches: Mapping[tuple[Direction, torch.dtype], Launch] = field(repr=False)
    sealed: bool = False


class StateCopyLayer:
    """Mixin of a KDA layer whose recurrent cache a plan serves.

    vLLM binds ``kv_cache`` (convolution state, recurrent state); the worker's start-up sets ``state_copy``.
    """

    kv_cache: Any
    state_copy: StateCopy | None = None

    def recurrent_cache(self) -> Tensor:
        """The bound recurrent cache [N, H, V, K]. RuntimeError if vLLM has not bound it."""
        bound = self.kv_cache
        if not isinstance(bound, (tuple, list)) or len(bound) != 2:
            what = f"{type(bound).__name__} of {len(bound)}" if isinstance(bound, (tuple, list)) else type(bound)
            raise RuntimeError(f"the KV cache is not bound: expected (convolution, recurrent) states, found {what}")
        recurrent: Tensor = bound[1]
        return recurrent


def of(layer: StateCopyLayer) -> StateCopy:
    """The layer's published plan. RuntimeError before the start-up has published one."""
    if layer.state_copy is None:
        name = getattr(layer, "prefix", "") or type(layer).__name__
        raise RuntimeError(
            f"{name}: no state copy was published; the worker's initialize_kv_cache must run (with "
            "k3_ascend.state_copy.install() called before it) before a prefill"
        )
    return layer.state_copy


def without_null(slots: Tensor) -> Tensor:
    """Slots with vLLM's null block (0) and padding (< 0) as -1, dtype kept: row 0 is ordinary to the operators."""
    return torch.where(slots > 0, slots, -1)


class StateCopy:
    """What one layer serves with: its name and the table of its layout.

    gather and scatter launch directly; under tracing (Dynamo, FakeTensor, a dispatch mode) they emit the opaque
    operators of :mod:`k3_ascend.state_copy.ops` instead, which come back here at run time.
    """

    __slots__ = ("__weakref__", "layer_name", "table")

    def __init__(self, layer_name: str, table: Table) -> None:
        self.layer_name = layer_name
        self.table = table

    def gather(
        self, cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Initial states [R, H, V, K] of the rows ``indices`` selects.

        cache: the bound recurrent cache [N, H, V, K] itself. indices: int32 or int64 [R], any stride; a negative one or
        one >= N gives zeros, repeats are legal. has_initial_state: bool [R], false gives zeros whatever the page holds;
        None: all true. out: where to write, contiguous and 16-byte aligned; None allocates. Raises RuntimeError where
        the plan does not fit.
        """
        if _traced(cache):
            packed: Tensor = torch.ops.k3_ascend.kda_state_gather(cache, indices, has_initial_state, self.layer_name)
            return packed if out is None else out.copy_(packed)
        return self.launch_gather(cache, indices, has_initial_state, out)

    def scatter(self, cache: Tensor, indices: Tensor, packed: Tensor) -> None:
        """Write packed states [R, H, V, K] (dtype of the cache, contiguous) to the pages that ``indices`` selects.

        Negative indices and those >= N are skipped; the others must be unique (not checked: that would need the
        device's answer). Gaps between pages keep their bits. Raises RuntimeError where the plan does not fit.
        """
        if _traced(cache):
            torch.ops.k3_ascend.kda_state_scatter(cache, indices, packed, self.layer_name)
        else:
            self.launch_scatter(cache, indices, packed)

    def store(self, cache: Tensor, indices: Tensor, states: Tensor) -> None:
        """scatter of final states of any dtype and stride: converted to the cache's dtype, made contiguous first."""
        self.scatter(cache, indices, states.to(cache.dtype).contiguous())

    def launch_gather(self, cache: Tensor, indices: Tensor, flags: Tensor | None, out: Tensor | None = None) -> Tensor:
        """gather without asking whether somebody traces."""
        _layout.check_flags(indices, flags)
        launch = self._launch(Direction.GATHER, cache, indices)
        rows = indices.shape[0]
        packed = out
        if packed is None:
            packed = torch.empty((rows, *self.table.layout.shape[1:]), dtype=cache.dtype, device=cache.device)
        self._check_packed(cache, indices, packed)
        if rows == 0:
            return packed
        if self.table.kind is PlanKind.BYTES:
            packed.zero_()
        flags = torch.ones(rows, dtype=torch.bool, device=cache.device) if flags is None else _staged(flags)
        launch(cache, _staged(indices), flags, packed)
        return packed

    def launch_scatter(self, cache: Tensor, indices: Tensor, packed: Tensor) -> None:
        """scatter without asking whether somebody traces."""
        launch = self._launch(Direction.SCATTER, cache, indices)
        self._check_packed(cache, indices, packed)
        if indices.shape[0]:
            launch(cache, _staged(indices), None, packed)

    def _launch(self, direction: Direction, cache: Tensor, indices: Tensor) -> Launch:
        """The compiled variant, after everything that can be refused by metadata of cache and indices."""
        table = self.table
        if not table.sealed:
            raise self._refusal("its plan is not sealed")
        _layout.check_metadata(cache, indices)
        found = Layout.of(cache)
        if found != table.layout:
            raise self._refusal(
                f"the cache is {found.describe()}, the plan was prepared for {table.layout.describe()}; pass the bound "
                "cache itself"
            )
        if indices.shape[0] > table.max_rows:
            raise self._refusal(f"{indices.shape[0]} rows, but max_num_seqs is {table.max_rows}")
        launch = table.launches[direction, indices.dtype]
        if (hook := launch.hooked()) is not None:
            raise self._refusal(f"{hook} after the plan was sealed")
        return launch

    def _check_packed(self, cache: Tensor, indices: Tensor, packed: Tensor) -> None:
        _layout.check_packed(cache, indices, packed)
        if packed.data_ptr() % ALIGNMENT:
            raise self._refusal(f"packed states must be aligned to {ALIGNMENT} bytes")
        if packed.numel() and _overlap(cache, packed):
            raise self._refusal("packed states lie inside the cache's address range; they must be memory of their own")

    def _refusal(self, reason: str) -> RuntimeError:
        return RuntimeError(f"state copy of layer {self.layer_name} refused: {reason}")


def _traced(tensor: Tensor) -> bool:
    """Whether something other than plain eager execution looks at the calls on this tensor."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or torch._C._len_torch_dispatch_stack() > 0


def _staged(metadata: Tensor) -> Tensor:
    """Metadata as the kernels take it: contiguous and aligned; copied (dtype kept) only where it is not."""
    if metadata.is_contiguous() and metadata.data_ptr() % ALIGNMENT == 0:
        return metadata
    return metadata.clone(memory_format=torch.contiguous_format)


def _overlap(cache: Tensor, packed: Tensor) -> bool:
    """Whether the packed range meets the range from the cache's first to its last element (gaps count as inside)."""
    last = sum((size - 1) * step for size, step in zip(cache.shape, cache.stride(), strict=True))
    begin, end = cache.data_ptr(), cache.data_ptr() + (last + 1) * cache.element_size()
    start = packed.data_ptr()
    return start < end and begin < start + packed.numel() * packed.element_size()
