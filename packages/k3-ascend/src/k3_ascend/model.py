"""Kimi K3 and Kimi-Linear on Ascend NPUs: decoder layer, text model, multimodal model, in the order the data flows.

Attention residuals run in the lazy form (:mod:`k3_core.vllm.serving.attn_res`): between sublayers travel the running
``prefix`` [T, H], the last sublayer's output ``delta`` [T, H], not yet added, and the ``bank`` of block sums
[T, slots, H]. What each mix reads and where the bank is written is asked of ``k3_core.contracts.attn_res.Schedule``.
The final norm is applied where logits are computed.

The model is captured whole in decode steps (ACL graph mode FULL_DECODE_ONLY); it is not traced by a compiler.

Hand-off between pipeline stages and auxiliary hidden states: :mod:`k3_core.vllm.serving.stack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from k3_ascend import dispatch, modelslim, modelslim_loading, prepared, speculation, state_copy, warmup
from k3_ascend.kda import KimiDeltaAttention
from k3_ascend.mla import LatentAttention
from k3_ascend.moe import Int4SharedExperts, MoE
from k3_core.checkpoint import Topology
from k3_core.config import K3Config
from k3_core.contracts.attn_res import Schedule
from k3_core.errors import UnsupportedError
from k3_core.vllm.processor import K3DummyInputsBuilder, K3MultiModalProcessor, K3ProcessingInfo
from k3_core.vllm.serving import loading
from k3_core.vllm.serving.attn_res import Mix
from k3_core.vllm.serving.modules import GatedMLP, Loadable, below, norm
from k3_core.vllm.serving.outer import MultimodalServing, TextServing
from k3_core.vllm.serving.stack import TextStack

# ------------------------------------------------------------------------------------------------------ decoder layer


class DecoderLayer(Loadable):
    """One layer: attention (KDA or MLA) and feed-forward (dense or experts), each behind a mix and a norm."""

    def __init__(self, config: K3Config, index: int, schedule: Schedule | None, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        self.index, self.schedule, self.eps = index, schedule, text.rms_norm_eps
        attention = KimiDeltaAttention if text.layer_kind(index) == "kda" else LatentAttention
        self.self_attn = attention(text, vllm_config, f"{prefix}.self_attn")
        self.input_layernorm = norm(text.hidden_size, self.eps)
        self.post_attention_layernorm = norm(text.hidden_size, self.eps)
        self.is_moe = text.is_moe_layer(index)
        if self.is_moe:
            self.feed_forward: nn.Module = MoE(config, vllm_config, f"{prefix}.block_sparse_moe")
        else:
            self.feed_forward = GatedMLP(text, text.intermediate_size, f"{prefix}.mlp", dispatch.choose)
        if schedule is not None:
            slots = schedule.mlp_blocks(index)
            self.self_attention_res = Mix(text, slots, dispatch.choose)
            self.mlp_res = Mix(text, slots, dispatch.choose)

    def forward(self, prefix: Tensor, delta: Tensor | None, bank: Tensor) -> tuple[Tensor, Tensor]:
        """Attention residuals: (prefix, delta) in and out; ``bank`` and the prefix are changed in place."""
        schedule = self.schedule
        assert schedule is not None
        write = schedule.write_index(self.index)
        h = self.self_attention_res(
            prefix,
            delta,
            bank,
            schedule.attn_blocks(self.index),
            write_block=write,
            output_norm=(self.input_layernorm.weight, self.eps),
        )
        attended = self.self_attn(h)
        # A prefix that went to the bank is complete: the attention's output begins the next one.
        prefix, delta = (prefix, attended) if write is None else (attended, None)
        h = self.mlp_res(
            prefix,
            delta,
            bank,
            schedule.mlp_blocks(self.index),
            output_norm=(self.post_attention_layernorm.weight, self.eps),
        )
        return prefix, self.feed_forward(h)

    def forward_plain(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ordinary pre-norm residuals (Kimi-Linear): (output not yet added, residual) in and out."""
        if residual is None:
            h, residual = self.input_layernorm(delta), delta
        else:
            h, residual = self.input_layernorm(delta, residual)
        h, residual = self.post_attention_layernorm(self.self_attn(h), residual)
        return self.feed_forward(h), residual

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors of this layer go, the routed experts apart."""
        for name in ("self_attn", "input_layernorm", "post_attention_layernorm"):
            yield from below(name, getattr(self, name))
        yield from below("block_sparse_moe" if self.is_moe else "mlp", self.feed_forward)
        if self.schedule is not None:
            yield from self.self_attention_res.named_parts("self_attention_res")
            yield from self.mlp_res.named_parts("mlp_res")


# --------------------------------------------------------------------------------------------------------- text model


class KimiLinearModel(TextStack):
    """This pipeline stage's layers in their order."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        def make(index: int, schedule: Schedule | None, prefix: str) -> DecoderLayer:
            return DecoderLayer(config, index, schedule, vllm_config, prefix)

        super().__init__(config, vllm_config, prefix, make, dispatch.choose)

    def forward(
        self, hidden: Tensor, intermediate: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Embeddings [T, H] (first stage) or the hand-off -> hidden states before the final norm, or a hand-off."""
        if self.schedule is None:
            return self._forward_plain(hidden, intermediate)
        prefix, bank = self.receive(hidden, intermediate)
        delta: Tensor | None = None
        aux = self.received_auxiliary(intermediate)
        for index in range(self.start_layer, self.end_layer):
            layer = cast(DecoderLayer, self.layers[index])
            if index in self.aux_layers:
                blocks = self.schedule.attn_blocks(index)
                aux.append(self.auxiliary(prefix, delta, bank, layer.self_attention_res, blocks))
            prefix, delta = layer(prefix, delta, bank)
        if not self.last:
            assert delta is not None
            return self.hand_over(prefix + delta, bank, aux)
        mixed = self.output_attn_res(prefix, delta, bank, self.schedule.output_blocks)
        if self.text.num_hidden_layers in self.aux_layers:
            aux.append(mixed)  # in both readings: a draft that asks for the last state wants the output mix
        return (mixed, aux) if aux else mixed

    def _forward_plain(
        self, hidden: Tensor, intermediate: IntermediateTensors | None
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Kimi-Linear: ordinary residuals."""
        residual: Tensor | None = None
        if intermediate is not None:
            hidden, residual = intermediate["hidden_states"], intermediate["residual"]
        aux = self.received_auxiliary(intermediate)
        for index in range(self.start_layer, self.end_layer):
            if index in self.aux_layers:
                aux.append(hidden.clone() if residual is None else hidden + residual)
            hidden, residual = cast(DecoderLayer, self.layers[index]).forward_plain(hidden, residual)
        assert residual is not None
        if not self.last:
            return self.hand_over(hidden, residual, aux)
        hidden = hidden + residual
        if self.text.num_hidden_layers in self.aux_layers:
            aux.append(hidden)
        return (hidden, aux) if aux else hidden


class KimiLinearForCausalLM(TextServing):
    """The text model with its head, as vLLM serves it; also the text part of Kimi K3."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", config: K3Config | None = None) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, config=config)
        if dispatch.device()[0] == "npu":
            # Before the runner that builds this model binds its caches and takes its first step.
            state_copy.install()
            speculation.install()

    def make_stack(self, prefix: str) -> KimiLinearModel:
        """Our own layers."""
        return KimiLinearModel(self.config, self.vllm_config, prefix)

    def warm_up(self) -> None:
        """Meet every kernel variant; see :mod:`k3_ascend.warmup`. Before it what nothing loaded is finished, too."""
        finish(self)  # with --load-format dummy no weights are loaded
        warmup.run(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint, then bring weights to the layout of their kernels."""
        refuse_again(self)
        loaded = super().load_weights(weights)
        finish(self)
        return loaded

    def destinations(self, prefix: str) -> loading.Destinations:
        """Where the text tensors go; ModelSlim's int4 and int8 matrices to theirs."""
        plain = super().destinations(prefix)
        result = modelslim_loading.ModelSlimDestinations(modelslim.of_model(self.model_config, self.config))
        result.tensors, result.experts = plain.tensors, plain.experts
        for index, layer in self.model.own_layers():
            if layer.is_moe and isinstance(layer.feed_forward.shared_experts, Int4SharedExperts):
                name = f"{prefix}model.layers.{index}.block_sparse_moe.shared_experts"
                result.shared[name] = layer.feed_forward.shared_experts.experts
        return result

    def fill(
        self,
        model: nn.Module,
        destinations: loading.Destinations,
        weights: Iterable[tuple[str, Tensor]],
        topology: Topology,
        cut: dict[str, int],
    ) -> set[str]:
        """Read the checkpoint into ``destinations``: the released form, or ModelSlim's."""
        found = modelslim.of_model(self.model_config, self.config)
        source = None if found is None else modelslim_loading.source(self.config, found, topology)
        return loading.load(model, destinations, self.config, weights, self.model_config, topology, cut, source)


def finish(model: nn.Module) -> None:
    """Bring the experts of all layers to the layout of their products, and what kernels read to theirs; idempotent."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MoE) and not module.finished:
                module.finish_loading()
    prepared.prepare(model)


def refuse_again(model: nn.Module) -> None:
    """Raise UnsupportedError where experts already have the layout of their products, which cannot be refilled."""
    if any(isinstance(module, MoE) and module.finished for module in model.modules()):
        raise UnsupportedError(
            "weights cannot be loaded a second time: experts have the layout of the NPU's products; restart the server"
        )


# --------------------------------------------------------------------------------------------------- multimodal model


@MULTIMODAL_REGISTRY.register_processor(K3MultiModalProcessor, info=K3ProcessingInfo, dummy_inputs=K3DummyInputsBuilder)
class KimiK3ForConditionalGeneration(MultimodalServing):
    """Kimi K3 with images, as vLLM serves it. The text model inside is always our own."""

    text_class = KimiLinearForCausalLM

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint, then bring weights to the layout of their kernels."""
        refuse_again(self)
        loaded = super().load_weights(weights)
        finish(self)
        return loaded
