"""The reference against the released code on text: both tiny models, float32, bfloat16, float64.

Tolerances are those of the goldens' README: float32 logits atol 2e-3 (measured 2e-4: summation order through 13 layers,
amplified by softmaxes), bfloat16 rms 0.4 end to end because near-equal experts flip, and one layer alone 0.02.
"""

import functools
from pathlib import Path
from typing import Any

import golden_data
import numpy as np
import pytest
import torch

from k3_core.contracts import moe
from k3_core.contracts.norm import rms_norm
from k3_core.reference import KdaState, Output, ReferenceK3, load_model
from k3_core.reference.layers import mix

MODELS = ["k3-tiny", "k3-linear-tiny"]
PROMPTS = ["p1", "p2", "p17", "p64", "p65", "p200"]
CASES = [(model, prompt) for model in MODELS for prompt in PROMPTS]


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> ReferenceK3:
    return load_model(golden_data.checkpoint(name), dtype)


@functools.cache
def arrays(name: str, tag: str = "fp32") -> dict[str, np.ndarray]:
    return golden_data.arrays(f"{name}-goldens/text_{tag}.npz")


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    return golden_data.load_json(f"{name}-goldens/text_fp32.json")


def ids(name: str, prompt: str) -> list[int]:
    return recorded(name)["prompts"][prompt]


@functools.cache
def run(name: str, prompt: str) -> Output:
    loaded = model(name)
    return loaded.forward(loaded.embed(ids(name, prompt)), record=True)


def largest(ours: torch.Tensor, theirs: np.ndarray) -> float:
    return float((ours.double() - torch.from_numpy(theirs).double()).abs().max())


# --- float32, whole model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_logits_fp32(name, prompt):
    logits = run(name, prompt).logits
    assert logits.dtype == torch.float32
    assert logits.shape == (len(ids(name, prompt)), 768)
    assert largest(logits, arrays(name)[f"{prompt}.logits"]) < 2e-3


@pytest.mark.parametrize("name", MODELS)
def test_logits_fp64_agree_too(name):
    assert largest(model(name, torch.float64).logits(ids(name, "p65")), arrays(name)["p65.logits"]) < 2e-3


def smallest_gap(out: Output, layer: int, loaded: ReferenceK3) -> torch.Tensor:
    """Distance between the last chosen and the first rejected biased score of every token, [T]."""
    text, weights = loaded.config.text, loaded.weights.layers[layer]
    record = out.layers[layer]
    before = out.layers[layer - 1].prefix
    writes = text.attn_res_block_size is not None and layer % text.attn_res_block_size == 0
    running = record.attention if writes else before + record.attention
    h = rms_norm(mix(record.bank, running, weights.mlp_mix, text), weights.post_norm, text.rms_norm_eps)
    biased = torch.sigmoid(moe.router_logits(h, weights.mlp.router)) + weights.mlp.bias
    ordered = biased.sort(-1, descending=True).values
    return ordered[:, text.num_experts_per_token - 1] - ordered[:, text.num_experts_per_token]


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_router_choices(name, prompt):
    out, compared = run(name, prompt), 0
    for layer, record in enumerate(out.layers):
        if record.routing is None:
            continue
        clear = smallest_gap(out, layer, model(name)) > 1e-5
        chosen, order = record.routing.ids.sort(-1)
        theirs = torch.from_numpy(arrays(name)[f"{prompt}.layer{layer}.router_ids"].astype(np.int64))
        assert torch.equal(chosen[clear], theirs[clear]), f"layer {layer}"
        weights = record.routing.weights.gather(-1, order)[clear]
        assert largest(weights, arrays(name)[f"{prompt}.layer{layer}.router_w"][clear.numpy()]) < 1e-3
        compared += int(clear.sum())
    assert compared > 0.99 * len(ids(name, prompt)) * (len(out.layers) - 1)


def prompts_with(name: str, key: str) -> list[str]:
    """Prompts for which `key` is recorded; at least one, so that no comparison is empty."""
    found = [prompt for prompt in PROMPTS if f"{prompt}.{key}" in arrays(name)]
    assert found, key
    return found


def test_bank_and_prefix():
    for prompt in prompts_with("k3-tiny", "bank"):
        assert largest(run("k3-tiny", prompt).bank, arrays("k3-tiny")[f"{prompt}.bank"]) < 5e-4
        assert largest(run("k3-tiny", prompt).prefix, arrays("k3-tiny")[f"{prompt}.prefix_last"]) < 5e-4


def test_probabilities_of_every_mix():
    for prompt in prompts_with("k3-tiny", "mix_probs"):
        ours, theirs = run("k3-tiny", prompt).mix_probs, arrays("k3-tiny")[f"{prompt}.mix_probs"]
        assert len(ours) == len(theirs) == 26
        for mixed, row in zip(ours, theirs, strict=True):
            assert largest(mixed, row[:, : mixed.shape[1]]) < 1e-4
            assert not row[:, mixed.shape[1] :].any()


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_p17(name):
    for layer, record in enumerate(run(name, "p17").layers):
        assert largest(record.prefix, arrays(name)[f"p17.layer{layer}.out"]) < 5e-4
        assert largest(record.attention, arrays(name)[f"p17.layer{layer}.attn_out"]) < 5e-4


