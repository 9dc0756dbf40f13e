"""Compiling every kernel variant that serving can meet, before the first request.

Triton compiles a variant when it first meets its constants, dtypes, alignments, and integers that are one or divisible
by 16. Token counts decide most of them: the model runs once, without metadata, at each count at which a tuning table
or such a property changes. KDA's kernels do not run without metadata, so one layer runs them on pools of its own.

It happens in vLLM's own profiling run, the first forward pass of a model, so its memory is accounted for.
``K3_WARMUP=0`` leaves compilation to first use: a faster start with a cold cache, and slow first requests.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.operators import triton_host
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import Decode, KdaMetadata, Prefill, Verify

logger = logging.getLogger("vllm.plugins.k3")

#: Properties of a row count that Triton specialises on: one, divisible by 16, neither.
ROWS = (1, 2, 16, 17)


@dataclass(frozen=True)
class Limits:
    """What bounds the variants: tokens and requests of a step, draft tokens of a request."""

    max_num_batched_tokens: int
    max_num_seqs: int
    num_spec: int

    @staticmethod
    def of(vllm_config: Any) -> Limits:
        """The engine's."""
        scheduler = vllm_config.scheduler_config
        return Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, int(vllm_config.num_speculative_tokens))


@dataclass(frozen=True)
class WarmUp:
    """A vendor's variants.

    profiles: (config, limits) -> every operator's profiles, as ``Dispatch.warmup_profiles`` gives them; a profile's
    ``tokens`` is an edge of a table over token counts.
    edges: token counts at which further tables change.
    step_rows: (local heads, most requests) -> row counts at which the step kernels change.
    plans: (layer, longest, device) -> further plans of one prompt of the longest length, cut as no other is.
    """

    profiles: Callable[[Any, Limits], Mapping[str, Iterable[Any]]]
    edges: Callable[[], Iterable[int]] = tuple
    step_rows: Callable[[int, int], Iterable[int]] = lambda heads, most: ()
    plans: Callable[[KdaLayer, int, torch.device], Iterable[Any]] = lambda layer, longest, device: ()

    def token_counts(self, config: Any, limits: Limits) -> list[int]:
        """Token counts that together reach every variant of the kernels that run on all tokens of a step.

        Both sides of every edge of a tuning table, each with a count divisible by 16 and one that is not.
        """
        edges = {1, 2, limits.max_num_batched_tokens, *self.edges()}
        for profiles in self.profiles(config, limits).values():
            edges |= {profile["tokens"] for profile in profiles if isinstance(profile, dict) and "tokens" in profile}
        counts: set[int] = set()
        for edge in edges:
            up = -(-edge // 16) * 16
            counts |= {edge, edge + 1, up, up + 1, up + 16, max(up - 16, 1), max(edge - 1, 1)}
        return sorted(count for count in counts if 1 <= count <= limits.max_num_batched_tokens)

    @torch.no_grad()
    def run(self, text_model: Any) -> None:
        """Meet every variant once on the device of ``text_model`` (a ``TextServing``), outside any graph."""
        if os.environ.get("K3_WARMUP", "1") == "0":
            logger.info("Kimi K3: K3_WARMUP=0, kernels are compiled when they are first used")
            return
        started = time.monotonic()
        limits = Limits.of(text_model.vllm_config)
        dtype = text_model.model_config.dtype
        device = torch.device("cuda", torch.cuda.current_device())
        counts = self.token_counts(text_model.config, limits)

        def run(count: int) -> None:
            _run_tokens(text_model.model, count, dtype, device)

        for count in counts + storage_edges(run, limits.max_num_batched_tokens):
            run(count)
        kda = next((m for m in text_model.modules() if isinstance(m, KdaLayer)), None)
        if kda is not None:
            self.run_kda(kda, limits, dtype, device)
        torch.cuda.synchronize()
        logger.info(
            "Kimi K3: kernels compiled or loaded in %.1f s (%d step sizes)", time.monotonic() - started, len(counts)
        )

    def run_kda(self, layer: KdaLayer, limits: Limits, dtype: torch.dtype, device: torch.device) -> None:
        """Every variant of the KDA kernels: decoding, verification, prompts of one and of several segments.

        On AMD each is met twice, on a small pool and on one that seems larger than 2 GiB: kernels are compiled for
        either, and how large the served pool will be is not known yet.
        """
        bound = layer.kv_cache
        slots = 2 + limits.num_spec
        shapes = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        pools = tuple(torch.zeros(slots, *shape, dtype=kind, device=device) for shape, kind in shapes)
        wide = [tuple(triton_host.as_if_wide(pool) for pool in pools)] if triton_host.HIP else []

        def run(metadata: KdaMetadata) -> None:
            tokens = metadata.step_tokens + metadata.prefill_tokens
            x = torch.zeros(tokens, layer.text.hidden_size, dtype=dtype, device=device)
            qkv, z, beta, gate = layer.project(x)
            out = torch.empty_like(z, memory_format=torch.contiguous_format)
            layer._run(metadata, qkv, z, beta, gate, out)

        try:
            layer.kv_cache = pools
            longest = limits.max_num_batched_tokens
            edges = storage_edges(lambda count: run(_prompts(layer, [count], device)), longest)
            for layer.kv_cache in (pools, *wide):
                for metadata in self.steps(layer, limits, device):
                    run(metadata)
                for count in edges:
                    run(_prompts(layer, [count], device))
        finally:
            layer.kv_cache = bound

    def steps(self, layer: KdaLayer, limits: Limits, device: torch.device) -> Iterator[KdaMetadata]:
        """Steps that together use every variant."""

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        for rows in sorted({*ROWS, *self.step_rows(layer.num_heads, limits.max_num_seqs)}):
            yield KdaMetadata(rows, 0, decode=Decode(ints([0] * rows)))
            if limits.num_spec:
                width = 1 + limits.num_spec
                slots = torch.zeros(rows, width, dtype=torch.int32, device=device)
                ends = ints([i * width for i in range(rows + 1)])
                yield KdaMetadata(rows * width, 0, verify=Verify(slots, ints([1] * rows), ends))
        longest = limits.max_num_batched_tokens
        for lengths in ([1], [16], [64], [65], [1000], [1024], [longest], [longest // 2] * 2, [1] * 16, [1] * 17):
            total = sum(lengths)
            if not 0 < total <= longest:
                continue
            yield _prompts(layer, lengths, device)
        # The lengths above are cut as the cost model likes; later ones may be cut where none of these was.
        for plan in self.plans(layer, longest, device):
            fresh = torch.zeros(1, dtype=torch.bool, device=device)
            yield KdaMetadata(0, longest, prefill=Prefill(ints([1]), ints([0, longest]), fresh, plan))


def _prompts(layer: KdaLayer, lengths: list[int], device: torch.device) -> KdaMetadata:
    """A step of fresh prompts. Slot 1 is the pool's own; further sequences go to the null block and touch nothing."""
    bounds = [0, *accumulate(lengths)]
    plan = layer.plan_prefill(np.array(bounds), device)
    fresh = torch.zeros(len(lengths), dtype=torch.bool, device=device)
    where, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1] + [0] * (len(lengths) - 1), bounds))
    return KdaMetadata(0, bounds[-1], prefill=Prefill(where, ends, fresh, plan))


