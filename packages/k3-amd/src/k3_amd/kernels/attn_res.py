"""AttnRes: launcher of the kernel in ``device/attn_res.py``; operator ``attn_res`` of the table."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from k3_amd.kernels import launch
from k3_amd.kernels.device.attn_res import attn_res_kernel
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec

#: Rows of a token are held in registers together; K3 has at most eight blocks.
MAX_BLOCKS = 15
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_launch = launch.Launcher(attn_res_kernel)


def supports(spec: CallSpec) -> tuple[bool, str]:
    """Capability query: bfloat16, float16 or float32, hidden size a multiple of 8, at most 15 blocks."""
    ok, why = launch.supports_device(spec)
    if not ok:
        return ok, why
    if spec.dtype not in DTYPES:
        return False, f"attn_res: dtype {spec.dtype} is not bfloat16, float16 or float32"
    hidden = spec.sizes.get("H", 8)
    if hidden % 8:
        return False, f"attn_res: hidden size {hidden} is not a multiple of 8"
    blocks = int(spec.options.get("num_blocks", 0))
    if blocks > MAX_BLOCKS:
        return False, f"attn_res: {blocks} blocks; the rows of at most {MAX_BLOCKS} and the prefix fit in registers"
    return True, f"attn_res: Triton, hidden size {hidden}"


def _check(prefix: Tensor, delta: Tensor | None, bank: Tensor, num_blocks: int, write_block: int | None) -> None:
    if prefix.dtype not in DTYPES:
        raise UnsupportedError(f"attn_res: dtype {prefix.dtype} is not bfloat16, float16 or float32")
    if prefix.dim() != 2 or bank.dim() != 3 or bank.shape[0] != prefix.shape[0] or bank.shape[2] != prefix.shape[1]:
        raise ValueError(
            f"attn_res: prefix {tuple(prefix.shape)} and bank {tuple(bank.shape)} are not [T, H] and [T, M, H]"
        )
    if prefix.shape[1] % 8:
        raise UnsupportedError(f"attn_res: hidden size {prefix.shape[1]} is not a multiple of 8")
    for name, tensor in (("prefix", prefix), ("delta", delta), ("bank", bank)):
        if tensor is not None and (tensor.dtype != prefix.dtype or tensor.stride(-1) != 1):
            raise UnsupportedError(
                f"attn_res: {name} is {tensor.dtype}, strides {tensor.stride()}; must be {prefix.dtype}, last one 1"
            )
    if delta is not None and delta.shape != prefix.shape:
        raise ValueError(f"attn_res: delta {tuple(delta.shape)} does not match prefix {tuple(prefix.shape)}")
    if not 0 <= num_blocks <= min(bank.shape[1], MAX_BLOCKS):
        raise ValueError(f"attn_res: num_blocks {num_blocks} must lie in 0..{min(bank.shape[1], MAX_BLOCKS)}")
    if write_block is not None and not num_blocks <= write_block < bank.shape[1]:
        raise ValueError(f"attn_res: write_block {write_block} must lie in {num_blocks}..{bank.shape[1] - 1}")


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    bank: Tensor,
    norm_weight: Tensor,
    proj_weight: Tensor,
    eps: float,
    num_blocks: int,
    *,
    write_block: int | None = None,
    output_norm_weight: Tensor | None = None,
    output_norm_eps: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Operator attn_res of the table: prefix and bank change in place, the (normed) mix [T, H] is returned.

    Raises ValueError for shapes and UnsupportedError for dtypes or strides it has no code for.
    """
    _check(prefix, delta, bank, num_blocks, write_block)
    if (output_norm_weight is None) != (output_norm_eps is None):
        raise ValueError("attn_res: output_norm_weight and output_norm_eps go together")
    tokens, hidden = prefix.shape
    if out is None:
        out = torch.empty((tokens, hidden), dtype=prefix.dtype, device=prefix.device)
    elif out.shape != prefix.shape or not out.is_contiguous() or out.dtype != prefix.dtype:
        raise ValueError(f"attn_res: out must be a contiguous {prefix.dtype} tensor of shape {tuple(prefix.shape)}")
    for name, weight in (
        ("norm_weight", norm_weight), ("proj_weight", proj_weight), ("output_norm_weight", output_norm_weight)
    ):  # fmt: skip
        if weight is not None and (weight.numel() != hidden or not weight.is_contiguous()):
            raise ValueError(f"attn_res: {name} must be contiguous with {hidden} elements")
    if tokens == 0:
        return out
    options = launch.options("attn_res", prefix.device)
    programs = min(tokens, options.pop("programs") * launch.compute_units(prefix.device))
    chunk = min(options.pop("CHUNK"), triton.next_power_of_2(hidden))
    options["TOGETHER"] = min(options["TOGETHER"], num_blocks + 1)
    _launch(
        (programs,),
        out, prefix, prefix if delta is None else delta, bank, norm_weight, proj_weight,
        norm_weight if output_norm_weight is None else output_norm_weight,
        prefix.stride(0), 0 if delta is None else delta.stride(0), bank.stride(0), bank.stride(1), tokens, eps,
        0.0 if output_norm_eps is None else output_norm_eps, 0 if write_block is None else write_block,
        NUM_BLOCKS=num_blocks, HAS_DELTA=delta is not None, HAS_WRITE=write_block is not None,
        HAS_NORM=output_norm_weight is not None, H=hidden, CHUNK=chunk, KC=triton.cdiv(hidden, chunk),
        **options,
    )  # fmt: skip
    return out


def warmup_profiles(config: Any, limits: Any) -> list[dict[str, int]]:
    """Token counts: Triton distinguishes none of them here, so one is enough; the schedule's calls do the rest."""
    return [{"tokens": 1}]
