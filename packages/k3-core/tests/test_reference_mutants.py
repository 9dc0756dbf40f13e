"""Deliberate errors in the whole model: each must move the result far beyond the tolerance of the tests above."""

import dataclasses
import functools
from collections.abc import Callable

import golden_data
import pytest
import torch

from k3_core.contracts import attn_res, kda, norm
from k3_core.contracts.moe import DenseExperts
from k3_core.contracts.situ import situ_and_mul
from k3_core.reference import LayerWeights, ReferenceK3, load_model
from k3_core.reference import layers as layers_module
from k3_core.reference.weights import KdaWeights

TOLERANCE = 2e-3


@functools.cache
def loaded() -> ReferenceK3:
    return load_model(golden_data.checkpoint("k3-tiny"))


@functools.cache
def prompt() -> list[int]:
    return golden_data.load_json("k3-tiny-goldens/text_fp32.json")["prompts"]["p65"]


@functools.cache
def expected() -> torch.Tensor:
    return torch.from_numpy(golden_data.arrays("k3-tiny-goldens/text_fp32.npz")["p65.logits"])


def error(model: ReferenceK3) -> float:
    return float((model.logits(prompt()) - expected()).abs().max())


def changed(change: Callable[[LayerWeights], LayerWeights]) -> ReferenceK3:
    """The model with `change` applied to the weights of every layer."""
    weights = dataclasses.replace(loaded().weights, layers=tuple(change(layer) for layer in loaded().weights.layers))
    return ReferenceK3(loaded().config, weights)


def in_moe(change) -> Callable[[LayerWeights], LayerWeights]:
    return lambda w: w if not hasattr(w.mlp, "router") else dataclasses.replace(w, mlp=change(w.mlp))


def in_kda(change) -> Callable[[LayerWeights], LayerWeights]:
    def apply(w: LayerWeights) -> LayerWeights:
        return dataclasses.replace(w, attention=change(w.attention)) if isinstance(w.attention, KdaWeights) else w

    return apply


def in_mla(change) -> Callable[[LayerWeights], LayerWeights]:
    def apply(w: LayerWeights) -> LayerWeights:
        return w if isinstance(w.attention, KdaWeights) else dataclasses.replace(w, attention=change(w.attention))

    return apply


def swapped_halves(experts: DenseExperts) -> DenseExperts:
    return DenseExperts(torch.cat(experts.w13.chunk(2, dim=1)[::-1], dim=1), experts.w2)


WEIGHT_MUTANTS: dict[str, Callable[[LayerWeights], LayerWeights]] = {
    "router bias dropped": in_moe(lambda m: dataclasses.replace(m, bias=None)),
    "w1 and w3 exchanged": in_moe(lambda m: dataclasses.replace(m, experts=swapped_halves(m.experts))),
    "latent norm left out": in_moe(lambda m: dataclasses.replace(m, norm=None)),
    "shared experts left out": in_moe(lambda m: dataclasses.replace(m, shared_gate=None)),
    "decay and output gate exchanged": in_kda(
        lambda a: dataclasses.replace(a, gate=(a.f_a, a.f_b), f_a=torch.eye(256), f_b=a.gate[0])
    ),
    "convolution taps reversed": in_kda(lambda a: dataclasses.replace(a, conv=a.conv.flip(-1))),
    "dt_bias dropped": in_kda(lambda a: dataclasses.replace(a, dt_bias=torch.zeros_like(a.dt_bias))),
    "A_log dropped": in_kda(lambda a: dataclasses.replace(a, a_log=torch.zeros_like(a.a_log))),
    "MLA output gate left out": in_mla(lambda a: dataclasses.replace(a, g=None)),
    "attention and MLP mixes exchanged": lambda w: dataclasses.replace(
        w, attention_mix=w.mlp_mix, mlp_mix=w.attention_mix
    ),
}


def test_the_model_itself_passes():
    assert error(changed(lambda layer: layer)) < TOLERANCE


@pytest.mark.parametrize("name", WEIGHT_MUTANTS)
def test_a_weight_used_wrongly_is_caught(name):
    assert error(changed(WEIGHT_MUTANTS[name])) > 50 * TOLERANCE


def clamped_gate(z, a_log, dt_bias, lower_bound):
    """The wrong safe gate: the softplus form clamped at the bound."""
    return kda_gate(z, a_log, dt_bias, None).clamp_min(lower_bound)


def one_block_missing(bank, prefix, norm_weight, proj_weight, eps):
    return attn_res_mix(bank[:, 1:], prefix, norm_weight, proj_weight, eps)


def normalised_sources(bank, prefix, norm_weight, proj_weight, eps):
    unit = norm.rms_norm(torch.cat([bank, prefix[:, None]], 1), torch.ones_like(prefix[0]), eps)
    return attn_res_mix(unit[:, :-1], unit[:, -1], norm_weight, proj_weight, eps)


def without_beta(q, k, v, g, beta, state=None, cu_seqlens=None):
    return kda_chunked(q, k, v, g, torch.ones_like(beta), state, cu_seqlens)


def silu_output_gate(o, gate, weight, eps):
    return kda_output_norm(o, gate, weight, eps) * gate.unflatten(-1, o.shape[-1:])


kda_gate, kda_chunked, kda_output_norm = kda.gate, kda.chunked, kda.output_norm
attn_res_mix = attn_res.mix

CODE_MUTANTS = {
    "gate clamped": (kda, "gate", clamped_gate),
    "beta left out": (kda, "chunked", without_beta),
    "SiLU output gate": (kda, "output_norm", silu_output_gate),
    "bank block missing": (attn_res, "mix", one_block_missing),
    "sources normalised": (attn_res, "mix", normalised_sources),
    "SwiGLU for SiTU": (
        layers_module,
        "gated_activation",
        lambda *_: lambda gate, up: torch.nn.functional.silu(gate) * up,
    ),
    "gate and up exchanged": (
        layers_module,
        "gated_activation",
        lambda act, beta, linear_beta: lambda gate, up: situ_and_mul(up, gate, beta, linear_beta),
    ),
}


@pytest.mark.parametrize("name", CODE_MUTANTS)
def test_wrong_arithmetic_is_caught(name, monkeypatch):
    module, attribute, replacement = CODE_MUTANTS[name]
    monkeypatch.setattr(module, attribute, replacement)
    assert error(loaded()) > 50 * TOLERANCE


def test_router_and_expert_errors_pass_the_bf16_bound():
    """The bound of the bfloat16 test (rms 0.4) must be below what the two classical errors give (1.07 and 1.54)."""
    prompt_200 = golden_data.load_json("k3-tiny-goldens/text_fp32.json")["prompts"]["p200"]
    right = loaded().logits(prompt_200)
    for name in ("router bias dropped", "w1 and w3 exchanged"):
        rms = (changed(WEIGHT_MUTANTS[name]).logits(prompt_200) - right).square().mean().sqrt()
        assert rms > 0.8, name