def storage_edges(run: Callable[[int], None], longest: int) -> list[int]:
    """On AMD: token counts below ``longest`` from which one more tensor that a kernel gets has over 2 GiB behind it.

    Kernels are compiled for either kind of storage, so between two edges they are others than beyond both. Storages
    grow by the token; ``run(tokens)`` launches what a step of so many launches, and two runs tell by how much. The
    count is a chunk past the edge: workspaces grow by chunks.
    """
    if not triton_host.HIP or longest < 4:
        return []
    few, many = longest // 4, longest // 2
    found = []
    for tokens in (few, many):
        with triton_host.noting_storages() as sizes:
            run(tokens)
        found.append(sizes)
    edges = set()
    for key in found[0].keys() & found[1].keys():
        growth = (found[1][key] - found[0][key]) / (many - few)
        if growth > 0:
            edge = many + math.ceil((triton_host.NARROW + 1 - found[1][key]) / growth)
            edges.add(min(max(edge, 0) + 64, longest))
    return sorted(edge for edge in edges if edge < longest)


def _run_tokens(model: Any, count: int, dtype: torch.dtype, device: torch.device) -> None:
    if model.first:
        model(torch.zeros(count, model.text.hidden_size, dtype=dtype, device=device), None)
        return
    received = model.empty_handoff(count, dtype, device)
    model(received["hidden_states"], received)
