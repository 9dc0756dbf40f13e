"""Low-latency matrix product for 1..32 rows: y = round(x W^T + residual), the weight streamed once.

    x [M, K], W [N, K], residual [M, N] or None -> y [M, N];  fp32 accumulation, one rounding at the end

At these sizes the product is a read of W: floor = 2 N K bytes at the bandwidth of the memory. What the design follows:

- About 4 MB must be outstanding to hide the memory's latency (32 KB a multiprocessor), from the first moment on. The
  ``vector`` kernel holds its loads in registers, one step ahead; the ``dot`` kernel in a ring of asynchronous copies.
- All loads of W are 16 bytes a lane and evict-first: W is read once, x and the partial sums stay in the L2.
- M <= 4 is arithmetic on the ordinary units (2 M + 1 operations an element leave room); above that the tensor cores
  take W as the 64-row operand, so that x's few rows are its narrow side.
- Narrow matrices have too few row tiles for every multiprocessor: K is then cut. Partial sums go to the L2 and the last
  program of a tile to arrive adds them, always in the order of the cuts, so the same input gives the same bits.
- With programmatic dependent launch a program loads its first steps of W (``Config.hold``) before it waits for x, while
  the kernels before still run, and asks the L2 for one step more. What lies in registers need not cross the L2's port
  again, which is hardly wider than the memory's: asking the L2 for more steps than one gained nothing.
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="assignment, misc, attr-defined"
# (bodies of Triton kernels have no Python types; tuples grow inside them)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from k3_core.operators.triton_host import Launcher, interpreting
from k3_nvidia.kernels.triton_math import dot

MAX_ROWS = 32
MAX_VECTOR_ROWS = 4
MAX_TILES = 8192
MAX_HOLD = 2
MAX_STRIDE = (1 << 31) // MAX_ROWS - 1
#: Elements of 16 bytes.
VECTOR = 8


@triton.jit
def _prefetch(pointers):
    """Ask the L2 for the lines behind these pointers; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_tile(w_ptr, n, first, N, K, stride_w, LINES: tl.constexpr):
    """LINES lines (64 elements each) of every row of a tile, from column ``first`` on."""
    row = tl.minimum(n, N - 1).to(tl.int64)
    column = tl.minimum(first + tl.arange(0, LINES) * 64, K - 1)
    _prefetch(w_ptr + row[:, None] * stride_w + column[None, :])


@triton.jit
def _last_to_arrive(ticket_ptr, tile, SPLITS: tl.constexpr):
    """Whether all other cuts of this tile have stored their sums; the counter is zero again afterwards."""
    tl.debug_barrier()  # every lane's sums are stored before one lane says so
    arrived = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLITS - 1
    tl.store(ticket_ptr + tile, 0, mask=last)
    return last


