"""Served logits and tokens against the golden data of the released code: text, images, Kimi-Linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import golden_data
import numpy as np
from PIL import Image
from serve_support import Engine

pytestmark = [pytest.mark.serve, pytest.mark.slow]

#: fp32 against fp32 goldens, as their README asks: summation order over 13 layers (another forward differs by 8e-5).
ATOL = 2e-3
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "logprobs_mode": "raw_logits", "max_logprobs": 768}


@pytest.fixture(scope="module")
def k3(k3_tiny: Path, start_engine: Callable[..., Engine]) -> Engine:
    return start_engine(k3_tiny, **OPTIONS)


def prompt_logits(output: Any) -> np.ndarray:
    """Logits [T, vocab] at every prompt position but the last, whose logits belong to the first new token."""
    rows = output.prompt_logprobs[1:]
    return np.array([[row[i].logprob for i in range(len(row))] for row in rows])


def assert_greedy(tokens: list[int], golden: list[int], margins: list[float]) -> None:
    """Equal up to the first token that a difference of ATOL could decide."""
    safe = next((i for i, margin in enumerate(margins) if margin < ATOL), len(golden))
    assert tokens[:safe] == golden[:safe]
    assert safe >= 1


def check_text(engine: Engine, goldens: str) -> None:
    table = golden_data.load_json(f"{goldens}/text_fp32.json")
    arrays = golden_data.arrays(f"{goldens}/text_fp32.npz")
    outputs = engine.generate(list(table["prompts"].values()), 32, prompt_logprobs=-1)
    checked = 0
    for (name, prompt), output in zip(table["prompts"].items(), outputs, strict=True):
        greedy = table["greedy"][name]
        assert_greedy(list(output.outputs[0].token_ids), greedy["tokens"], greedy["margins"])
        if f"{name}.logits" in arrays and len(prompt) > 1:
            np.testing.assert_allclose(prompt_logits(output), arrays[f"{name}.logits"][:-1], atol=ATOL, rtol=0)
            checked += len(prompt) - 1
    assert checked > 100
    assert engine.chunks()


def test_text(k3: Engine) -> None:
    check_text(k3, "k3-tiny-goldens")


def test_images(k3: Engine) -> None:
    """Five prompts at once, images cut by chunk boundaries; ids arrive with one pad an image."""
    table = golden_data.load_json("k3-tiny-goldens/vision.json")
    arrays = golden_data.arrays("k3-tiny-goldens/vision.npz")
    cases = table["prompts"]
    k3.forget()
    pictures = [[picture(name) for name in case["images"]] for case in cases.values()]
    prompts = [case["input_ids_one_pad_per_image"] for case in cases.values()]
    outputs = k3.generate(prompts, 16, pictures, prompt_logprobs=-1)
    for (name, case), output in zip(cases.items(), outputs, strict=True):
        assert output.prompt_token_ids == case["input_ids_expanded"]
        np.testing.assert_allclose(prompt_logits(output), arrays[f"{name}.fp32.logits"][:-1], atol=ATOL, rtol=0)
        assert_greedy(list(output.outputs[0].token_ids), case["greedy_fp32"], case["greedy_margins_fp32"])
    assert k3.chunks()


def test_a_chat_with_images_is_encoded_as_released(k3: Engine) -> None:
    from vllm import SamplingParams

    case = golden_data.load_json("k3-tiny-goldens/vision.json")["prompts"]["all_three"]
    messages = [
        {
            "role": message["role"],
            "content": [chat_part(part) for part in message["content"]]
            if isinstance(message["content"], list)
            else message["content"],
        }
        for message in case["messages"]
    ]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = k3.llm.chat(messages, sampling, use_tqdm=False, chat_template_kwargs={"thinking": False})
    assert output.prompt_token_ids == case["input_ids_expanded"]
    assert_greedy(list(output.outputs[0].token_ids), case["greedy_fp32"][:4], case["greedy_margins_fp32"][:4])


def test_bf16_stays_within_the_drift_of_the_release(k3_tiny: Path, start_engine: Callable[..., Engine]) -> None:
    """BF16 weights and activations against the fp32 goldens, at the bounds of their README: rms 0.4, argmax 0.8."""
    engine = start_engine(k3_tiny, **{**OPTIONS, "dtype": "bfloat16"})
    table = golden_data.load_json("k3-tiny-goldens/text_fp32.json")
    arrays = golden_data.arrays("k3-tiny-goldens/text_fp32.npz")
    names = [name for name, prompt in table["prompts"].items() if len(prompt) >= 17 and f"{name}.logits" in arrays]
    assert len(names) >= 3
    outputs = engine.generate([table["prompts"][name] for name in names], 1, prompt_logprobs=-1)
    for name, output in zip(names, outputs, strict=True):
        served, golden = prompt_logits(output), arrays[f"{name}.logits"][:-1]
        assert np.sqrt(np.mean((served - golden) ** 2)) <= 0.4
        assert np.mean(served.argmax(-1) == golden.argmax(-1)) >= 0.8


def test_kimi_linear(k3_linear_tiny: Path, start_engine: Callable[..., Engine]) -> None:
    """The other family: no attention residuals, BF16 experts, low-rank gates. Runs last: it replaces the engine."""
    check_text(start_engine(k3_linear_tiny, skip_tokenizer_init=True, **OPTIONS), "k3-linear-tiny-goldens")


def picture(name: str) -> Image.Image:
    return Image.open(golden_data.path(f"k3-tiny-goldens/images/{name}.png"))


def chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    name = part["image_url"] if part["type"] == "image_url" else part["image"]
    return {"type": "image_pil", "image_pil": picture(name)}
