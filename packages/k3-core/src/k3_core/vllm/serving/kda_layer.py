"""A KDA layer: one fused input projection, short convolution, gated delta rule, gated norm, output projection.

Rows of the input projection on each rank: q, k, v and g by head, then f_a (all of it on every rank), then b by head,
then padding to a multiple of 16. Kimi-Linear has the low-rank g_a in the place of g. z = f_b(f_a(x)) follows.

The states are in vLLM's cache: raw inputs of the convolution (3 + num_spec columns, in either layout of
``VLLM_SSM_CONV_STATE_LAYOUT``) and the recurrent state [heads, V, K]. :mod:`k3_core.vllm.serving.kda_metadata` says
which slot belongs to which row. The part between the projections is one call that piecewise CUDA graphs leave out
of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from k3_core.config import TextConfig
from k3_core.vllm import compat
from k3_core.vllm.serving.cache import StateShapes, common_page_bytes, state_dtypes, state_shapes
from k3_core.vllm.serving.dispatch import CONTRACT, Choose
from k3_core.vllm.serving.kda_metadata import KdaBackend, KdaMetadata
from k3_core.vllm.serving.modules import Loadable, Rows, below, local_linear, parameter, row_parallel, tp

Planner = Callable[..., Any]

#: The newest plan of a prefill and what it was made for.
_last_plan: dict[str, Any] = {}


class KdaLayer(Loadable, MambaBase):
    """KDA over a ragged batch, with its states in vLLM's cache.

    choose: the vendor's choice of operators. planner: what its prefill kernels precompute on the host, as
    (offsets of the sequences, heads, device, dim=head dimension) -> plan; not asked where a contract computes.
    """

    def __init__(
        self, text: TextConfig, vllm_config: Any, prefix: str, choose: Choose, planner: Planner | None = None
    ) -> None:
        super().__init__()
        linear, hidden = text.linear_attn, text.hidden_size
        size, _ = tp()
        self.text, self.prefix, self._planner = text, prefix, planner
        self.num_heads, self.head_dim = linear.num_heads // size, linear.head_dim
        self.lower_bound, self.eps = linear.gate_lower_bound, text.rms_norm_eps
        self.full_rank_gate = linear.use_full_rank_gate
        self._shapes = state_shapes(text, size, vllm_config.num_speculative_tokens)
        self._dtypes = state_dtypes(vllm_config)
        self._num_spec = vllm_config.num_speculative_tokens

        width = self.num_heads * self.head_dim
        self.width = width
        self.rows = Rows()
        for name in ("q_proj", "k_proj", "v_proj"):
            self.rows.add(name, width)
        self.rows.add(*(("g_proj", width) if self.full_rank_gate else ("g_a_proj", self.head_dim)))
        self.rows.add("f_a_proj", self.head_dim)
        self.rows.add("b_proj", self.num_heads)
        self.in_proj = local_linear(hidden, self.rows.padded, f"{prefix}.in_proj")
        self.in_proj.weight.data[self.rows.total :].zero_()
        self.f_b_proj = local_linear(self.head_dim, width, f"{prefix}.f_b_proj")
        if not self.full_rank_gate:
            self.g_b_proj = local_linear(self.head_dim, width, f"{prefix}.g_b_proj")
        taps = linear.short_conv_kernel_size
        self.conv_weight = parameter(3 * width, taps, dtype=torch.float32)
        self.A_log = parameter(self.num_heads, dtype=torch.float32)
        self.dt_bias = parameter(self.num_heads, self.head_dim, dtype=torch.float32)
        self.o_norm_weight = parameter(self.head_dim, dtype=torch.float32)
        self.o_proj = row_parallel(linear.projection_size, hidden, f"{prefix}.o_proj")
        self._choose_operators(taps, choose)

        self.kv_cache: Any = ()
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def _choose_operators(self, taps: int, choose: Choose) -> None:
        sizes = {"N": self.num_heads, "D": self.head_dim, "K": self.head_dim, "V": self.head_dim, "W": taps}
        sizes |= {"C": 3 * self.width, "P": taps - 1 + self._num_spec, "Q": 1 + self._num_spec}
        options = {"state_dtype": self._dtypes[1], "lower_bound": self.lower_bound, "num_spec": self._num_spec}
        self.dtype = dtype = torch.get_default_dtype()
        names = ("short_conv", "kda_prefill", "gated_norm", "kda_decode", "kda_verify")
        chosen = {name: choose(name, dtype, sizes, options) for name in names}
        self._short_conv, self._prefill = chosen["short_conv"], chosen["kda_prefill"]
        self._gated_norm = chosen["gated_norm"]
        self._decode, self._verify = chosen["kda_decode"], chosen["kda_verify"]

    # ---------------------------------------------------------------------------------------------------- computation

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]; zeros where the step has no metadata and in padding rows."""
        qkv, z, beta, gate = self.project(x)
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        self._attend(qkv, z, beta, gate, out)
        result: Tensor = self.o_proj(out.flatten(1))
        return result

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [T, 3 N D] before the convolution, z [T, N, D], beta fp32 [T, N] and the gate's logits [T, N, D]."""
        projected = self.in_proj(x)
        heads = (-1, self.head_dim)
        z, beta = self.decays(self.rows.columns(projected, "f_a_proj"), self.rows.columns(projected, "b_proj"))
        z = z.unflatten(-1, heads)
        if self.full_rank_gate:
            gate = self.rows.columns(projected, "g_proj").unflatten(-1, heads)
        else:
            gate = self.g_b_proj(self.rows.columns(projected, "g_a_proj")).unflatten(-1, heads)
        return self.rows.columns(projected, "q_proj", "v_proj"), z, beta, gate

    def decays(self, low: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(z [T, N D] of the low rank f_a [T, D], beta fp32 [T, N] of its logits); a vendor may make it one launch."""
        return self.f_b_proj(low), torch.sigmoid(logits.float())

    @eager_break_during_capture
    def _attend(self, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, out: Tensor) -> None:
        """Fill ``out`` [T, N, D] with the gated outputs of this step's rows; the states are read and replaced."""
        metadata: KdaMetadata | None = compat.forward_metadata(self.prefix)
        if metadata is None:
            out.zero_()
            return
        if metadata.order is None:
            self._run(metadata, qkv, z, beta, gate, out)
            return
        order = metadata.order
        packed = out.new_empty(len(order), *out.shape[1:])
        self._run(metadata, qkv[order], z[order], beta[order], gate[order], packed)
        out.zero_()
        out[order] = packed

    def _run(self, metadata: KdaMetadata, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, out: Tensor) -> None:
        """The operators of a step whose step rows come first."""
        conv_state, recurrent_state = self.states()
        steps = metadata.step_tokens
        end = steps + metadata.prefill_tokens
        fixed = (self.conv_weight, self.A_log, self.dt_bias, self.lower_bound, self.o_norm_weight, self.eps)
        if steps:
            inputs = (qkv[:steps], z[:steps], beta[:steps], gate[:steps], *fixed, conv_state, recurrent_state)
            if metadata.verify is not None:
                v = metadata.verify
                self._verify(*inputs, v.slots, v.accepted, v.cu_seqlens, out=out[:steps])
            elif metadata.decode is not None:
                self._decode(*inputs, metadata.decode.slots, out=out[:steps])
        if metadata.prefill is not None:
            self._run_prefill(metadata, slice(steps, end), qkv, z, beta, gate, out)
        if end < out.shape[0]:
            out[end:].zero_()

    def _run_prefill(
        self, metadata: KdaMetadata, part: slice, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, out: Tensor
    ) -> None:
        p = metadata.prefill
        assert p is not None
        conv_state, recurrent_state = self.states()
        plan = {} if p.plan is None else {"plan": p.plan}
        where = (p.slots, p.cu_seqlens, p.has_initial_state)
        q, k, v = self._convolved(qkv[part], conv_state, where, plan)
        o = self._prefill(
            q, k, v, z[part], beta[part], self.A_log, self.dt_bias, self.lower_bound, recurrent_state, *where, **plan
        )
        self._gated_norm(o, gate[part], self.o_norm_weight, self.eps, out=out[part])

    def _convolved(
        self, qkv: Tensor, conv_state: Tensor, where: tuple[Tensor, ...], plan: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """q, k and v [T, N, D] after the convolution; a vendor may lay them out as its prefill kernels like best."""
        mixed = self._short_conv(qkv, self.conv_weight, conv_state, *where, **plan)
        return tuple(third.unflatten(-1, (-1, self.head_dim)) for third in mixed.chunk(3, dim=-1))

    def states(self) -> tuple[Tensor, Tensor]:
        """The pools: conv_state [slots, channels, columns] in either layout, and recurrent_state [slots, N, V, K]."""
        conv_state, recurrent_state = compat.state_views(self.kv_cache)
        return (conv_state if is_conv_state_dim_first() else conv_state.transpose(1, 2)), recurrent_state

    def plan_prefill(self, bounds: np.ndarray, device: torch.device) -> Any:
        """What the prefill kernels precompute for sequences with these offsets; None where they need nothing."""
        if self._planner is None or self._prefill.name == CONTRACT:
            return None
        # vLLM builds the metadata of a step once a cache group; the groups of a step have the same plan.
        key = (bounds.tobytes(), self.num_heads, self.head_dim, str(device))
        if _last_plan.get("key") != key:
            _last_plan.update(key=key, plan=self._planner(bounds.tolist(), self.num_heads, device, dim=self.head_dim))
        return _last_plan["plan"]

    # --------------------------------------------------------------------------------------------------------- loading

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors go."""
        yield from self.rows.parts(self.in_proj.weight)
        yield from below("f_b_proj", self.f_b_proj)
        if not self.full_rank_gate:
            yield from below("g_b_proj", self.g_b_proj)
        for index, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            third = self.conv_weight.data[index * self.width : (index + 1) * self.width]
            yield f"{name}.weight", third.unsqueeze(1)
        yield "A_log", self.A_log.data
        yield "dt_bias", self.dt_bias.data.view(-1)
        yield "o_norm.weight", self.o_norm_weight.data
        yield from below("o_proj", self.o_proj)

    # ------------------------------------------------------------------------------------ what vLLM asks of the layer

    @property
    def mamba_type(self) -> Any:
        """A member of vLLM's list of recurrent layers; the backend is our own."""
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_state_shape(self) -> StateShapes:
        """Shapes of the states of one request."""
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the states."""
        return self._dtypes

    def get_attn_backend(self) -> type[KdaBackend]:
        """Our own backend, whatever ``mamba_type`` says."""
        return KdaBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MambaSpec:
        """One page a request and draft token (a few more with prefix caching), as large as a latent page."""
        cache = vllm_config.cache_config
        return MambaSpec(
            shapes=self._shapes,
            dtypes=self._dtypes,
            block_size=cache.mamba_block_size,
            page_size_padded=common_page_bytes(self.text, vllm_config) or cache.mamba_page_size_padded,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache.mamba_cache_mode,
            num_speculative_blocks=self._num_spec,
        )
