"""The unmodified model on CPU tensors, reference arithmetic behind the vendor's own schemas, against the goldens.

Every layer, vllm-ascend's linears, norms, MLA backend, token dispatcher and metadata builders are the real ones. What
has no implementation on a CPU is printed: those operators are opaque here, only their schemas and shapes are checked
(test_ascend_device.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ascend_support as support
import numpy as np
import pytest
import torch

if not support.has_vllm_ascend():
    pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')", allow_module_level=True)

import ascend_reference_ops as reference_ops

from k3_ascend import channels, constraints
from k3_core.multimodal import preprocess_image
from k3_core.reference import load_model
from k3_core.vllm.testing.rank_engine import noise_image
from k3_core.vllm.testing.ranks import Group

sys.path.insert(0, str(Path(__file__).parents[2] / "k3-core" / "tests"))
import golden_data

FP32, BF16 = torch.float32, torch.bfloat16
#: Largest distance of fp32 logits from the goldens: core's reference itself is within 2.2e-4 of them on this machine
#: family, and sums of a few hundred terms in another order add as much again.
LOGITS = 5e-4
#: The reference and this model share the contracts; what differs is the order of sums (logits are of size 10).
SAME_ARITHMETIC = 1e-4
PROMPTS = ("p17", "p65", "p1", "p2")


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    support.fake_device()
    support.plugins()
    reference_ops.install()


@pytest.fixture(scope="module")
def goldens() -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Prompts by name, and recorded arrays."""
    table = golden_data.load_json("k3-tiny-goldens/text_fp32.json")["prompts"]
    return table, golden_data.arrays("k3-tiny-goldens/text_fp32.npz")


def built(checkpoint: Path, dtype: torch.dtype, experts: str) -> Iterator[tuple[Any, Any]]:
    config = support.settle(checkpoint, additional_config={"k3_experts": experts})
    config.model_config.dtype = dtype  # an NPU serves bfloat16 only; on a CPU fp32 tells errors from rounding
    with support.worker(config):
        model = support.build(config)
        support.load(model, config)
        yield model, config


@pytest.fixture(scope="module")
def exact() -> Iterator[tuple[Any, Any]]:
    """(model, configuration) in fp32 with experts unpacked."""
    yield from built(golden_data.checkpoint("k3-tiny"), FP32, "bf16")


@pytest.fixture(scope="module")
def rounded() -> Iterator[tuple[Any, Any]]:
    """The same in bfloat16, as an NPU would serve it."""
    yield from built(golden_data.checkpoint("k3-tiny"), BF16, "bf16")


def test_logits_of_prompts_equal_the_goldens(exact: Any, goldens: Any) -> None:
    prompts, arrays = goldens
    steps = support.Steps(*exact)
    logits = steps.prefill([prompts[name] for name in PROMPTS])
    for name, found in zip(PROMPTS, logits, strict=True):
        np.testing.assert_allclose(found.numpy(), arrays[f"{name}.logits"], atol=LOGITS, rtol=0, err_msg=name)


def test_each_layer_equals_the_goldens(exact: Any, goldens: Any) -> None:
    """Attention outputs of all 13 layers; experts and mixes between them show in the next layer's."""
    prompts, arrays = goldens
    model, _ = exact
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out: outputs.append(out.clone()))
        for layer in model.language_model.model.layers
    ]
    try:
        support.Steps(*exact).prefill([prompts["p17"]])
    finally:
        for hook in hooks:
            hook.remove()
    assert len(outputs) == 13
    for index, found in enumerate(outputs):
        expected = torch.from_numpy(arrays[f"p17.layer{index}.attn_out"])
        assert float((found - expected).abs().max()) < LOGITS, f"layer {index}"


