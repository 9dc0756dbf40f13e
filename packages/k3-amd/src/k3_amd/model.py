"""Kimi K3 and Kimi-Linear on AMD GPUs: decoder layer, text model, multimodal model, in the order the data flows.

Attention residuals run in the lazy form (:mod:`k3_core.vllm.serving.attn_res`): between sublayers travel the running
``prefix`` [T, H], the last sublayer's output ``delta`` [T, H], not yet added, and the ``bank`` of block sums
[T, slots, H]. What each mix reads and where the bank is written is asked of ``k3_core.contracts.attn_res.Schedule``.
The final norm is applied where logits are computed, so the hidden states handed out are those before it.

Hand-off between pipeline stages and auxiliary hidden states: :mod:`k3_core.vllm.serving.stack`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from k3_amd import dispatch, vision, warmup
from k3_amd.kda import KimiDeltaAttention
from k3_amd.mla import KimiLatentAttention
from k3_amd.moe import MoE
from k3_core.config import K3Config
from k3_core.contracts.attn_res import Schedule
from k3_core.vllm.processor import K3DummyInputsBuilder, K3MultiModalProcessor, K3ProcessingInfo
from k3_core.vllm.serving.attn_res import Mix
from k3_core.vllm.serving.modules import GatedMLP, Loadable, below, norm
from k3_core.vllm.serving.outer import MultimodalServing, TextServing
from k3_core.vllm.serving.stack import TextStack
from k3_core.vllm.serving.vision import Attend

# ------------------------------------------------------------------------------------------------------ decoder layer


class DecoderLayer(Loadable):
    """One layer: attention (KDA or MLA) and feed-forward (dense or experts), each behind a mix and a norm."""

    def __init__(self, config: K3Config, index: int, schedule: Schedule | None, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        self.index, self.schedule, self.eps = index, schedule, text.rms_norm_eps
        attention = KimiDeltaAttention if text.layer_kind(index) == "kda" else KimiLatentAttention
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
        schedule, i = self.schedule, self.index
        assert schedule is not None
        write = schedule.write_index(i)
        h = self.self_attention_res(
            prefix,
            delta,
            bank,
            schedule.attn_blocks(i),
            write_block=write,
            output_norm=(self.input_layernorm.weight, self.eps),
        )
        attention = self.self_attn(h)
        # Where the prefix was written to the bank, the attention's output begins a new one.
        prefix, delta = (prefix, attention) if write is None else (attention, None)
        h = self.mlp_res(
            prefix,
            delta,
            bank,
            schedule.mlp_blocks(i),
            output_norm=(self.post_attention_layernorm.weight, self.eps),
        )
        return prefix, self.feed_forward(h)

    def forward_plain(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ordinary pre-norm residuals (Kimi-Linear): (output not yet added, residual) in and out."""
        if residual is None:
            residual = delta
            h = self.input_layernorm(delta)
        else:
            h, residual = self.input_layernorm(delta, residual)
        h, residual = self.post_attention_layernorm(self.self_attn(h), residual)
        return self.feed_forward(h), residual

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's tensors of this layer go, the routed experts apart."""
        yield from below("self_attn", self.self_attn)
        yield from below("input_layernorm", self.input_layernorm)
        yield from below("post_attention_layernorm", self.post_attention_layernorm)
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
        for index in self.running():
            layer = cast(DecoderLayer, self.layers[index])
            if index in self.aux_layers:
                aux.append(
                    self.auxiliary(prefix, delta, bank, layer.self_attention_res, self.schedule.attn_blocks(index))
                )
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
        for index in self.running():
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

    def make_stack(self, prefix: str) -> KimiLinearModel:
        """Our own layers."""
        return KimiLinearModel(self.config, self.vllm_config, prefix)

    def warm_up(self) -> None:
        """Meet every kernel variant; see :mod:`k3_amd.warmup`."""
        warmup.WARM_UP.run(self)


# --------------------------------------------------------------------------------------------------- multimodal model


@MULTIMODAL_REGISTRY.register_processor(K3MultiModalProcessor, info=K3ProcessingInfo, dummy_inputs=K3DummyInputsBuilder)
class KimiK3ForConditionalGeneration(MultimodalServing):
    """Kimi K3 with images, as vLLM serves it. The text model inside is always our own."""

    text_class = KimiLinearForCausalLM

    def vision_attention(self) -> Attend:
        """This device's; see :mod:`k3_amd.vision`."""
        return vision.attention()
