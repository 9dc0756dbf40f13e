"""What a plan is chosen from: the device generation and the layout of a recurrent cache, nothing else.

A recurrent cache is a 4-D tensor [N, H, V, K]: N pages (slots), each holding one payload [H, V, K]. Pages lie in vLLM's
own allocation, so stride(0) is the page and usually exceeds the payload (the convolution state lies in the gap).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from k3_ascend.generation import of_number
from k3_core.errors import UnsupportedError

#: Bytes of the alignment class that compilers specialise on.
ALIGNMENT = 16
#: Element types of the fused plan.
FUSED_DTYPES = (torch.float32, torch.bfloat16)
#: Integer of each element size in bytes, to move elements as bits.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PlanKind(StrEnum):
    """Which plan copies the states of a layer."""

    FUSED = "fused"
    BYTES = "byte-copy"


class Choice(NamedTuple):
    """A plan and the sentence that says why."""

    kind: PlanKind
    reason: str


@dataclass(frozen=True)
class Layout:
    """The layout signature of a cache: what compiled variants depend on, and what serving compares.

    device: "npu:0". shape, stride: of the 4-D cache, in elements. alignment: data_ptr modulo 16.
    """

    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    alignment: int

    @classmethod
    def of(cls, cache: Tensor) -> Layout:
        """The signature of a live cache; reads metadata and the address, launches nothing."""
        return cls(str(cache.device), cache.dtype, tuple(cache.shape), cache.stride(), cache.data_ptr() % ALIGNMENT)

    @property
    def payload(self) -> int:
        """Elements of one page's payload."""
        return self.shape[1] * self.shape[2] * self.shape[3]

    @property
    def dense(self) -> bool:
        """Whether the payload is one run of memory."""
        return dense_payload(self.shape, self.stride)

    def describe(self) -> str:
        """For messages: ``[5, 12, 128, 128] torch.float32 on npu:0, strides (..), address 0 mod 16``."""
        return (
            f"{list(self.shape)} {self.dtype} on {self.device}, strides {self.stride}, "
            f"address {self.alignment} mod {ALIGNMENT}"
        )


