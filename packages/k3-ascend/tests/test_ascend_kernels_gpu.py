"""The same Triton sources on a device: an NPU, or an NVIDIA GPU (semantics on a second device, not speed).

pytest packages/k3-ascend/tests -m gpu      torch with CUDA, Triton 3.6 (not triton-ascend) and k3-core; no vLLM
pytest packages/k3-ascend/tests -m npu      torch_npu and triton-ascend
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_kernel_support import kernel_module
from ascend_support import has_npu

from k3_ascend import kernels
from k3_core.contracts import kda, mxfp4
from k3_core.testing import conformance


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("npu", marks=pytest.mark.npu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device that is here; the others are skipped."""
    if not kernels.available()[0]:
        pytest.skip(kernels.available()[1])
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "npu" and not has_npu():
        pytest.skip("no NPU")
    return str(request.param)


HEADS = (1, 6, 12)
OPERATORS = ("attn_res", "situ", "gated_norm", "short_conv", "kda_decode", "kda_verify", "kda_prefill")


@pytest.mark.parametrize("scale", ["small", "real", "huge"])
@pytest.mark.parametrize("name", OPERATORS)
def test_conforms(name: str, scale: Any, device: str) -> None:
    """Every case of the suite, released sizes and offsets beyond 2^31 elements included.

    Three of the head counts: each is a variant to compile, and they walk the same addresses.
    """
    if not conformance.cases(name, (scale,)):
        pytest.skip(f"{name} has no {scale} cases")
    implementation = kernels.implementations()[name]
    some = lambda case: case.sizes.get("N", 6) in HEADS or case.scale == "small" or name == "gated_norm"  # noqa: E731
    report = conformance.run(name, implementation, device, scales=(scale,), only=some)
    refused = {row.reason for row in report.rows if row.verdict == "refused"}
    assert all("SD layout" in r or "activations must" in r or "dimension" in r for r in refused), refused
    report.raise_if_failed()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate(bound: float | None, device: str) -> None:
    g = torch.Generator().manual_seed(1)
    z = (torch.randn(200, 12, 128, generator=g) * 3).bfloat16().to(device)
    a_log = (torch.randn(12, generator=g) * 0.3).to(device)
    dt_bias = (torch.randn(12, 128, generator=g) * 3 - 2).to(device)
    want = kda.gate(z.cpu().double(), a_log.cpu().double(), dt_bias.cpu().double(), bound)
    got = kernel_module("kda_gate").kda_gate(z, a_log, dt_bias, bound)
    torch.testing.assert_close(got.cpu().double(), want, rtol=4e-6, atol=1e-12)
    plan = kernel_module("kda_plan").plan_prefill([0, 65, 200], device)
    sums = kernel_module("kda_gate").kda_cumulative_gate(z, a_log, dt_bias, bound, plan)
    for first, end in ((0, 64), (64, 65), (65, 129), (129, 193), (193, 200)):
        torch.testing.assert_close(sums[first:end].cpu().double(), want[first:end].cumsum(0), rtol=1e-5, atol=1e-12)


def test_mxfp4_is_exact(device: str) -> None:
    """Every byte under every scale, then a part of an expert."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    g = torch.Generator().manual_seed(1)
    big = torch.randint(0, 256, (2, 512, 1792), dtype=torch.uint8, generator=g)
    exponents = torch.randint(90, 160, (2, 512, 112), dtype=torch.uint8, generator=g)
    for codes, scales in ((packed, scale), (big, exponents)):
        want = mxfp4.unpack(codes, scales, torch.bfloat16)
        got = kernel_module("mxfp4").unpack_mxfp4(codes.to(device), scales.to(device)).cpu()
        keep = ~want.isnan()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(torch.int16)[keep], want.view(torch.int16)[keep])


def test_warm_up_profiles_run(device: str) -> None:
    """Every profile of a K3 rank launches."""
    linear = SimpleNamespace(num_heads=96, head_dim=128, gate_lower_bound=-5.0)
    text = SimpleNamespace(
        hidden_size=7168, attn_res_block_size=12, hidden_act="situ", intermediate_size=33792,
        moe_intermediate_size=3072, num_shared_experts=2, linear_attn=linear,
    )  # fmt: skip
    limits = SimpleNamespace(tensor_parallel_size=8, num_spec=3, max_num_batched_tokens=8192, max_num_seqs=64)
    warmup = kernel_module("warmup")
    count = 0
    for name in ("attn_res", "situ", "gated_norm", "mxfp4", "kda_gate", "short_conv", "kda_step", "kda_prefill"):
        for profile in kernel_module(name).warmup_profiles(text, limits):
            warmup.run_profile(**profile, device=device)
            count += 1
    torch.get_device_module(device).synchronize()
    assert count > 20
