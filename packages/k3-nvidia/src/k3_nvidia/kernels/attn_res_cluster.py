"""AttnRes for few tokens in the CuTe DSL: the blocks of a cluster divide a token's columns.

Same formula, operands and rounding as :mod:`k3_nvidia.kernels.attn_res`. At 1 to 128 tokens most multiprocessors have
nothing to do and one of them takes longer to pull a token's rows through its L1 than memory takes to give them (143 KB
at eight blocks, 1.3 us at 64 bytes a clock). So:

- a token is a cluster of 1, 2, 4 or 8 blocks; a lane holds eight columns of every row, 16 bytes each, all loaded at
  once and kept in registers until they are mixed;
- before the kernel waits for the one that wrote the delta, it asks the L2 for prefix and blocks (a prefetch reads
  nothing, so it does not matter whether they are final) and folds the weights;
- the two sums of every row go through one tree in which lanes halve the list of sums among them (20 exchanges for nine
  rows instead of 90), then through shared memory of the block, then into that of every block of the cluster; the norm's
  sum likewise. Everything is added in a fixed order: the same bits every run.

Number of blocks, delta and bank write are run-time values; a binary is compiled per cluster, row bound and dtype. The
package ``nvidia-cutlass-dsl`` is optional: where :func:`available` says no, the table's Triton entries are used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from k3_core.operators import compiling
from k3_nvidia.kernels import skinny_cute

#: Source rows a binary is compiled for: the smallest bound that holds them is taken.
ROWS = (3, 5, 9)
MAX_THREADS = 1024


@functools.cache
def available() -> tuple[bool, str]:
    """Whether the DSL can be imported and the device has clusters of eight blocks, and why not."""
    ok, why = skinny_cute.available()
    if ok and torch.cuda.get_device_capability()[0] not in (9, 10):  # 12.x is made without
        return False, "attn_res_cluster: needs compute capability 9.x or 10.x"
    return ok, why.replace("skinny_cute", "attn_res_cluster")


def geometry(hidden: int, cluster: int, resident: int = 0) -> tuple[int, int, int]:
    """(threads, lanes with columns, blocks that must fit a multiprocessor) of a block; a lane holds eight columns.

    resident: blocks that must fit, which bounds the registers; 0: two of 448 threads or one of 896, for which 72
    registers a lane hold nine rows, and one of a larger cluster.
    """
    lanes = -(-hidden // (8 * cluster))
    threads = -(-lanes // 32) * 32
    return threads, lanes, resident or (max(1, min(2, MAX_THREADS // threads)) if cluster <= 2 else 1)


def takes(tensors: list[torch.Tensor | None], num_blocks: int) -> tuple[bool, str]:
    """Whether these operands fit: 1 to 8 blocks, at most 8192 columns, rows of 16-bit floats aligned to 16 bytes.

    The first tensor is the prefix [T, H].
    """
    assert tensors[0] is not None
    hidden = tensors[0].shape[1]
    if not 1 <= num_blocks < ROWS[-1]:
        return False, f"attn_res_cluster: {num_blocks} blocks, 1 to {ROWS[-1] - 1} are supported"
    if hidden > 8 * MAX_THREADS or hidden % 8:
        return False, f"attn_res_cluster: {hidden} columns"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            return False, f"attn_res_cluster: dtype {tensor.dtype}"
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in tensor.stride()[:-1]):
            return False, "attn_res_cluster: rows are not aligned to 16 bytes"
    return True, "attn_res_cluster: supported"


def halvings(values: int) -> list[int]:
    """Sizes of the list of ``values`` sums as the lanes of a warp divide it among them: [values, ..., 1]."""
    sizes = [values]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


@functools.cache
def compiled(cluster: int, resident: int, rows: int, hidden: int, dtype: torch.dtype, normed: bool) -> Any:
    """The binary for up to ``rows`` source rows, compiled at first use."""
    from k3_nvidia.kernels import attn_res_cluster_kernel

    threads, lanes, resident = geometry(hidden, cluster, resident)
    with compiling.timing("CuTe"):
        return attn_res_cluster_kernel.build(
            cluster, rows, halvings(2 * rows), hidden, threads, lanes, resident, dtype == torch.bfloat16, normed
        )


def launch(
    out: torch.Tensor,
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    bank: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    eps: float,
    out_eps: float,
    num_blocks: int,
    write_block: int | None,
    cluster: int,
    resident: int = 0,
) -> None:
    """Launch on the current stream; operands as ``attn_res.attn_res`` has checked them and :func:`takes` accepts them.

    weights: of the norm, of the projection and of the output norm (None for none). Raises RuntimeError where the DSL is
    absent.
    """
    ok, why = available()
    if not ok:
        raise RuntimeError(why)
    rows = next(bound for bound in ROWS if num_blocks + 1 <= bound)
    norm, proj, out_norm = weights
    call = compiled(cluster, resident, rows, prefix.shape[1], prefix.dtype, out_norm is not None)
    if compiling.naming:
        return
    tensors = (
        out, prefix, prefix if delta is None else delta, bank, norm, proj, norm if out_norm is None else out_norm,
    )  # fmt: skip
    strides = (prefix.stride(0), 0 if delta is None else delta.stride(0), bank.stride(0), bank.stride(1))
    call(
        [tensor.data_ptr() for tensor in tensors], strides, prefix.shape[0], num_blocks, int(delta is not None),
        -1 if write_block is None else write_block, eps, out_eps, torch.cuda.current_stream(prefix.device).cuda_stream,
    )  # fmt: skip
