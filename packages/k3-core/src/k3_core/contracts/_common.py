"""What the contracts share: the compute dtype, row partitions of packed batches, linear layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when any operand is float64, else float32: BF16 data is always accumulated in at least fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def sequence_bounds(num_rows: int, cu_seqlens: Tensor | Sequence[int] | None) -> list[int]:
    """Row boundaries [0, ..., end] of the sequences packed in `num_rows` rows; one sequence when None.

    Rows at and after the last boundary are padding. Raises ValueError where the boundaries do not start at 0,
    decrease, or pass `num_rows`.
    """
    if cu_seqlens is None:
        return [0, num_rows]
    bounds = [int(b) for b in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    ordered = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or not ordered or bounds[-1] > num_rows:
        raise ValueError(f"cu_seqlens must be [0, ...] without decrease and end at or before {num_rows}, got {bounds}")
    return bounds


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] @ weight [out, in]^T in x's dtype (fp32 accumulation for BF16), no bias: K3 has none anywhere."""
    return functional.linear(x, weight.to(x.dtype))
