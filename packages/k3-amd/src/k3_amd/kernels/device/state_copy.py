"""Copies of whole cache rows: gather with zeros for what is not there, scatter that skips it. Sixteen bytes a lane."""

# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["slots", "index_stride", "init_stride"],
    do_not_specialize_on_alignment=["index_ptr", "init_ptr"],
)
def state_gather_kernel(
    cache_ptr, index_ptr, init_ptr, out_ptr, slots, payload, cache_stride, index_stride, init_stride,
    HAS_INIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a payload, rows)."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + row * index_stride).to(tl.int64)
    keep = (index >= 0) & (index < slots)
    if HAS_INIT:
        keep = keep & (tl.load(init_ptr + row * init_stride).to(tl.int32) != 0)
    value = tl.load(cache_ptr + index * cache_stride + at, mask=at < tl.where(keep, payload, 0), other=0.0)
    tl.store(out_ptr + row * payload + at, value, mask=at < payload)


@triton.jit(do_not_specialize=["slots", "index_stride"], do_not_specialize_on_alignment=["index_ptr"])
def state_scatter_kernel(
    cache_ptr, index_ptr, packed_ptr, slots, payload, cache_stride, index_stride, BLOCK: tl.constexpr
):
    """Grid (blocks of a payload, rows)."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + row * index_stride).to(tl.int64)
    if (index >= 0) & (index < slots):
        value = tl.load(packed_ptr + row * payload + at, mask=at < payload)
        tl.store(cache_ptr + index * cache_stride + at, value, mask=at < payload)
