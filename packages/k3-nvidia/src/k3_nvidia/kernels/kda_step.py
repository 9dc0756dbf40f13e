"""KDA decode and verification: convolution, SiLU, gate, recurrence, gated norm, both states.

State traffic is all that matters (the other operands are under 3 % of it): 64 KiB read and, per token, written a head.

decode  one program a (row, head). The state is walked in blocks of BV value rows whose loads are in flight ahead of the
        arithmetic (asynchronous copies to shared memory); the convolution and the gate run meanwhile.
verify  one program a (row, head, block of BV value rows), the block in registers over 1 + n tokens, a state written
        after every token; a second small kernel norms the outputs and moves the conv state, which all blocks have read.

Per token, with raw q and k and their reciprocal norms rq (D^-0.5 included) and rk as late scalars:

    S' = S diag(exp g)      a = S' k      b = S' q          two reductions that don't wait for each other
    u  = beta (v - rk a) rk                S = S' + u k^T    o = rq (b + u (k . q))

Null and padding rows (slot <= 0) write zeros and touch no state. Offsets are 64 bit. No host wait, graph safe.

Formulas: k3_core.contracts.kda; slots and columns of verification: the operator table.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators import CallSpec
from k3_core.operators.triton_host import Launcher
from k3_nvidia.kernels import kda_checks as checks
from k3_nvidia.kernels import kda_step_cuda
from k3_nvidia.kernels import kda_verify as verification
from k3_nvidia.kernels.kda_math import gate_log2, sigmoid
from k3_nvidia.kernels.kda_token import _block_step, _inner, _norm, _zero_rows
from k3_nvidia.tuning import kda as tuning

try:
    from k3_nvidia.kernels import kda_decode_async
except ImportError:  # a Triton without Gluon, or with another: the form of this file serves every size
    kda_decode_async = None


@triton.jit
def _prefetch(address, count):
    """Asks the L2 for `count` bytes (a multiple of 16) from a 16-byte aligned address; one thread, no register held."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred leader;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 leader, thread, 0;
        @leader cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address.to(tl.int64), count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _step_inputs(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_at, head, token, lower_bound,
    qkv_stride, z_stride, beta_stride, gate_stride, weight_stride, column_stride,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(y, gate | norm weight, q, k, decay, beta, rq, rk, k . q) of one row and head; shifts its conv state.

    q | k | v | z of this head as one flat vector: each element is loaded by one thread, and `gather` hands the parts to
    the layouts of the state. Loads written per part would be repeated by every thread that uses them.
    """
    c = tl.arange(0, D)
    e = tl.arange(0, 4 * D)
    part = e // D
    channel = (part * H + head) * D + e % D
    here = part < 3
    w_at = weight_ptr + channel.to(tl.int64) * weight_stride
    h0 = tl.load(conv_at, mask=here, other=0.0)
    h1 = tl.load(conv_at + column_stride, mask=here, other=0.0)
    h2 = tl.load(conv_at + 2 * column_stride, mask=here, other=0.0)
    w0 = tl.load(w_at, mask=here, other=0.0)
    w1 = tl.load(w_at + 1, mask=here, other=0.0)
    w2 = tl.load(w_at + 2, mask=here, other=0.0)
    w3 = tl.load(w_at + 3, mask=here, other=0.0)
    bias = tl.load(dt_bias_ptr + head * D + e - 3 * D, mask=part == 3, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    last = tl.load(norm_ptr + e - D, mask=part == 1, other=0.0).to(tl.float32)
    x = tl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + token * beta_stride + head)
    last += tl.load(gate_ptr + token * gate_stride + head * D + e, mask=part == 0, other=0.0).to(tl.float32)
    y = w0 * h0.to(tl.float32)
    y += w1 * h1.to(tl.float32)
    y += w2 * h2.to(tl.float32)
    y += w3 * x.to(tl.float32)
    # Each thread moves its own columns; where the vector is shorter than the block, copies of it must have read.
    if D < 128:
        tl.debug_barrier()
    tl.store(conv_at, h1, mask=here)
    tl.store(conv_at + column_stride, h2, mask=here)
    tl.store(conv_at + 2 * column_stride, x, mask=here)
    # Rounded like the tensor that the separate convolution writes; the fourth part is the decay.
    y = (y * sigmoid(y)).to(x.dtype).to(tl.float32)
    y = tl.where(here, y, tl.exp2(gate_log2(z + bias, rate, 0.0, lower_bound, BOUNDED)))
    q = tl.gather(y, c, 0)
    k = tl.gather(y, c + D, 0)
    decay = tl.gather(y, c + 3 * D, 0)
    rq = tl.rsqrt(_inner(q, q) + 1e-6) * (D**-0.5)
    rk = tl.rsqrt(_inner(k, k) + 1e-6)
    return y, last, q, k, decay, beta, rq, rk, _inner(k, q)


@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "beta_ptr"])
def kda_decode_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, out_ptr, o_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride, weight_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride,
    BOUNDED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, LATE: tl.constexpr, KEEP: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows).

    BV value rows are a block; one block of all rows is held in registers, else the blocks are a pipeline of STAGES.
    PREFETCH: so many value rows are asked for from the L2 as soon as the slot is known. LATE: convolution and gate are
    computed inside the first iteration, so that the pipeline's first copies are issued before them. KEEP: o stays in
    registers until the norm; else it goes through o_ptr fp32 [rows, H, D], scratch of the program that owns the row and
    head. EVICT: cache policy of the state, which nobody reads before the next step. PDL: launched while the kernel
    before it drains; nothing is read before the wait, states included, so two steps in a row on one state are legal.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slot_ptr + row.to(tl.int64) * slot_stride).to(tl.int64)
    if slot <= 0:
        _zero_rows(out_ptr, row, 1, out_stride, head, D)
    else:
        c = tl.arange(0, D)
        r = tl.arange(0, BV)
        token = row.to(tl.int64)
        base = state_ptr + (slot * state_stride + head * (D * D))
        state_at = base + r[:, None] * D + c[None, :]
        if PREFETCH:
            _prefetch(base, tl.full([], PREFETCH * D * (state_ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32))
        e = tl.arange(0, 4 * D)
        channel = (e // D * H + head) * D + e % D
        conv_at = conv_ptr + slot * conv_stride + channel.to(tl.int64) * channel_stride
        if BV == D:
            whole = tl.load(state_at, eviction_policy=EVICT)
            y, last, q, k, decay, beta, rq, rk, kq = _step_inputs(
                qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_at, head, token,
                lower_bound, qkv_stride, z_stride, beta_stride, gate_stride, weight_stride, column_stride,
                BOUNDED, H, D,
            )  # fmt: skip
            S, o = _block_step(whole.to(tl.float32), q, k, tl.gather(y, r + 2 * D, 0), decay, beta, rq, rk, kq)
            tl.store(state_at, S.to(state_ptr.dtype.element_ty), eviction_policy=EVICT)
            o = _norm(o, tl.gather(last, r + D, 0), tl.gather(last, r, 0), eps, D)
            tl.store(out_ptr + token * out_stride + head * D + r, o.to(out_ptr.dtype.element_ty))
        else:
            if LATE:
                y = tl.zeros([4 * D], dtype=tl.float32)
                last = y
                q = tl.gather(y, c, 0)
                k = q
                decay = q
                beta = 0.0
                rq = _inner(q, q)
                rk = rq
                kq = rq
            else:
                y, last, q, k, decay, beta, rq, rk, kq = _step_inputs(
                    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_at, head,
                    token, lower_bound, qkv_stride, z_stride, beta_stride, gate_stride, weight_stride, column_stride,
                    BOUNDED, H, D,
                )  # fmt: skip
            o_at = o_ptr + (token * H + head) * D
            kept = tl.zeros([D], dtype=tl.float32)
            for n in tl.range(0, D // BV, num_stages=STAGES):
                S = tl.load(state_at + n * (BV * D), eviction_policy=EVICT).to(tl.float32)
                if LATE:  # noqa: SIM102 (a constant: not to be joined with the condition of the loop)
                    if n == 0:
                        y, last, q, k, decay, beta, rq, rk, kq = _step_inputs(
                            qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_at,
                            head, token, lower_bound, qkv_stride, z_stride, beta_stride, gate_stride, weight_stride,
                            column_stride, BOUNDED, H, D,
                        )  # fmt: skip
                v = tl.gather(y, n * BV + r + 2 * D, 0)
                S, o = _block_step(S, q, k, v, decay, beta, rq, rk, kq)
                tl.store(state_at + n * (BV * D), S.to(state_ptr.dtype.element_ty), eviction_policy=EVICT)
                if KEEP:
                    kept = tl.where(c // BV == n, tl.gather(o, c % BV, 0), kept)
                else:
                    tl.store(o_at + n * BV + r, o)
            if not KEEP:
                tl.debug_barrier()
                kept = tl.load(o_at + c)
            o = _norm(kept, tl.gather(last, c + D, 0), tl.gather(last, c, 0), eps, D)
            tl.store(out_ptr + token * out_stride + head * D + c, o.to(out_ptr.dtype.element_ty))


_decode = Launcher(kda_decode_kernel)
_FLOATS = (torch.bfloat16, torch.float32)
#: Constants of kda_decode_kernel that an entry of the tuning table may leave out.
DECODE_DEFAULTS: dict[str, Any] = {
    "FORM": "blocks", "DIRECT": False, "SPLIT": 1, "BULK": False, "BLOCKS": 1,
    "PREFETCH": 0, "LATE": False, "KEEP": False, "EVICT": "", "PDL": False,
}  # fmt: skip
_OTHER_FORMS = ("DIRECT", "SPLIT", "BULK", "BLOCKS")
_TRITON_ONLY = ("STAGES", "PREFETCH", "LATE", "KEEP")
#: FORM: "tokens" (kda_verify) or "cluster" (kda_step_cuda, else "tokens"). PDL: the second kernel of the former
#: overlaps the first, the latter the kernel before it.
VERIFY_DEFAULTS: dict[str, Any] = {"FORM": "tokens", "PDL": False}
_CLUSTER: dict[str, Any] = {"SPLIT": 1, "BULK": False, "BLOCKS": 1}


def supports_step(spec: CallSpec) -> tuple[bool, str]:
    """kda_decode and kda_verify: any head count, both conv layouts, fp32 or bf16 state."""
    return checks.supports(spec, _FLOATS)


def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_decode of the table. One launch, no host wait: safe inside a CUDA graph.

    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    out = checks.check_step(
        "kda_decode",
        qkv,
        z,
        beta,
        gate,
        conv_weight,
        a_log,
        dt_bias,
        o_norm_weight,
        conv_state,
        recurrent_state,
        3,
        out,
    )
    checks.check_index("kda_decode", "slot_mapping", slot_mapping, (qkv.shape[0],))
    rows, heads, dim = z.shape
    if rows == 0:
        return out
    options = _decode_options(rows * heads, dim, qkv.device, recurrent_state.dtype)
    strides = [checks.row_stride(x) for x in (qkv, z, beta, gate, out, conv_weight)]
    strides += [*conv_state.stride(), recurrent_state.stride(0), slot_mapping.stride(0)]
    form = options.pop("FORM")
    if form == "cluster" and not kda_step_cuda.refusal(qkv, z, gate, out, conv_weight, o_norm_weight, recurrent_state):
        kda_step_cuda.step(
            options, qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
            slot_mapping, out, lower_bound, o_norm_eps, strides[:5],
        )  # fmt: skip
        return out
    if form == "async":
        kda_decode_async.launch(
            (heads, rows),
            qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
            slot_mapping, out, float(lower_bound or 0.0), o_norm_eps, *strides,
            BOUNDED=lower_bound is not None, H=heads, D=dim, W=options["num_warps"],
            **{k: v for k, v in options.items() if k not in (*_TRITON_ONLY, "SPLIT", "BULK", "BLOCKS")},
        )  # fmt: skip
        return out
    scratch = torch.empty(rows, heads, dim, dtype=torch.float32, device=qkv.device)
    options = {k: v for k, v in options.items() if k not in _OTHER_FORMS}
    _decode(
        (heads, rows),
        qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight, conv_state, recurrent_state,
        slot_mapping, out, scratch, float(lower_bound or 0.0), o_norm_eps, *strides,
        BOUNDED=lower_bound is not None, H=heads, D=dim, **options,
    )  # fmt: skip
    return out


def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it drains, and the L2 be asked for bytes: sm_90 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _decode_options(programs: int, dim: int, device: torch.device, state: torch.dtype) -> dict[str, Any]:
    """Constants and launch options of a decode kernel; what a device or the interpreter lacks is left out.

    FORM "async" (kda_decode_async) and "cluster" (kda_step_cuda) give way to kda_decode_kernel where they have no
    code; all compute the same up to the order of sums.
    """
    options = DECODE_DEFAULTS | tuning.step_launch("decode", programs, dim)
    if not _overlaps(device):
        options |= {"PREFETCH": 0, "PDL": False}
    if options["FORM"] == "async" and (
        dim != 128 or state != torch.float32 or not _overlaps(device) or kda_decode_async is None
    ):
        options["FORM"] = "blocks"
    options["PREFETCH"] = min(options["PREFETCH"], dim)
    if options["PDL"]:
        options["launch_pdl"] = True
    return options


def kda_verify(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    o_norm_weight: Tensor,
    o_norm_eps: float,
    conv_state: Tensor,
    recurrent_state: Tensor,
    slot_mapping: Tensor,
    num_accepted: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Operator kda_verify of the table. One launch, no host wait: safe inside a CUDA graph.

    Raises as kda_decode. Token and accepted counts are device data: that they fit the slots is the caller's promise.
    """
    op = "kda_verify"
    rows, columns = slot_mapping.shape
    out = checks.check_step(
        op,
        qkv,
        z,
        beta,
        gate,
        conv_weight,
        a_log,
        dt_bias,
        o_norm_weight,
        conv_state,
        recurrent_state,
        columns + 2,
        out,
    )
    checks.check_index(op, "slot_mapping", slot_mapping, (rows, columns))
    checks.check_vector(op, "num_accepted", num_accepted, (rows,), torch.int32)
    checks.check_vector(op, "cu_seqlens", cu_seqlens, (rows + 1,), torch.int32)
    if rows == 0:
        return out.zero_()
    options = VERIFY_DEFAULTS | tuning.step_launch("verify", rows * z.shape[1], z.shape[2])
    form, overlap = options.pop("FORM"), options.pop("PDL") and _overlaps(qkv.device)
    clusters = form == "cluster" and columns <= kda_step_cuda.MOST_TOKENS
    if clusters and not kda_step_cuda.refusal(qkv, z, gate, out, conv_weight, o_norm_weight, recurrent_state):
        kda_step_cuda.step(
            _CLUSTER | options | {"PDL": overlap}, qkv, z, beta, gate, conv_weight, a_log, dt_bias, o_norm_weight,
            conv_state, recurrent_state, slot_mapping, out, lower_bound, o_norm_eps,
            [checks.row_stride(x) for x in (qkv, z, beta, gate, out)], num_accepted, cu_seqlens,
        )  # fmt: skip
        return out
    options = {k: v for k, v in options.items() if k not in _CLUSTER}
    verification.launch(
        options | {"PDL": overlap}, qkv, z, beta, gate, conv_weight, a_log, dt_bias, lower_bound, o_norm_weight,
        o_norm_eps, conv_state, recurrent_state, slot_mapping, num_accepted, cu_seqlens, out,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, Any]]:
    """Row counts on each side of every boundary of the tuning table; row counts within a boundary share a variant."""
    text = getattr(config, "text", config)
    heads = int(getattr(limits, "local_heads", 0) or text.linear_attn.num_heads)
    return [{"rows": r} for r in tuning.step_rows(heads, int(getattr(limits, "max_num_seqs", 256)))]