@pytest.mark.parametrize("name", MODELS)
def test_states(name):
    compared = 0
    for prompt in ("p17", "p65"):
        for layer, record in enumerate(run(name, prompt).layers):
            conv = arrays(name).get(f"{prompt}.layer{layer}.conv_state")
            recurrent = arrays(name).get(f"{prompt}.layer{layer}.kda_state")
            if conv is not None:
                assert isinstance(record.state, KdaState)
                assert largest(record.state.conv, conv[:, 1:]) < 5e-4  # they keep four columns, three carry on
            if recurrent is not None:
                assert largest(record.state.recurrent, recurrent) < 5e-4
                # Square and V-major: a transposed state must not pass.
                assert largest(record.state.recurrent.transpose(-1, -2), recurrent) > 0.01
            compared += (conv is not None) + (recurrent is not None)
    assert compared > 0


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_greedy_tokens(name, prompt):
    greedy = recorded(name)["greedy"][prompt]
    theirs, margins = greedy["tokens"], greedy["margins"]
    certain = next((step for step, margin in enumerate(margins) if margin < 2e-3), len(theirs))
    ours = model(name).generate(ids(name, prompt), len(theirs))
    assert len(ours) == 32
    assert ours[:certain] == theirs[:certain]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_decoding_steps(name):
    for prompt in prompts_with(name, "greedy_step_logits"):
        theirs = arrays(name)[f"{prompt}.greedy_step_logits"]
        loaded, cache = model(name), model(name).new_cache()
        logits = [loaded.step(ids(name, prompt), cache)[-1]]
        for token in recorded(name)["greedy"][prompt]["tokens"][: len(theirs) - 1]:
            logits.append(loaded.step([token], cache)[-1])
        assert largest(torch.stack(logits), theirs) < 2e-3


# --- auxiliary hidden states -----------------------------------------------------------------------------------------


def test_auxiliary_states_in_both_readings():
    out = run("k3-tiny", "p17")
    for layer in range(13):
        assert largest(out.aux_prefix(layer + 1), arrays("k3-tiny")[f"p17.layer{layer}.out"]) < 5e-4
    assert torch.equal(out.aux_mix(13), out.hidden)
    assert torch.equal(out.aux_mix(0), model("k3-tiny").embed(ids("k3-tiny", "p17")))
    assert not torch.allclose(out.aux_mix(5), out.aux_prefix(5), atol=0.1)
    with pytest.raises(IndexError, match="no record"):
        out.aux_prefix(14)


def test_hidden_is_before_the_final_norm():
    loaded, out = model("k3-tiny"), run("k3-tiny", "p17")
    wide = out.hidden.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * loaded.weights.norm.double()
    assert torch.allclose(normed @ loaded.weights.lm_head.double().T, out.logits.double(), atol=1e-4)


# --- bfloat16 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_bf16_end_to_end(name, prompt):
    ours, theirs = model(name, torch.bfloat16).logits(ids(name, prompt)), arrays(name)[f"{prompt}.logits"]
    rms = float(np.sqrt(np.mean((ours.numpy() - theirs) ** 2)))
    if prompt in ("p1", "p2"):
        assert rms <= 0.6
        return
    # Dropping the router's bias or exchanging w1 and w3 gives 1.07 and 1.54 on k3-tiny, .35 and .71 on the other.
    assert rms <= (0.4 if name == "k3-tiny" else 0.25)
    assert (ours.argmax(-1).numpy() == theirs.argmax(-1)).mean() >= 0.8


def test_f32_tensors_stay_f32_in_a_bf16_model():
    weights = model("k3-tiny", torch.bfloat16).weights
    kda, experts = weights.layers[0].attention, weights.layers[1].mlp
    for tensor in (kda.a_log, kda.dt_bias, kda.conv, kda.o_norm, experts.bias):
        assert tensor.dtype == torch.float32
    for tensor in (weights.embed, kda.q, experts.router, experts.experts.w13, weights.norm):
        assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("layer", range(13))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_alone(layer, dtype):
    """Layer i fed the released bfloat16 run's own input: no error build-up, so the bound is tight."""
    loaded, theirs = model("k3-tiny", dtype), arrays("k3-tiny", "bf16")
    prefix = torch.from_numpy(theirs[f"p65.layer{layer - 1}.out"]) if layer else loaded.embed(ids("k3-tiny", "p65"))
    bank = torch.from_numpy(theirs["p65.bank"])[:, : -(-layer // 3)]
    ours = loaded.run_layer(layer, prefix, bank).prefix.double().numpy()
    expected = theirs[f"p65.layer{layer}.tf_out_fp32"]
    error = np.linalg.norm(ours - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    if dtype == torch.float32:
        assert error.max() < 1e-4
    else:
        assert np.median(error) <= 0.02
        assert np.quantile(error, 0.95) <= 0.04


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_give_the_same_bits(dtype):
    packed = load_model(golden_data.checkpoint("k3-tiny"), dtype, packed_experts=True)
    prompt = ids("k3-tiny", "p65")
    assert torch.equal(packed.logits(prompt), model("k3-tiny", dtype).logits(prompt))
    experts = packed.weights.layers[1].mlp.experts
    assert {t.dtype for t in (experts.w13, experts.w2, experts.w13_scale, experts.w2_scale)} == {torch.uint8}


def test_a_string_path_and_a_path_are_the_same(k3_linear_tiny: Path):
    prompt = ids("k3-linear-tiny", "p2")
    assert torch.equal(load_model(str(k3_linear_tiny)).logits(prompt), model("k3-linear-tiny").logits(prompt))
