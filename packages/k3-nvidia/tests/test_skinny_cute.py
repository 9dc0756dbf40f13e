"""The CuTe DSL product: the judge of ``test_skinny_gemm`` where there is a device, refusals everywhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as test_skinny_gemm, whichever is imported first
pytest.importorskip("triton")

from test_skinny_gemm import SHAPES, judge

from k3_nvidia.kernels import skinny_cute
from k3_nvidia.kernels.skinny_cute import Config

CONFIGS = [Config(1, 4, 8, 1), Config(2, 2, 4, 2), Config(1, 7, 4, 4), Config(1, 2, 16, 8), Config(1, 4, 1, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conforms(config: Config, dtype: torch.dtype) -> None:
    ok, why = skinny_cute.available()
    if not ok:
        pytest.skip(why)
    for index, shape in enumerate([*SHAPES, (1, 3216, 7168), (16, 768, 7168)]):
        judge(lambda x, w, r, out: skinny_cute.skinny_cute(x, w, config, r, out), shape, dtype, index % 2 == 0)


def test_without_the_package_or_a_device_it_says_so() -> None:
    ok, why = skinny_cute.available()
    if ok:
        pytest.skip("it is here")
    assert "nvidia-cutlass-dsl" in why or "CUDA" in why or "capability" in why
    with pytest.raises(RuntimeError, match="skinny_cute"):
        skinny_cute.skinny_cute(torch.zeros(1, 64).half(), torch.zeros(16, 64).half(), CONFIGS[0])


def test_operands_are_checked_before_the_package_is_asked_for() -> None:
    with pytest.raises(ValueError, match="17 rows"):
        skinny_cute.skinny_cute(torch.zeros(17, 64).half(), torch.zeros(16, 64).half(), CONFIGS[0])


@pytest.mark.parametrize(("n", "k"), [(3216, 7168), (768, 128), (7168, 384), (448, 3584), (20480, 7168)])
@pytest.mark.parametrize("m", [1, 16])
def test_candidates_fit_the_hardware(m: int, n: int, k: int) -> None:
    found = list(skinny_cute.candidates(m, n, k))
    assert found
    for config in found:
        assert config.cluster in (1, 2, 4, 8)
        assert config.warps <= 16
        partial = (config.warps + 1) * 16 * config.tiles * 8 * skinny_cute.columns(m) * 4
        assert partial <= 48 * 1024, config
