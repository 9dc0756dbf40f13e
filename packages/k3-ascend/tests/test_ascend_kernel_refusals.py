"""What the launchers refuse, and how: one clear error before anything is launched. No compiler is needed."""

from __future__ import annotations

import pytest
import torch
from ascend_kernel_support import kernel_module

from k3_ascend import kernels
from k3_core.errors import CheckpointError, UnsupportedError
from k3_core.operators import TABLE, CallSpec, check_signature


def test_the_plan_of_a_batch() -> None:
    plan = kernel_module("kda_plan").plan_prefill(torch.tensor([0, 65, 65, 67]), "cpu")
    assert plan.chunks.tolist() == [[0, 64, 0, 0], [64, 1, 0, 1], [65, 2, 2, 0]]
    assert plan.sequences.tolist() == [[0, 2, 0, 65], [2, 0, 65, 0], [2, 1, 65, 2]]
    assert (plan.num_seqs, plan.end, plan.num_chunks) == (3, 67, 3)
    for wrong in ([], [1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="cu_seqlens must start at 0 and not decrease"):
            kernel_module("kda_plan").plan_prefill(wrong, "cpu")


def test_signatures_are_the_tables() -> None:
    pytest.importorskip("triton")
    for name, implementation in kernels.implementations().items():
        assert check_signature(TABLE[name], implementation.function).ok
        assert implementation.name == kernels.NAME


def test_capability_queries_say_why() -> None:
    pytest.importorskip("triton")
    known = kernels.implementations()
    fine = known["kda_decode"].supports(CallSpec("kda_decode", "npu", torch.bfloat16, sizes={"D": 128}))
    assert fine[0], fine
    for changes, said in (
        ({"device": "cpu"}, "not on cpu"),
        ({"dtype": torch.float16}, "activations must be"),
        ({"sizes": {"D": 96}}, "head dimension must be"),
        ({"sizes": {"K": 128, "V": 64}}, "must be equal"),
        ({"sizes": {"W": 3}}, "4 taps"),
        ({"options": {"layout": "DS"}}, "SD layout"),
        ({"options": {"state_dtype": torch.float16}}, "recurrent state"),
        ({"options": {"lower_bound": 1.0}}, "lower_bound"),
    ):
        fields = {"operator": "kda_decode", "device": "npu", "dtype": torch.bfloat16, **changes}
        ok, reason = known["kda_decode"].supports(CallSpec(**fields))  # type: ignore[arg-type]
        assert not ok, changes
        assert said in reason, (changes, reason)
    ok, reason = known["attn_res"].supports(CallSpec("attn_res", "npu", torch.bfloat16, sizes={"H": 16384}))
    assert not ok
    assert "hidden size 16384" in reason


def test_cpu_tensors_are_refused_outside_verification() -> None:
    pytest.importorskip("triton")
    with pytest.raises(UnsupportedError, match="use the contract implementation"):
        kernel_module("situ").situ(torch.zeros(2, 8), 4.0, 25.0)


def test_wrong_arguments_are_named() -> None:
    pytest.importorskip("triton")
    bf16 = {"dtype": torch.bfloat16}
    x, f32 = torch.zeros(2, 48, **bf16), torch.zeros(48, 4)
    conv, slots, cu, init = torch.zeros(3, 48, 3, **bf16), torch.zeros(1).int(), torch.tensor([0, 2]).int(), [True]
    with pytest.raises(UnsupportedError, match="channels must be contiguous; leave VLLM_SSM_CONV_STATE_LAYOUT at SD"):
        kernel_module("short_conv").short_conv(x, f32, conv, slots, cu, torch.tensor(init))
    w = torch.zeros(48, **bf16)
    with pytest.raises(ValueError, match=r"write_block 0 must lie in 1\.\.1"):
        kernel_module("attn_res").attn_res(x, None, torch.zeros(2, 2, 48, **bf16), w, w, 1e-5, 1, write_block=0)
    with pytest.raises(ValueError, match=r"situ: x must be \[T, 2 I\]"):
        kernel_module("situ").situ(torch.zeros(2, 7), 4.0, 25.0)
    with pytest.raises(CheckpointError, match="don't belong together"):
        kernel_module("mxfp4").unpack_mxfp4(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
