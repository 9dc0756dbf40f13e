"""vLLM's FlashKDA operator as one of the prefill implementations, for the shapes where it is the faster one.

The operator is compiled in vLLM's CUDA wheels (torch.ops._flashkda_C, registered by importing vllm._flashkda_C). It
walks a sequence in chunks of 16, one block a head, so it wins where heads times sequences fill the machine and loses
where they do not; tuning/kda_prefill.json holds the measurements that decide.

What it wants and where that comes from:

    q, k, v     dense bf16 [1, T, N, 128]        the convolution writes three tensors (short_conv, parts=3): no copy
    g           z, dense bf16 [1, T, N, 128]     the projection's output; the gate is inside the operator
    beta        bf16 [1, T, N] before the sigmoid: recovered from ours and stored [N, T], the layout that the operator
                would otherwise make itself with a transposing copy
    states      packed [B, N, V, K]: gathered (zeros for new sequences and null slots) and scattered here

so a call is three launches of ours and vLLM's together: gather, operator, scatter. beta in bf16 logits is what vLLM's
layer passes; a beta that came from bf16 logits is recovered exactly.

The operator's last chunk of a sequence reads on, up to 15 rows into whatever follows: it masks the gate and k there but
multiplies v and beta by zero, so that one value that is not finite (a neighbour's, or in a padding row) makes the
whole chunk and the final state NaN. Therefore such values in the first 15 rows of a sequence and behind the last one
are replaced by zeros while the operator runs; the sequence that they belong to gets NaN in its initial state instead,
in the same value rows, and v gets its bits back after it.

Formulas: k3_core.contracts.kda. The operator's signature: vLLM 0.33, csrc of FlashKDA; checked before it is used.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec
from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels import kda_checks as checks

DIM = 128
#: Arguments of the operator that are passed; further ones must have defaults.
ARGUMENTS = (
    "q", "k", "v", "g", "beta", "scale", "out", "workspace", "A_log", "dt_bias", "lower_bound",
    "initial_state", "final_state", "cu_seqlens",
)  # fmt: skip
#: Its chunks of 16 keep products of decays inside bf16's range down to this bound (natural logarithm a token).
LEAST_BOUND = -5.0
_ARCHITECTURES = ("9", "10", "12")  # major versions that vLLM builds it for


@cache
def operator() -> tuple[Any, str]:
    """(the namespace with fwd and get_workspace_size or None, why)."""
    try:
        importlib.import_module("vllm._flashkda_C")
        namespace = torch.ops._flashkda_C
        arguments = namespace.fwd.default._schema.arguments
        _ = namespace.get_workspace_size
    except Exception as error:  # a missing module, library or symbol: each means that it cannot be called
        return None, f"vLLM's FlashKDA operator is not here ({type(error).__name__}: {str(error)[:120]})"
    names = tuple(a.name for a in arguments)
    if names[: len(ARGUMENTS)] != ARGUMENTS or not all(a.has_default_value() for a in arguments[len(ARGUMENTS) :]):
        return None, f"vLLM's FlashKDA operator has another signature: {names}"
    return namespace, "vLLM's FlashKDA operator"


def refusal(dim: int, dtype: torch.dtype, state_dtype: torch.dtype, lower_bound: float | None) -> str:
    """Why the operator cannot take such a call on any device, or an empty string."""
    if dim != DIM:
        return f"FlashKDA has head dimension {DIM}, not {dim}"
    if dtype != torch.bfloat16:
        return f"FlashKDA takes bfloat16 activations, not {dtype}"
    if state_dtype not in checks.STATE_DTYPES:
        return f"FlashKDA takes float32 or bfloat16 states, not {state_dtype}"
    if lower_bound is None or not LEAST_BOUND <= lower_bound < 0:
        return f"FlashKDA takes gates bounded between {LEAST_BOUND} and 0, not lower_bound {lower_bound}"
    return "" if operator()[0] is not None else operator()[1]


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Capability query: device, architecture, sizes, dtypes and gate, and whether vLLM's wheel has the operator."""
    major = "".join(filter(str.isdigit, spec.arch))[:-1]
    if spec.device != "cuda" or (spec.arch and major not in _ARCHITECTURES):
        return False, f"{spec.operator}: FlashKDA is built for compute capability 9, 10 and 12, not for {spec.arch}"
    ok, why = checks.supports_sizes(spec, (torch.bfloat16,))
    if not ok:
        return ok, why
    dim, state = spec.sizes.get("K", DIM), spec.options.get("state_dtype", torch.float32)
    why = refusal(dim, spec.dtype, state, spec.options.get("lower_bound"))
    return not why, f"{spec.operator}: {why or operator()[1]}"


