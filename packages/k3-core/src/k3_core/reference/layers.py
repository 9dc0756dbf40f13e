"""One decoder layer on one sequence, composed from the contracts, in the order the data flows.

h = mix(bank, P)                      attention residuals; Kimi-Linear: h = P
bank += [P], P := nothing             at layers 0, B, 2B, ... only
P := P + attention(rms_norm(h))       KDA or MLA
h = mix(bank, P)                      Kimi-Linear: h = P
P := P + mlp(rms_norm(h))             dense or mixture of experts
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_core.config import TextConfig
from k3_core.contracts import attn_res, kda, mla, moe
from k3_core.contracts._common import compute_dtype, linear
from k3_core.contracts.moe import Routing
from k3_core.contracts.norm import rms_norm
from k3_core.contracts.situ import gated_activation
from k3_core.reference.cache import KdaState, LayerState, MlaState
from k3_core.reference.weights import KdaWeights, LayerWeights, MixWeights, MlpWeights

#: From this many tokens on the chunked form is faster than the token loop; both compute the same.
_CHUNK_FROM = 16


@dataclass(frozen=True)
class LayerOutput:
    """What one layer produced for its T tokens.

    prefix [T, H] and bank [T, n, H] after the layer; state after it; attention_input [T, H]: the mix before the input
    norm (Kimi-Linear: the residual stream); attention [T, H]: its output; routing, None for a dense layer;
    mix_probs: softmax of the mixes with at least one bank block, attention's first, each [T, n + 1] (only if recorded).
    """

    prefix: Tensor
    bank: Tensor
    state: LayerState
    attention_input: Tensor
    attention: Tensor
    routing: Routing | None
    mix_probs: tuple[Tensor, ...]


def decoder_layer(
    index: int,
    prefix: Tensor,
    bank: Tensor,
    state: LayerState,
    weights: LayerWeights,
    text: TextConfig,
    *,
    record: bool = False,
) -> LayerOutput:
    """Layer `index` on prefix [T, H] and bank [T, n, H], with the state left by earlier tokens.

    The bank holds the blocks written by earlier layers. Nothing is changed in place.
    """
    probabilities: list[Tensor] = []
    h = mixed = mix(bank, prefix, weights.attention_mix, text, probabilities if record else None)
    running: Tensor | None = prefix
    if text.attn_res_block_size is not None:
        schedule = attn_res.Schedule(text.num_hidden_layers, text.attn_res_block_size)
        if schedule.write_index(index) is not None:
            bank, running = torch.cat([bank, prefix.unsqueeze(1)], dim=1), None

    h = rms_norm(h, weights.input_norm, text.rms_norm_eps)
    if isinstance(weights.attention, KdaWeights):
        attention, state = kda_attention(h, weights.attention, text, _as_kda(state))
    else:
        attention, state = mla_attention(h, weights.attention, text, _as_mla(state))
    running = attention if running is None else running + attention

    h = mix(bank, running, weights.mlp_mix, text, probabilities if record else None)
    h = rms_norm(h, weights.post_norm, text.rms_norm_eps)
    mlp, routing = feed_forward(h, weights.mlp, text)
    return LayerOutput(running + mlp, bank, state, mixed, attention, routing, tuple(probabilities))


def kda_attention(x: Tensor, w: KdaWeights, text: TextConfig, state: KdaState) -> tuple[Tensor, KdaState]:
    """Kimi Delta Attention on normed x [T, H]: (out [T, H], new state)."""
    heads = text.linear_attn.num_heads
    raw = torch.cat([linear(x, w.q), linear(x, w.k), linear(x, w.v)], dim=-1)
    convolved, conv = kda.short_conv(raw, w.conv, state.conv.unsqueeze(0))
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in convolved.chunk(3, dim=-1))

    z = linear(linear(x, w.f_a), w.f_b).unflatten(-1, (heads, -1))
    g = kda.gate(z, w.a_log, w.dt_bias, text.linear_attn.gate_lower_bound)
    strength = linear(x, w.b)
    beta = torch.sigmoid(strength.to(compute_dtype(strength)))

    rule = kda.chunked if x.shape[0] >= _CHUNK_FROM else kda.recurrent
    o, recurrent = rule(q, k, v, g, beta, state.recurrent.unsqueeze(0))

    output_gate = x
    for matrix in w.gate:
        output_gate = linear(output_gate, matrix)
    o = kda.output_norm(o, output_gate.unflatten(-1, (heads, -1)), w.o_norm, text.rms_norm_eps)
    return linear(o.flatten(1), w.o), KdaState(conv[0], recurrent[0])


def mla_attention(x: Tensor, w: mla.MlaWeights, text: TextConfig, state: MlaState) -> tuple[Tensor, MlaState]:
    """Gated latent attention on normed x [T, H]: (out [T, H], new state). Single tokens use the absorbed form."""
    out, rows = mla.layer(
        x,
        w,
        num_heads=text.num_attention_heads,
        nope_dim=text.qk_nope_head_dim,
        past=state.rows,
        absorbed=x.shape[0] == 1,
        low_rank_eps=text.low_rank_norm_eps,
    )
    return out, MlaState(rows)


def feed_forward(x: Tensor, w: MlpWeights | moe.MoeWeights, text: TextConfig) -> tuple[Tensor, Routing | None]:
    """Dense MLP or mixture of experts on normed x [T, H]: (out [T, H], routing or None)."""
    activation = gated_activation(text.hidden_act, text.activation_situ_beta, text.activation_situ_linear_beta)
    if isinstance(w, MlpWeights):
        return moe.gated_mlp(x, w.gate, w.up, w.down, activation), None
    return moe.layer(
        x,
        w,
        top_k=text.num_experts_per_token,
        activation=activation,
        eps=text.rms_norm_eps,
        renormalize=text.moe_renormalize,
        scaling=text.routed_scaling_factor,
        num_groups=text.num_expert_group if text.use_grouped_topk else 1,
        topk_groups=text.topk_group if text.use_grouped_topk else 1,
    )


def mix(
    bank: Tensor, prefix: Tensor, w: MixWeights | None, text: TextConfig, probabilities: list[Tensor] | None = None
) -> Tensor:
    """The input of a sublayer (or of the final norm), [T, H]: the mix, or the residual stream in Kimi-Linear.

    Its softmax [T, n + 1] is appended to `probabilities`, where given and where the bank is not empty.
    """
    if w is None:
        return prefix
    if probabilities is not None and bank.shape[1]:
        probabilities.append(attn_res.mix_probabilities(bank, prefix, w.norm, w.proj, text.rms_norm_eps))
    return attn_res.mix(bank, prefix, w.norm, w.proj, text.rms_norm_eps)


def _as_kda(state: LayerState) -> KdaState:
    if not isinstance(state, KdaState):
        raise TypeError("a KDA layer was given the state of an MLA layer; the cache belongs to another model")
    return state


def _as_mla(state: LayerState) -> MlaState:
    if not isinstance(state, MlaState):
        raise TypeError("an MLA layer was given the state of a KDA layer; the cache belongs to another model")
    return state
