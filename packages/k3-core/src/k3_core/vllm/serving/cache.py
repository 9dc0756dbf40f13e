"""Sizes of KDA states and of cache pages, and how large a page is on a CPU.

On a GPU vLLM's platform raises the block size until a latent page holds a state, and pads the state's page. On a CPU
vLLM does not know this model's latent attention (:mod:`k3_core.vllm.serving.mla_cpu`), so both pages are padded to the
larger one.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator

from k3_core.config import TextConfig
from k3_core.vllm.layers.cache import latent_width

StateShapes = tuple[tuple[int, ...], ...]


def state_shapes(text: TextConfig, tp_size: int, num_spec: int) -> StateShapes:
    """Shapes of one request's states: the convolution's window and the recurrent state, of one rank."""
    linear = text.linear_attn
    shapes: StateShapes = MambaStateShapeCalculator.kda_state_shape(
        tp_size,
        linear.num_heads,
        linear.head_dim,
        conv_kernel_size=linear.short_conv_kernel_size,
        num_spec=num_spec,
    )
    return shapes


def state_dtypes(vllm_config: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of the states: the model's, and fp32 (or bf16 by --mamba-ssm-cache-dtype)."""
    cache = vllm_config.cache_config
    dtypes: tuple[torch.dtype, ...] = MambaStateDtypeCalculator.kda_state_dtype(
        vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    return dtypes


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
