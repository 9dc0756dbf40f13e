"""An engine that verifies drafts: ``python -m k3_core.vllm.testing.draft_engine``, a :mod:`.world` program of one rank.

A case: ``vendor``, ``folder``, ``options`` of ``vllm.LLM``, ``count`` and ``top`` as :mod:`.rank_engine`;
``compilers``, the functions of :class:`.compiling.Watch` (may be missing); ``requests`` ({ids, image}) and the
``rounds`` in which they are served: "new" and "again" as they are, "longer" with what the first round generated and
``extra`` ids behind them; ``script``: texts (ids) whose continuation is known, or null.

With a script the n-gram proposer (which a case turns on in ``options``) proposes from it and makes one token of the
proposal wrong, or none: each request has 0 to k tokens accepted in turn, whatever the model says. All behind the
proposer - scheduling, verification, sampling, states - is vLLM's and the model's own.

The payload: ``rounds`` of {ids, prompt, tokens, logprobs, cached}, ``drafts`` counted by vLLM, ``late``, the vendor's
kernels that were compiled after the start, and the engine's sizes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from k3_core.vllm.testing import world
from k3_core.vllm.testing.compiling import Watch
from k3_core.vllm.testing.proposals import propose_on_device
from k3_core.vllm.testing.rank_engine import answer, request, runner

COUNTERS = "vllm:spec_decode_"


def propose_from(script: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Let vLLM's n-gram proposer propose what ``script`` says comes next, with one wrong token at a varying place.

    Returns what undoes it.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    texts = [list(text) for text in script]

    def propose(
        self: Any, count: int, sampled: list[list[int]], lengths: Any, tokens: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        return [
            following(texts, tokens[row, : lengths[row]].tolist(), count) if ids else []
            for row, ids in enumerate(sampled)
        ]

    cls: Any = NgramProposer
    honest, cls.propose = cls.propose, propose
    restore = propose_on_device(script)  # the second runner's proposer

    def undo() -> None:
        cls.propose = honest
        restore()

    return undo


def following(texts: Sequence[Sequence[int]], known: list[int], count: int) -> list[int]:
    """Up to ``count`` tokens behind ``known`` in the text that begins with it, one of them wrong."""
    length = len(known)
    text = next((t for t in texts if len(t) > length and list(t[:length]) == known), None)
    if text is None:
        return []
    result = list(text[length : length + count])
    wrong = wrong_place(length, count)
    if wrong < len(result):
        result[wrong] ^= 1
    return result


def wrong_place(length: int, count: int) -> int:
    """Which of ``count`` proposed tokens behind ``length`` known ones is made wrong; ``count``: none.

    Scattered (Knuth's multiplicative hash): how far a request gets decides its next length, and a plain remainder ends
    in a place that leads to itself.
    """
    return (length * 2654435761 >> 12) % (count + 1)


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of drafts: drafts, draft_tokens, accepted_tokens, and accepted_tokens_per_pos as a list."""
    result: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTERS):
            name = metric.name.removeprefix(COUNTERS + "num_")
            result[name] = metric.values if hasattr(metric, "values") else metric.value
    return result


def work(case: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, serve the rounds, and stop it."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    watch = Watch(case["vendor"][1], case.get("compilers", ()))
    began = time.monotonic()
    llm = LLM(case["folder"], disable_log_stats=False, **case["options"])
    started = time.monotonic()
    watch.take()
    # Not before: it loads numba, after which vLLM starts no engine on a CPU.
    restore = (lambda: None) if case["script"] is None else propose_from(case["script"])
    sampling = SamplingParams(
        temperature=0, max_tokens=case["count"], ignore_eos=True, detokenize=False, logprobs=case["top"]
    )
    rounds: list[list[dict[str, Any]]] = []
    for name in case["rounds"]:
        asked = [dict(one) for one in case["requests"]]
        if name == "longer":
            for one, first in zip(asked, rounds[0], strict=True):
                one["ids"] = one["ids"] + first["tokens"] + case["extra"]
        requests = [request(one["ids"], one["image"]) for one in asked]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        rounds.append([{"ids": one["ids"], **served(output)} for one, output in zip(asked, outputs, strict=True)])
    config = llm.llm_engine.vllm_config
    result = {
        "rounds": rounds,
        "drafts": counters(llm),
        "late": watch.take(),
        "block_size": config.cache_config.block_size,
        "cache_mode": config.cache_config.mamba_cache_mode,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "attention": attention_backends(llm),
        "start_s": round(started - began, 1),
        "generate_s": round(time.monotonic() - started, 2),
    }
    restore()
    watch.stop()
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


def served(output: Any) -> dict[str, Any]:
    """A request's prompt as the engine read it, how much of it was cached, and its answer."""
    prompt = {"prompt": list(output.prompt_token_ids), "cached": output.num_cached_tokens}
    return {**prompt, **answer(output.outputs[0])}


def attention_backends(llm: Any) -> list[str]:
    """Which backends the latent attention uses, and the dtype of its cache."""
    found = set()
    for module in runner(llm).get_model().modules():
        attention = getattr(module, "attn", None)
        if attention is not None and hasattr(attention, "kv_cache_dtype"):
            backend = attention.get_attn_backend() if hasattr(attention, "get_attn_backend") else type(attention)
            found.add(f"{backend.__name__} {attention.kv_cache_dtype}")
    return sorted(found)


if __name__ == "__main__":
    world.serve_engines(work)
