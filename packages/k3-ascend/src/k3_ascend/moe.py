"""``block_sparse_moe`` on NPUs: fp32 router on the hidden state, latent routed experts, shared ones beside.

    logits = x W_r^T                      fp32
    z      = x W_down^T                   latent
    r      = sum_e p_e expert_e(z)        over vllm-ascend's communication paths, SiTU between the grouped products
    y      = norm(sum over ranks r) W_up^T + sum over ranks shared(x)

vllm-ascend chooses a path for each step (all-gather, MC2, all-to-all); of each this layer uses the stages that move
tokens (prepare, dispatch, combine, finalize) and computes between dispatch and combine itself. Tokens may be cut over
ranks by ``prepare``, so the router's logits travel with the latent and experts are chosen after it. After all-gather
the latent is a partial sum (experts' width is cut, or only local experts took part); after MC2 and all-to-all it is
whole. Formulas: ``k3_core.contracts.moe``.

The fused path FUSED_MC2 contains SwiGLU and is refused where the configuration is settled (:mod:`k3_ascend.limits`),
and here once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce

from k3_ascend import dispatch, experts, modelslim
from k3_core.checkpoint import expert_range, expert_width
from k3_core.config import K3Config
from k3_core.contracts.moe import router_logits
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.serving.modules import (
    Activation,
    GatedMLP,
    Loadable,
    below,
    local_linear,
    norm,
    parameter,
    tp,
)


class Router(Loadable):
    """The router's matrix and the bias that takes part in choosing only, which stays fp32 from the file on."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        text = config.text
        self.text = text
        self.weight = parameter(text.num_experts, text.hidden_size)
        self.e_score_correction_bias = parameter(text.num_experts, dtype=torch.float32)
        self.groups = (text.num_expert_group, text.topk_group) if text.use_grouped_topk else (1, 1)
        options = {
            "num_expert_group": self.groups[0],
            "topk_group": self.groups[1],
            "renormalize": text.moe_renormalize,
        }
        sizes = {"A": text.num_experts, "X": text.num_experts_per_token}
        self.operator = dispatch.choose("route", torch.get_default_dtype(), sizes, options)

    def forward(self, x: Tensor) -> Tensor:
        """Logits fp32 [T, E] of hidden states [T, H]; the product of bfloat16 values is accumulated in fp32."""
        return router_logits(x, self.weight)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> (weights fp32 [T, k], global expert ids int32 [T, k])."""
        text = self.text
        weights, ids = self.operator(
            logits,
            self.e_score_correction_bias,
            text.num_experts_per_token,
            renormalize=text.moe_renormalize,
            routed_scaling_factor=text.routed_scaling_factor,
            num_expert_group=self.groups[0],
            topk_group=self.groups[1],
        )
        return weights, ids

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Both tensors."""
        yield "weight", self.weight.data
        yield "e_score_correction_bias", self.e_score_correction_bias.data


class Int4SharedExperts(Loadable):
    """Shared experts of a ModelSlim checkpoint: one expert of the same grouped products, cut along its width.

    vllm-ascend's own int4 linear layer leaves activations in bfloat16 and knows no scale a channel; here they are int8
    with a scale a token, as the scheme's name says.
    """

    def __init__(self, config: K3Config, layout: modelslim.Layout) -> None:
        super().__init__()
        text = config.text
        width = text.shared_intermediate_size // tp()[0]
        self.experts = RoutedExperts(modelslim.Store(1, width, text.hidden_size, layout), range(1), quantised=True)
        self.act = Activation(text, width, dispatch.choose)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> this rank's share [T, H]."""
        rows = experts.Rows(x, None, x.new_full((1,), x.shape[0], dtype=torch.int64), 1)
        result: Tensor = self.experts.store.mlp(rows, self.act)  # type: ignore[attr-defined]
        return result

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """None: the matrices are taken as an expert's."""
        yield from ()


