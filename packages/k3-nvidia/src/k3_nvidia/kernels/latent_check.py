"""Pages of the latent cache, read once more for values that are not finite: one launch a latent attention layer.

``check`` reads every row that the attention of a step reads from earlier steps, [context, R + S] of each request, and
marks the last row of a request that has NaN or infinity there (as ``glue.low_rank_norms`` marks new rows). Nothing less
is sound: what reads a part of the pages misses damage elsewhere in them, and the result of FlashAttention 3 does not
tell (its splits with NaN have no weight, in the log-sum-exp neither). So it costs the bytes of the attention again,
context x width x item size a layer, and is off unless ``K3_CHECK_LATENT=1``.

Compared are exponents: all ones in bf16, fp16, fp32 and e5m2 are NaN or infinity; e4m3 has one NaN, all seven bits.
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="assignment"
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from k3_core.operators.triton_host import Launcher

#: dtype of the cache -> (integers of the same size, the bits that are all set where a value is not finite).
EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7C),
}
#: Programs that the requests of a step share: enough to fill any device, and few rows in flight for each.
PROGRAMS = 512
ROWS, COLUMNS = 32, 64


@triton.jit(do_not_specialize=["size", "width", "stride_mark", "stride_table"])
def latent_check_kernel(
    mark_ptr, pages_ptr, table_ptr, lengths_ptr, bounds_ptr, size, width, stride_mark, stride_table, stride_page,
    stride_row,
    MASK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program (request, part): every num_programs(1)-th block of BR rows; TILES of BC columns cover the width."""
    request = tl.program_id(0).to(tl.int64)
    first, end = tl.load(bounds_ptr + request), tl.load(bounds_ptr + request + 1)
    if end > first:
        context = tl.load(lengths_ptr + request) - (end - first)
        bad = tl.zeros((BR, BC), tl.int32)
        for begin in range(tl.program_id(1) * BR, context, tl.num_programs(1) * BR):
            t = begin + tl.arange(0, BR)
            page = tl.load(table_ptr + request * stride_table + t // size, mask=t < context, other=0).to(tl.int64)
            row = page * stride_page + (t % size).to(tl.int64) * stride_row
            for tile in tl.static_range(TILES):
                c = tile * BC + tl.arange(0, BC)
                there = (t < context)[:, None] & (c < width)[None, :]
                bits = tl.load(pages_ptr + row[:, None] + c[None, :], mask=there, other=0).to(tl.int32)
                bad |= tl.where((bits & MASK) == MASK, 1, 0)
        if tl.max(tl.max(bad, 1), 0) > 0:
            tl.store(mark_ptr + (end.to(tl.int64) - 1) * stride_mark, float("nan"))


_check = Launcher(latent_check_kernel)


def check(
    marks: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, bounds: torch.Tensor
) -> None:
    """NaN in the first column of marks [T, >= 1] of the last row of each request whose cached rows are not finite.

    pages [blocks, tokens, width] of a dtype of EXPONENTS, contiguous rows; table int32 [B, >= blocks of a request];
    lengths int32 [B]: tokens of the sequence after this step; bounds int32 [B + 1]: the request's rows of this step,
    which are not looked at (they are written later). Requests without rows are passed over. Raises ValueError.
    """
    rows = lengths.shape[0]
    known = EXPONENTS.get(pages.dtype)
    if known is None or pages.dim() != 3 or pages.stride(2) != 1:
        raise ValueError(f"latent_check: pages {pages.dtype} {tuple(pages.shape)} with strides {pages.stride()}")
    if table.shape[0] < rows or bounds.shape[0] <= rows or table.stride(1) != 1 or marks.dim() != 2:
        raise ValueError(
            f"latent_check: table {tuple(table.shape)} and bounds {tuple(bounds.shape)} for {rows} requests"
        )
    if any(x.dtype != torch.int32 for x in (table, lengths, bounds)):
        raise ValueError(f"latent_check: {table.dtype}, {lengths.dtype} and {bounds.dtype} are not all int32")
    if rows:
        integers, mask = known
        _check(
            (rows, max(1, min(64, PROGRAMS // rows))), marks, pages.view(integers), table, lengths, bounds,
            pages.shape[1], pages.shape[2], marks.stride(0), table.stride(0), pages.stride(0), pages.stride(1),
            MASK=mask, BR=ROWS, BC=COLUMNS, TILES=triton.cdiv(pages.shape[2], COLUMNS), num_warps=4,
        )  # fmt: skip


def wanted() -> bool:
    """Whether ``K3_CHECK_LATENT`` asks for it."""
    return os.environ.get("K3_CHECK_LATENT", "0") not in ("", "0")


def keep_tables() -> None:
    """Have vLLM's metadata of a latent attention keep the whole step's block table and lengths (``k3_pages``).

    It holds those of its decoding rows, and of prompts the table only; a captured step replays with their addresses.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    cls: Any = MLACommonMetadataBuilder
    honest = cls.build
    if getattr(honest, "keeps_tables", False):
        return

    @functools.wraps(honest)
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **named: Any) -> Any:
        made = honest(self, common_prefix_len, common_attn_metadata, *args, **named)
        made.k3_pages = (common_attn_metadata.block_table_tensor, common_attn_metadata.seq_lens)
        return made

    build.keeps_tables = True  # type: ignore[attr-defined]
    cls.build = build


def of_step(marks: torch.Tensor, cache: torch.Tensor, kind: str, step: Any) -> None:
    """:func:`check` of one layer. cache: as vLLM bound it, of ``kind`` (``--kv-cache-dtype``); step: its metadata.

    Raises RuntimeError where the metadata was built by something that :func:`keep_tables` does not reach.
    """
    if not hasattr(step, "k3_pages"):
        raise RuntimeError(f"K3_CHECK_LATENT=1: {type(step).__name__} keeps no block table to check; leave it out")
    table, lengths = step.k3_pages
    if cache.dtype in (torch.uint8, torch.int8):
        cache = cache.view(torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn)
    rows = step.query_start_loc.shape[0] - 1
    check(marks, cache, table, lengths[:rows], step.query_start_loc)