@triton.jit
def _store(out_ptr, residual_ptr, value, m, n, mask, stride_out, stride_residual, RESIDUAL: tl.constexpr):
    """Add the residual in fp32 and round once."""
    if RESIDUAL:
        value += tl.load(residual_ptr + m * stride_residual + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * stride_out + n, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_weights(w_ptr, n, k, N, end, stride_w, EVEN_N: tl.constexpr):
    """One step's weights [lanes, BN, 8]; zeros past the end. k [lanes]: first elements.

    Lanes come first so that Triton spreads them over the warps before the rows: a warp then reads 512 bytes of a row,
    and a lane holds the same columns of x as of every row of W.
    """
    inside = (k < end)[:, None, None]
    mask = inside if EVEN_N else (n < N)[None, :, None] & inside
    column = k[:, None, None] + tl.arange(0, 8)[None, None, :]
    return tl.load(
        w_ptr + n.to(tl.int64)[None, :, None] * stride_w + column, mask=mask, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _load_rows(x_ptr, k, M: tl.constexpr, end, stride_x):
    """One step's M rows of x [lanes, 1, 8]; zeros past the end."""
    inside = (k < end)[:, None, None]
    column = k[:, None, None] + tl.arange(0, 8)[None, None, :]
    rows = ()
    for m in tl.static_range(M):
        rows = rows + (tl.load(x_ptr + m * stride_x + column, mask=inside, other=0.0),)
    return rows


@triton.jit
def _added(sums, w, rows, M: tl.constexpr):
    """The sums of M rows with one step's products."""
    wide = w.to(tl.float32)
    added = ()
    for m in tl.static_range(M):
        added = added + (sums[m] + tl.sum(wide * rows[m].to(tl.float32), 2),)
    return added


@triton.jit(do_not_specialize=["steps"])
def vector_kernel(
    out_ptr, x_ptr, w_ptr, residual_ptr, partial_ptr, ticket_ptr, N, K, stride_x, stride_w, stride_out,
    stride_residual, steps,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN_N: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """Program (row tile, cut): BN rows of W against M rows of x over ``steps`` steps of BK, HOLD (0 to 2) of them
    loaded before x is waited for."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    first = split * steps * BK
    k = first + tl.arange(0, BK // 8) * 8
    end = tl.minimum(K, first + steps * BK)
    if HOLD > 0:
        w = _load_weights(w_ptr, n, k, N, end, stride_w, EVEN_N)
    if HOLD > 1:
        next_w = _load_weights(w_ptr, n, k + BK, N, end, stride_w, EVEN_N)
    if PDL:
        _prefetch_tile(w_ptr, n, first + HOLD * BK, N, K, stride_w, BK // 64)
        gdc_wait()
    sums = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros((BK // 8, BN), tl.float32),)
    if HOLD == 0:
        w = _load_weights(w_ptr, n, k, N, end, stride_w, EVEN_N)
    rows = _load_rows(x_ptr, k, M, end, stride_x)
    if HOLD > 1:
        k += BK
        next_rows = _load_rows(x_ptr, k, M, end, stride_x)
        sums = _added(sums, w, rows, M)
        w = next_w
        rows = next_rows
    for _ in range(HOLD // 2, steps):
        k += BK
        next_w = _load_weights(w_ptr, n, k, N, end, stride_w, EVEN_N)
        next_rows = _load_rows(x_ptr, k, M, end, stride_x)
        sums = _added(sums, w, rows, M)
        w = next_w
        rows = next_rows
    if PDL:
        gdc_launch_dependents()
    there = n < N
    if SPLITS == 1:
        for m in tl.static_range(M):
            _store(out_ptr, residual_ptr, tl.sum(sums[m], 0), m, n, there, stride_out, stride_residual, RESIDUAL)
    else:
        for m in tl.static_range(M):
            tl.store(partial_ptr + (split * M + m) * N + n, tl.sum(sums[m], 0), mask=there, cache_modifier=".cg")
        if _last_to_arrive(ticket_ptr, tile, SPLITS):
            for m in tl.static_range(M):
                total = tl.zeros((BN,), tl.float32)
                for s in tl.static_range(SPLITS):
                    total += tl.load(partial_ptr + (s * M + m) * N + n, mask=there, other=0.0, cache_modifier=".cg")
                _store(out_ptr, residual_ptr, total, m, n, there, stride_out, stride_residual, RESIDUAL)


@triton.jit
def _dot_weights(ptrs, rows, k, K, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """One step's weights [BN, BK]; zeros past the end."""
    if EVEN_K and EVEN_N:
        return tl.load(ptrs, eviction_policy="evict_first")
    elif EVEN_K:
        return tl.load(ptrs, mask=rows, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=rows & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _dot_rows(ptrs, columns, k, K, EVEN_K: tl.constexpr):
    """One step's rows of x [BK, BM]; zeros past the end."""
    if EVEN_K:
        return tl.load(ptrs, mask=columns, other=0.0)
    else:
        return tl.load(ptrs, mask=columns & (k < K)[:, None], other=0.0)


@triton.jit(do_not_specialize=["M", "steps"])
def dot_kernel(
    out_ptr, x_ptr, w_ptr, residual_ptr, partial_ptr, ticket_ptr, M, N, K, stride_x, stride_w, stride_out,
    stride_residual, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, HOLD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (row tile, cut): [BN, BM] of the transposed result on the tensor cores. HOLD: as ``vector_kernel``, at
    most ``steps``."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    first = split * steps * BK
    m = tl.arange(0, BM)
    k = first + tl.arange(0, BK)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * stride_w + k[None, :]
    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * stride_x + k[:, None]
    rows = (n < N)[:, None]
    columns = (m < M)[None, :]
    if HOLD > 0:
        w0 = _dot_weights(w_ptrs, rows, k, K, EVEN_N, EVEN_K)
    if HOLD > 1:
        w1 = _dot_weights(w_ptrs + BK, rows, k + BK, K, EVEN_N, EVEN_K)
    if PDL:
        _prefetch_tile(w_ptr, n, first + HOLD * BK, N, K, stride_w, BK // 64)
        gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    if HOLD > 0:
        acc = dot(w0, _dot_rows(x_ptrs, columns, k, K, EVEN_K), acc, INTERPRET)
    if HOLD > 1:
        acc = dot(w1, _dot_rows(x_ptrs + BK, columns, k + BK, K, EVEN_K), acc, INTERPRET)
    w_ptrs += HOLD * BK
    x_ptrs += HOLD * BK
    for i in range(HOLD, steps):
        w = _dot_weights(w_ptrs, rows, k + i * BK, K, EVEN_N, EVEN_K)
        acc = dot(w, _dot_rows(x_ptrs, columns, k + i * BK, K, EVEN_K), acc, INTERPRET)
        w_ptrs += BK
        x_ptrs += BK
    if PDL:
        gdc_launch_dependents()
    there = rows & columns
    m2 = m[None, :]
    n2 = n[:, None]
    if SPLITS == 1:
        _store(out_ptr, residual_ptr, acc, m2, n2, there, stride_out, stride_residual, RESIDUAL)
    else:
        at = m2 * N + n2
        tl.store(partial_ptr + split * (M * N) + at, acc, mask=there, cache_modifier=".cg")
        if _last_to_arrive(ticket_ptr, tile, SPLITS):
            total = tl.zeros((BN, BM), tl.float32)
            for s in tl.static_range(SPLITS):
                total += tl.load(partial_ptr + s * (M * N) + at, mask=there, other=0.0, cache_modifier=".cg")
            _store(out_ptr, residual_ptr, total, m2, n2, there, stride_out, stride_residual, RESIDUAL)


_vector, _dot = Launcher(vector_kernel), Launcher(dot_kernel)


@dataclass(frozen=True)
class Config:
    """How a product is computed.

    kind: ``vector`` (M <= 4) or ``dot``. block_n: rows of W a program. block_k: elements of K a step. splits: cuts of
    K. warps; stages: ring of asynchronous copies (``dot`` only). pdl: programmatic dependent launch, capability 9.0 up.
    hold: steps of W that a program loads before it waits for x, 0 to 2 (with pdl; else before it does anything).
    """

    kind: str
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int = 2
    pdl: bool = False
    hold: int = 0

    @property
    def name(self) -> str:
        """One word for tables of results."""
        sizes = f"n{self.block_n}-k{self.block_k}-s{self.splits}-w{self.warps}-p{self.stages}"
        return f"{self.kind}-{sizes}{'-pdl' * self.pdl}"


def block_m(rows: int) -> int:
    """Columns of the tensor core that so many rows of x take."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32


def supports(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[bool, str]:
    """Whether the kernels of this file and of ``skinny_cute`` take these operands, and why not."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return False, f"skinny_gemm: x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [M, K] and [N, K]"
    if not 1 <= x.shape[0] <= MAX_ROWS:
        return False, f"skinny_gemm: {x.shape[0]} rows are not 1..{MAX_ROWS}"
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False, f"skinny_gemm: x is {x.dtype}, weight {weight.dtype}; both must be bfloat16 or both float16"
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.stride(1) != 1 or tensor.stride(0) % VECTOR or tensor.data_ptr() % 16:
            return False, f"skinny_gemm: rows of {name} must be contiguous and start on 16 bytes"
    if weight.shape[1] % VECTOR or not weight.shape[0]:
        return False, f"skinny_gemm: weight {tuple(weight.shape)} needs rows, of a multiple of {VECTOR} elements"
    if residual is not None:
        if residual.shape != (x.shape[0], weight.shape[0]) or residual.dtype != x.dtype:
            return False, f"skinny_gemm: residual is {residual.dtype} {tuple(residual.shape)}, not like the result"
        if residual.stride(1) != 1:
            return False, "skinny_gemm: rows of the residual must be contiguous"
    # Row numbers times these strides are 32-bit products in the kernels; a weight's are 64-bit ones.
    if max(x.stride(0), 0 if residual is None else residual.stride(0)) > MAX_STRIDE:
        return False, f"skinny_gemm: rows of x and the residual may be {MAX_STRIDE} elements apart"
    return True, "skinny_gemm: supported"


def prepare_out(x: torch.Tensor, weight: torch.Tensor, residual: Any, out: torch.Tensor | None) -> torch.Tensor:
    """The checked or new result tensor; raises ValueError as :func:`supports` says."""
    ok, why = supports(x, weight, residual)
    if not ok:
        raise ValueError(why)
    shape = (x.shape[0], weight.shape[0])
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != shape or out.dtype != x.dtype or out.stride(1) != 1:
        raise ValueError(f"skinny_gemm: out must be {x.dtype} {shape} with contiguous rows")
    return out


_SPARE_SETS = 8
_tickets: dict[tuple[Any, int], torch.Tensor] = {}
_spare: dict[Any, list[torch.Tensor]] = {}


def _ticket(device: torch.device) -> torch.Tensor:
    """Arrival counters, zero between calls: one set a stream, because products of one stream never overlap.

    A set made during a capture would only be zeroed when that graph runs, and another graph might run first. A capture
    on a new stream therefore takes one of the spare sets that the first call outside a capture made; if there is none
    its counters are its own, zeroed by the graph each time.
    """
    on_gpu = device.type == "cuda"
    key = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    if key in _tickets:
        return _tickets[key]
    if on_gpu and torch.cuda.is_current_stream_capturing():
        if not _spare.get(device):
            return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        _tickets[key] = _spare[device].pop()
    else:
        sets = 1 if device in _spare else 1 + _SPARE_SETS
        first, *others = torch.zeros(sets, MAX_TILES, dtype=torch.int32, device=device)
        _tickets[key] = first
        _spare.setdefault(device, others)
    return _tickets[key]


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """round(x W^T + residual) of x [M, K] (any row stride of whole 16 bytes) and weight [N, K], M 1..32 -> [M, N].

    bfloat16 or float16; safe in CUDA graphs (arrival counters of ``splits`` > 1 outlive the call, see ``_ticket``).
    Raises ValueError where :func:`supports` says no.
    """
    out = prepare_out(x, weight, residual, out)
    (rows, inner), outer = x.shape, weight.shape[0]
    if config.kind == "vector" and rows > MAX_VECTOR_ROWS:
        raise ValueError(f"skinny_gemm: the vector kernel takes up to {MAX_VECTOR_ROWS} rows, not {rows}")
    tiles = triton.cdiv(outer, config.block_n)
    steps = triton.cdiv(triton.cdiv(inner, config.block_k), config.splits)
    splits = triton.cdiv(triton.cdiv(inner, config.block_k), steps)
    partial = ticket = out
    if splits > 1:
        if tiles > MAX_TILES:
            raise ValueError(f"skinny_gemm: {tiles} row tiles are more than the {MAX_TILES} that may be cut along K")
        partial = torch.empty((splits, rows, outer), dtype=torch.float32, device=x.device)
        ticket = _ticket(x.device)
    pdl = config.pdl and not interpreting()
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    if pdl:
        options["launch_pdl"] = True
    shared = (residual if residual is not None else out, partial, ticket)
    strides = (x.stride(0), weight.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0)
    common = {
        "BN": config.block_n, "BK": config.block_k, "SPLITS": splits, "EVEN_N": outer % config.block_n == 0,
        "RESIDUAL": residual is not None, "PDL": pdl, "HOLD": min(config.hold, steps),
    }  # fmt: skip
    if config.kind == "vector":
        constants = {"M": rows, **common}
        _vector((tiles, splits), out, x, weight, *shared, outer, inner, *strides, steps, **constants, **options)
    else:
        # the cuts cover K exactly when every step of every cut is whole
        constants = {
            "BM": block_m(rows), **common, "EVEN_K": steps * splits * config.block_k == inner,
            "INTERPRET": interpreting(),
        }  # fmt: skip
        _dot((tiles, splits), out, x, weight, *shared, rows, outer, inner, *strides, steps, **constants, **options)
    return out