def test_images_equal_the_reference(exact: Any, goldens: Any) -> None:
    """Two pictures in one step, of two requests: logits of text before, between and after their placeholders.

    The tower's sums have another order, too: the bound is that of two implementations.
    """
    prompts, _ = goldens
    model, _ = exact
    reference = load_model(golden_data.checkpoint("k3-tiny"), dtype=FP32)
    pad = model.config.media_placeholder_token_id
    pictures = [noise_image(60, 44, 1), noise_image(30, 90, 2)]
    made = [preprocess_image(picture, reference.image_settings) for picture in pictures]
    short = [[*prompts["p17"][:5], pad, *prompts["p17"][5:9]], [pad, *prompts["p2"]]]
    lengths = [int(torch.as_tensor(grid).prod()) // 4 for _, grid in made]
    whole = [
        [t for token in ids for t in ([token] * length if token == pad else [token])]
        for ids, length in zip(short, lengths, strict=True)
    ]
    images = {
        "pixel_values": torch.cat([torch.as_tensor(pixels) for pixels, _ in made]),
        "grid_thws": torch.stack([torch.as_tensor(grid) for _, grid in made]),
    }
    found = support.Steps(*exact).step(whole, images)
    for ids, picture, logits in zip(short, pictures, found, strict=True):
        expected = reference.logits(torch.tensor(ids), [picture])
        assert expected.shape == logits.shape
        assert float((logits - expected).abs().max()) < LOGITS
    swapped = support.Steps(*exact).step(whole, images | {"pixel_values": images["pixel_values"].flip(0)})
    assert float((swapped[0] - found[0]).abs().max()) > 100 * LOGITS, "the pictures do not reach the logits"


def test_decoding_continues_like_the_reference(exact: Any, goldens: Any) -> None:
    prompts, _ = goldens
    reference = load_model(golden_data.checkpoint("k3-tiny"), dtype=FP32)
    sequences = [list(prompts[name]) for name in ("p17", "p2", "p1")]
    steps = support.Steps(*exact)
    tokens = [int(logits[-1].argmax()) for logits in steps.prefill(sequences)]
    for _ in range(3):
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
        found = steps.decode(tokens)
        for sequence, logits in zip(sequences, found, strict=True):
            expected = reference.logits(torch.tensor(sequence))[-1]
            assert float((logits - expected).abs().max()) < SAME_ARITHMETIC
        tokens = [int(logits.argmax()) for logits in found]


def test_two_pipeline_stages_equal_the_goldens(goldens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that end inside a block hand prefix and bank over; a prompt, then a token from both stages' states."""
    from vllm.distributed import parallel_state

    prompts, arrays = goldens
    config = support.settle(golden_data.checkpoint("k3-tiny"), additional_config={"k3_experts": "bf16"})
    config.model_config.dtype = FP32
    reference = load_model(golden_data.checkpoint("k3-tiny"), dtype=FP32)
    with support.worker(config):
        stages = []
        for rank in range(2):
            monkeypatch.setattr(parallel_state, "_PP", Group(2, rank))
            model = support.build(config)
            support.load(model, config)
            stages.append(support.Steps(model, config))
        assert [m.model.language_model.model.end_layer for m in stages] == [7, 13]

        def step(tokens: list[int]) -> torch.Tensor:
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
            handed, embedded = None, stages[0].model.embed_input_ids(torch.tensor(tokens))
            for rank, stage in enumerate(stages):
                monkeypatch.setattr(parallel_state, "_PP", Group(2, rank))
                metadata = stage._metadata([tokens], bounds)
                with torch.no_grad(), support.forward_context(config, len(tokens), metadata):
                    handed = stage.model(None, None, handed, inputs_embeds=None if rank else embedded)
                stage.lengths[0] += len(tokens)
            text = stages[1].model.language_model
            with torch.no_grad():
                logits = torch.nn.functional.linear(text.model.norm(handed), text.lm_head.weight)
            return logits[:, : text.config.text.vocab_size]

        prompt = list(prompts["p17"])
        found = step(prompt)
        np.testing.assert_allclose(found.numpy(), arrays["p17.logits"], atol=LOGITS, rtol=0)
        token = int(found[-1].argmax())
        expected = reference.logits(torch.tensor([*prompt, token]))[-1]
        assert float((step([token])[0] - expected).abs().max()) < SAME_ARITHMETIC


def test_decodes_and_prompts_share_a_step(exact: Any, goldens: Any) -> None:
    prompts, arrays = goldens
    alone = support.Steps(*exact)
    token = int(alone.prefill([prompts["p17"]])[0][-1].argmax())
    expected = alone.decode([token])[0]
    mixed = support.Steps(*exact)
    mixed.prefill([prompts["p17"]])
    decoded, prompt = mixed.step([[token], prompts["p65"]])
    assert float((decoded[0] - expected).abs().max()) < SAME_ARITHMETIC
    np.testing.assert_allclose(prompt.numpy(), arrays["p65.logits"], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_auxiliary_states_cross_the_edge_between_stages(
    stream: str, exact: Any, goldens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids on both sides of the edge and on it: the last of two stages hands out all of them, as one stage alone."""
    model, _ = exact
    stack, edge = model.get_language_model().model, 3
    forward, layers = stack.forward, stack.text.num_hidden_layers
    found: dict[str, list[torch.Tensor]] = {}

    def stage(start: int, end: int, hidden: torch.Tensor, received: Any) -> Any:
        stack.start_layer, stack.end_layer, stack.last = start, end, end == layers
        stack.stage = stack.schedule.stage(start, end)
        return forward(hidden, received)

    def alone(hidden: torch.Tensor, received: Any) -> torch.Tensor:
        result, found["alone"] = forward(hidden, received)
        return result

    def staged(hidden: torch.Tensor, received: Any) -> torch.Tensor:
        handed = stage(0, edge, hidden, None)
        result, found["staged"] = stage(edge, layers, handed["hidden_states"], handed)
        return result

    for name in ("start_layer", "end_layer", "last", "stage"):
        monkeypatch.setattr(stack, name, getattr(stack, name))
    monkeypatch.setattr(stack, "aux_hidden_state_layers", (1, edge, edge + 1, layers))
    monkeypatch.setattr(stack, "aux_stream", stream)
    logits = []
    for run in (alone, staged):
        monkeypatch.setattr(stack, "forward", run)
        logits += support.Steps(*exact).prefill([goldens[0]["p17"]])
    torch.testing.assert_close(logits[1], logits[0])
    assert len(found["alone"]) == len(found["staged"]) == 4
    for one, two in zip(found["alone"], found["staged"], strict=True):
        torch.testing.assert_close(two, one)


def test_states_of_other_slots_stay(exact: Any, goldens: Any) -> None:
    """Slots start as NaN: a prompt takes its own only, and the null block keeps its bits."""
    prompts, _ = goldens
    steps = support.Steps(*exact)
    steps.prefill([prompts["p17"]])
    for layer in steps.recurrent.values():
        for pool in layer.kv_cache:
            assert pool[0].isnan().all()
            assert pool[2:].isnan().all()
            assert not pool[1].isnan().any()


@pytest.mark.parametrize(
    "metadata", [None, {}, {"another.layer": object()}], ids=["none", "empty", "without the layer"]
)
def test_without_metadata_the_attention_is_zero(exact: Any, metadata: Any) -> None:
    model, config = exact
    x = torch.randn(5, model.config.text.hidden_size)
    with torch.no_grad(), support.forward_context(config, 5, metadata):
        for layer in model.language_model.model.layers[:4]:
            assert not layer.self_attn(x).any()


def test_bfloat16_is_as_near_as_rounding_lets_it(rounded: Any, goldens: Any) -> None:
    """Against the fp32 goldens: not farther than twice the bfloat16 reference, whose roundings fall elsewhere."""
    prompts, arrays = goldens
    reference = load_model(golden_data.checkpoint("k3-tiny"), dtype=BF16)
    found = support.Steps(*rounded).prefill([prompts["p17"]])
    for name, logits in zip(("p17",), found, strict=True):
        expected = torch.from_numpy(arrays[f"{name}.logits"])
        theirs = reference.logits(torch.tensor(prompts[name])).float()
        ours, bound = ((x - expected).square().mean().sqrt() for x in (logits, theirs))
        assert float(ours) < 2 * float(bound), name


def test_a_bfloat16_step_keeps_the_rules_and_says_what_is_opaque(rounded: Any, goldens: Any) -> None:
    prompts, _ = goldens
    steps = support.Steps(*rounded)
    with support.Census() as census:
        tokens = [int(logits[-1].argmax()) for logits in steps.prefill([prompts["p17"], prompts["p2"]])]
        steps.decode(tokens)
    broken = [
        violation
        for function, args, kwargs in census.calls
        for violation in constraints.violations(
            function._schema.name, constraints.bound(function._schema, args, kwargs)
        )
    ]
    # The tiny checkpoint's latent attention is 32 wide, not 512; head counts, layouts and dtypes are the real ones.
    assert broken == []
    called = {name for name in census.counts() if name.startswith(("npu::", "_C_ascend::"))}
    assert "_C_ascend::npu_recurrent_gated_delta_rule" in called
    assert "npu::npu_fused_infer_attention_score_v2" in called
    opaque = sorted(channels.vendor_calls() - called)
    print(f"\nbehind real schemas, computed on the CPU: {', '.join(sorted(called))}")
    print(f"opaque here (schema and shapes only): {', '.join(opaque)}")
    assert "npu::npu_dynamic_mx_quant" in opaque


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    """(checkpoint with wide experts, a prompt, its fp32 logits)."""
    from k3_core.checkpoint import write_tiny

    folder = write_tiny(tmp_path_factory.mktemp("ascend-wide"), support.wide_config(), seed=3)
    prompt = list(range(7, 19))
    return folder, prompt, load_model(folder, dtype=FP32).logits(torch.tensor(prompt))


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.15), ("w4a8", 1.0)])
def test_requantised_experts_stay_near(form: str, bound: float, wide: Any) -> None:
    """int8 and int4 experts through the quantised dispatch and products, against the exact reference.

    The bound is on the rms of logits relative to theirs: weight errors of 0.7 % (int8) and 12 % (int4) a layer, through
    4 expert layers and the norms between. It tells a wrong scale or layout (error above 1) from rounding.
    """
    folder, prompt, expected = wide
    for model, config in built(folder, BF16, form):
        found = support.Steps(model, config).prefill([prompt])[0]
    error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    print(f"\n{form}: relative rms of the logits {error:.3f}")
    assert error < bound


@pytest.fixture(scope="module")
def linear() -> Iterator[tuple[Any, Any]]:
    """Kimi-Linear in fp32: no query rank, low-rank gate, softplus decay, SiLU, ordinary residuals."""
    yield from built(golden_data.checkpoint("k3-linear-tiny"), FP32, "bf16")


def test_kimi_linear_equals_its_goldens(linear: Any) -> None:
    prompts = golden_data.load_json("k3-linear-tiny-goldens/text_fp32.json")["prompts"]
    arrays = golden_data.arrays("k3-linear-tiny-goldens/text_fp32.npz")
    names = [name for name in PROMPTS if f"{name}.logits" in arrays]
    assert names
    with support.Census() as census:
        logits = support.Steps(*linear).prefill([prompts[name] for name in names])
    for name, found in zip(names, logits, strict=True):
        np.testing.assert_allclose(found.numpy(), arrays[f"{name}.logits"], atol=LOGITS, rtol=0, err_msg=name)
    called = {name for name in census.counts() if name.startswith(("npu::", "_C_ascend::"))}
    assert called <= channels.vendor_calls()
    assert "_C_ascend::npu_add_rms_norm_bias" in called
    assert "_C_ascend::npu_causal_conv1d_custom" in called


# ------------------------------------------------------------------------ mutants


def _largest_error(exact: Any, goldens: Any) -> float:
    prompts, arrays = goldens
    found = support.Steps(*exact).prefill([prompts["p17"]])[0]
    return float((found - torch.from_numpy(arrays["p17.logits"])).abs().max())


def test_a_rotation_would_show(exact: Any, goldens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend.ops import rotary_embedding as tables

    angles = torch.arange(512).unsqueeze(1) * torch.rand(1, tables._cos_cache.shape[-1])
    monkeypatch.setattr(tables, "_cos_cache", angles.cos())
    monkeypatch.setattr(tables, "_sin_cache", angles.sin())
    assert _largest_error(exact, goldens) > 100 * LOGITS


def test_a_missing_output_gate_would_show(exact: Any, goldens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sigmoid", lambda x: torch.ones_like(x))
    assert _largest_error(exact, goldens) > 100 * LOGITS


def test_swiglu_instead_of_situ_would_show(exact: Any, goldens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = exact
    for layer in model.language_model.model.layers:
        if layer.is_moe:
            monkeypatch.setattr(
                layer.feed_forward.activation,
                "forward",
                lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
            )
    assert _largest_error(exact, goldens) > 10 * LOGITS


def test_another_low_rank_eps_would_show(exact: Any, goldens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = exact
    for layer in model.language_model.model.layers:
        if hasattr(layer.self_attn, "kv_a_layernorm"):
            monkeypatch.setattr(layer.self_attn.kv_a_layernorm, "variance_epsilon", 1e-2)
    assert _largest_error(exact, goldens) > 10 * LOGITS
