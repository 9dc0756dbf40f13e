"""Served tokens are the reference's: many requests at once, prompts cut into chunks, cached prefixes, aborts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from serve_support import Engine, random_prompts

from k3_core.reference import ReferenceK3, load_model

pytestmark = [pytest.mark.serve, pytest.mark.slow]

#: One step takes at most this many tokens: prompts are cut, and mixed with other requests' decoding.
BUDGET = 48
BLOCK = 128


@pytest.fixture(scope="module")
def reference(long_memory_tiny: Path) -> ReferenceK3:
    return load_model(long_memory_tiny, torch.float32)


@pytest.fixture(scope="module")
def engine(long_memory_tiny: Path, start_engine: Callable[..., Engine]) -> Engine:
    # On by default from 0.32 on; 0.27 leaves it to the user for hybrid models.
    return start_engine(long_memory_tiny, max_num_batched_tokens=BUDGET, enable_prefix_caching=True)


@pytest.fixture(autouse=True)
def forget(engine: Engine) -> None:
    engine.forget()


def expected(reference: ReferenceK3, prompts: list[list[int]], count: int) -> list[list[int]]:
    return [reference.generate(prompt, count) for prompt in prompts]


MIXED = (1, 2, 3, 5, 17, 40, 47, 48, 49, 96, 131, 150, 257, 300)


def test_chunked_prefill_and_prefix_caching_are_on(engine: Engine) -> None:
    assert engine.config.scheduler_config.enable_chunked_prefill
    assert engine.config.cache_config.enable_prefix_caching
    assert engine.config.cache_config.mamba_cache_mode == "align"


def test_the_text_model_inside_is_ours(engine: Engine) -> None:
    from k3_core.vllm.model import KimiK3ForConditionalGeneration
    from k3_core.vllm.text_model import KimiLinearForCausalLM

    assert type(engine.model) is KimiK3ForConditionalGeneration
    assert type(engine.model.get_language_model()) is KimiLinearForCausalLM


def test_concurrent_requests_of_mixed_lengths_equal_the_reference(engine: Engine, reference: ReferenceK3) -> None:
    prompts = random_prompts(MIXED, seed=1)
    assert engine.tokens(prompts, 12) == expected(reference, prompts, 12)
    assert engine.chunks(), "no prompt was cut into chunks: the test shows nothing about carried states"
    longest = max(step_rows for step_rows in map(len, engine.steps))
    assert longest >= 4, "requests did not run together"
    mixed = [step for step in engine.steps if any(r.is_chunk for r in step) and any(r.num_tokens == 1 for r in step)]
    assert mixed, "no step mixed a chunk with decoding"


def test_a_state_dropped_between_chunks_is_noticed(
    engine: Engine, reference: ReferenceK3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that the test above must catch: every chunk starts from zeros."""
    from k3_core.vllm.layers.kda import KimiDeltaAttention

    honest = KimiDeltaAttention._states

    def forgetful(self: Any, rows: Any) -> Any:
        conv, recurrent = honest(self, rows)
        for index, request in enumerate(rows.requests):
            if request.end - request.start > 1:
                recurrent[index] = 0
        return conv, recurrent

    prompts = random_prompts((30, 100, 200, 300), seed=2)
    right = expected(reference, prompts, 12)
    assert engine.tokens(prompts, 12) == right
    engine.forget()
    monkeypatch.setattr(KimiDeltaAttention, "_states", forgetful)
    wrong = engine.tokens(prompts, 12)
    assert wrong[0] == right[0], "a prompt that fits one step has no state to lose"
    assert all(got != want for got, want in zip(wrong[1:], right[1:], strict=True))


def test_a_window_dropped_between_chunks_is_noticed(
    engine: Engine, reference: ReferenceK3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other state: the last inputs of the short convolution."""
    from k3_core.vllm.layers.kda import KimiDeltaAttention

    honest = KimiDeltaAttention._states

    def forgetful(self: Any, rows: Any) -> Any:
        conv, recurrent = honest(self, rows)
        return torch.zeros_like(conv), recurrent

    prompts = random_prompts((60, 100, 200), seed=3)
    monkeypatch.setattr(KimiDeltaAttention, "_states", forgetful)
    wrong = engine.tokens(prompts, 12)
    assert all(got != want for got, want in zip(wrong, expected(reference, prompts, 12), strict=True))


def test_cached_prefixes_give_the_same_tokens(engine: Engine, reference: ReferenceK3) -> None:
    """A, then B, then A again and longer: the second and third A start from cached states."""
    first, other = random_prompts((300, 290), seed=4)
    longer = first + random_prompts((70,), seed=5)[0]
    for prompt, hit in ((first, 0), (other, 0), (first, 2 * BLOCK), (longer, 2 * BLOCK)):
        (output,) = engine.generate([prompt], 12)
        assert output.num_cached_tokens == hit
        assert list(output.outputs[0].token_ids) == reference.generate(prompt, 12)


def test_concurrent_hits_on_one_cached_prefix_do_not_disturb_each_other(engine: Engine, reference: ReferenceK3) -> None:
    (common,) = random_prompts((2 * BLOCK + 5,), seed=6)
    prompts = [common + tail for tail in random_prompts((1, 9, 33, 60, 90), seed=7)]
    engine.tokens([common], 2)
    outputs = engine.generate(prompts, 12)
    assert [output.num_cached_tokens for output in outputs] == [2 * BLOCK] * len(prompts)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected(reference, prompts, 12)


def test_aborted_requests_leave_the_others_alone(engine: Engine, reference: ReferenceK3) -> None:
    from vllm import SamplingParams

    prompts = random_prompts((20, 200, 64, 130, 90, 33, 250, 70, 45, 10), seed=8)
    core, results = engine.llm.llm_engine, {}
    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
    aborted = {"1", "4", "5", "8"}
    for step in range(400):
        for output in core.step():
            if output.finished:
                results[output.request_id] = list(output.outputs[0].token_ids)
        if step == 3:  # some prompts are half read, some requests decode, some wait
            core.abort_request(sorted(aborted))
        if not core.has_unfinished_requests():
            break
    assert not core.has_unfinished_requests()
    for index, prompt in enumerate(prompts):
        if str(index) not in aborted:
            assert results[str(index)] == reference.generate(prompt, 12), index
    again = random_prompts((200, 60, 130), seed=9)
    assert engine.tokens(again, 12) == expected(reference, again, 12)


def test_the_same_batch_gives_the_same_bits(engine: Engine) -> None:
    prompts = random_prompts((70, 5, 130, 41), seed=10)

    def run() -> list[Any]:
        engine.forget()
        outputs = engine.generate(prompts, 8, logprobs=3)
        return [
            [{i: entry.logprob for i, entry in position.items()} for position in output.outputs[0].logprobs]
            for output in outputs
        ]

    assert run() == run()


def test_the_null_block_is_never_written(engine: Engine) -> None:
    from k3_core.vllm import compat
    from k3_core.vllm.layers.kda import KimiDeltaAttention
    from k3_core.vllm.layers.mla import KimiLatentAttention

    engine.tokens(random_prompts((30, 200, 7, 140), seed=11), 8)
    layers = [m for m in engine.model.modules() if isinstance(m, KimiDeltaAttention | KimiLatentAttention)]
    assert len(layers) == 5
    for layer in layers:
        caches = (
            compat.state_views(layer.kv_cache)
            if isinstance(layer, KimiDeltaAttention)
            else (compat.latent_pages(layer.kv_cache),)
        )
        for cache in caches:
            assert not cache[0].any()
            assert cache[1:].any()
