"""A small Kimi K3 with the released head sizes, served by vllm and vllm-ascend on an NPU: tokens are the reference's.

Never run by this project, which has no NPU. What can be seen without one: its configuration is accepted.
"""

from __future__ import annotations

import os
from pathlib import Path

import ascend_support as support
import pytest
import torch

if not support.has_vllm_ascend():
    pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')", allow_module_level=True)

from k3_core.checkpoint import write_tiny
from k3_core.reference import load_model

PROMPTS = [[5, 17, 300, 41, 9, 77], list(range(20, 180)), [3]]
#: A token counts as the reference's if its fp32 logit is this near to the best one's (bfloat16 moves logits so far).
MARGIN = 0.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("ascend-hardware"), support.kernel_config(), seed=11)


def test_the_configuration_is_accepted(checkpoint: Path) -> None:
    support.fake_device()
    support.plugins()
    config = support.settle(checkpoint)
    assert config.cache_config.block_size % 128 == 0


@pytest.mark.npu
@pytest.mark.skipif(not support.has_npu(), reason="needs an Ascend NPU")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_greedy_tokens_are_the_references(checkpoint: Path, eager: bool) -> None:
    from vllm import LLM, SamplingParams

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    extra = {"k3_experts": "bf16"}
    llm = LLM(str(checkpoint), max_model_len=512, max_num_seqs=4, enforce_eager=eager, additional_config=extra)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    reference = load_model(checkpoint, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logits = reference.logits(torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float((logits.max(1).values - chosen).max()) < MARGIN