class MoE(Loadable):
    """A mixture-of-experts layer of one rank."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        size, rank = tp()
        self.text, self.ranks = text, size
        self.finished = False
        self.expert_parallel = bool(vllm_config.parallel_config.enable_expert_parallel) and size > 1
        ep = size if self.expert_parallel else 1
        self.local_ids = expert_range(config, ep, rank if ep > 1 else 0)
        width, _ = expert_width(config, size, ep)
        self.layout = modelslim.of_model(vllm_config.model_config, config)
        self.gate = Router(config)
        self.experts = RoutedExperts(
            self._store(config, vllm_config, width), self.local_ids, config.quantization is not None
        )
        self._add_expert_map()
        self._add_dense_parts(config, prefix)
        self.activation = Activation(text, width, dispatch.choose)
        self._register_paths(vllm_config, width)

    def _store(self, config: K3Config, vllm_config: Any, width: int) -> Any:
        """Storage in the form that this device computes with."""
        text, quantised = config.text, config.quantization is not None
        extra = vllm_config.additional_config
        want = extra.get("k3_experts") if isinstance(extra, dict) else None
        widths = (text.expert_hidden_size, width)
        if self.layout is not None:
            self.form = "w4a8"
            return modelslim.Store(len(self.local_ids), width, text.expert_hidden_size, self.layout)
        self.form = experts.choose(want, quantised, dispatch.generation(), widths)
        return experts.FORMS[self.form](len(self.local_ids), width, text.expert_hidden_size)

    def _add_expert_map(self) -> None:
        self.expert_map: Tensor | None
        local = None
        if self.expert_parallel:
            local = torch.full((self.text.num_experts,), -1, dtype=torch.int32)
            ids = self.local_ids
            local[ids.start : ids.stop] = torch.arange(len(ids), dtype=torch.int32)
        self.register_buffer("expert_map", local, persistent=False)

    def _add_dense_parts(self, config: K3Config, prefix: str) -> None:
        text, latent = config.text, config.text.routed_expert_hidden_size
        self.routed_expert_norm = None
        if latent is not None:
            name = f"{prefix}.routed_expert"
            self.routed_expert_down_proj = local_linear(text.hidden_size, latent, f"{name}_down_proj")
            self.routed_expert_up_proj = local_linear(latent, text.hidden_size, f"{name}_up_proj")
            if text.latent_moe_use_norm:
                self.routed_expert_norm = norm(latent, text.rms_norm_eps)
        self.shared_experts: Loadable | None = None
        if text.num_shared_experts and self.layout is not None and self.layout.shared:
            self.shared_experts = Int4SharedExperts(config, self.layout)
        elif text.num_shared_experts:
            width = text.shared_intermediate_size
            self.shared_experts = GatedMLP(text, width, f"{prefix}.shared_experts", dispatch.choose, reduce=False)

    def _register_paths(self, vllm_config: Any, width: int) -> None:
        """Make vllm-ascend's communication paths for layers of this size; they are shared by all layers."""
        from k3_ascend import paths

        paths.register(self.text, vllm_config, self.local_ids, width)

    # ---------------------------------------------------------------------------------------------------- computation

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]."""
        latent = x if self.text.routed_expert_hidden_size is None else self.routed_expert_down_proj(x)
        routed, whole = self._routed(latent, self.gate(x))
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if self.ranks > 1 and not whole:
            if shared is not None:  # one collective for both partial sums
                both = tensor_model_parallel_all_reduce(torch.cat([routed, shared], dim=-1))
                routed, shared = both.split([routed.shape[-1], shared.shape[-1]], dim=-1)
            else:
                routed = tensor_model_parallel_all_reduce(routed)
        elif self.ranks > 1 and shared is not None:
            shared = tensor_model_parallel_all_reduce(shared)
        result = self._finish(routed)
        return result if shared is None else result + shared

    def _finish(self, routed: Tensor) -> Tensor:
        """Norm and up-projection of the whole latent sum."""
        if self.routed_expert_norm is not None:
            routed = self.routed_expert_norm(routed.contiguous())
        if self.text.routed_expert_hidden_size is None:
            return routed
        projected: Tensor = self.routed_expert_up_proj(routed)
        return projected

    def _routed(self, latent: Tensor, logits: Tensor) -> tuple[Tensor, bool]:
        """The weighted sum of experts [T, L], and whether it is the sum over all ranks."""
        from k3_ascend import paths

        return paths.run(self, latent, logits)

    # --------------------------------------------------------------------------------------------------------- loading

    def finish_loading(self) -> None:
        """Bring the experts to the layout of their products, once: when all are there, or when none will come."""
        self.finished = True
        blocks = [self.experts]
        if isinstance(self.shared_experts, Int4SharedExperts):
            blocks.append(self.shared_experts.experts)
        for block in blocks:
            block.store.finish()  # type: ignore[attr-defined]
            for name, tensor in block.store.tensors().items():
                block.register_buffer(name, tensor, persistent=False)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors go, the routed experts apart."""
        yield from below("gate", self.gate)
        if self.text.routed_expert_hidden_size is not None:
            yield from below("routed_expert_down_proj", self.routed_expert_down_proj)
            yield from below("routed_expert_up_proj", self.routed_expert_up_proj)
        if self.routed_expert_norm is not None:
            yield from below("routed_expert_norm", self.routed_expert_norm)
        if self.shared_experts is not None:
            yield from below("shared_experts", self.shared_experts)
