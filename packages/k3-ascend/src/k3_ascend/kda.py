"""KDA on NPUs: the shared layer with this wheel's operators, prefill states through the state copy, prefill plans.

A prefill works on states packed by row: they are gathered from the cache's pages first and scattered back after it
(:mod:`k3_ascend.state_copy`), because pages of vllm-ascend's cache need not lie densely. Decode and verification
address the pages themselves. On a CPU (contracts) the pool is used as it is.

The metadata carries, beside what the layers need, the few counts that vllm-ascend's runner reads from the metadata of
any gated delta-rule layer while it captures and replays graphs.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from k3_ascend import channels, dispatch, speculation, state_copy
from k3_core.config import TextConfig
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import KdaBackend, KdaMetadata, KdaMetadataBuilder

#: The newest plan of a prefill and what it was made for.
_last_plan: dict[str, Any] = {}


@dataclass(frozen=True)
class AscendKdaMetadata(KdaMetadata):
    """A step, with the counts of vllm-ascend's runner: requests that prefill, tokens of step rows, no others.

    num_spec_decodes is always 0: the runner would otherwise clear slots in buffers of its own metadata class.
    """

    num_prefills: int = 0
    num_decodes: int = 0
    num_spec_decodes: int = 0


class AscendKdaBackend(KdaBackend):
    """vLLM's name for KDA layers on NPUs."""

    @staticmethod
    def get_builder_cls() -> type[AscendKdaMetadataBuilder]:
        """Class of the metadata builder."""
        return AscendKdaMetadataBuilder


class AscendKdaMetadataBuilder(KdaMetadataBuilder):
    """The shared builder; its result also has the runner's counts."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> AscendKdaMetadata:
        """See :meth:`KdaMetadataBuilder.build`; rows that drafted nothing are verified too, padding rows are empty."""
        m = _without_padding(common_attn_metadata)
        if self.use_spec_decode and num_accepted_tokens is not None and num_decode_draft_tokens_cpu is not None:
            num_decode_draft_tokens_cpu = speculation.with_undrafted(
                num_decode_draft_tokens_cpu[: m.num_reqs], m.query_start_loc_cpu, m.is_prefilling
            )
        made = super().build(common_prefix_len, m, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build)
        shared = {f.name: getattr(made, f.name) for f in fields(KdaMetadata)}
        prefills = 0 if made.prefill is None else made.prefill.slots.shape[0]
        return AscendKdaMetadata(**shared, num_prefills=prefills, num_decodes=made.step_tokens)


def _without_padding(m: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The step with its offsets cut at the tokens that are there.

    vllm-ascend's first runner gives the rows that pad a graph the length of a real row, for its attention operator's
    sake; ``num_actual_tokens`` counts real tokens. A padding row must not look like a prompt.
    """
    cut = copy(m)
    cut.query_start_loc = m.query_start_loc.clamp(max=m.num_actual_tokens)
    cut.query_start_loc_cpu = m.query_start_loc_cpu.clamp(max=m.num_actual_tokens)
    return cut


class KimiDeltaAttention(KdaLayer, state_copy.StateCopyLayer):
    """KDA over a ragged batch, with its states in vLLM's cache."""

    def __init__(self, text: TextConfig, vllm_config: Any, prefix: str) -> None:
        super().__init__(text, vllm_config, prefix, dispatch.choose)
        self._copies = dispatch.device()[0] == "npu"

    def _run_prefill(
        self, metadata: KdaMetadata, part: slice, qkv: Tensor, z: Tensor, beta: Tensor, gate: Tensor, out: Tensor
    ) -> None:
        if not self._copies:
            super()._run_prefill(metadata, part, qkv, z, beta, gate, out)
            return
        p = metadata.prefill
        assert p is not None
        conv_state, _ = self.states()
        plan = {} if p.plan is None else {"plan": p.plan}
        mixed = self._short_conv(
            qkv[part],
            self.conv_weight,
            conv_state,
            p.slots,
            p.cu_seqlens,
            p.has_initial_state,
            **(plan if self._short_conv.name == channels.TRITON else {}),
        )
        q, k, v = (third.unflatten(-1, (-1, self.head_dim)) for third in mixed.chunk(3, dim=-1))
        copies, cache, pages = state_copy.of(self), self.recurrent_cache(), state_copy.without_null(p.slots)
        # Row 0 of the packed states stands for the null block, which operators neither read nor write.
        packed = cache.new_empty(p.slots.shape[0] + 1, *cache.shape[1:])
        copies.gather(cache, pages, p.has_initial_state, out=packed[1:])
        own = torch.arange(1, packed.shape[0], dtype=p.slots.dtype, device=packed.device)
        rows = torch.where(p.slots > 0, own, 0)
        o = self._prefill(
            q,
            k,
            v,
            z[part],
            beta[part],
            self.A_log,
            self.dt_bias,
            self.lower_bound,
            packed,
            rows,
            p.cu_seqlens,
            p.has_initial_state,
            **(plan if self._prefill.name == channels.TRITON else {}),
        )
        copies.store(cache, pages, packed[1:])
        self._gated_norm(o, gate[part], self.o_norm_weight, self.eps, out=out[part])

    def plan_prefill(self, bounds: np.ndarray, device: torch.device) -> Any:
        """What the prefill kernels precompute for sequences with these offsets; None where they need nothing."""
        if channels.TRITON not in (self._prefill.name, self._short_conv.name):
            return None
        from k3_ascend.kernels.kda_plan import plan_prefill

        # vLLM builds the metadata of a step once a cache group; the groups of a step have the same plan.
        key = (bounds.tobytes(), str(device))
        if _last_plan.get("key") != key:
            _last_plan.update(key=key, plan=plan_prefill(bounds.tolist(), device))
        return _last_plan["plan"]

    def get_attn_backend(self) -> type[AscendKdaBackend]:
        """This wheel's backend, whatever ``mamba_type`` says."""
        return AscendKdaBackend
