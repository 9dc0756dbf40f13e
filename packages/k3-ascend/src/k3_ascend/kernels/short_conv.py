"""The short convolution of KDA over whole sequences and over the tokens of a step, with its state.

    y_t = silu(w_0 u_{t-3} + w_1 u_{t-2} + w_2 u_{t-1} + w_3 u_t)        fp32 inside, one rounding

A program takes a block of channels, which are contiguous in the input, in the tap-major weight and in the SD state, and
walks over rows with the last three inputs in the unified buffer: every input is read once. Contracts:
`k3_core.contracts.kda.short_conv`, `short_conv_verify`.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, attr-defined"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_ascend.kernels import checks, warmup
from k3_ascend.kernels.device import sigmoid
from k3_ascend.kernels.kda_plan import PrefillPlan, check_plan, plan_prefill
from k3_ascend.kernels.launch import launch, programs_for
from k3_core.operators import CallSpec

#: Channels a program.
BLOCK = 512


@triton.jit(do_not_specialize=["x_stride", "out_stride", "slot_stride", "chunks"])
def short_conv_kernel(
    x_ptr, taps_ptr, state_ptr, out_ptr, chunk_ptr, cu_ptr, slot_ptr, init_ptr,
    x_stride, out_stride, state_stride, column_stride, slot_stride, chunks, channels, BLOCK: tl.constexpr,
):  # fmt: skip
    """Items (chunk, channel block). The first chunk of a sequence also writes the new state: it alone reads the old."""
    blocks = tl.cdiv(channels, BLOCK)
    for item in range(tl.program_id(0), chunks * blocks, tl.num_programs(0)):
        chunk = item // blocks
        c = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = c < channels
        first = tl.load(chunk_ptr + chunk * 4)
        rows = tl.load(chunk_ptr + chunk * 4 + 1)
        seq = tl.load(chunk_ptr + chunk * 4 + 2)
        index = tl.load(chunk_ptr + chunk * 4 + 3)
        slot = tl.load(slot_ptr + seq * slot_stride).to(tl.int64)
        if slot > 0:
            state_at = state_ptr + slot * state_stride
            w0 = tl.load(taps_ptr + c, mask=inside, other=0.0)
            w1 = tl.load(taps_ptr + channels + c, mask=inside, other=0.0)
            w2 = tl.load(taps_ptr + 2 * channels + c, mask=inside, other=0.0)
            w3 = tl.load(taps_ptr + 3 * channels + c, mask=inside, other=0.0)
            # What is not there is masked away by a limit of 0 channels: a product would keep NaN of a former owner.
            old = tl.where(tl.load(init_ptr + seq).to(tl.int32) != 0, channels, 0)
            old = tl.where(index == 0, old, 0)
            before = tl.where(index > 0, channels, 0)
            start = (tl.maximum(first, 3) - 3).to(tl.int64)
            h0 = tl.load(state_at + c, mask=c < old, other=0.0).to(tl.float32)
            h1 = tl.load(state_at + column_stride + c, mask=c < old, other=0.0).to(tl.float32)
            h2 = tl.load(state_at + 2 * column_stride + c, mask=c < old, other=0.0).to(tl.float32)
            h0 += tl.load(x_ptr + start * x_stride + c, mask=c < before, other=0.0).to(tl.float32)
            h1 += tl.load(x_ptr + (start + 1) * x_stride + c, mask=c < before, other=0.0).to(tl.float32)
            h2 += tl.load(x_ptr + (start + 2) * x_stride + c, mask=c < before, other=0.0).to(tl.float32)
            if index == 0:
                # The last three inputs of the sequence; where it is shorter, the end of what was there before.
                begin = tl.load(cu_ptr + seq)
                end = tl.load(cu_ptr + seq + 1)
                length = end - begin
                for column in tl.static_range(3):
                    from_x = tl.where(length >= 3 - column, channels, 0)
                    row = tl.maximum(end - 3 + column, begin).to(tl.int64)
                    new = tl.load(x_ptr + row * x_stride + c, mask=c < from_x, other=0.0).to(tl.float32)
                    if column < 2:
                        if column == 0:
                            new = tl.where(length == 1, h1, tl.where(length == 2, h2, new))
                        else:
                            new = tl.where(length == 1, h2, new)
                    tl.store(state_at + column * column_stride + c, new.to(state_ptr.dtype.element_ty), mask=inside)
            for r in range(rows):
                t = (first + r).to(tl.int64)
                x = tl.load(x_ptr + t * x_stride + c, mask=inside, other=0.0).to(tl.float32)
                y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x
                y = y * sigmoid(y)
                tl.store(out_ptr + t * out_stride + c, y.to(out_ptr.dtype.element_ty), mask=inside)
                h0 = h1
                h1 = h2
                h2 = x
        else:
            zero = tl.zeros([BLOCK], dtype=tl.float32).to(out_ptr.dtype.element_ty)
            for r in range(rows):
                tl.store(out_ptr + (first + r).to(tl.int64) * out_stride + c, zero, mask=inside)


@triton.jit(do_not_specialize=["x_stride", "out_stride", "slot_stride", "rows"])
def step_conv_kernel(
    x_ptr, taps_ptr, state_ptr, out_ptr, cu_ptr, slot_ptr, accepted_ptr,
    x_stride, out_stride, state_stride, column_stride, slot_stride, rows, channels,
    VERIFY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Items (sequence, channel block): one token a sequence, or with VERIFY the tokens of cu_ptr after accepted_ptr.

    Sequences whose slot is the null block or padding are skipped: their rows of out are not written.
    """
    blocks = tl.cdiv(channels, BLOCK)
    for item in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        seq = item // blocks
        c = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = c < channels
        slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride).to(tl.int64)
        if slot > 0:
            if VERIFY:
                first = tl.load(cu_ptr + seq)
                count = tl.load(cu_ptr + seq + 1) - first
                column = (tl.load(accepted_ptr + seq) - 1).to(tl.int64)
            else:
                first = seq
                count = 1
                column = tl.zeros([], dtype=tl.int64)
            state_at = state_ptr + slot * state_stride
            h0 = tl.load(state_at + column * column_stride + c, mask=inside, other=0.0).to(tl.float32)
            h1 = tl.load(state_at + (column + 1) * column_stride + c, mask=inside, other=0.0).to(tl.float32)
            h2 = tl.load(state_at + (column + 2) * column_stride + c, mask=inside, other=0.0).to(tl.float32)
            w0 = tl.load(taps_ptr + c, mask=inside, other=0.0)
            w1 = tl.load(taps_ptr + channels + c, mask=inside, other=0.0)
            w2 = tl.load(taps_ptr + 2 * channels + c, mask=inside, other=0.0)
            w3 = tl.load(taps_ptr + 3 * channels + c, mask=inside, other=0.0)
            if count > 0:
                tl.store(state_at + c, h1.to(state_ptr.dtype.element_ty), mask=inside)
                tl.store(state_at + column_stride + c, h2.to(state_ptr.dtype.element_ty), mask=inside)
            for j in range(count):
                t = (first + j).to(tl.int64)
                x = tl.load(x_ptr + t * x_stride + c, mask=inside, other=0.0)
                tl.store(state_at + (j + 2).to(tl.int64) * column_stride + c, x, mask=inside)
                x = x.to(tl.float32)
                y = w0 * h0 + w1 * h1 + w2 * h2 + w3 * x
                y = y * sigmoid(y)
                tl.store(out_ptr + t * out_stride + c, y.to(out_ptr.dtype.element_ty), mask=inside)
                h0 = h1
                h1 = h2
                h2 = x


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Four taps, SD states, any channel count."""
    return checks.supports(spec, checks.FLOATS)


def tap_major(weight: Tensor) -> Tensor:
    """[C, W] or [C, 1, W] fp32 -> [W, C], contiguous: the layout the kernels read."""
    return weight.reshape(weight.shape[0], -1).t().contiguous()


def check_taps(op: str, weight: Tensor, taps: Tensor | None, channels: int) -> Tensor:
    """The tap-major weight, made here if the caller has none prepared."""
    checks.check_vector(op, "weight", weight, (channels, checks.TAPS), torch.float32)
    if taps is None:
        return tap_major(weight)
    checks.check_vector(op, "taps", taps, (checks.TAPS, channels), torch.float32)
    return taps


def short_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor,
    *,
    out: Tensor | None = None,
    plan: PrefillPlan | None = None,
    taps: Tensor | None = None,
) -> Tensor:
    """Operator ``short_conv`` of the table.

    plan: `plan_prefill` of the same boundaries; without one it is built here, which reads a device cu_seqlens back.
    taps: `tap_major` of the weight. Raises ValueError for shapes, UnsupportedError for dtypes and layouts.
    """
    op = "short_conv"
    tokens, channels = x.shape
    checks.check_rows(op, "x", x, (tokens, channels), checks.FLOATS)
    taps = check_taps(op, weight, taps, channels)
    checks.check_conv_state(op, conv_state, channels, checks.TAPS - 1, x.dtype)
    checks.check_index(op, "slot_mapping", slot_mapping, (cu_seqlens.shape[0] - 1,))
    checks.check_vector(op, "has_initial_state", has_initial_state, tuple(slot_mapping.shape), torch.bool)
    out = checks.result(op, out, (tokens, channels), x)
    if plan is None:
        plan = plan_prefill(cu_seqlens, x.device)
    check_plan(op, plan, slot_mapping.shape[0], tokens)
    out[plan.end :].zero_()
    if plan.num_chunks == 0 or channels == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(channels))
    launch(
        short_conv_kernel, programs_for(plan.num_chunks * triton.cdiv(channels, block), x.device),
        x, taps, conv_state, out, plan.chunks, cu_seqlens, slot_mapping, has_initial_state.view(torch.uint8),
        checks.row_stride(x), checks.row_stride(out), conv_state.stride(0), conv_state.stride(2),
        slot_mapping.stride(0), plan.num_chunks, channels, BLOCK=block,
    )  # fmt: skip
    return out


def step_conv(
    x: Tensor,
    taps: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    out: Tensor,
    accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """One token a row, or with accepted and cu_seqlens a verification; rows without a slot are left alone in out.

    slots [rows] (any stride). The launchers of kda_step check the rest.
    """
    rows, channels = slots.shape[0], x.shape[1]
    block = min(BLOCK, triton.next_power_of_2(channels))
    verify = accepted is not None
    launch(
        step_conv_kernel, programs_for(rows * triton.cdiv(channels, block), x.device),
        x, taps, conv_state, out, cu_seqlens if verify else slots, slots, accepted if verify else slots,
        checks.row_stride(x), checks.row_stride(out), conv_state.stride(0), conv_state.stride(2), slots.stride(0),
        rows, channels, VERIFY=verify, BLOCK=block,
    )  # fmt: skip


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """A batch of two sequences, for both types of indices. Lengths are no variant."""
    shape = {"num_spec": limits.num_spec, **warmup.heads(config, limits)}
    return [{"operator": "short_conv", "index": i, **shape} for i in (torch.int32, torch.int64)]
