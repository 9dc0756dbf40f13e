"""Launch choices, plans, refusals and layouts: what is decided on the host. No kernel is compiled here."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_amd import kernels, tuning
from k3_amd.kernels import attn_res, experts, experts_layout, kda_prefill, launch, router, state_copy
from k3_core.checkpoint import unpack_mxfp4
from k3_core.errors import UnsupportedError
from k3_core.operators import TABLE, CallSpec, ExpertWeights, triton_host
from k3_core.operators.kda_args import TESTED_HEADS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = kernels.implementations()


def test_every_operator_has_a_kernel() -> None:
    assert set(IMPLEMENTATIONS) == set(TABLE)
    for implementation in IMPLEMENTATIONS.values():
        assert implementation.warmup_profiles is not None


@pytest.mark.parametrize("hip", [False, True])
def test_amd_options_reach_amd_only(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "HIP", hip)
    monkeypatch.setattr(launch, "WAVE", 64 if hip else 32)
    options = launch.prepare(tuning.launch("chunk", "gfx942"))
    assert ("waves_per_eu" in options) is hip
    assert ("matrix_instr_nonkdim" in options) is hip
    assert options["num_warps"] == (4 if hip else 8)
    assert "threads" not in options


def test_a_variant_for_narrow_storage_is_not_used_for_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton cuts offsets to 32 bits up to 2 GiB of storage: the warm-up's pool is smaller, a served one is not."""
    backend = pytest.importorskip("triton.backends.amd.compiler").HIPBackend
    monkeypatch.setattr(triton_host, "HIP", True)
    pools = [torch.empty(size, dtype=torch.uint8, device="meta") for size in (64, 2**31 - 1, 2**31, 2**33)]
    narrow = [backend.is_within_2gb(pool) for pool in pools]
    assert narrow == [True, True, False, False]
    # A view of a wide pool is as wide as the pool, whatever its own size.
    traits = [triton_host._trait(pool[:16]) for pool in pools]
    assert traits == [(torch.uint8, True, small) for small in narrow]
    monkeypatch.setattr(triton_host, "HIP", False)
    assert len({triton_host._trait(pool) for pool in pools}) == 1


@pytest.mark.parametrize("arch", tuning.ARCHITECTURES)
def test_tables_cover_every_size(arch: str) -> None:
    assert tuning.expert_plans(arch)[-1]["max_pairs"] is None
    for pairs in (0.01, 8, 8.1, 40, 1e6):
        plan = tuning.expert_plan(arch, pairs)
        assert 64 % plan["BN13"] == 0
        assert experts_layout.LATENT_UNIT % plan["BN2"] == 0
    with pytest.raises(KeyError, match="gfx90a"):
        tuning.table("gfx90a")


def test_few_heads_are_cut_along_the_sequence() -> None:
    """One long sequence and few heads fill the device; many heads, or one chunk, are left whole."""
    for arch, units in tuning.COMPUTE_UNITS.items():
        assert kda_prefill.segment_length([1], 6, 128, arch, units) == 0
        assert kda_prefill.segment_length([128], 96, 128, arch, units) == 0
        for heads in (h for h in TESTED_HEADS if h <= 12):
            assert 3 <= kda_prefill.segment_length([1024], heads, 128, arch, units) <= 512


REFUSED = [
    ("kda_prefill", dict(dtype=torch.float16), "bfloat16"),
    ("kda_prefill", dict(sizes={"N": 6, "D": 96}), "head dimension"),
    ("kda_prefill", dict(sizes={"N": 6, "K": 64, "V": 32}), "equal"),
    ("kda_prefill", dict(options={"lower_bound": 1.0}), "negative"),
    ("kda_decode", dict(options={"state_dtype": torch.float16}), "recurrent state"),
    ("kda_decode", dict(device="npu"), "cuda"),
    ("kda_decode", dict(arch="gfx90a"), "gfx942"),
    ("attn_res", dict(sizes={"H": 60}), "multiple of 8"),
    ("attn_res", dict(options={"num_blocks": 16}), "16 blocks"),
    ("route", dict(sizes={"A": 896, "X": 16}, options={"num_expert_group": 8, "topk_group": 4}), "groups"),
    ("route", dict(sizes={"A": 5000, "X": 16}), "at most 4096"),
    ("experts", dict(sizes={"I": 48, "L": 3584}), "multiple of 32"),
    ("experts", dict(sizes={"I": 64, "L": 3584}, options={"quantised": False}), "MXFP4"),
    ("experts", dict(dtype=torch.float32), "multiply bfloat16"),
    ("situ", dict(dtype=torch.float64), "float64"),
    ("state_gather", dict(dtype=torch.float64), "float64"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "change", "says"), REFUSED)
def test_capability_query_says_why(operator: str, change: dict, says: str) -> None:
    spec = CallSpec(operator, "cuda", torch.bfloat16, "gfx950", {})
    assert IMPLEMENTATIONS[operator].supports(spec)[0]
    ok, reason = IMPLEMENTATIONS[operator].supports(replace(spec, **change))
    assert not ok
    assert says in reason


