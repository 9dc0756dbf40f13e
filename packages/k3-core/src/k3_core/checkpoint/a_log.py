"""The A_log padding rule (K3-SPEC 2.1, 11.3).

Kimi K3 stores A_log with 128 values for 96 heads, the last 32 exactly zero; its own modelling code declares 96.
Kimi-Linear stores [1, 1, heads, 1]. Reading the padded tensor as per-channel values gives a plausible, wrong model, so
anything else is refused.
"""

import torch
from torch import Tensor

from k3_core.errors import CheckpointError


def normalize_a_log(tensor: Tensor, num_heads: int, name: str = "A_log") -> Tensor:
    """The `num_heads` values of a stored A_log.

    Args:
        tensor: floating [num_heads]; or longer, [n] with an exactly zero tail; or [1, 1, num_heads, 1].
        num_heads: KDA heads of the model.
        name: the tensor's name, for messages.

    Returns:
        float32 [num_heads], contiguous, never a view of the stored tensor.

    Raises:
        CheckpointError: any other shape, a tail that is not zero, values that are not finite.
    """
    if not tensor.is_floating_point():
        raise CheckpointError(f"{name}: dtype {tensor.dtype}, expected a floating dtype")
    if not a_log_shape_fits(tuple(tensor.shape), num_heads):
        raise CheckpointError(
            f"{name}: shape {list(tensor.shape)}, expected [{num_heads}], a longer vector with a zero tail, or "
            f"[1, 1, {num_heads}, 1]"
        )
    flat = tensor.reshape(-1)
    tail = flat[num_heads:]
    if bool((tail != 0).any()):  # NaN differs from 0 as well
        raise CheckpointError(
            f"{name}: {flat.numel()} values for {num_heads} heads, but the tail is not zero ({int((tail != 0).sum())} "
            f"values differ); it is not padding, so the tensor belongs to a model with other heads"
        )
    heads = flat[:num_heads].to(torch.float32, copy=True)
    if not bool(torch.isfinite(heads).all()):
        raise CheckpointError(f"{name}: holds NaN or infinity")
    return heads.contiguous()


def a_log_shape_fits(shape: tuple[int, ...], num_heads: int) -> bool:
    """Whether a header's shape can be an A_log of `num_heads` heads (the tail is checked when it is read)."""
    return (len(shape) == 1 and shape[0] >= num_heads) or shape == (1, 1, num_heads, 1)
