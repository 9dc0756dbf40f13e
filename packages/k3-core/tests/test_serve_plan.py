"""`k3 plan` against a running engine: the parameters it allocated and the cache vLLM laid out, within 3%."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("vllm", reason="starts vLLM")

from serve_support import Engine

from k3_core.checkpoint import Topology
from k3_core.cli.plan.cache import cache_shape
from k3_core.cli.plan.weights import WeightModel
from k3_core.config import load_config
from k3_core.vllm import versions

pytestmark = pytest.mark.serve
OLDER = Version(versions.found_version("vllm") or "0") < Version("0.32")
POOL = 1 << 30  # VLLM_CPU_KVCACHE_SPACE of the test engines


@pytest.fixture(scope="module")
def engine(long_memory_tiny: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(long_memory_tiny, dtype="bfloat16")


def test_weights_are_what_the_engine_allocated(engine: Engine, long_memory_tiny: Path) -> None:
    config = load_config(long_memory_tiny)
    planned = WeightModel(config).rank_bytes(Topology(), range(config.text.num_hidden_layers))
    held = {name: p.nbytes for name, p in engine.model.named_parameters()}
    experts = sum(size for name, size in held.items() if ".experts.w" in name)
    assert sum(held.values()) - experts == pytest.approx(sum(planned.values()) - planned["routed experts"], rel=0.03)
    # Small models unpack their experts: 16 bits a value instead of 4 and a scale of 8 for 32 values.
    assert experts == pytest.approx(planned["routed experts"] * 16 / 4.25, rel=0.03)


@pytest.mark.skipif(OLDER, reason="the plan follows the layout of vLLM 0.32; 0.27 keeps smaller blocks on a CPU")
def test_the_cache_is_laid_out_as_planned(engine: Engine, long_memory_tiny: Path) -> None:
    config = load_config(long_memory_tiny)
    cache = engine.config.cache_config
    ours = cache_shape(
        config,
        1,
        range(config.text.num_hidden_layers),
        kv_dtype="auto",
        state_dtype="float32",
        prefix_caching=cache.enable_prefix_caching,
    )
    assert cache.block_size == ours.block_size
    theirs = engine.scheduler.kv_cache_config
    assert {group.kv_cache_spec.page_size_bytes for group in theirs.kv_cache_groups} == {ours.page_bytes}
    assert len(theirs.kv_cache_groups) == ours.kda_groups + ours.mla_groups
    assert cache.num_gpu_blocks == pytest.approx(POOL // ours.block_bytes, rel=0.03)
