"""Sizes of the two caches, and how their pages share one pool.

vLLM keeps all caches of a model in pages of one size. A latent page holds ``block_size`` rows of kv_lora_rank +
qk_rope_head_dim values, a state page holds one request's convolution window and recurrent state. Both are padded to the
larger of the two, which makes the layout independent of how a release of vLLM estimates an attention page.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from k3_core.config import TextConfig
from k3_core.errors import UnsupportedError
from k3_core.vllm import compat

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Dtypes = tuple[torch.dtype, torch.dtype]


def latent_width(text: TextConfig) -> int:
    """Values of one latent cache row."""
    return text.kv_lora_rank + text.qk_rope_head_dim


def state_shapes(text: TextConfig) -> Shapes:
    """Shapes of one request's states: convolution [q, k and v channels, W-1] and recurrent [heads, V, K]."""
    linear = text.linear_attn
    window = (3 * linear.projection_size, linear.short_conv_kernel_size - 1)
    return window, (linear.num_heads, linear.head_dim, linear.head_dim)


def state_dtypes(vllm_config: Any) -> Dtypes:
    """Dtypes of the convolution window (that of the model) and of the recurrent state (fp32, or bf16 on request).

    Raises UnsupportedError for any other ``--mamba-ssm-cache-dtype``.
    """
    names = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
    name = vllm_config.cache_config.mamba_ssm_cache_dtype
    if name not in names:
        raise UnsupportedError(f"--mamba-ssm-cache-dtype {name} is not supported; use auto, float32 or bfloat16")
    return vllm_config.model_config.dtype, names[name]


def page_bytes(text: TextConfig, vllm_config: Any) -> tuple[int, int, int]:
    """Bytes of a latent page, of a state page, and of the common page."""
    block_size = vllm_config.cache_config.block_size
    latent = block_size * latent_width(text) * compat.element_size(vllm_config.model_config.dtype)
    state = sum(
        prod(shape) * compat.element_size(dtype)
        for shape, dtype in zip(state_shapes(text), state_dtypes(vllm_config), strict=True)
    )
    kinds = {text.layer_kind(i) for i in range(text.num_hidden_layers)}
    return latent, state, max(latent if "mla" in kinds else 0, state if "kda" in kinds else 0)