def test_launchers_refuse_before_launch() -> None:
    x = torch.randn(3, 64).bfloat16()
    bank, weight = torch.randn(3, 4, 64).bfloat16(), torch.ones(64).bfloat16()
    with pytest.raises(ValueError, match="write_block 1"):
        attn_res.attn_res(x, None, bank, weight, weight, 1e-5, 2, write_block=1)
    with pytest.raises(UnsupportedError, match="strides"):
        attn_res.attn_res(x, None, bank.transpose(1, 2).contiguous().transpose(1, 2), weight, weight, 1e-5, 2)
    with pytest.raises(ValueError, match="go together"):
        attn_res.attn_res(x, None, bank, weight, weight, 1e-5, 2, output_norm_weight=weight)
    more = dict(renormalize=True, routed_scaling_factor=1.0, num_expert_group=1, topk_group=1)
    with pytest.raises(ValueError, match="correction_bias must be float32"):
        router.route(torch.randn(2, 16), torch.zeros(16).bfloat16(), 4, **more)
    with pytest.raises(UnsupportedError, match="contiguous inside"):
        state_copy.state_gather(torch.randn(3, 2, 8, 4).transpose(2, 3), torch.tensor([0]), None)


@pytest.mark.parametrize("form", ["unpacked", "scaled"])
@pytest.mark.parametrize(("width", "latent"), [(32, 64), (96, 192), (192, 128)])
def test_layout_keeps_every_weight_and_pads_with_zeros(form: str, width: int, latent: int) -> None:
    generator = torch.Generator().manual_seed(width)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(118, 129, shape, dtype=torch.uint8, generator=generator)

    weights = ExpertWeights(codes(3, 2 * width, latent // 2), scales(3, 2 * width, latent // 32),
                            codes(3, latent, width // 2), scales(3, latent, width // 32))  # fmt: skip
    packed = experts_layout.prepare(weights, form=form)
    order = experts_layout.neighbouring if form == "unpacked" else (lambda t: t)
    w13 = unpack_mxfp4(order(packed.w13), packed.s13, torch.float32)
    want = unpack_mxfp4(weights.w13, weights.w13_scale, torch.float32)
    assert torch.equal(w13[:, 0, :width], want[:, :width])
    assert torch.equal(w13[:, 1, :width], want[:, width:])
    assert not w13[:, :, width:].any()
    w2 = unpack_mxfp4(order(packed.w2), packed.s2, torch.float32)
    assert torch.equal(w2[:, :latent, :width], unpack_mxfp4(weights.w2, weights.w2_scale, torch.float32))
    assert not w2[:, latent:].any()
    assert not w2[:, :, width:].any()
    assert not packed.wide_scales


def test_one_expert_at_a_time_is_the_same_layout() -> None:
    weights = ExpertWeights(*(torch.randint(0, 129, s, dtype=torch.uint8) for s in
                              ((4, 128, 32), (4, 128, 2), (4, 64, 32), (4, 64, 2))))  # fmt: skip
    whole = experts_layout.prepare(weights)
    single = experts_layout.empty_packed(4, 64, 64, "cpu")
    for e in range(4):
        experts_layout.pack_expert_(
            single, e, (weights.w13[e, :64], weights.w13_scale[e, :64]),
            (weights.w13[e, 64:], weights.w13_scale[e, 64:]), (weights.w2[e], weights.w2_scale[e]),
        )  # fmt: skip
    for name in ("w13", "s13", "w2", "s2"):
        assert torch.equal(getattr(whole, name), getattr(single, name))
    with pytest.raises(ValueError, match="gate is"):
        experts_layout.pack_expert_(single, 0, (weights.w2[0], weights.w2_scale[0, :32]), *[(weights.w2[0],) * 2] * 2)


def test_the_lossy_form_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in tuning.ARCHITECTURES:
        monkeypatch.setenv(launch.TABLE, arch)
        assert experts_layout.default_form("cuda" if DEVICE == "cuda" else "cpu") in ("unpacked", "scaled")
    with pytest.raises(ValueError, match="form must be one of"):
        experts_layout.empty_packed(1, 64, 64, "cpu", form="fp8")
    monkeypatch.setattr(launch, "HIP", True)
    monkeypatch.setattr(launch, "architecture", lambda device: "gfx942")
    with pytest.raises(UnsupportedError, match="gfx950"):
        experts_layout.empty_packed(1, 64, 64, "cpu", form="mxfp8")


def test_warmup_profiles_meet_every_plan() -> None:
    config = SimpleNamespace(num_experts_per_token=16, num_experts=896)
    limits = SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256, num_spec=0)
    tokens = [p["tokens"] for p in experts.warmup_profiles(config, limits)]
    for arch in tuning.ARCHITECTURES:
        met = {tuning.expert_plan(arch, t * 16 / 896)["BM"] for t in tokens}
        assert met == {p["BM"] for p in tuning.expert_plans(arch)}
    assert min(tokens) == 1
    assert max(tokens) == 8192
