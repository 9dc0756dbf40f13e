"""A vendor's model in vLLM's real engine on a CPU: greedy tokens equal the reference's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from k3_core.reference import ReferenceK3, load_model
from k3_core.vllm import compat
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import KdaBackend
from k3_core.vllm.serving.mla_cpu import LatentAttentionOnCpu
from k3_core.vllm.testing.engine import Engine
from k3_core.vllm.testing.suite_ranks import VendorSuite
from k3_core.vllm.testing.vendor import random_prompts

#: One step takes at most this many tokens: prompts are cut, and mixed with other requests' decoding.
BUDGET = 48
BLOCK = 128
MIXED = (1, 2, 5, 40, 47, 48, 49, 131, 150)
Start = Callable[..., Engine]


def expected(reference: ReferenceK3, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of the reference."""
    return [reference.generate(prompt, count) for prompt in prompts]


@pytest.mark.serve
@pytest.mark.slow
class ServeSuite(VendorSuite):
    """Mixed batches, cached prefixes, images, verification, Kimi-Linear, and what must not be touched."""

    @pytest.fixture(scope="class")
    @classmethod
    def start(cls, acting: None) -> Iterator[Start]:
        """Starts engines, one at a time."""
        running: list[Engine] = []

        def begin(checkpoint: Path, **options: Any) -> Engine:
            while running:
                running.pop().close()
            running.append(Engine.start(checkpoint, **options))
            return running[-1]

        yield begin
        while running:
            running.pop().close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny: Path) -> ReferenceK3:
        """The oracle."""
        return load_model(tiny, torch.float32)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny: Path, start: Start) -> Engine:
        """The tiny Kimi K3, served."""
        return start(tiny, max_num_batched_tokens=BUDGET)

    def test_the_models_are_ours_inside_and_out(self, engine: Engine) -> None:
        ours = self.vendor.module("model")
        assert type(engine.model) is ours.KimiK3ForConditionalGeneration
        assert type(engine.model.get_language_model()) is ours.KimiLinearForCausalLM
        layers = [m for m in engine.model.modules() if isinstance(m, KdaLayer)]
        assert len(layers) == 3
        assert {layer.get_attn_backend() for layer in layers} == {KdaBackend}
        assert engine.config.cache_config.mamba_cache_mode == "align"
        assert engine.config.scheduler_config.enable_chunked_prefill

    def test_concurrent_requests_of_mixed_lengths_equal_the_reference(
        self, engine: Engine, reference: ReferenceK3
    ) -> None:
        engine.forget()
        prompts = random_prompts(MIXED, seed=1)
        assert engine.tokens(prompts, 10) == expected(reference, prompts, 10)
        cut = [row for step in engine.steps for row in step if row[0] + row[1] < row[2]]
        assert cut, "no prompt was cut into chunks: the test shows nothing about carried states"
        mixed = [step for step in engine.steps if any(r[1] > 1 for r in step) and any(r[1] == 1 for r in step)]
        assert mixed, "no step mixed a prompt with decoding"

    @pytest.mark.parametrize("state", ["recurrent", "conv"])
    def test_a_state_dropped_between_chunks_is_noticed(
        self, state: str, engine: Engine, reference: ReferenceK3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mutants that the test above must catch: chunks that start without a recurrent state or a window."""
        honest = KdaLayer._run_prefill

        def forgetful(self: Any, metadata: Any, *rest: Any) -> None:
            pools = self.kv_cache
            slots = metadata.prefill.slots.long()
            pools[1 if state == "recurrent" else 0][slots] = 0
            honest(self, metadata, *rest)

        prompts = random_prompts((30, 100, 150), seed=2)
        monkeypatch.setattr(KdaLayer, "_run_prefill", forgetful)
        engine.forget()
        wrong, right = engine.tokens(prompts, 10), expected(reference, prompts, 10)
        assert wrong[0] == right[0], "a prompt that fits one step has no state to lose"
        assert all(got != want for got, want in zip(wrong[1:], right[1:], strict=True))

    def test_cached_prefixes_give_the_same_tokens(self, engine: Engine, reference: ReferenceK3) -> None:
        """A, then B, then A again and longer: the second and third A start from cached states."""
        engine.forget()
        first, other = random_prompts((300, 290), seed=4)
        longer = first + random_prompts((70,), seed=5)[0]
        for prompt, hit in ((first, 0), (other, 0), (first, 2 * BLOCK), (longer, 2 * BLOCK)):
            (output,) = engine.generate([prompt], 10)
            assert output.num_cached_tokens == hit
            assert list(output.outputs[0].token_ids) == reference.generate(prompt, 10)

    def test_images_equal_the_reference(self, engine: Engine, reference: ReferenceK3) -> None:
        pad = reference.config.media_placeholder_token_id
        assert pad is not None
        noise = torch.randint(0, 255, (70, 100, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        image = Image.fromarray(noise.numpy(), "RGBA")
        prompts: list[list[int]] = [[1, 2, 3, pad, 5, 6], random_prompts((20,), seed=6)[0]]
        want = [reference.generate(prompts[0], 10, images=[image]), reference.generate(prompts[1], 10)]
        assert engine.tokens(prompts, 10, [image, None]) == want
        assert engine.tokens(prompts[:1], 10, [image.convert("RGB")]) != want[:1], "transparency must be seen"

    def test_the_null_block_is_never_touched(self, engine: Engine) -> None:
        engine.tokens(random_prompts((30, 90, 7), seed=11), 6)
        pools: tuple[torch.Tensor, ...]
        for layer in engine.model.modules():
            if isinstance(layer, KdaLayer):
                pools = layer.states()
            elif isinstance(layer, LatentAttentionOnCpu):
                pools = (compat.latent_pages(layer.kv_cache),)
            else:
                continue
            for pool in pools:
                assert not pool[0].any()
                assert pool[1:].any()

    def test_drafted_tokens_are_verified_without_changing_any(self, tiny: Path, reference: ReferenceK3) -> None:
        """Proposals from the text itself: rows of 1 to 4 tokens, accepted in part, beside prompts.

        In a process of its own: the proposer loads numba, after which vLLM starts no further engine in that process.
        """
        repeating = [prompt * 4 for prompt in random_prompts((7, 20), seed=5)]
        prompts = repeating + random_prompts((1, 2, 50, 140), seed=6)
        asked = json.dumps([astuple(self.vendor), str(tiny)])
        run = subprocess.run(
            [sys.executable, "-m", "k3_core.vllm.testing.verify", asked],
            input=json.dumps({"prompts": prompts, "count": 16}),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        result = json.loads(run.stdout.splitlines()[-1])
        assert result["tokens"] == expected(reference, prompts, 16)
        assert set(result["verified"]) >= {1, 4}, "no full verification was scheduled"

    def test_kimi_linear_equals_the_reference(
        self, linear: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Plain experts, low-rank gate, ordinary residuals; with the other layout of the convolution's window."""
        from vllm.model_executor.layers.mamba import mamba_utils

        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        mamba_utils.get_conv_state_layout.cache_clear()
        try:
            engine = start(linear, max_num_batched_tokens=BUDGET)
            assert mamba_utils.is_conv_state_dim_first()
            reference = load_model(linear, torch.float32)
            prompts = random_prompts((1, 40, 130), seed=3)
            assert engine.tokens(prompts, 10) == expected(reference, prompts, 10)
        finally:
            mamba_utils.get_conv_state_layout.cache_clear()
