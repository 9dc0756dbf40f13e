"""``block_sparse_moe``: fp32 router on the hidden state, routed experts in the latent space, shared experts beside.

    ids, p = route(x W_r^T, bias)         fp32 logits and bias
    z      = x W_down^T                   latent
    r      = sum_e p_e expert_e(z)        this rank's part, operator ``experts``
    y      = norm(sum over ranks r) W_up^T + sum over ranks shared(x)

How ranks are summed is one of the forms of :mod:`k3_core.vllm.serving.reductions`. Experts are cut along their width
over the tensor parallel ranks, or whole and distributed with expert parallelism (then every rank routes all tokens
and computes its own experts; the sum is the same). Formulas: ``k3_core.contracts.moe``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from k3_core.checkpoint import expert_range, expert_width
from k3_core.config import K3Config
from k3_core.contracts.moe import router_logits
from k3_core.operators import Implementation
from k3_core.vllm.serving import reductions
from k3_core.vllm.serving.dispatch import Choose
from k3_core.vllm.serving.experts import RoutedExperts, Store
from k3_core.vllm.serving.modules import GatedMLP, Loadable, Rows, below, local_linear, norm, parameter, tp

#: (x [T, H], weight [A, H]) -> logits fp32 [T, A] of products that are not rounded before their sum.
Logits = Callable[[Tensor, Tensor], Tensor]
#: (implementation, experts, width of this rank, latent size, packed) -> storage in the implementation's layout.
MakeStore = Callable[[Implementation, int, int, int, bool], Store]

#: Names of the joined input matrix's rows, first and last.
LATENT_ROWS = ("routed_expert_down_proj",)
SHARED_ROWS = ("shared_experts.gate_proj", "shared_experts.up_proj")


class Router(Loadable):
    """The router's matrix and the bias that takes part in choosing only, which stays fp32 from the file on."""

    def __init__(self, config: K3Config, choose: Choose, logits: Logits) -> None:
        super().__init__()
        text = config.text
        self.text, self._logits = text, logits
        self.weight = parameter(text.num_experts, text.hidden_size)
        self.e_score_correction_bias = parameter(text.num_experts, dtype=torch.float32)
        self.groups = (text.num_expert_group, text.topk_group) if text.use_grouped_topk else (1, 1)
        options = {"num_expert_group": self.groups[0], "topk_group": self.groups[1]}
        sizes = {"A": text.num_experts, "X": text.num_experts_per_token}
        self.operator = choose("route", torch.get_default_dtype(), sizes, options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> (weights fp32 [T, k], global expert ids int32 [T, k])."""
        logits = self._logits(x, self.weight)
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


class MoeLayer(Loadable):
    """A mixture-of-experts layer of one rank.

    choose, make_store, logits: the vendor's operators, expert layouts and router product. one_input: the latent's down
    projection and the shared experts' gate and up rows are one matrix, ``in_proj``, that reads x once.
    """

    def __init__(
        self,
        config: K3Config,
        vllm_config: Any,
        prefix: str,
        choose: Choose,
        make_store: MakeStore,
        logits: Logits = router_logits,
        *,
        one_input: bool = False,
    ) -> None:
        super().__init__()
        text = config.text
        size, rank = tp()
        has_both = text.routed_expert_hidden_size is not None and text.num_shared_experts > 0
        self.one_input = one_input and has_both
        parallel = vllm_config.parallel_config
        self.text, self.ranks, self.rank = text, size, rank
        self.expert_parallel = bool(parallel.enable_expert_parallel) and size > 1
        quantised = config.quantization is not None
        ep = size if self.expert_parallel else 1
        # Unpadded: padding belongs to a kernel's layout, which does it once. Whole experts have nothing to pad.
        width, _ = expert_width(config, size, ep)
        self.width = width
        latent = text.expert_hidden_size
        sizes = {"L": latent, "I": width, "X": text.num_experts_per_token, "A": text.num_experts}
        options = {"quantised": quantised, "hidden_act": text.hidden_act}
        self.operator = choose("experts", torch.get_default_dtype(), sizes, options)
        ids = expert_range(config, ep, rank if ep > 1 else 0)
        self.gate = Router(config, choose, logits)
        store = make_store(self.operator, len(ids), width, latent, quantised)
        self.experts = RoutedExperts(store, ids, quantised)
        self._add_expert_map(ids)

        extra = vllm_config.additional_config
        want = extra.get("k3_moe_reduction") if isinstance(extra, dict) else None
        facts = reductions.facts(text, vllm_config)
        self.form = reductions.choose(facts, want)
        self._gathers = self.form in ("sharded", "adaptive") and facts.gathers
        self._add_dense_parts(config, size, prefix, choose)

    def _add_expert_map(self, ids: range) -> None:
        self.expert_map: Tensor | None
        local = None
        if self.expert_parallel:
            local = torch.full((self.text.num_experts,), -1, dtype=torch.int32)
            local[ids.start : ids.stop] = torch.arange(len(ids), dtype=torch.int32)
        self.register_buffer("expert_map", local, persistent=False)

    def _add_dense_parts(self, config: K3Config, size: int, prefix: str, choose: Choose) -> None:
        text, latent = config.text, config.text.routed_expert_hidden_size
        self.up_rows = text.hidden_size // size if self.form == "sharded" else text.hidden_size
        self.routed_expert_norm = None
        if latent is not None:
            name = f"{prefix}.routed_expert"
            if self.one_input:
                self.rows = Rows()
                self.rows.add(*LATENT_ROWS, latent)
                for half in SHARED_ROWS:
                    self.rows.add(half, text.shared_intermediate_size // size)
                self.in_proj = local_linear(text.hidden_size, self.rows.padded, f"{prefix}.in_proj")
                self.in_proj.weight.data[self.rows.total :].zero_()
            else:
                self.routed_expert_down_proj = local_linear(text.hidden_size, latent, f"{name}_down_proj")
            self.routed_expert_up_proj = local_linear(latent, self.up_rows, f"{name}_up_proj")
            if text.latent_moe_use_norm:
                self.routed_expert_norm = norm(latent, text.rms_norm_eps)
        self.shared_experts = None
        if text.num_shared_experts:
            width, own = text.shared_intermediate_size, not self.one_input
            self.shared_experts = GatedMLP(
                text, width, f"{prefix}.shared_experts", choose, reduce=False, own_inputs=own
            )
        up = self.routed_expert_up_proj if latent is not None else None
        self._finish = reductions.Finish(self.routed_expert_norm, up)

    # ---------------------------------------------------------------------------------------------------- computation

    def forward(self, x: Tensor) -> Tensor:
        """Normed hidden states [T, H] -> [T, H]."""
        routed, shared = self.partial(x)
        if self.form == "none":
            return reductions.none(routed, shared, self._finish)
        if self.form == "merged":
            return reductions.merged(routed, shared, self._finish)
        if self.form == "separate":
            return reductions.separate(routed, shared, self._finish)
        if self.form == "adaptive":
            return reductions.adaptive(routed, shared, self._finish, self.rank, self.ranks)
        return reductions.sharded(routed, shared, self._finish, self.rank)

    def partial(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's partial results: routed experts [T, L] and shared ones [T, H] or None, neither reduced."""
        by_ranks = self.latent_by_ranks(x.shape[0])
        if not self.one_input:
            if by_ranks:
                latent = reductions.gathered(x, self.routed_expert_down_proj.weight, self.rank, self.ranks)
            else:
                latent = x if self.text.routed_expert_hidden_size is None else self.routed_expert_down_proj(x)
            return self.routed(x, latent), None if self.shared_experts is None else self.shared_experts(x)
        assert self.shared_experts is not None
        if by_ranks:
            latent = reductions.gathered(x, self.input_weight(*LATENT_ROWS), self.rank, self.ranks)
            gate_up = linear(x, self.input_weight(*SHARED_ROWS))
        else:
            latent, gate_up = self.parts_of_input(self.in_proj(x))
        return self.routed(x, latent), self.shared_experts.finish(gate_up)

    def latent_by_ranks(self, tokens: int) -> bool:
        """Whether each rank computes a share of the latent's columns of so many tokens."""
        return self._gathers and tokens >= reductions.GATHER_TOKENS

    def parts_of_input(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """(latent [T, L], gate and up rows of the shared experts [T, 2 I]): columns of ``in_proj``'s product."""
        return self.rows.columns(product, *LATENT_ROWS), self.rows.columns(product, *SHARED_ROWS)

    def input_weight(self, first: str, last: str | None = None) -> Tensor:
        """Rows of the joined input matrix, for a product of their own: a view, which no CPU build of vLLM leaves."""
        start, end = self.rows.sizes[first][0], sum(self.rows.sizes[last or first])
        weight: Tensor = self.in_proj.weight
        return weight[start:end]

    def routed(self, x: Tensor, latent: Tensor) -> Tensor:
        """This rank's weighted sum of experts [T, L], not reduced."""
        text = self.text
        weights, ids = self.gate(x)
        routed: Tensor = self.operator(
            latent,
            self.experts.weights(),
            weights,
            ids,
            hidden_act=text.hidden_act,
            situ_beta=text.activation_situ_beta,
            situ_linear_beta=text.activation_situ_linear_beta,
            expert_map=self.expert_map,
        )
        return routed

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors go, the routed experts apart."""
        yield from below("gate", self.gate)
        if self.one_input:
            yield from self.rows.parts(self.in_proj.weight)
        elif self.text.routed_expert_hidden_size is not None:
            yield from below("routed_expert_down_proj", self.routed_expert_down_proj)
        if self.text.routed_expert_hidden_size is not None:
            yield from below("routed_expert_up_proj", self.routed_expert_up_proj)
        if self.routed_expert_norm is not None:
            yield from below("routed_expert_norm", self.routed_expert_norm)
        if self.shared_experts is not None:
            yield from below("shared_experts", self.shared_experts)