def dense_payload(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether [H, V, K] is dense: from the last axis backwards size 1, or the stride equals the payload so far."""
    payload = 1
    for size, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        if size != 1 and step != payload:
            return False
        payload = payload * size
    return True


def illegal(layout: Layout) -> str | None:
    """Why no plan can serve this layout, or None.

    Legal is: 4-D, at least one page and a payload, elements of 1, 2, 4 or 8 bytes, and no element at two positions
    (strides in ascending order each exceed the extent of the smaller ones; a sufficient condition, which every
    permuted, padded or sliced dense tensor meets).
    """
    if len(layout.shape) != 4:
        return f"the state must be 4-D [N, H, V, K], got {list(layout.shape)} (is the cache bound?)"
    if min(layout.shape) < 1:
        return f"the cache is empty: {list(layout.shape)} (is it bound?)"
    if layout.dtype.itemsize not in WORDS:
        return f"elements of {layout.dtype.itemsize} bytes ({layout.dtype}) are not copied"
    extent = 1
    axes = sorted((step, size) for size, step in zip(layout.shape, layout.stride, strict=True) if size > 1)
    for step, size in axes:
        if step < extent:
            return f"strides {layout.stride} of {list(layout.shape)} overlap: pages or payload elements share memory"
        extent += (size - 1) * step
    return None


def choose(layout: Layout, generation: str) -> Choice:
    """The plan of a layout on a device generation ("A2", "A3", "950", or another device's name).

    Raises ValueError where neither plan can serve it (see :func:`illegal`).
    """
    if (problem := illegal(layout)) is not None:
        raise ValueError(problem)
    if generation != "950":
        return Choice(PlanKind.BYTES, f"the fused plan is for Ascend 950 only, this is {generation}")
    if layout.dtype not in FUSED_DTYPES:
        return Choice(PlanKind.BYTES, f"the fused plan copies float32 and bfloat16, the cache is {layout.dtype}")
    if not layout.dense:
        return Choice(PlanKind.BYTES, f"the payload is not dense: strides {layout.stride} of {list(layout.shape)}")
    if layout.stride[0] < layout.payload:
        return Choice(PlanKind.BYTES, f"the page ({layout.stride[0]}) is smaller than the payload ({layout.payload})")
    return Choice(PlanKind.FUSED, "Ascend 950, dense payload, pages apart")


def generation(device: torch.device) -> str:
    """ "A2", "A3" or "950" of an NPU, "soc<n>" of one not known here; the device type of anything else."""
    if device.type != "npu":
        return device.type
    import torch_npu

    number = int(torch_npu.npu.get_soc_version())
    try:
        return of_number(number).value
    except UnsupportedError:
        return f"soc{number}"


def check_metadata(cache: Tensor, indices: Tensor) -> None:
    """What every copy requires of a cache and its indices, by metadata alone (symbolic sizes welcome).

    Raises RuntimeError: the cache is not 4-D, has no page, or its pages overlap; the indices are not 1-D int32 or int64
    on the cache's device.
    """
    torch._check(cache.dim() == 4, lambda: f"the state cache must be 4-D [N, H, V, K], got {cache.dim()}-D")
    torch._check(cache.shape[0] > 0, lambda: "the state cache has no page")
    torch._check(
        indices.dim() == 1 and indices.dtype in (torch.int32, torch.int64),
        lambda: f"state indices must be 1-D int32 or int64, got {indices.dim()}-D {indices.dtype}",
    )
    torch._check(
        indices.device == cache.device,
        lambda: f"state indices are on {indices.device}, the cache is on {cache.device}",
    )


def check_dense(cache: Tensor) -> None:
    """What the traced operators require beyond that: a dense payload and pages that don't overlap (RuntimeError)."""
    torch._check(
        dense_payload(cache.shape, cache.stride()),
        lambda: f"the payload of the state cache is not dense: strides {cache.stride()}",
    )
    payload = cache.shape[1] * cache.shape[2] * cache.shape[3]
    torch._check(
        cache.stride(0) >= payload,
        lambda: f"pages of the state cache overlap: stride {cache.stride(0)}, payload {payload}",
    )


def check_packed(cache: Tensor, indices: Tensor, packed: Tensor) -> None:
    """What a packed tensor must be: [R, H, V, K], dtype and device of the cache, contiguous (RuntimeError)."""
    torch._check(
        packed.dim() == 4 and tuple(packed.shape[1:]) == tuple(cache.shape[1:]),
        lambda: f"packed states are {tuple(packed.shape)}, the cache is {tuple(cache.shape)}",
    )
    torch._check(
        packed.shape[0] == indices.shape[0],
        lambda: f"{packed.shape[0]} packed rows for {indices.shape[0]} indices",
    )
    torch._check(
        packed.dtype == cache.dtype and packed.device == cache.device,
        lambda: f"packed states are {packed.dtype} on {packed.device}, the cache is {cache.dtype} on {cache.device}",
    )
    torch._check(packed.is_contiguous(), lambda: f"packed states must be contiguous, strides {packed.stride()}")


def check_flags(indices: Tensor, flags: Tensor | None) -> None:
    """What initial-state flags must be: None, or bool [R] on the device of the indices (RuntimeError)."""
    if flags is None:
        return
    torch._check(
        flags.dim() == 1 and flags.dtype == torch.bool and flags.device == indices.device,
        lambda: (
            f"has_initial_state must be 1-D bool on {indices.device}, got {flags.dim()}-D {flags.dtype} on "
            f"{flags.device}"
        ),
    )
    torch._check(
        flags.shape[0] == indices.shape[0],
        lambda: f"{flags.shape[0]} initial-state flags for {indices.shape[0]} indices",
    )
