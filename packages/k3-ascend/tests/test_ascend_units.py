"""What needs no vllm-ascend: generations, the table of channels, constraints, forms of experts."""

from __future__ import annotations

import math

import pytest
import torch

from k3_ascend import channels, constraints, experts, generation, paths, versions
from k3_ascend.generation import Generation
from k3_core.contracts import mxfp4
from k3_core.errors import ConfigError, UnsupportedError

# ------------------------------------------------------------------------ generations


@pytest.mark.parametrize(
    ("soc", "expected"),
    [
        ("Ascend910B1", Generation.A2),
        ("Ascend910B3", Generation.A2),
        ("Ascend910B4-1", Generation.A2),
        ("Ascend910B2C", Generation.A2),
        ("Ascend910_9391", Generation.A3),
        ("ascend910_9362", Generation.A3),
        ("Ascend950PR_9589", Generation.A950),
        ("Ascend950DT_9571", Generation.A950),
    ],
)
def test_soc_names(soc: str, expected: Generation) -> None:
    assert generation.of_name(soc) is expected


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend910A", "Ascend910ProB", "", "950"])
def test_other_socs_are_refused_by_name(soc: str) -> None:
    with pytest.raises(UnsupportedError, match="910B"):
        generation.of_name(soc)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(220, Generation.A2), (225, Generation.A2), (250, Generation.A3), (255, Generation.A3), (260, Generation.A950)],
)
def test_soc_numbers(number: int, expected: Generation) -> None:
    assert generation.of_number(number) is expected


@pytest.mark.parametrize("number", [200, 219, 226, 249, 256, 261])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(UnsupportedError):
        generation.of_number(number)


# ------------------------------------------------------------------------ channels


def test_every_operator_of_the_shared_table_has_a_row() -> None:
    names = (
        "attn_res", "short_conv", "kda_prefill", "gated_norm", "kda_decode", "kda_verify", "route", "experts", "situ",
    )  # fmt: skip
    assert set(names) <= channels.TABLE.keys()


def test_every_row_ends_with_something_that_always_runs() -> None:
    for row in channels.ROWS:
        for g in Generation:
            assert row.channels[g], (row.operator, g)
            last = row.channels[g][-1]
            assert last in (channels.TORCH, channels.VLLM_ASCEND, channels.NPU), (row.operator, last)


def test_every_vendor_call_is_constrained_or_known_to_be_undocumented() -> None:
    ruled = {c.operator for c in constraints.CONSTRAINTS}
    free = channels.vendor_calls() - ruled - set(constraints.UNDOCUMENTED)
    # Their documentation states no limit beyond dtypes that nothing here can break.
    assert free == {"npu::npu_transpose_batchmatmul", "npu::npu_attention_update", "npu::npu_format_cast"}


def test_no_vendor_call_of_the_table_is_forbidden_for_kimi_k3() -> None:
    forbidden = {c.operator for c in constraints.CONSTRAINTS if c.rule.startswith("never called")}
    assert forbidden & channels.vendor_calls() == {"npu::npu_swiglu"}  # Kimi-Linear's own activation
    assert channels.TABLE["silu"].calls == ("npu::npu_swiglu",)
    assert {"npu::npu_swiglu", "npu::npu_recurrent_gated_delta_rule"} <= forbidden


def test_the_table_renders_every_row() -> None:
    text = channels.markdown()
    assert all(f"| {row.operator} |" in text for row in channels.ROWS)


# ------------------------------------------------------------------------ constraints


def test_a_prefill_with_an_undocumented_head_count_is_found() -> None:
    call = {
        "input_layout": "TND",
        "num_heads": 12,
        "num_key_value_heads": 12,
        "query": torch.zeros(1, dtype=torch.bfloat16),
    }
    assert constraints.violations("npu::npu_fused_infer_attention_score", call)
    call |= {"num_heads": 16, "num_key_value_heads": 16}
    assert not constraints.violations("npu::npu_fused_infer_attention_score", call)


def test_swiglu_is_found_however_it_is_called() -> None:
    for name in ("npu::npu_swiglu", "_C_ascend::grouped_matmul_swiglu_quant_v2", "_C_ascend::dispatch_ffn_combine"):
        assert constraints.violations(name, {})


def test_a_bias_of_another_dtype_is_found() -> None:
    call = {
        "x": torch.zeros(1, 8),
        "bias": torch.zeros(8, dtype=torch.bfloat16),
        "renorm": 0,
        "k": 2,
        "group_count": 1,
        "k_group": 1,
    }
    assert len(constraints.violations("npu::npu_moe_gating_top_k", call)) == 1


# ------------------------------------------------------------------------ experts

A2, A950 = Generation.A2, Generation.A950


def test_the_form_follows_the_generation() -> None:
    assert experts.choose(None, True, A2, (3584, 3072)) == "w4a8"
    assert experts.choose(None, True, Generation.A3, (3584, 192)) == "int8"
    assert experts.choose(None, True, A950, (3584, 3072)) == "mxfp"
    assert experts.choose(None, False, A950, (3584, 3072)) == "bf16"
    assert experts.choose("bf16", True, A2, (3584, 3072)) == "bf16"


