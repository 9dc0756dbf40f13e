"""The tensors of a whole model, grouped as the computation uses them. Shapes are those of the checkpoint, [out, in].

Tensors stored F32 (A_log, dt_bias, K3's convolutions and o_norm, the router's bias) stay F32 in a BF16 model.
"""

from dataclasses import dataclass

from torch import Tensor

from k3_core.contracts.mla import MlaWeights
from k3_core.contracts.moe import MoeWeights
from k3_core.contracts.vision import ProjectorWeights, TowerWeights


@dataclass(frozen=True)
class KdaWeights:
    """One KDA layer, P = heads * D.

    q, k, v [P, H]; conv [3 P, W] (q, k, v one after the other); f_a [D, H] and f_b [P, D] of the decay; b [N, H] of the
    write strength; a_log [N]; dt_bias [P]; o_norm [D]; gate: (g,) with g [P, H], or (g_a [D, H], g_b [P, D]); o [H, P].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    conv: Tensor
    f_a: Tensor
    f_b: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    gate: tuple[Tensor, ...]
    o: Tensor


@dataclass(frozen=True)
class MlpWeights:
    """A dense MLP: gate, up [I, H]; down [H, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MixWeights:
    """The two vectors of one attention-residual mix: norm [H], proj [1, H]."""

    norm: Tensor
    proj: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; both mixes are None in Kimi-Linear, which has an ordinary residual stream."""

    attention_mix: MixWeights | None
    input_norm: Tensor
    attention: KdaWeights | MlaWeights
    mlp_mix: MixWeights | None
    post_norm: Tensor
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """embed, lm_head [vocab, H] (the same tensor where tied), the layers, the output mix, the final norm, vision."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    output_mix: MixWeights | None
    norm: Tensor
    lm_head: Tensor
    tower: TowerWeights | None
    projector: ProjectorWeights | None
