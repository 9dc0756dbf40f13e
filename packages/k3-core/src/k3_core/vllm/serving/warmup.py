"""Compiling every kernel variant that serving can meet, before the first request.

Triton compiles a variant when it first meets its constants, dtypes, alignments, and integers that are one or divisible
by 16. Token counts decide most of them: one layer of each kind runs, without metadata, at a count of every class that
a tuning table or such a property makes of them. KDA's kernels do not run without metadata, so one layer runs them on
pools of its own.

What a first pass only names is compiled by several threads at once (:mod:`k3_core.operators.compiling`); the second
launches it.

It happens in vLLM's own profiling run, the first forward pass of a model, so its memory is accounted for.
``K3_WARMUP=0`` leaves compilation to first use: a faster start with a cold cache, and slow first requests.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3_core.operators import compiling, triton_host
from k3_core.vllm.serving.kda_layer import KdaLayer
from k3_core.vllm.serving.kda_metadata import Decode, KdaMetadata, Prefill, Verify
from k3_core.vllm.serving.modules import tp, votes

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


#: By table: the last count of each of its classes but the last. What lies between two of them is one class.
Tables = Mapping[str, Iterable[int]]


def classes(count: int, tables: Mapping[str, Sequence[int]], by_number: bool = True) -> set[tuple[str, int, str]]:
    """What a token count means to each table, whose numbers are sorted: (table, its class, property of the number).

    by_number: whether it matters that a count is one, or divisible by 16.
    """
    kind = "" if not by_number else "one" if count == 1 else "sixteen" if count % 16 == 0 else "other"
    return {(name, bisect_left(edges, count), kind) for name, edges in tables.items()}


def representatives(tables: Tables, longest: int, by_number: bool = True) -> list[int]:
    """Few token counts in 1..``longest``, small ones, that together have every class that a count there can have.

    Between two neighbouring numbers of all tables together counts differ by their property only, so the first of each
    property stands for all of them. Of these the one that adds most classes is taken, then the next.
    """
    ordered = {name: sorted(set(edges)) for name, edges in tables.items()} or {"": []}
    candidates = {1}
    for edge in {0}.union(*ordered.values()):
        first = edge + 1 if edge else 2
        candidates |= {first, first + (first % 16 == 0), -(-first // 16) * 16}
    met = {count: classes(count, ordered, by_number) for count in sorted(candidates) if 1 <= count <= longest}
    missing: set[tuple[str, int, str]] = set().union(*met.values())
    chosen = []
    while missing:
        best = max(met, key=lambda count: (len(met[count] & missing), -count))
        missing -= met[best]
        chosen.append(best)
    return sorted(chosen)


@dataclass(frozen=True)
class WarmUp:
    """A vendor's variants.

    profiles: (config, limits) -> every operator's profiles, as ``Dispatch.warmup_profiles`` gives them; a profile's
    ``tokens`` is the last token count of a class in the operator's tables.
    edges: further tables of the kind, by name: the last token counts of their classes.
    step_rows: (local heads, most requests) -> row counts at which the step kernels change.
    plans: (layer, longest, device) -> further plans of one prompt of the longest length, cut as no other is.
    more: (text model) -> meets what else the vendor compiles.
    ahead: (text model) -> whether nothing but this wheel's own kernels reads indices that they write, so that variants
    may be compiled before any is launched (``compiling.ahead``).
    by_number: whether a kernel is specialised on a token count's being one or divisible by 16.
    """

    profiles: Callable[[Any, Limits], Mapping[str, Iterable[Any]]]
    edges: Callable[[], Tables] = dict
    step_rows: Callable[[int, int], Iterable[int]] = lambda heads, most: ()
    plans: Callable[[KdaLayer, int, torch.device], Iterable[Any]] = lambda layer, longest, device: ()
    more: Callable[[Any], None] = lambda text_model: None
    ahead: Callable[[Any], bool] = lambda text_model: False
    by_number: bool = True

    def tables(self, config: Any, limits: Limits) -> dict[str, list[int]]:
        """Last token counts of the classes of every table, sorted."""
        found = {name: list(edges) for name, edges in self.edges().items()}
        for name, profiles in self.profiles(config, limits).items():
            found.setdefault(name, []).extend(p["tokens"] for p in profiles if isinstance(p, dict) and "tokens" in p)
        return {name: sorted(set(edges)) for name, edges in found.items()}

    def token_counts(self, config: Any, limits: Limits) -> list[int]:
        """Token counts that together reach every variant of the kernels that run on all tokens of a step."""
        return representatives(self.tables(config, limits), limits.max_num_batched_tokens, self.by_number)

    @torch.no_grad()
    def run(self, text_model: Any) -> None:
        """Meet every variant once on the device of ``text_model`` (a ``TextServing``), outside any graph.

        Layers sum over ranks in it, so all tensor parallel ranks do the same: what one of them is set not to do, none
        does (the environment of another machine may be another).
        """
        asked = [os.environ.get("K3_WARMUP", "1") != "0", compiling.possible() and self.ahead(text_model)]
        device = torch.device("cuda", torch.cuda.current_device())
        wanted, ahead = (count == tp()[0] for count in votes(asked, device))
        if not wanted:
            logger.info("Kimi K3: K3_WARMUP=0, kernels are compiled when they are first used")
            return
        with compiling.timed() as spent:
            if ahead:
                with spent.part("ahead of launches"), compiling.ahead():
                    self.meet(text_model, spent, "named")
            self.meet(text_model, spent, "launched")
            torch.cuda.synchronize()
        logger.info("Kimi K3: kernels compiled or loaded in %s", spent.told())

    def meet(self, text_model: Any, spent: compiling.Spent, word: str) -> None:
        """Every variant once; ``word`` says in ``spent`` what it took."""
        limits = Limits.of(text_model.vllm_config)
        dtype = text_model.model_config.dtype
        device = torch.device("cuda", torch.cuda.current_device())
        counts = self.token_counts(text_model.config, limits)
        with spent.part(f"{word}, {len(counts)} step sizes"):
            self.run_tokens(text_model.model, counts, limits.max_num_batched_tokens, dtype, device)
        kda = next((m for m in text_model.modules() if isinstance(m, KdaLayer)), None)
        if kda is not None:
            with spent.part(f"{word}, KDA"):
                self.run_kda(kda, limits, dtype, device)
        with spent.part(f"{word}, few rows"):
            self.more(text_model)

    def run_tokens(
        self, model: Any, counts: list[int], longest: int, dtype: torch.dtype, device: torch.device
    ) -> list[int]:
        """One layer of each kind of ``model`` (a ``TextStack``) at each count; returns the layers' indices."""

        def run(count: int) -> None:
            _run_tokens(model, count, dtype, device)

        with model.one_of_each_kind() as layers:
            edges = storage_edges(run, longest)
            if self.by_number:
                edges = sorted({count for edge in edges for count in of_each_property(edge, longest)})
            for count in counts + edges:
                run(count)
        return list(layers)

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


def of_each_property(count: int, longest: int) -> set[int]:
    """``count``, and close behind it (before it, where that is beyond ``longest``) one that is divisible by 16 and one
    that is not."""
    up = -(-count // 16) * 16
    close = (up, up + 1) if up + 1 <= longest else (count // 16 * 16, count - 1 - (count % 16 == 1))
    return {count, *(other for other in close if other > 0)}


def storage_edges(run: Callable[[int], None], longest: int) -> list[int]:
    """On AMD: token counts from which one more tensor that a kernel gets has over 2 GiB behind it, at most ``longest``.

    Kernels are compiled for either kind of storage, so between two edges they are others than beyond both. Storages
    grow by the token; ``run(tokens)`` launches what a step of so many launches, and two runs tell by how much. The
    count is a chunk past the edge, since workspaces grow by chunks, or ``longest`` where that is nearer.
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
    return sorted(edges)


def _run_tokens(model: Any, count: int, dtype: torch.dtype, device: torch.device) -> None:
    if model.first:
        model(torch.zeros(count, model.text.hidden_size, dtype=dtype, device=device), None)
        return
    received = model.empty_handoff(count, dtype, device)
    model(received["hidden_states"], received)