@pytest.mark.parametrize(
    ("want", "quantised", "where", "widths", "said"),
    [
        ("fp4", True, A2, (512, 512), "not one of"),
        ("mxfp", True, A2, (512, 512), "for 950"),
        ("int8", True, A950, (512, 512), "for A2, A3"),
        ("w4a8", True, A2, (512, 192), "256"),
        ("mxfp", False, A950, (512, 512), "not stored as MXFP4"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused_with_the_others(
    want: str, quantised: bool, where: Generation, widths: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        experts.choose(want, quantised, where, widths)
    assert "possible here: bf16" in str(caught.value)


def random_packed(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of roughly normal values: each group's scale brings its largest value near 6."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(125, 129, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return codes, scale


def expert(width: int, latent: int, seed: int) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, torch.Tensor]]:
    """One expert as it comes from the checkpoint, and its values."""
    parts: dict[tuple[str, str], torch.Tensor] = {}
    values = {}
    for i, (matrix, shape) in enumerate((("w1", (width, latent)), ("w3", (width, latent)), ("w2", (latent, width)))):
        packed, scale = random_packed(*shape, seed + i)
        parts[matrix, "weight_packed"], parts[matrix, "weight_scale"] = packed, scale
        values[matrix] = mxfp4.unpack(packed, scale, torch.float32)
    return parts, values


def test_bf16_experts_are_exact_and_gate_comes_first() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        store = experts.Bf16(2, 64, 96)
    finally:
        torch.set_default_dtype(torch.float32)
    parts, values = expert(64, 96, 1)
    store.put(1, parts)
    assert torch.equal(store.w13[1].float(), torch.cat([values["w1"], values["w3"]]).t())
    assert torch.equal(store.w2[1].float(), values["w2"].t())


def test_int8_codes_are_the_nearest() -> None:
    store = experts.Int8(1, 64, 96)
    parts, values = expert(64, 96, 2)
    store.put(0, parts)
    restored = store.w13[0].float() * store.w13_scale[0].float()
    wanted = torch.cat([values["w1"], values["w3"]]).t()
    # Half a step, and what rounding the scale to bfloat16 cuts off at the end of the range (2^-9 of 127 steps).
    step = store.w13_scale[0].float()
    assert ((restored - wanted).abs() <= (0.5 + 127 * 2**-8) * step).all()
    assert store.w13[0].abs().max() == 127


def unpacked_int4(packed: torch.Tensor) -> torch.Tensor:
    """Signed codes [K, N] of packed int32 [K, N / 8]."""
    nibbles = [(packed >> (4 * i)) & 15 for i in range(8)]
    codes = torch.stack(nibbles, dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)


def test_int4_codes_scales_and_bias_belong_together() -> None:
    store = experts.W4A8(1, 64, 128, group=64)
    parts, values = expert(64, 128, 3)
    store.put(0, parts)
    codes = unpacked_int4(store.w13[0]).float()
    scales = store.w13_scale[0].to(torch.int32).view(torch.float32).repeat_interleave(64, dim=0)
    wanted = torch.cat([values["w1"], values["w3"]]).t()
    assert ((codes * scales - wanted).abs() <= 0.5 * scales * (1 + 2**-10)).all()
    torch.testing.assert_close(store.w13_bias[0], 8 * (codes * scales).sum(0), rtol=1e-5, atol=1e-4)


def test_int4_packing_puts_even_columns_low() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(1, 16)
    assert torch.equal(unpacked_int4(experts.pack_int4(codes)).to(torch.int8), codes)
    assert experts.pack_int4(codes).view(torch.uint8)[0, 0] == (8 | 9 << 4)


def test_an_empty_channel_stays_zero() -> None:
    zeros = torch.zeros(4, 64)
    codes, scale = experts.to_int4(zeros, 32)
    assert not codes.any()
    assert torch.isfinite(scale).all()
    assert (experts.channel_scale(zeros, 127) == 1).all()


def test_requantisation_is_lossy_as_documented() -> None:
    """How far int8 and int4 are from what they requantise: what choosing them costs before any NPU."""
    weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    codes, scale = experts.to_int4(weights, 256)
    int4 = codes.float() * scale.repeat_interleave(256, dim=1)
    channel = experts.channel_scale(weights, 127).float()[:, None]
    int8 = (weights / channel).round() * channel
    error = {n: float((w - weights).norm() / weights.norm()) for n, w in (("int4", int4), ("int8", int8))}
    # Uniform rounding: step / sqrt(12); the step is the largest of 256 normal values (about 2.8 sigma) over 7 or 127.
    assert error["int8"] < 1.2 * 2.8 / 127 / math.sqrt(12)
    assert 0.5 * 2.8 / 7 / math.sqrt(12) < error["int4"] < 1.3 * 2.8 / 7 / math.sqrt(12)


# ------------------------------------------------------------------------ versions


def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "found", lambda: {"vllm-ascend": "0.24.1", "torch-npu": None})
    said = versions.mismatch()
    assert said is not None
    assert "vllm-ascend 0.24.1 (supported: >=0.23,<0.24)" in said
    assert "torch-npu is not installed" in said
    monkeypatch.setattr(versions, "found", lambda: {"vllm-ascend": "0.23.0", "torch-npu": "2.10.0.post4"})
    assert versions.mismatch() is None


def test_the_documented_table_is_this_one() -> None:
    from pathlib import Path

    page = Path(__file__).parents[3] / "docs" / "ascend.md"
    if not page.exists():
        pytest.skip("no documentation beside the tests")
    assert channels.markdown() in page.read_text()


# ---------------------------------------------------------------------------------------------- communication paths


def test_the_path_that_computes_swiglu_inside_is_refused_whoever_chose_it() -> None:
    """The limits refuse the setting; vllm-ascend may still choose the path for a step."""
    for path in ("ALLGATHER", "ALLTOALL", "MC2"):
        paths.refuse_fused(path)
    with pytest.raises(UnsupportedError, match=r"SwiGLU.*enable_fused_mc2"):
        paths.refuse_fused("FUSED_MC2")
