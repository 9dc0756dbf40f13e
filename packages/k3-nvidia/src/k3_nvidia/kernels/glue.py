"""Small steps between the products of a layer, each one launch: what would otherwise be two to four of a microsecond.

- ``kda_inputs``: z = f_a W_fb^T for few rows and beta = sigmoid(b), from one fused projection;
- ``low_rank_norms``: the two norms of latent attention's low ranks, zeros for the attention to write over, and a mark
  where the row that goes to the latent cache is not finite;
- ``rms_norm``: one norm of plain rows, as the released code rounds it;
- ``sigmoid_mul``: the output gate, sigmoid and product each rounded to the model's dtype.

All are launched programmatically dependent where the device can (capability 9.0): a kernel starts while the one before
ends and waits before it reads what that wrote. Launch and latency are all there is to them at small batches; at large
ones bytes: ``low_rank_norms`` 2 (q_lora + latent) + N v elements a token, ``sigmoid_mul`` 3 N v.

Rounding is that of the operations they stand for, so bits do not depend on which of both ran (fp32 sums apart).
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="assignment"
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import Launcher, interpreting
from k3_nvidia.tuning import glue as tuning

#: Rows up to which ``kda_inputs`` multiplies; more are a library's product.
MAX_ROWS = 16
#: Rows beyond which ``low_rank_norms`` gives a program a whole row; fewer are spread over more programs.
WHOLE_ROWS = 512
#: Elements of a row that ``kda_inputs`` multiplies in one step.
MAX_INNER = 256


@triton.jit(do_not_specialize=["rows"])
def kda_inputs_kernel(
    z_ptr, beta_ptr, f_ptr, b_ptr, weight_ptr, rows, width, heads, stride_z, stride_beta, stride_f, stride_b,
    stride_weight,
    BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, HB: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. TILES-1: BN columns of z; program TILES: beta. K: elements of f_a, KB the power of two above."""
    tile = tl.program_id(0)
    m = tl.arange(0, BM)
    if PDL:
        gdc_launch_dependents()
    if tile < TILES:
        n = tile * BN + tl.arange(0, BN)
        k = tl.arange(0, KB)
        w = tl.load(
            weight_ptr + n.to(tl.int64)[:, None] * stride_weight + k[None, :],
            mask=(n < width)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        if PDL:
            gdc_wait()
        x = tl.load(f_ptr + m[None, :] * stride_f + k[:, None], mask=(m < rows)[None, :] & (k < K)[:, None], other=0.0)
        if INTERPRET:  # noqa: SIM108 (constant: only one branch is compiled)
            z = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            z = tl.dot(w, x)
        at = z_ptr + m[None, :] * stride_z + n[:, None]
        tl.store(at, z.to(z_ptr.dtype.element_ty), mask=(n < width)[:, None] & (m < rows)[None, :])
    else:
        if PDL:
            gdc_wait()
        h = tl.arange(0, HB)
        there = (m < rows)[:, None] & (h < heads)[None, :]
        logit = tl.load(b_ptr + m[:, None] * stride_b + h[None, :], mask=there, other=0.0).to(tl.float32)
        tl.store(beta_ptr + m[:, None] * stride_beta + h[None, :], 1.0 / (1.0 + tl.exp(-logit)), mask=there)


@triton.jit(do_not_specialize=["rows"])
def sigmoid_fp32_kernel(out_ptr, x_ptr, rows, columns, stride_x, BR: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr):
    """Program (block of rows): fp32 sigmoid of 16-bit rows, out contiguous."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_x + column[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], 1.0 / (1.0 + tl.exp(-x)), mask=there)


@triton.jit
def _normed(x, weight, size, eps):
    """x rsqrt(mean x^2 + eps) rounded to the weight's dtype, times the weight, rounded again by the store."""
    x = x.to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    return scaled.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, size, eps, stride_out, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < size
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + c, mask=inside, other=0.0)
    tl.store(out_ptr + row * stride_out + c, _normed(x, weight, size, eps).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _infinite(x):
    """How many values of x are NaN or infinite."""
    return tl.sum(tl.where(tl.abs(x.to(tl.float32)) < float("inf"), 0, 1), 0)


@triton.jit
def _mark(mark_ptr, stride_mark, bounds_ptr, requests, row):
    """NaN in the mark of the last row of the request that ``row`` belongs to: the row before the first end behind it,
    which is ``row`` itself where no request has it."""
    nobody = 2147483647
    end = tl.full((), nobody, tl.int32)
    for first in range(0, requests, 128):
        r = first + tl.arange(0, 128)
        ends = tl.load(bounds_ptr + 1 + r, mask=r < requests, other=0)
        end = tl.minimum(end, tl.min(tl.where(ends > row, ends, nobody), 0))
    at = tl.where(end == nobody, row, end.to(tl.int64) - 1)
    tl.store(mark_ptr + at * stride_mark, float("nan"))


@triton.jit(do_not_specialize=["requests"])
def low_rank_norms_kernel(
    q_ptr, latent_ptr, zero_ptr, x_q_ptr, x_latent_ptr, x_shared_ptr, weight_q_ptr, weight_latent_ptr, mark_ptr,
    bounds_ptr, q_size, latent_size, shared_size, zeros, eps, stride_x, stride_mark, requests,
    BQ: tl.constexpr, BL: tl.constexpr, BS: tl.constexpr, BZ: tl.constexpr, HAS_Q: tl.constexpr, MARKS: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): 0 the latent's norm, 1 zeros, 2 the queries' norm; WHOLE: (row), all of them, their loads
    in flight together. Outputs contiguous. MARKS: see the launcher."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if WHOLE:
        c = tl.arange(0, BL)
        x = tl.load(x_latent_ptr + row * stride_x + c, mask=c < latent_size, other=0.0)
        if MARKS:
            cs = tl.arange(0, BS)
            bad = _infinite(tl.load(x_shared_ptr + row * stride_x + cs, mask=cs < shared_size, other=0.0))
        if HAS_Q:
            cq = tl.arange(0, BQ)
            xq = tl.load(x_q_ptr + row * stride_x + cq, mask=cq < q_size, other=0.0)
        for first in range(0, zeros, BZ):
            cz = first + tl.arange(0, BZ)
            tl.store(zero_ptr + row * zeros + cz, tl.zeros((BZ,), zero_ptr.dtype.element_ty), mask=cz < zeros)
        y = _normed(x, tl.load(weight_latent_ptr + c, mask=c < latent_size, other=0.0), latent_size, eps)
        y = y.to(latent_ptr.dtype.element_ty)
        tl.store(latent_ptr + row * latent_size + c, y, mask=c < latent_size)
        if HAS_Q:
            yq = _normed(xq, tl.load(weight_q_ptr + cq, mask=cq < q_size, other=0.0), q_size, eps)
            yq = yq.to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + row * q_size + cq, yq, mask=cq < q_size)
        if MARKS:
            bad += _infinite(y)
            if HAS_Q:
                bad += _infinite(yq)
            if bad > 0:
                _mark(mark_ptr, stride_mark, bounds_ptr, requests, row)
    elif part == 0:
        c = tl.arange(0, BL)
        weight = tl.load(weight_latent_ptr + c, mask=c < latent_size, other=0.0)
        x = tl.load(x_latent_ptr + row * stride_x + c, mask=c < latent_size, other=0.0)
        y = _normed(x, weight, latent_size, eps).to(latent_ptr.dtype.element_ty)
        tl.store(latent_ptr + row * latent_size + c, y, mask=c < latent_size)
        if MARKS:
            cs = tl.arange(0, BS)
            bad = _infinite(tl.load(x_shared_ptr + row * stride_x + cs, mask=cs < shared_size, other=0.0))
            if bad + _infinite(y) > 0:
                _mark(mark_ptr, stride_mark, bounds_ptr, requests, row)
    elif part == 1:
        for first in range(0, zeros, BZ):
            c = first + tl.arange(0, BZ)
            nothing = tl.zeros((BZ,), zero_ptr.dtype.element_ty)
            tl.store(zero_ptr + row * zeros + c, nothing, mask=c < zeros)
    elif HAS_Q:
        c = tl.arange(0, BQ)
        weight = tl.load(weight_q_ptr + c, mask=c < q_size, other=0.0)
        x = tl.load(x_q_ptr + row * stride_x + c, mask=c < q_size, other=0.0)
        y = _normed(x, weight, q_size, eps).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * q_size + c, y, mask=c < q_size)
        if MARKS:  # noqa: SIM102 (constant: without it the branch is not compiled)
            if _infinite(y) > 0:
                _mark(mark_ptr, stride_mark, bounds_ptr, requests, row)