@triton.jit
def _hide(v_ptr, saved_ptr, flag_ptr, first, count, at, num_heads, head, c, D: tl.constexpr, REACH: tl.constexpr):
    """Replaces values of v that are not finite, in columns c of up to REACH - 1 rows, by zeros; keeps what was there.

    Returns per column whether there was one. at: where to keep the tile [REACH, D] and the flag.
    """
    j = tl.arange(0, REACH)
    inside = (j < tl.minimum(count, REACH - 1))[:, None] & (c < D)[None, :]
    v_at = v_ptr + ((first + j).to(tl.int64) * num_heads + head)[:, None] * D + c[None, :]
    x = tl.load(v_at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    bad = (wide - wide) != 0.0
    columns = tl.max(bad.to(tl.int32), axis=0)
    found = tl.max(columns, axis=0)
    tl.store(flag_ptr + at, found)
    if found > 0:
        tl.store(saved_ptr + at * (REACH * c.shape[0]) + j[:, None] * c.shape[0] + tl.arange(0, c.shape[0])[None, :], x)
        tl.store(v_at, tl.where(bad, 0.0, wide).to(v_ptr.dtype.element_ty), mask=inside)
    return columns > 0


@triton.jit(
    do_not_specialize=["slot_stride", "tokens", "sequences", "num_heads"],
    do_not_specialize_on_alignment=["slot_ptr", "init_ptr", "beta_ptr", "cu_ptr", "v_ptr"],
)
def flash_before_kernel(
    state_ptr, slot_ptr, init_ptr, beta_ptr, v_ptr, cu_ptr, initial_ptr, raw_ptr, saved_ptr, flag_ptr,
    state_stride, slot_stride, beta_stride, tokens, sequences, num_heads,
    D: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Grid (heads, D / BR, sequences + 1 or more blocks of BT D / BR tokens): initial states packed, beta as
    bf16 logits [N, T], v [T, N, D] dense without values that the operator would carry from one sequence to another.

    The states of new sequences and of null slots are zeros, whatever memory holds.
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    seq = tl.program_id(2)
    r = part * BR + tl.arange(0, BR)
    kept = (tl.minimum(seq, sequences).to(tl.int64) * num_heads + head) * (D // BR) + part
    if seq < sequences:
        first = tl.load(cu_ptr + seq)
        count = tl.load(cu_ptr + seq + 1) - first
        lost = _hide(v_ptr, saved_ptr, flag_ptr, first, count, kept, num_heads, head, r, D, REACH)
        j = tl.arange(0, REACH)
        reached = j < tl.minimum(count, REACH - 1)
        early = tl.load(beta_ptr + (first + j).to(tl.int64) * beta_stride + head, mask=reached, other=0.5)
        gone = tl.max((early != early).to(tl.int32), axis=0)
        tile = head * (D * D) + r[:, None] * D + tl.arange(0, D)[None, :]
        slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride).to(tl.int64)
        use = (slot > 0) & (tl.load(init_ptr + seq).to(tl.int32) != 0)
        mask = r[:, None] < tl.where(use, D, 0)
        S = tl.load(state_ptr + slot * state_stride + tile, mask=mask, other=0.0)
        S = tl.where(lost[:, None] | (gone > 0), float("nan"), S.to(tl.float32)).to(S.dtype)
        tl.store(initial_ptr + seq.to(tl.int64) * num_heads * (D * D) + tile, S)
    else:
        last = tl.load(cu_ptr + sequences)
        if seq == sequences:
            _hide(v_ptr, saved_ptr, flag_ptr, last, tokens - last, kept, num_heads, head, r, D, REACH)
        t = ((seq - sequences) * (D // BR) + part) * BT + tl.arange(0, BT)
        inside = t < tokens
        beta = tl.load(beta_ptr + t.to(tl.int64) * beta_stride + head, mask=inside, other=0.5)
        raw = tl.log(beta) - tl.log(1.0 - beta)
        # Written so that NaN stays NaN. 80 is beyond where fp32's sigmoid is 0 or 1.
        raw = tl.where(raw > 80.0, 80.0, tl.where(raw < -80.0, -80.0, raw))
        raw = tl.where(t < last, raw, 0.0)
        if tl.max((raw != raw).to(tl.int32), axis=0) > 0:
            for n in tl.range(0, sequences):
                since = t - tl.load(cu_ptr + n)
                raw = tl.where((since >= 0) & (since < REACH - 1) & (raw != raw), 0.0, raw)
        tl.store(raw_ptr + head.to(tl.int64) * tokens + t, raw.to(raw_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["slot_stride", "num_heads", "sequences", "tokens"],
    do_not_specialize_on_alignment=["slot_ptr", "cu_ptr", "v_ptr"],
)
def flash_after_kernel(
    final_ptr, state_ptr, slot_ptr, cu_ptr, out_ptr, v_ptr, saved_ptr, flag_ptr,
    state_stride, slot_stride, out_stride, sequences, tokens, num_heads,
    D: tl.constexpr, BR: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Grid (heads, D / BR, sequences + 1): final states to their slots, zeros for null sequences, v as it was."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    seq = tl.program_id(2)
    first = tl.load(cu_ptr + seq)
    last = tokens
    if seq < sequences:
        last = tl.load(cu_ptr + seq + 1)
    c = tl.arange(0, D)
    r = part * BR + tl.arange(0, BR)
    kept = (seq.to(tl.int64) * num_heads + head) * (D // BR) + part
    if tl.load(flag_ptr + kept) > 0:
        j = tl.arange(0, REACH)
        x = tl.load(saved_ptr + kept * (REACH * BR) + j[:, None] * BR + tl.arange(0, BR)[None, :])
        v_at = v_ptr + ((first + j).to(tl.int64) * num_heads + head)[:, None] * D + r[None, :]
        tl.store(v_at, x, mask=(j < tl.minimum(last - first, REACH - 1))[:, None] & (r < D)[None, :])
    if seq < sequences:
        slot = tl.load(slot_ptr + seq.to(tl.int64) * slot_stride).to(tl.int64)
        if slot > 0:
            tile = head * (D * D) + r[:, None] * D + c[None, :]
            mask = r[:, None] < tl.where(last > first, D, 0)
            S = tl.load(final_ptr + seq.to(tl.int64) * num_heads * (D * D) + tile, mask=mask, other=0.0)
            tl.store(state_ptr + slot * state_stride + tile, S, mask=mask)
        else:
            for n in tl.range(0, last - first - part, D // BR):
                row = (first + part + n).to(tl.int64)
                tl.store(out_ptr + row * out_stride + head * D + c, tl.zeros([D], out_ptr.dtype.element_ty))


_before = Launcher(flash_before_kernel)
_after = Launcher(flash_after_kernel)
#: Value rows a program, tokens a block of beta, rows of a chunk of the operator.
BR, BT, REACH = 32, 256, 16


def prefill(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float,
    recurrent_state: Tensor, slots: Tensor, cu_seqlens: Tensor, init: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """kda_prefill through the operator, arguments as there and checked; fills `out` [T, N, 128] to the last sequence.

    Every sequence must have a token. Rows that are not dense are copied. Raises UnsupportedError where the operator
    cannot take the call.
    """
    tokens, heads, dim = q.shape
    why = refusal(dim, q.dtype, recurrent_state.dtype, lower_bound)
    if why:
        raise UnsupportedError(f"kda_prefill: {why}")
    sequences = slots.shape[0]
    device, pool = q.device, recurrent_state
    initial, final = torch.empty(2, sequences, heads, dim, dim, dtype=pool.dtype, device=device).unbind(0)
    raw = torch.empty(heads, tokens, dtype=torch.bfloat16, device=device)
    parts = dim // BR
    saved = torch.empty((sequences + 1) * heads * parts, REACH, BR, dtype=q.dtype, device=device)
    flag = torch.empty((sequences + 1) * heads * parts, dtype=torch.int32, device=device)
    v = v.contiguous()
    _before(
        (heads, parts, sequences + max(-(-tokens // (BT * parts)), 1)),
        pool, slots, init, beta, v, cu_seqlens, initial, raw, saved, flag,
        pool.stride(0), slots.stride(0), checks.row_stride(beta), tokens, sequences, heads,
        D=dim, BR=BR, BT=BT, REACH=REACH, num_warps=4,
    )  # fmt: skip
    namespace, _ = operator()
    size = int(namespace.get_workspace_size(tokens, heads, sequences))
    # A copy is copied back whole, rows behind the last sequence included.
    dense = out if out.is_contiguous() else torch.zeros_like(out, memory_format=torch.contiguous_format)
    rows = [x.contiguous().unsqueeze(0) for x in (q, k, v, z)]
    namespace.fwd(
        *rows, raw.t().unsqueeze(0), dim**-0.5, dense.unsqueeze(0),
        torch.empty(size, dtype=torch.uint8, device=device), a_log, dt_bias, lower_bound,
        initial_state=initial, final_state=final, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if dense is not out:
        out.copy_(dense)
    _after(
        (heads, parts, sequences + 1),
        final, pool, slots, cu_seqlens, out, v, saved, flag,
        pool.stride(0), slots.stride(0), checks.row_stride(out), sequences, tokens, heads,
        D=dim, BR=BR, REACH=REACH, num_warps=4,
    )  # fmt: skip
