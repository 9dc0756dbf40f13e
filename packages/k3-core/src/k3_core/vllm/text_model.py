"""The text model: Kimi K3's decoder with attention residuals, and Kimi-Linear's with ordinary ones.

Reads top to bottom in the order the data flows. The order of mixes and bank writes is asked of the contract's schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from k3_core.config import K3Config, TextConfig, load_config
from k3_core.contracts import attn_res
from k3_core.contracts.norm import rms_norm
from k3_core.vllm import compat, loading
from k3_core.vllm.layers import cache
from k3_core.vllm.layers.kda import KimiDeltaAttention
from k3_core.vllm.layers.mla import KimiLatentAttention
from k3_core.vllm.layers.moe import MLP, MoE
from k3_core.vllm.layers.weights import Weight


class DecoderLayer(nn.Module):
    """One layer: attention (KDA or MLA) and feed-forward (dense or experts), each behind a mix and a norm."""

    def __init__(self, config: K3Config, index: int, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        self.index, self.eps = index, text.rms_norm_eps
        attention = KimiDeltaAttention if text.layer_kind(index) == "kda" else KimiLatentAttention
        self.self_attn = attention(text, vllm_config, f"{prefix}.self_attn")
        self.input_layernorm = Weight(text.hidden_size)
        self.post_attention_layernorm = Weight(text.hidden_size)
        if text.is_moe_layer(index):
            self.block_sparse_moe = MoE(text, packed=config.quantization is not None)
        else:
            self.mlp = MLP(text, text.intermediate_size)
        if text.attn_res_block_size is not None:
            self.self_attention_res_norm, self.mlp_res_norm = Weight(text.hidden_size), Weight(text.hidden_size)
            self.self_attention_res_proj = Weight(1, text.hidden_size)
            self.mlp_res_proj = Weight(1, text.hidden_size)

    def attention(self, h: Tensor) -> Tensor:
        """Normed attention of [T, H]."""
        return self.self_attn(rms_norm(h, self.input_layernorm.weight, self.eps))

    def feed_forward(self, h: Tensor) -> Tensor:
        """Normed feed-forward of [T, H]."""
        layer = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return layer(rms_norm(h, self.post_attention_layernorm.weight, self.eps))

    def forward_residual(self, hidden: Tensor) -> Tensor:
        """Ordinary pre-norm residuals (Kimi-Linear)."""
        hidden = hidden + self.attention(hidden)
        return hidden + self.feed_forward(hidden)

    def forward_attn_res(self, prefix: Tensor, bank: Tensor, schedule: attn_res.Schedule) -> Tensor:
        """Attention residuals: the running prefix [T, H] in and out, the bank [T, K, H] written in place."""
        i = self.index
        h = attn_res.mix(
            bank[:, : schedule.attn_blocks(i)],
            prefix,
            self.self_attention_res_norm.weight,
            self.self_attention_res_proj.weight,
            self.eps,
        )
        attention = self.attention(h)
        slot = schedule.write_index(i)
        if slot is None:
            prefix = prefix + attention
        else:
            bank[:, slot] = prefix
            prefix = attention
        h = attn_res.mix(
            bank[:, : schedule.mlp_blocks(i)],
            prefix,
            self.mlp_res_norm.weight,
            self.mlp_res_proj.weight,
            self.eps,
        )
        return prefix + self.feed_forward(h)


class Decoder(nn.Module):
    """Embedding, layers, output mix and final norm (``model.`` in the checkpoint)."""

    def __init__(self, config: K3Config, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        text = config.text
        self.text = text
        self.embed_tokens = Weight(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, vllm_config, f"{prefix}.layers.{i}") for i in range(text.num_hidden_layers)
        )
        self.norm = Weight(text.hidden_size)
        self.schedule: attn_res.Schedule | None = None
        if text.attn_res_block_size is not None:
            self.schedule = attn_res.Schedule(text.num_hidden_layers, text.attn_res_block_size)
            self.output_attn_res_norm = Weight(text.hidden_size)
            self.output_attn_res_proj = Weight(1, text.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Embeddings [T, H] -> hidden states [T, H] before the final norm."""
        if self.schedule is None:
            for layer in self.layers:
                hidden = cast(DecoderLayer, layer).forward_residual(hidden)
            return hidden
        bank = hidden.new_empty(hidden.shape[0], self.schedule.output_blocks, hidden.shape[1])
        for layer in self.layers:
            hidden = cast(DecoderLayer, layer).forward_attn_res(hidden, bank, self.schedule)
        return attn_res.mix(
            bank, hidden, self.output_attn_res_norm.weight, self.output_attn_res_proj.weight, self.text.rms_norm_eps
        )


class KimiLinearForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The text model with its head, as vLLM serves it; also the text part of Kimi K3."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", config: K3Config | None = None) -> None:
        super().__init__()
        compat.rewind_cpu_generators()
        self.config = config or load_config(compat.released_config(vllm_config.model_config))
        self.model_config = vllm_config.model_config
        text = self.config.text
        self.model = Decoder(self.config, vllm_config, f"{prefix}.model" if prefix else "model")
        if not text.tie_word_embeddings:
            self.lm_head = Weight(text.vocab_size, text.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [T, H] of ids [T]."""
        return functional.embedding(input_ids, self.model.embed_tokens.weight)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] before the final norm. ``positions`` is not used: the model has none."""
        if inputs_embeds is None:
            assert input_ids is not None, "either ids or embeddings"
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Final norm and head: [n, H] -> [n, vocab]."""
        text = self.config.text
        head = self.model.embed_tokens if text.tie_word_embeddings else self.lm_head
        return head(rms_norm(hidden_states, self.model.norm.weight, text.rms_norm_eps))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill all parameters from the checkpoint's tensors; see :mod:`k3_core.vllm.loading`."""
        return loading.load(self, self.config, weights, self.model_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> cache.Shapes:
        """Shapes of one request's states, before the model exists."""
        return cache.state_shapes(_text_config(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> cache.Dtypes:
        """Dtypes of one request's states, before the model exists."""
        return cache.state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, Any]:
        """How prefix caching copies the two states between blocks: whole."""
        return compat.whole_state_copy(), compat.whole_state_copy()


def _text_config(vllm_config: Any) -> TextConfig:
    return load_config(compat.released_config(vllm_config.model_config)).text
