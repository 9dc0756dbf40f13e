"""What the checks of whole engines share: rows, the environment of their processes, and how runs are compared.

The rule for two runs of one checkpoint that sum in different orders (other ranks, other batches, drafts): a greedy
token may fall the other way where two are nearly equal. So (1) log probabilities of what was generated, teacher-forced
against ``k3_core.reference`` in fp32, are at most twice as far off as the bf16 reference's at the 90th percentile (as
in gpu_smoke.py), and no more of the generated tokens are half a nat from the one that it likes best than twice those
of the bf16 reference and one in fifty;
(2) where a request first departs from the other run, that run had the two tokens nearer to each other than twice the
largest distance of the bf16 reference, i.e. its own rounding could have turned them. On a CPU in fp32: the same
tokens, log probabilities within 2e-3 (sums of 1024 in another order; 1e-4 was seen).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_smoke
import torch

# NVLink multicast stays off whatever the machine says: a program that uses it can put a shared host's GPUs out of
# service. vLLM's own all-reduce (peer to peer) and NCCL's rings and trees do not use it; the others here would.
SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
CPU_BOUND = 2e-3
FAR_SHARE = 0.02


Say = Callable[..., None]


class Log:
    """Rows of one script: printed, and appended to $OUT/<name>."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._one_at_a_time = threading.Lock()

    def say(self, **values: Any) -> None:
        """Write a row; from any thread."""
        with self._one_at_a_time:
            print(json.dumps(values), flush=True)
            if os.environ.get("OUT"):
                with (Path(os.environ["OUT"]) / self.name).open("a") as log:
                    log.write(json.dumps(values) + "\n")


def run_parts(
    script: str, limits: argparse.Namespace, parts: dict[str, Callable[[argparse.Namespace], bool]], say: Say
) -> int:
    """Run ``limits.parts`` of a script, each guarded, until ``limits.seconds`` from now are over; 1 if one failed."""
    limits.deadline = time.monotonic() + limits.seconds
    command = f"{script} --parts {limits.parts}"
    say(date=time.strftime("%Y-%m-%d", time.gmtime()), command=command, gpus=gpu_names())
    right = True
    for name in limits.parts.split(","):
        began = time.monotonic()
        try:
            ok = parts[name](limits)
        except Exception:
            traceback.print_exc()
            ok = False
        right &= ok
        say(part=name, seconds=round(time.monotonic() - began, 1), ok=ok)
    return 0 if right else 1


def on_gpu() -> bool:
    """Whether a GPU is here; asked without making a context in this process."""
    return torch.cuda.device_count() > 0


def gpu_names() -> list[str]:
    """Names of the devices here."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def sized_text(heads: int) -> dict[str, Any]:
    """Changes to the tiny preset on a GPU: ``heads`` of the released size, experts whose half fits the kernels."""
    text = gpu_smoke.tiny_text("k3", kernels=on_gpu())
    if text:
        text["linear_attn_config"]["num_heads"] = heads
        text |= {"num_attention_heads": heads, "num_key_value_heads": heads, "moe_intermediate_size": 256}
    return text


class Remembering:
    """The reference, asked once for each text: most runs generate the same."""

    def __init__(self, model: Any) -> None:
        self.model, self.known = model, {}

    def logits(self, ids: Any, images: Any = None) -> Any:
        """As ReferenceK3.logits."""
        key = (tuple(ids.tolist()), None if images is None else images[0].tobytes())
        if key not in self.known:
            given = {} if images is None else {"images": images}
            self.known[key] = self.model.logits(ids, **given)
        return self.known[key]


class Judge:
    """Compares runs with the reference and with the run of one rank."""

    def __init__(self, folder: Path) -> None:
        from k3_core.reference import load_model

        device = "cuda:0" if on_gpu() else "cpu"
        self.exact = Remembering(load_model(folder, torch.float32, device))
        self.rounded = Remembering(load_model(folder, torch.bfloat16, device))

    def against_reference(
        self, outputs: list[dict[str, Any]], prompts: list[list[int]], sizes: list[Any]
    ) -> dict[str, Any]:
        """:meth:`compare` with the fp32 and the bf16 reference."""
        return self.compare(outputs, prompts, sizes, self.exact, self.rounded)

    @staticmethod
    def compare(
        outputs: list[dict[str, Any]], prompts: list[list[int]], sizes: list[Any], exact: Any, yardstick: Any
    ) -> dict[str, Any]:
        """gpu_smoke's comparison of one run; sizes: [width, height, seed] of an image or None, one a prompt."""
        from k3_core.vllm.testing.rank_engine import noise_image

        images = [None if size is None else noise_image(*size) for size in sizes]
        shaped = [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=one["tokens"],
                        logprobs=[
                            {int(token): SimpleNamespace(logprob=value) for token, value in row.items()}
                            for row in one["logprobs"]
                        ],
                    )
                ]
            )
            for one in outputs
        ]
        result: dict[str, Any] = gpu_smoke.compare(shaped, prompts, exact, yardstick, images)
        # A handful of tokens beside twice the yardstick's: where another expert was chosen, either side may be far off.
        near = result["p90_ours"] <= 2 * result["p90_bf16_reference"] + 0.02
        far, far_reference = (1 - result[f"within_half_a_nat{name}"] for name in ("", "_bf16_reference"))
        result["ok"] = near and result["finite"] and far <= 2 * far_reference + FAR_SHARE
        return result


def against_one(outputs: list[dict[str, Any]], one: list[dict[str, Any]], bound: float) -> dict[str, Any]:
    """Where requests depart from the run of one rank, and how near the two tokens were to each other there."""
    margins, distances, same = [], [], 0
    for ours, theirs in zip(outputs, one, strict=True):
        length = len(theirs["tokens"])
        equal = next((i for i in range(length) if ours["tokens"][i] != theirs["tokens"][i]), length)
        same += equal == length
        # Rows up to the first departure have the same context.
        for a, b in zip(ours["logprobs"][: equal + 1], theirs["logprobs"][: equal + 1], strict=True):
            distances += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
        if equal < length:
            row = theirs["logprobs"][equal]
            other = row.get(str(ours["tokens"][equal]), min(row.values()))
            margins.append(row[str(theirs["tokens"][equal])] - other)
    return {
        "same_tokens": same,
        "requests": len(one),
        "margins": [round(m, 4) for m in margins],
        "max_distance_from_one": max(distances, default=0.0),
        "margin_bound": bound,
        "ok": all(margin <= bound for margin in margins),
    }
