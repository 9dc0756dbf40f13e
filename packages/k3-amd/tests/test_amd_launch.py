"""What the layers hand to this wheel's kernels passes the kernels' own checks, as chosen for both architectures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from amd_support import VENDOR

from k3_core.operators import triton_host
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.warmup import Limits, of_each_property, storage_edges
from k3_core.vllm.testing.suite_launch import LaunchSuite

#: Storage of a served pool.
SERVED = 3 * 2**30


@pytest.mark.parametrize(("beyond", "edges"), [(5000, [5064]), (8180, [8192]), (9000, [8192])])
def test_storage_that_is_wide_for_the_longest_steps_only_is_met(
    beyond: int, edges: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: edges from ``longest`` on are left out, though the longest step itself is behind one."""
    longest, row = 8192, triton_host.NARROW // beyond
    noted: list[dict[Any, int]] = []

    @contextmanager
    def noting() -> Iterator[dict[Any, int]]:
        noted.append({})
        yield noted[-1]

    monkeypatch.setattr(triton_host, "HIP", True)
    monkeypatch.setattr(triton_host, "noting_storages", noting)

    def run(tokens: int) -> None:
        noted[-1]["kernel", 0] = tokens * row

    assert storage_edges(run, longest) == pytest.approx(edges, abs=1)


@pytest.mark.parametrize("longest", [130, 143, 144, 145])
def test_behind_an_edge_is_a_count_of_each_property(longest: int) -> None:
    for count in range(2, longest + 1):
        near = of_each_property(count, longest)
        assert count in near
        assert all(1 <= other <= longest and abs(other - count) <= 16 for other in near)
        assert count < 16 or {other % 16 == 0 for other in near} == {True, False}


class TestGfx942(LaunchSuite):
    vendor, arch = VENDOR, "gfx942"
    prompt_parts = ("attn_res", "conv", "kda", "norm", "route", "w13", "w2", "combine", "situ")
    step_kernels = frozenset({"kda_decode_kernel"})
    verify_kernels = frozenset({"kda_verify_kernel"})


class TestGfx950(TestGfx942):
    arch = "gfx950"

    @pytest.mark.parametrize("served", [2**20, SERVED])
    def test_warm_up_meets_the_pools_storage_whatever_its_size(
        self, served: int, tiny: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels are compiled for storages up to 2 GiB or beyond: what serving launches, the warm-up has launched.

        The served pool is faked: its storage says its size, and only the part that is used exists.
        """
        from k3_amd import warmup

        traits: set[tuple[Any, ...]] = set()

        def note(launcher: Any, grid: Any, *args: Any, **named: Any) -> None:
            kernel = launcher.kernel
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            pools = [a for a in args if isinstance(a, torch.Tensor) and a.untyped_storage().size() > triton_host.NARROW]
            kinds = tuple(triton_host._trait(a)[2] for a in args if isinstance(a, torch.Tensor))
            traits.add((name, kinds))
            assert all(pool.data_ptr() for pool in pools)

        monkeypatch.setattr(triton_host, "HIP", True)
        monkeypatch.setattr(triton_host.Launcher, "__call__", note)
        model = self.make(tiny)
        layer = next(m for m in model.modules() if isinstance(m, KdaLayer))
        limits = Limits(max_num_batched_tokens=130, max_num_seqs=8, num_spec=0)
        warmup.WARM_UP.run_kda(layer, limits, torch.bfloat16, torch.device("cpu"))
        met = set(traits)
        traits.clear()
        pools = [
            torch.zeros(4, *s, dtype=d) for s, d in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        ]
        layer.kv_cache = tuple(pools)
        if served > triton_host.NARROW:
            layer.kv_cache = tuple(triton_host.as_if_wide(pool) for pool in pools)
        for metadata in warmup.WARM_UP.steps(layer, limits, torch.device("cpu")):
            tokens = metadata.step_tokens + metadata.prefill_tokens
            qkv, z, beta, gate = layer.project(torch.zeros(tokens, 256, dtype=torch.bfloat16))
            layer._run(metadata, qkv, z, beta, gate, torch.empty_like(z, memory_format=torch.contiguous_format))
        assert {name for name, _ in traits} >= {"kda_decode_kernel", "short_conv_kernel", "kda_output_kernel"}
        assert traits <= met
        assert any(False in kinds for _, kinds in traits) is (served > triton_host.NARROW)

    def test_warm_up_meets_workspaces_on_both_sides_of_two_gib(
        self, tiny: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the limit at 400 kB some tensors of a prompt pass it and others not, as a large prompt's do at 2 GiB."""
        from k3_amd import warmup
        from k3_core.vllm.serving import warmup as core_warmup

        met: set[tuple[Any, ...]] = set()

        def note(launcher: Any, grid: Any, *args: Any, **named: Any) -> None:
            if triton_host._noted is not None:
                triton_host._note(launcher.kernel, args)
            kinds = tuple(triton_host._trait(a)[2] for a in args if isinstance(a, torch.Tensor))
            met.add((launcher.kernel.fn.__name__, kinds))

        monkeypatch.setattr(triton_host, "HIP", True)
        monkeypatch.setattr(triton_host, "NARROW", 400_000)
        monkeypatch.setattr(triton_host.Launcher, "__call__", note)
        model = self.make(tiny)
        layer = next(m for m in model.modules() if isinstance(m, KdaLayer))
        longest, cpu = 1500, torch.device("cpu")

        def run(count: int) -> None:
            qkv, z, beta, gate = layer.project(torch.zeros(count, 256, dtype=torch.bfloat16))
            out = torch.empty_like(z, memory_format=torch.contiguous_format)
            layer._run(core_warmup._prompts(layer, [count], cpu), qkv, z, beta, gate, out)

        def warmed() -> set[tuple[Any, ...]]:
            met.clear()
            limits = Limits(max_num_batched_tokens=longest, max_num_seqs=8, num_spec=0)
            warmup.WARM_UP.run_kda(layer, limits, torch.bfloat16, cpu)
            return set(met)

        with_edges = warmed()
        layer.kv_cache = tuple(
            torch.zeros(4, *s, dtype=d) for s, d in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        )
        edges = core_warmup.storage_edges(run, longest)
        assert len(edges) >= 3
        met.clear()
        for before, edge in pairwise([0, *edges, longest]):
            if edge - before > 200:  # the place of an edge is estimated, to a chunk
                run((before + edge - 128) // 2)
        served = set(met)
        assert served <= with_edges
        assert len({kinds for name, kinds in served if name == "kda_output_kernel"}) >= 2
        monkeypatch.setattr(core_warmup, "storage_edges", lambda run, longest: [])
        assert not served <= warmed()
