"""Sizes of KDA states and of cache pages, and how large a page is on a CPU.

On a GPU vLLM's platform raises the block size until a latent page holds a state, and pads the state's page. On a CPU
vLLM does not know this model's latent attention (:mod:`k3_core.vllm.serving.mla_cpu`), so both pages are padded to the
larger one.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from k3_core.config import TextConfig
from k3_core.errors import ConfigError
from k3_core.vllm.layers.cache import latent_width

StateShapes = tuple[tuple[int, ...], ...]


def state_shapes(text: TextConfig, tp_size: int, num_spec: int) -> StateShapes:
    """Shapes of one request's states: the convolution's window and the recurrent state, of one rank.

    The window has a column more for each draft token, in the layout of ``VLLM_SSM_CONV_STATE_LAYOUT``. Written out here
    because vLLM's own function leaves the drafts out up to 0.23.
    """
    linear = text.linear_attn
    if linear.num_heads % tp_size:
        raise ConfigError(f"{linear.num_heads} KDA heads cannot be cut over {tp_size} ranks")
    channels = 3 * linear.num_heads * linear.head_dim // tp_size
    columns = linear.short_conv_kernel_size - 1 + num_spec
    window = (channels, columns) if is_conv_state_dim_first() else (columns, channels)
    return window, (linear.num_heads // tp_size, linear.head_dim, linear.head_dim)


def state_dtypes(vllm_config: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of the states: the model's (or --mamba-cache-dtype), and fp32 (or --mamba-ssm-cache-dtype).

    Written out here because vLLM's own function takes no dtype of the recurrent state up to 0.23.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config.dtype
    window, recurrent = cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    return (
        model if window == "auto" else getattr(torch, window),
        torch.float32 if recurrent == "auto" else getattr(torch, recurrent),
    )


def latent_page_bytes(text: TextConfig, vllm_config: Any) -> int:
    """Bytes of ``block_size`` latent rows in the model's dtype."""
    itemsize = vllm_config.model_config.dtype.itemsize
    return int(vllm_config.cache_config.block_size * latent_width(text) * itemsize)


def common_page_bytes(text: TextConfig, vllm_config: Any) -> int | None:
    """Bytes of the page that both kinds of layers use on a CPU; None on a GPU, where vLLM decides."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    shapes = state_shapes(text, vllm_config.parallel_config.tensor_parallel_size, vllm_config.num_speculative_tokens)
    state = sum(prod(s) * d.itemsize for s, d in zip(shapes, state_dtypes(vllm_config), strict=True))
    kinds = {text.layer_kind(i) for i in range(text.num_hidden_layers)}
    latent = latent_page_bytes(text, vllm_config)
    return max(latent if "mla" in kinds else 0, state if "kda" in kinds else 0)
