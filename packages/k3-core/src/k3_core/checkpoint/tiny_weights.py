"""Random weights at scales that keep activations and logits sane.

Each tensor is drawn from its own generator, seeded by (seed, name), so its values depend neither on the order of
writing nor on the other tensors. Matrices are normal with standard deviation gain / sqrt(inputs); the gains give layer
outputs of rms about 1, logits of standard deviation about 2.5, gates over their whole range and feed-forward inputs
that reach SiTU's saturation.

`long_memory` makes the KDA state last: the forget gates are shut (g about -1e-4) and writes are gentle. A delta-rule
state of D columns is overwritten at a rate of beta / D a token, so with beta near 1/2 even a never-decaying state of 32
columns is gone after a hundred tokens. There is no bias on the write gate; it gets one here through hidden channel 0,
which is constant in the embedding and which no sublayer writes.
"""

import hashlib
import re
from collections.abc import Callable
from math import floor, log2, prod

import torch
from torch import Tensor

from k3_core.checkpoint.table import TensorSpec
from k3_core.config import K3Config
from k3_core.contracts import mxfp4

#: Hidden channel that long_memory keeps constant, its value in the embedding and its weight into the write gate.
CONSTANT_CHANNEL = 0
CONSTANT_VALUE = 9.0
WRITE_GATE_WEIGHT = -1.5

#: name pattern -> gain; the standard deviation is gain / sqrt(inputs of a row).
_GAINS: tuple[tuple[str, float], ...] = (
    (r"embed_tokens\.weight$", 0.0),  # set apart below
    (r"lm_head\.weight$", 2.5),
    (r"_res_proj\.weight$", 1.2),
    (r"\.(q|k|v)_proj\.weight$", 1.5),
    (r"\.(f|g)_a_proj\.weight$", 1.0),
    (r"\.(f|g)_b_proj\.weight$", 1.8),
    (r"\.(b|g)_proj\.weight$", 1.7),
    (r"\.q_a_proj\.weight$", 1.0),
    (r"\.q_b_proj\.weight$", 1.6),
    (r"\.kv_a_proj_with_mqa\.weight$", 1.2),
    (r"\.kv_b_proj\.weight$", 1.4),
    (r"\.self_attn\.o_proj\.weight$", 0.86),
    (r"\.gate\.weight$", 1.5),
    (r"\.routed_expert_down_proj\.weight$", 1.0),
    (r"\.routed_expert_up_proj\.weight$", 0.3),
    (r"patch_embed\.proj\.weight$", 1.2),
    (r"\.wqkv\.weight$", 1.4),
    (r"\.wo\.weight$", 1.3),
    (r"\.mlp\.fc0\.weight$", 1.5),
    (r"\.mlp\.fc1\.weight$", 1.2),
    (r"mm_projector\.proj\.0\.weight$", 1.5),
    (r"mm_projector\.proj\.2\.weight$", 1.2),
)
_FEED_FORWARD = re.compile(r"\.(?:(gate_proj|w1)|(up_proj|w3)|(down_proj|w2))\.weight")
#: Gains of (gate, up, down). SiTU products reach 100, hence K3's small down gain.
_SITU_GAINS = (2.2, 8.0, 0.042)
_SILU_GAINS = (1.5, 1.5, 0.5)

_FIXED: tuple[tuple[str, Callable[[TensorSpec, torch.Generator], Tensor]], ...] = (
    (r"\.dt_bias$", lambda s, g: torch.empty(s.shape, device=g.device).uniform_(-6.5, 1.0, generator=g)),
    (r"e_score_correction_bias$", lambda s, g: _normal(s, g, 0.15)),
    (r"\.pos_emb\.weight$", lambda s, g: _normal(s, g, 0.4)),
    (r"embed_tokens\.weight$", lambda s, g: _normal(s, g, 3.0)),
    (r"conv1d\.weight$", lambda s, g: _convolution(s, g)),
    (r"norm\d?\.weight$", lambda s, g: 1 + _normal(s, g, 0.2)),
)


