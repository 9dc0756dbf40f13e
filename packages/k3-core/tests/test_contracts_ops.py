"""The contracts against the operator goldens."""

import contract_checks as checks
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", checks.KDA_FORMS)
def test_kda_op(form: str, dtype: torch.dtype) -> None:
    checks.check_kda_op(form, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kda_gate(dtype: torch.dtype) -> None:
    checks.check_kda_gate(dtype)


def test_short_conv() -> None:
    checks.check_short_conv()


@pytest.mark.parametrize("chunk", [None, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kda_layer(dtype: torch.dtype, chunk: int | None) -> None:
    checks.check_kda_layer(dtype, chunk)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mla_layer(dtype: torch.dtype, absorbed: bool) -> None:
    checks.check_mla_layer(dtype, absorbed)


def test_attn_res_mix() -> None:
    checks.check_attn_res_mix()


def test_attn_res_step() -> None:
    checks.check_attn_res_step()


def test_schedule() -> None:
    checks.check_schedule()


def test_situ() -> None:
    checks.check_situ()


@pytest.mark.parametrize("case", checks.ROUTER_CASES)
def test_router(case: str) -> None:
    checks.check_router(case)


def test_norm_rounding() -> None:
    checks.check_norm_rounding()