@triton.jit
def sigmoid_mul_kernel(
    out_ptr, x_ptr, gate_ptr, width, stride_out, stride_x, stride_gate, BLOCK: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (row, column block)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_ptr + row * stride_gate + c, mask=inside, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-gate))
    if not INTERPRET:  # the interpreter truncates to bfloat16
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + c, (x * gate).to(out_ptr.dtype.element_ty), mask=inside)


_kda_inputs, _sigmoid_fp32 = Launcher(kda_inputs_kernel), Launcher(sigmoid_fp32_kernel)
_rms_norm, _low_rank_norms = Launcher(rms_norm_kernel), Launcher(low_rank_norms_kernel)
_sigmoid_mul = Launcher(sigmoid_mul_kernel)


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


_serial = False


@contextlib.contextmanager
def serial() -> Iterator[None]:
    """Kernels launched within wait for their predecessors as a whole: they follow an event of another stream."""
    global _serial
    before, _serial = _serial, True
    try:
        yield
    finally:
        _serial = before


def pdl(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device are launched programmatically dependent: capability 9.0 and up."""
    return _capability(tensor.device) >= 9 and not interpreting() and not _serial


def launch_options(dependent: bool) -> dict[str, Any]:
    """Triton's launch options of a kernel whose constant PDL is ``dependent``."""
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


def _rows(name: str, *tensors: torch.Tensor) -> None:
    for x in tensors:
        if x.dim() != 2 or x.stride(1) != 1:
            raise ValueError(f"{name}: {tuple(x.shape)} with strides {x.stride()} is not rows with a contiguous axis")


def row_edges() -> list[int]:
    """Row counts after which a kernel of this file is another variant, whatever the widths are."""
    return sorted({MAX_ROWS, WHOLE_ROWS, *(1 << i for i in range(tuning.sigmoid()[0].bit_length()))})


def sigmoid_fp32(x: torch.Tensor) -> torch.Tensor:
    """fp32 sigmoid of x [T, N] (any row stride), contiguous; equals ``torch.sigmoid(x.float())`` to fp32 rounding."""
    _rows("sigmoid_fp32", x)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, columns = x.shape
    if rows:
        wide, (most, warps) = triton.next_power_of_2(columns), tuning.sigmoid()
        tall = max(1, min(most // wide, triton.next_power_of_2(rows)))
        _sigmoid_fp32(
            (triton.cdiv(rows, tall),), out, x, rows, columns, x.stride(0), BR=tall, BC=wide, num_warps=warps,
            **launch_options(pdl(x)),
        )  # fmt: skip
    return out


def kda_inputs(f: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(z [T, C] = round(f W^T), beta fp32 [T, N] = sigmoid(b)) of f [T, K], b [T, N] and weight [C, K], 1..16 rows.

    f and b may have any row stride. Raises ValueError for other shapes.
    """
    _rows("kda_inputs", f, b, weight)
    (rows, inner), (width, columns), heads = f.shape, weight.shape, b.shape[1]
    if not 1 <= rows <= MAX_ROWS or b.shape[0] != rows or columns != inner or inner > MAX_INNER:
        raise ValueError(f"kda_inputs: f {tuple(f.shape)}, b {tuple(b.shape)} and weight {tuple(weight.shape)}")
    if max(f.stride(0), b.stride(0)) * MAX_ROWS >= 1 << 31:
        raise ValueError(f"kda_inputs: rows of f and b are {f.stride(0)} and {b.stride(0)} elements apart, too far")
    z = torch.empty(rows, width, dtype=f.dtype, device=f.device)
    beta = torch.empty(rows, heads, dtype=torch.float32, device=f.device)
    block = 32
    tiles = triton.cdiv(width, block)
    _kda_inputs(
        (tiles + 1,), z, beta, f, b, weight, rows, width, heads, z.stride(0), beta.stride(0), f.stride(0), b.stride(0),
        weight.stride(0), BM=MAX_ROWS, BN=block, K=inner, KB=max(16, triton.next_power_of_2(inner)),
        HB=triton.next_power_of_2(heads), TILES=tiles, INTERPRET=interpreting(), num_warps=2,
        **launch_options(pdl(f)),
    )  # fmt: skip
    return z, beta


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of the rows of x [T, H] (any row stride): rounded once before and once after the weight [H]."""
    _rows("rms_norm", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        block = triton.next_power_of_2(x.shape[1])
        warps = max(1, min(8, block // 512))
        _rms_norm(
            (x.shape[0],), out, x, weight, x.shape[1], eps, out.stride(0), x.stride(0), BLOCK=block, num_warps=warps,
            **launch_options(pdl(x)),
        )  # fmt: skip
    return out


def low_rank_norms(
    q: torch.Tensor | None,
    latent: torch.Tensor,
    q_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    eps: float,
    zeros: int,
    *,
    shared: torch.Tensor | None = None,
    marks: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(norm of q [T, A] or None, norm of latent [T, R], zeros [T, zeros]): columns of one projection, one launch.

    marks [T, >= 1]: where a normed row of latent or q or a row of shared [T, S] (which goes to the cache as it is) has
    NaN or infinity, NaN is written to the first column of the last row of its request. bounds int32 [B + 1]: request
    i has the rows bounds[i] to bounds[i + 1]; rows of no request mark themselves. All other marks keep their bits.

    q, latent and shared are columns of the same tensor: their row strides must be equal, else ValueError.
    """
    _rows("low_rank_norms", latent, *(x for x in (q, shared, marks) if x is not None))
    rows, rank = latent.shape
    for name, x in (("q", q), ("shared", shared)):
        if x is not None and (x.shape[0] != rows or x.stride(0) != latent.stride(0)):
            raise ValueError(f"low_rank_norms: {name} {tuple(x.shape)} is not beside latent {tuple(latent.shape)}")
    where = _marking(latent, shared, marks, bounds)
    low = None if q is None else latent.new_empty(q.shape)
    normed, nothing = latent.new_empty(latent.shape), latent.new_empty(rows, zeros)
    if rows:
        size = 1 if q is None else q.shape[1]
        others = (normed, latent, latent_weight) if low is None else (low, q, q_weight)
        whole = rows > WHOLE_ROWS
        parts = 1 if whole else 2 if q is None else 3
        _low_rank_norms(
            (rows, parts), others[0], normed, nothing, others[1], latent, where[0], others[2], latent_weight, where[1],
            where[2], size, rank, where[0].shape[1], zeros, eps, latent.stride(0), where[1].stride(0),
            where[2].shape[0] - 1, BQ=triton.next_power_of_2(size), BL=triton.next_power_of_2(rank),
            BS=triton.next_power_of_2(max(1, where[0].shape[1])), BZ=1024, HAS_Q=q is not None, MARKS=marks is not None,
            WHOLE=whole, num_warps=4, **launch_options(pdl(latent)),
        )  # fmt: skip
    return low, normed, nothing


def _marking(
    latent: torch.Tensor, shared: torch.Tensor | None, marks: torch.Tensor | None, bounds: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(shared, marks, bounds) as the kernel takes them: latent stands for all three where nothing is marked."""
    if marks is None:
        return latent, latent, latent
    if shared is None or bounds is None or marks.shape[0] != latent.shape[0] or marks.dtype != latent.dtype:
        raise ValueError(f"low_rank_norms: marks {marks.dtype} {tuple(marks.shape)} need shared, bounds and its rows")
    if bounds.dim() != 1 or bounds.dtype != torch.int32 or not bounds.is_contiguous() or not bounds.numel():
        raise ValueError(f"low_rank_norms: bounds {bounds.dtype} {tuple(bounds.shape)} are not int32 [requests + 1]")
    return shared, marks, bounds


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) of [T, C] rows (any row strides), contiguous; sigmoid and product are rounded to x's dtype."""
    _rows("sigmoid_mul", x, gate)
    if x.shape != gate.shape or x.dtype != gate.dtype:
        raise ValueError(f"sigmoid_mul: x {x.dtype} {tuple(x.shape)} and gate {gate.dtype} {tuple(gate.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.shape
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _sigmoid_mul(
            (rows, triton.cdiv(width, block)), out, x, gate, width, out.stride(0), x.stride(0), gate.stride(0),
            BLOCK=block, INTERPRET=interpreting(), num_warps=4, **launch_options(pdl(x)),
        )  # fmt: skip
    return out
