"""Weights go straight to their final place: experts one by one into the kernels' layout, routing values untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from amd_support import VENDOR

from k3_core.checkpoint import CheckpointReader, Topology, expert_width
from k3_core.checkpoint.slicing import shard_plan
from k3_core.operators import CallSpec
from k3_core.vllm.serving.experts import RoutedExperts
from k3_core.vllm.testing.suite_load import MOE, LoadSuite, load


@pytest.fixture(params=["gfx942", "gfx950"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layers choose and lay out experts as on one architecture; nothing is launched while weights load on a CPU."""
    pytest.importorskip("triton")
    from k3_amd import dispatch
    from k3_amd.kernels import launch

    def choose(name: str, dtype: Any, sizes: Any, options: Any = None, want: str | None = None) -> Any:
        spec = CallSpec(name, "cuda", dtype, request.param, dict(sizes), dict(options or {}))
        return dispatch.registry().choose(spec, want).implementation

    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setenv(launch.TABLE, request.param)
    return str(request.param)


def released(codes: torch.Tensor, form: str, columns: int) -> torch.Tensor:
    """Rows of codes back in the checkpoint's order, padding cut off."""
    from k3_amd.kernels.experts_layout import neighbouring

    return (neighbouring(codes) if form == "unpacked" else codes)[..., : columns // 2]


class TestLoad(LoadSuite):
    vendor = VENDOR

    @pytest.mark.parametrize(("size", "rank", "whole"), [(1, 0, True), (2, 1, False), (2, 1, True)])
    def test_packed_experts_keep_every_byte_and_are_padded_once(
        self, size: int, rank: int, whole: bool, tiny: Path, packed: str
    ) -> None:
        """Cut along their width, or whole experts by expert parallelism, whose width nothing divides."""
        from k3_amd.kernels.experts_layout import WIDTH_UNIT

        model = load(self.vendor, tiny, size, rank, expert_parallel=whole and size > 1)
        reader = CheckpointReader(tiny)
        plan = shard_plan(reader.config, Topology(tp_size=size, tp_rank=rank))
        experts: RoutedExperts = model.model.layers[2].feed_forward.experts
        assert experts.ids == (range(4, 8) if whole and size > 1 else range(8))
        held = experts.weights()
        width, _ = expert_width(reader.config, size, size if whole else 1)
        assert held.width == width
        unit = WIDTH_UNIT[held.form]
        assert held.padded_width == -(-width // unit) * unit, "padding is the layout's, and is done once"
        assert held.form == {"gfx942": "unpacked", "gfx950": "scaled"}[packed]
        for expert in experts.ids:
            e = expert - experts.ids.start
            got = {
                "w1": (released(held.w13[e, 0, :width], held.form, held.latent), held.s13[e, 0, :width]),
                "w3": (released(held.w13[e, 1, :width], held.form, held.latent), held.s13[e, 1, :width]),
                "w2": (
                    released(held.w2[e, : held.latent], held.form, width),
                    held.s2[e, : held.latent, : width // 32],
                ),
            }
            for matrix, tensors in got.items():
                for kind, tensor in zip(("weight_packed", "weight_scale"), tensors, strict=True):
                    name = f"{MOE.format(2)}.experts.{expert}.{matrix}.{kind}"
                    want = reader.read(name) if whole else plan[name].take(reader.read(name))
                    assert torch.equal(tensor, want), name

    def test_the_lossy_form_is_the_device_s_only_where_it_was_asked_for(
        self, tiny: Path, packed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``k3_experts`` reaches the layout, which keeps the codes; activations are rounded by its kernels."""
        from k3_amd import moe

        if packed == "gfx942":
            pytest.skip("its matrix cores have no scaled product")
        monkeypatch.setattr(moe, "wanted_form", lambda vllm_config: "mxfp8")
        held = load(self.vendor, tiny, 1, 0).model.layers[2].feed_forward.experts.weights()
        assert held.form == "mxfp8"
        assert held.padded_width % 128 == 0
        name = f"{MOE.format(2)}.experts.0.w1.weight_packed"
        assert torch.equal(held.w13[0, 0, : held.width], CheckpointReader(tiny).read(name))


def test_a_form_where_no_kernel_computes_is_refused() -> None:
    from types import SimpleNamespace

    from k3_amd.experts_store import make_store
    from k3_core.errors import ConfigError

    with pytest.raises(ConfigError, match="'contract' computes the experts here; leave it out"):
        make_store(SimpleNamespace(name="contract"), 1, 64, 64, True, "mxfp8")  # type: ignore[arg-type]


def test_router_products_are_not_rounded_before_their_sum() -> None:
    """On a CPU the contract's product; what the GPU's would have to give is asked of the device itself."""
    from k3_amd import moe

    x = torch.full((3, 64), 1.0078125, dtype=torch.bfloat16)
    weight = torch.full((5, 64), 1.0078125, dtype=torch.bfloat16)
    exact = 64 * 1.0078125**2
    assert torch.equal(moe.logits(x, weight), torch.full((3, 5), exact))
    assert exact != float(torch.tensor(exact).bfloat16()), "the value would survive bfloat16: the test shows nothing"


@pytest.mark.parametrize("answer", ["fp32", "rounded", "refused"])
def test_a_torch_without_fp32_sums_is_noticed(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3_amd import moe

    def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        if answer == "refused":
            raise RuntimeError("out_dtype is not supported")
        product = a.float() @ b.float()
        return product if answer == "fp32" else product.bfloat16().float()

    monkeypatch.setattr(torch, "mm", mm)
    moe.leaves_sums_unrounded.cache_clear()
    assert moe.leaves_sums_unrounded("cpu") is (answer == "fp32")
    moe.leaves_sums_unrounded.cache_clear()