def generator_for(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on `seed`, `name` and the kind of device only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def random_tensor(
    name: str,
    spec: TensorSpec,
    config: K3Config,
    seed: int,
    *,
    long_memory: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Random values of the tensor `name` and, for `.weight_packed`, of its `.weight_scale` too, drawn on `device`.

    Returns {name: CPU tensor} with the shapes and dtypes of the table; {} for a `.weight_scale`, which comes with its
    packed partner.
    """
    if name.endswith(".weight_scale"):
        return {}
    generator = generator_for(seed, name, device)
    if name.endswith(".weight_packed"):
        whole = TensorSpec((spec.shape[0], spec.shape[1] * 2), spec.dtype)
        if generator.device.type == "cpu":
            packed, scale = mxfp4.quantise(_with_empty_groups(_matrix(name, whole, config, generator), generator))
        else:
            packed, scale = _codes(whole, _std(name, whole, config), generator)
        return {name: packed.cpu(), name.removesuffix("_packed") + "_scale": scale.cpu()}
    value = _plain(name, spec, config, generator)
    if long_memory:
        value = _remember(name, value, config, generator)
    return {name: value.to(spec.dtype).contiguous().cpu()}


def _plain(name: str, spec: TensorSpec, config: K3Config, generator: torch.Generator) -> Tensor:
    if name.endswith(".A_log"):
        return _a_log(spec, config.text.linear_attn.num_heads, generator)
    for pattern, make in _FIXED:
        if re.search(pattern, name):
            return make(spec, generator)
    return _matrix(name, spec, config, generator)


def _matrix(name: str, spec: TensorSpec, config: K3Config, generator: torch.Generator) -> Tensor:
    return _normal(spec, generator, _std(name, spec, config))


def _std(name: str, spec: TensorSpec, config: K3Config) -> float:
    """Standard deviation of a matrix's elements."""
    inputs = prod(spec.shape[1:])
    part = _FEED_FORWARD.search(name)
    if part:
        gains = _SITU_GAINS if config.text.hidden_act == "situ" else _SILU_GAINS
        gain = gains[next(i for i, group in enumerate(part.groups()) if group)]
        if part[3] and ".experts." in name and config.text.routed_expert_hidden_size is None:
            gain *= 0.25  # no norm follows the routed sum here, and routed_scaling_factor enlarges it
        return float(gain / inputs**0.5)
    for pattern, gain in _GAINS:
        if re.search(pattern, name):
            return float(gain / inputs**0.5)
    raise KeyError(f"no scale is known for {name}")


def _codes(spec: TensorSpec, std: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """MXFP4 bytes drawn as such: all codes alike (their rms is 2.93), scales of two neighbouring powers around ``std``.

    Quantising normal values instead costs minutes for tens of thousands of experts. One scale byte in a hundred is 0.
    """
    rows, columns = spec.shape
    device = generator.device
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator, device=device)
    middle = mxfp4.BIAS + floor(log2(std / 2.93))
    draw = torch.randint(0, 200, (rows, columns // mxfp4.GROUP_SIZE), generator=generator, device=device)
    return packed, torch.where(draw < 2, 0, middle + draw % 2).to(torch.uint8)


def _normal(spec: TensorSpec, generator: torch.Generator, std: float) -> Tensor:
    return torch.randn(spec.shape, generator=generator, device=generator.device) * std


def _convolution(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """Taps of std 0.45 around (0, 0, 0.1, 0.6): the current token counts most."""
    value = _normal(spec, generator, 0.45)
    value[..., -1] += 0.6
    value[..., -2] += 0.1
    return value


def _a_log(spec: TensorSpec, num_heads: int, generator: torch.Generator) -> Tensor:
    """Values of std 0.3 for the heads, an exactly zero tail behind them."""
    flat = torch.zeros(prod(spec.shape), device=generator.device)
    flat[:num_heads] = torch.randn(num_heads, generator=generator, device=generator.device) * 0.3
    return flat.reshape(spec.shape)


def _with_empty_groups(weight: Tensor, generator: torch.Generator) -> Tensor:
    """About one group in a hundred zeroed, so that scale byte 0 occurs as in pruned weights."""
    groups = weight.reshape(weight.shape[0], -1, mxfp4.GROUP_SIZE)
    keep = torch.rand(groups.shape[:2], generator=generator, device=generator.device) > 0.01
    return (groups * keep.unsqueeze(-1)).reshape(weight.shape)


def _remember(name: str, value: Tensor, config: K3Config, generator: torch.Generator) -> Tensor:
    """The changes of `long_memory` to one tensor."""
    channel = CONSTANT_CHANNEL
    if name.endswith(".dt_bias"):
        return torch.empty_like(value).uniform_(-13.0, -10.0, generator=generator)
    if name.endswith(".f_b_proj.weight"):
        return value * 0.3
    if name.endswith("embed_tokens.weight"):
        value[:, channel] = CONSTANT_VALUE
    elif name.endswith(".b_proj.weight"):
        value[:, channel] = WRITE_GATE_WEIGHT
    elif name.endswith("input_layernorm.weight"):
        value[channel] = 1.0
    elif name.endswith((".o_proj.weight", ".routed_expert_up_proj.weight", ".down_proj.weight")) or (
        config.text.routed_expert_hidden_size is None and name.endswith(".w2.weight")
    ):
        value[channel] = 0.0
    return value
