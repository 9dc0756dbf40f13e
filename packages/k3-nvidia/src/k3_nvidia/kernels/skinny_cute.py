"""Low-latency matrix product for 1..16 rows in the CuTe DSL: y = round(x W^T + residual), as ``skinny_gemm``.

What differs from the Triton kernels:

- W goes from memory to the tensor core through registers only. An ``mma.m16n8k16`` wants from lane (g, t) the columns
  2t, 2t+1, 2t+8, 2t+9 of rows g and g+8; the sum over K may run in any order that W and x share, so lane (g, t) loads
  the 16 bytes at column 8t instead and feeds two products with them. No shared memory, no shuffle, whole sectors.
- The warps of a block share a row tile and cut K; so do the blocks of a cluster. Their sums meet in (distributed)
  shared memory in a fixed order: no workspace, no counters, the same bits every run.
- Under programmatic dependent launch the L2 is asked for the first batch of weights before x is waited for, and the
  assembler may move loads of W there: the kernel right before must not be the one that writes W (it writes x).

M, N, K and strides are run-time values. A binary is compiled per number of 8-row tiles of x (M <= 8 or <= 16),
configuration, dtype and residual and kept in this process; one per M would multiply the compilations of a start-up by
eight for nothing. The package ``nvidia-cutlass-dsl`` is optional: ask :func:`available` first.
"""

# mypy: allow-untyped-defs
# mypy: disable-error-code="no-untyped-call, misc, untyped-decorator, no-any-return, unused-ignore, import-not-found"
# (bodies of device functions have no Python types, and the DSL ships none)
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from k3_core.operators import compiling
from k3_nvidia.kernels.skinny_gemm import prepare_out

MULTIPROCESSORS = 132
MAX_ROWS = 16


@dataclass(frozen=True)
class Config:
    """tiles: 16-row tiles a warp; unroll: 32-column chunks a batch; warps: cuts of K in a block; cluster: blocks that
    cut K further (1, 2, 4 or 8)."""

    tiles: int
    unroll: int
    warps: int
    cluster: int

    @property
    def name(self) -> str:
        """One word for tables of results."""
        return f"r{self.tiles}-u{self.unroll}-w{self.warps}-c{self.cluster}"


@functools.cache
def available() -> tuple[bool, str]:
    """Whether the DSL can be imported and the device has clusters (capability 9.0 or higher), and why not."""
    if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("cuda") is None:
        return False, "skinny_cute: the package nvidia-cutlass-dsl is not installed"
    try:
        importlib.import_module("cutlass.cute")
    except Exception as error:  # a broken or foreign installation: say so once, use other kernels
        return False, f"skinny_cute: nvidia-cutlass-dsl cannot be imported ({type(error).__name__}: {error})"
    if not torch.cuda.is_available():
        return False, "skinny_cute: no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return False, "skinny_cute: needs compute capability 9.0 or higher"
    return True, "skinny_cute: available"


def candidates(m: int, n: int, k: int) -> Iterator[Config]:
    """Configurations worth a try: enough blocks for every multiprocessor, every warp with work."""
    chunks = -(-k // 32)
    seen = set()
    for tiles in (1, 2):
        programs = -(-n // (16 * tiles))
        for warps, unroll in ((8, 4), (4, 4), (8, 2), (4, 7), (16, 2)) if k > 512 else ((2, 4), (4, 2), (1, 4)):
            if tiles * unroll > 8 or (tiles == 2 and (m > 8 and unroll > 2)):
                continue  # registers
            wanted = 200 / programs
            fitting = [c for c in (1, 2, 4, 8) if c * warps * unroll <= 2 * chunks]
            cluster = min(fitting or [1], key=lambda c: abs(c - wanted))
            config = Config(tiles, unroll, warps, cluster)
            if config not in seen and programs * cluster >= 24:
                seen.add(config)
                yield config


@functools.cache
def compiled(config: Config, columns: int, dtype: torch.dtype, residual: bool) -> Any:
    """The binary for 1..8 rows (``columns`` 1) or 9..16 (2), compiled at first use."""
    from k3_nvidia.kernels import skinny_cute_kernel

    with compiling.timing("CuTe"):
        return skinny_cute_kernel.build(config, columns, dtype == torch.bfloat16, residual)


def columns(rows: int) -> int:
    """Tiles of eight rows."""
    return -(-rows // 8)


def skinny_cute(
    x: torch.Tensor,
    weight: torch.Tensor,
    config: Config,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """round(x W^T + residual) of x [M, K] and weight [N, K], M 1..16 -> [M, N]; contract of ``skinny_gemm``.

    Raises ValueError for operands that ``skinny_gemm.supports`` refuses and for more rows, and RuntimeError where the
    DSL is absent.
    """
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"skinny_cute: {x.shape[0]} rows are not 1..{MAX_ROWS}")
    out = prepare_out(x, weight, residual, out)
    ok, why = available()
    if not ok:
        raise RuntimeError(why)
    launch = compiled(config, columns(x.shape[0]), x.dtype, residual is not None)
    if compiling.naming:
        return out
    added = out if residual is None else residual
    launch(out, x, weight, added, torch.cuda.current_stream(x.device).cuda_stream)
    return out
