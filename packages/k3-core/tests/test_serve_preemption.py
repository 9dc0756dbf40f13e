"""A cache too small for all requests: preempted ones resume with the reference's tokens, prefix caching on and off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from serve_support import Engine, random_prompts

from k3_core.reference import ReferenceK3, load_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

#: Prompts of just under two blocks of 128 tokens, which decoding pushes into a third.
LENGTHS = (250, 120, 246, 252, 100, 240)
NEW = 24


@pytest.fixture(scope="module")
def reference(long_memory_tiny: Path) -> ReferenceK3:
    return load_model(long_memory_tiny, torch.float32)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["align", "none"])
def test_preempted_requests_equal_the_reference(
    prefix_caching: bool, long_memory_tiny: Path, start_engine: Callable[..., Engine], reference: ReferenceK3
) -> None:
    engine = start_engine(
        long_memory_tiny,
        max_model_len=384,
        max_num_batched_tokens=64,
        enable_prefix_caching=prefix_caching,
        num_gpu_blocks_override=16 if prefix_caching else 10,
    )
    assert engine.config.cache_config.mamba_cache_mode == ("align" if prefix_caching else "none")
    prompts = random_prompts(LENGTHS, seed=21)
    assert engine.tokens(prompts, NEW) == [reference.generate(prompt, NEW) for prompt in prompts]
    assert engine.preemptions > 0, "nothing was preempted: the cache is too large for this test"
    assert engine.chunks()
