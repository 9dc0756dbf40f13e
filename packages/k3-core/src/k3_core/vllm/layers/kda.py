"""A KDA layer: projections, short convolution, gated delta rule, gated norm, output projection.

Both states of a request live in one block of vLLM's cache. A request that starts here finds whatever the block's last
user left; it begins from zeros. Requests with one token and a past go through the recurrence, all others through the
chunked form, so a request's arithmetic does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import MambaSpec

from k3_core.config import TextConfig
from k3_core.contracts import kda
from k3_core.vllm import compat
from k3_core.vllm.backends import RecurrentBackend, Rows
from k3_core.vllm.layers import cache
from k3_core.vllm.layers.weights import Weight, parameter


class KimiDeltaAttention(torch.nn.Module, MambaBase):
    """KDA over a ragged batch, with its states in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        linear, hidden = text.linear_attn, text.hidden_size
        width, heads, dim = linear.projection_size, linear.num_heads, linear.head_dim
        self.text, self.num_kda_heads, self.head_dim, self.prefix = text, heads, dim, prefix
        self.lower_bound, self.eps = linear.gate_lower_bound, text.rms_norm_eps

        self.q_proj, self.k_proj, self.v_proj = (Weight(width, hidden) for _ in range(3))
        taps = linear.short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Weight(width, 1, taps, dtype=torch.float32) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Weight(dim, hidden), Weight(width, dim)
        self.b_proj = Weight(heads, hidden)
        if linear.use_full_rank_gate:
            self.g_proj = Weight(width, hidden)
        else:
            self.g_a_proj, self.g_b_proj = Weight(dim, hidden), Weight(width, dim)
        self.A_log = parameter(heads, dtype=torch.float32)
        self.dt_bias = parameter(width, dtype=torch.float32)
        self.o_norm = Weight(dim, dtype=torch.float32)
        self.o_proj = Weight(hidden, width)

        self._dtypes = cache.state_dtypes(vllm_config)
        self.kv_cache: Any = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]; zeros where the step has no metadata and in padding rows."""
        step = compat.forward_metadata(self.prefix)
        out = x.new_zeros(x.shape[0], self.num_kda_heads, self.head_dim)
        if step is not None:
            for rows, rule in ((step.prefill, kda.chunked), (step.decode, kda.recurrent)):
                if rows:
                    out[rows.tokens] = self._attend(x[rows.tokens], rows, rule)
        return self.o_proj(out.flatten(1)) if step is not None else torch.zeros_like(x)

    def _attend(self, x: Tensor, rows: Rows, rule: Any) -> Tensor:
        """Gated output [tokens, N, D] of the requests in ``rows``, whose states are read and replaced."""
        conv_state, recurrent_state = self._states(rows)
        raw = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        mixed, conv_state = kda.short_conv(raw, taps, conv_state, rows.bounds)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in mixed.chunk(3, dim=-1))
        z = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (-1, self.head_dim))
        g = kda.gate(z, self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).float())
        o, recurrent_state = rule(q, k, v, g, beta, recurrent_state, rows.bounds)
        self._keep(rows, conv_state, recurrent_state)
        return kda.output_norm(o, self._output_gate(x), self.o_norm.weight, self.eps)

    def _output_gate(self, x: Tensor) -> Tensor:
        gate = self.g_proj(x) if self.text.linear_attn.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return gate.unflatten(-1, (-1, self.head_dim))

    def _states(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Copies of the states of ``rows``, zeros for requests that start with this step."""
        conv, recurrent = (state[rows.slots] for state in compat.state_views(self.kv_cache))
        conv[rows.fresh] = 0
        recurrent[rows.fresh] = 0
        return conv, recurrent.float()

    def _keep(self, rows: Rows, conv: Tensor, recurrent: Tensor) -> None:
        conv_cache, recurrent_cache = compat.state_views(self.kv_cache)
        conv_cache[rows.slots] = conv.to(conv_cache.dtype)
        recurrent_cache[rows.slots] = recurrent.to(recurrent_cache.dtype)

    # ------------------------------------------------------------------------------------ what vLLM asks of the layer

    @property
    def mamba_type(self) -> Any:
        """Kind of recurrent layer."""
        return compat.mamba_type()

    def get_state_shape(self) -> cache.Shapes:
        """Shapes of the states of one request."""
        return cache.state_shapes(self.text)

    def get_state_dtype(self) -> cache.Dtypes:
        """Dtypes of the states."""
        return self._dtypes

    def get_attn_backend(self) -> type[RecurrentBackend]:
        """Our own backend, whatever ``mamba_type`` says."""
        return RecurrentBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MambaSpec:
        """One page a request (a few with prefix caching), padded to the common size."""
        _, _, page = cache.page_bytes(self.text, vllm_config)
        return MambaSpec(
            shapes=self.get_state_shape(),
            dtypes=self.get_state_dtype(),
            block_size=vllm_config.cache_config.mamba_block_size,
            page_size_padded=page,
            mamba_type=self.mamba_type,
            mamba_cache_mode=vllm_config.cache_config.mamba_cache_mode,
        )
