"""The whole model on an AMD GPU: vLLM with this wheel against the fp32 reference, eager and with HIP graphs.

Never run by this project, which has no AMD GPU. What a machine with one would show first is here, and the same
comparison runs on a CPU with contracts in place of kernels, so that the test itself is known to work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from amd_support import VENDOR

from k3_core.checkpoint import tiny_config, write_tiny
from k3_core.reference import load_model
from k3_core.vllm.testing.engine import Engine
from k3_core.vllm.testing.vendor import random_prompts

on_gpu = pytest.mark.skipif(torch.version.hip is None or not torch.cuda.is_available(), reason="needs an AMD GPU")

#: Heads of the released sizes, which the kernels are made for; everything else is tiny.
HEADS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "use_full_rank_gate": True, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5],
    },
}  # fmt: skip
LENGTHS = (1, 17, 200, 513)


def agreement(folder: Path, **options: Any) -> tuple[float, float]:
    """(share of prompt positions whose likeliest token is the reference's, root mean square of log-prob differences).

    Over the reference's 20 likeliest tokens at every position of prompts of 17 tokens and more that both list.
    """
    from vllm import SamplingParams

    prompts = random_prompts(LENGTHS, seed=7)
    reference = load_model(folder, torch.float32)
    with VENDOR.acting():
        engine = Engine.start(folder, dtype="bfloat16", **options)
        try:
            sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, detokenize=False)
            outputs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        finally:
            engine.close()
    same, count, squares, values = 0, 0, 0.0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompt) < 17:
            continue
        want = torch.log_softmax(reference.logits(torch.tensor(prompt)).float(), -1)
        for position, listed in enumerate(output.prompt_logprobs[1:]):
            got = {token: entry.logprob for token, entry in listed.items()}
            best = [token for token, entry in listed.items() if entry.rank == 1]
            same += int(best == [int(want[position].argmax())])
            count += 1
            for token in want[position].topk(20).indices.tolist():
                if token in got:
                    squares += (got[token] - float(want[position, token])) ** 2
                    values += 1
    return same / count, (squares / values) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Kimi K3 with heads of the released sizes."""
    return write_tiny(tmp_path_factory.mktemp("k3"), tiny_config("k3", **HEADS), seed=3, long_memory=True)


#: A bf16 run against fp32: rms at most 0.4 and at least 0.8 of the choices equal. Dropping the router's bias gives
#: 1.07, swapping the experts' gate and up 1.54 (both on the tiny K3's longest golden prompt); most of what is allowed
#: is experts chosen differently where two are nearly equal.
def holds(result: tuple[float, float]) -> bool:
    return result[0] >= 0.8 and result[1] <= 0.4


@pytest.mark.gpu
@pytest.mark.slow
@on_gpu
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_log_probabilities_on_an_amd_gpu(mode: str, folder: Path) -> None:
    options: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": mode == "eager"}
    assert holds(agreement(folder, **options))


@pytest.mark.gpu
@pytest.mark.slow
@on_gpu
def test_every_operator_runs_as_a_kernel_on_an_amd_gpu(folder: Path) -> None:
    from k3_amd import dispatch

    agreement(folder, gpu_memory_utilization=0.3, enforce_eager=True)
    lines = dispatch.report()
    assert lines
    assert all("-> contract" not in line for line in lines)


@pytest.mark.gpu
@on_gpu
def test_the_installed_aiter_is_compared_with_the_table() -> None:
    """Prints what `k3 doctor` says; the vision tower calls aiter only where its function takes what is passed."""
    from k3_amd import aiter, plugin, vision

    lines = plugin.diagnose()
    print("\n" + "\n".join(lines))
    assert len(lines) == 1 + len(aiter.SYMBOLS)
    _, why = vision.choose_attention()
    assert aiter.VISION.name not in why or "takes what is passed" in lines[1] or "lacks" in why


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_comparison_itself_on_a_cpu(folder: Path) -> None:
    assert holds(agreement(folder, max_num_batched_tokens=256))
