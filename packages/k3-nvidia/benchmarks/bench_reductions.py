"""The forms of the MoE reduction timed on real ranks; a rank's program of ranks.py (``--parts reductions``).

At the released sizes (hidden 7168, latent 3584, bf16): the whole of a form from the two partial results to y [T, H],
norm and up-projection included, since the forms differ in where those stand, and the bare all-reduces of each width.
Each is checked against fp64 before it is timed, and timed eager and in a CUDA graph of ``CALLS`` calls (vLLM's own
capture, so its peer-to-peer all-reduce takes part as it does in serving). Microseconds a call; on a CPU wall time of
small tensors, which says only that the script runs.

Bound of the check: sums of 2 values and the norm round to bf16 three times, products over 3584 in fp32 and one rounding
of y: norm error <= 4 * 1.7e-3 = 0.007 (each bf16 rounding is 1.7e-3 rms).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3_core.vllm.testing import world

HIDDEN, LATENT = 7168, 3584
CALLS, ROUNDS = 8, 40
BOUND = 0.007


class Rank:
    """This rank's device and groups, made with the first case."""

    def __init__(self, ranks: int) -> None:
        import os

        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        self.rank = int(os.environ["RANK"])
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.rank) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        backend = "nccl" if self.gpu else "gloo"
        self.config = VllmConfig()
        with set_current_vllm_config(self.config):
            init_distributed_environment(ranks, self.rank, "env://", local_rank=self.rank, backend=backend)
            initialize_model_parallel(ranks, 1, backend=backend)
        self.ranks = ranks

    def random(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        """The same bf16 values on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(*shape, generator=generator, device=self.device) * scale).to(torch.bfloat16)

    def eager(self, call: Callable[[], Any]) -> float:
        """Microseconds of a call, launch gaps included."""

        def several() -> None:
            for _ in range(CALLS):
                call()

        return self._clock(several)

    def graph(self, call: Callable[[], Any]) -> float:
        """Microseconds of a call in a replayed graph."""
        from vllm.distributed.parallel_state import graph_capture

        with graph_capture(self.device) as context:
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream):
                for _ in range(CALLS):
                    call()
        return self._clock(graph.replay)

    def _clock(self, several: Callable[[], None]) -> float:
        """Median microseconds of one of ``CALLS`` calls.

        On a GPU nothing waits between the rounds: the collectives keep the ranks together, and none is timed while it
        waits for another's process.
        """
        self.wait()
        times = []
        if self.gpu:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
            events[0].record()
            for event in events[1:]:
                several()
                event.record()
            self.wait()
            times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
        else:
            for _ in range(4):
                began = time.perf_counter()
                several()
                times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times[len(times) // 4 :]) / CALLS

    def wait(self) -> None:
        """Until this rank's device is idle."""
        if self.gpu:
            torch.cuda.synchronize()


_rank: Rank | None = None


def work(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one token count."""
    global _rank
    if _rank is None:
        _rank = Rank(case["ranks"])
    me, tokens = _rank, case["tokens"]
    rows = []
    with torch.inference_mode():
        for name, call, error in [*forms(me, tokens), *latents(me, tokens), *bare(me, tokens)]:
            ok = error <= BOUND
            for how, clock in (("eager", me.eager), ("graph", me.graph)) if me.gpu else (("eager", me.eager),):
                row: dict[str, Any] = {"what": name, "tokens": tokens, "ranks": me.ranks, "how": how}
                row |= {"error": error, "ok": ok, "device": device_name(me)}
                if name.startswith("all_reduce"):
                    row["by"] = summed_by(me, tokens, int(name.split()[1]))
                if ok:  # a wrong form has no time
                    row["us"] = round(clock(call), 2)
                rows.append(row)
    return rows


def device_name(me: Rank) -> str:
    """What ran."""
    return torch.cuda.get_device_name(me.device) if me.gpu else "cpu"


def summed_by(me: Rank, tokens: int, width: int) -> str:
    """What sums [tokens, width] in vLLM: its own peer-to-peer kernel up to a size, then NCCL; gloo on a CPU."""
    from vllm.distributed.parallel_state import get_tp_group

    if not me.gpu:
        return "gloo"
    own = getattr(get_tp_group().device_communicator, "ca_comm", None)
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device=me.device)
    return "peer to peer" if own is not None and not own.disabled and own.should_custom_ar(x) else "nccl"


def forms(me: Rank, tokens: int) -> list[tuple[str, Callable[[], Tensor], float]]:
    """(name, call, its error against fp64) of each form."""
    from k3_core.vllm.serving import reductions

    hidden, latent = (HIDDEN, LATENT) if me.gpu else (256, 128)
    parts_r = [me.random(tokens, latent, seed=10 + r) for r in range(me.ranks)]
    parts_s = [me.random(tokens, hidden, seed=20 + r) for r in range(me.ranks)]
    weight, scale = me.random(hidden, latent, seed=1, scale=latent**-0.5), me.random(latent, seed=2)
    routed, shared = parts_r[me.rank], parts_s[me.rank]

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (latent,), scale, 1e-5)

    whole = reductions.Finish(norm, Up(weight))
    rows = hidden // me.ranks
    part = reductions.Finish(norm, Up(weight[me.rank * rows : (me.rank + 1) * rows]))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "merged": lambda shared: reductions.merged(routed, shared, whole),
        "separate": lambda shared: reductions.separate(routed, shared, whole),
        "sharded": lambda shared: reductions.sharded(routed, shared, part, me.rank),
        "adaptive": lambda shared: reductions.adaptive(routed, shared, whole, me.rank, me.ranks),
    }
    total = sum(x.double() for x in parts_r)
    want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * scale.double()
    want = want @ weight.double().t() + sum(x.double() for x in parts_s)
    # In the model the shared part is new in each layer and a form may change it in place: so do the timed calls, whose
    # values are of no account. gloo sums in place too, and would soon reach infinity.
    again = (lambda: shared) if me.gpu else shared.clone
    result = []
    for name, form in calls.items():
        error = distance(form(shared.clone()), want)

        def call(form: Callable[[Tensor], Tensor] = form) -> Tensor:
            return form(again())

        result.append((name, call, error))
    return result


def latents(me: Rank, tokens: int) -> list[tuple[str, Callable[[], Tensor], float]]:
    """The latent's down projection, whole on every rank and as its columns gathered from all."""
    from k3_core.vllm.serving import reductions

    hidden, latent = (HIDDEN, LATENT) if me.gpu else (256, 128)
    x, weight = me.random(tokens, hidden, seed=3), me.random(latent, hidden, seed=4, scale=hidden**-0.5)
    want = x.double() @ weight.double().t()
    calls: dict[str, Callable[[], Tensor]] = {
        "latent whole": lambda: torch.nn.functional.linear(x, weight),
        "latent gathered": lambda: reductions.gathered(x, weight, me.rank, me.ranks),
    }
    return [(name, call, distance(call(), want)) for name, call in calls.items()]


class Up:
    """The up-projection as ``reductions.Finish`` wants it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def bare(me: Rank, tokens: int) -> list[tuple[str, Callable[[], Tensor], float]]:
    """(name, call, error) of the all-reduces alone."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    result = []
    for width in (LATENT, HIDDEN, LATENT + HIDDEN) if me.gpu else (128, 256, 384):
        parts = [me.random(tokens, width, seed=30 + r) for r in range(me.ranks)]
        mine = parts[me.rank]

        def call(mine: Tensor = mine) -> Tensor:
            summed: Tensor = tensor_model_parallel_all_reduce(mine if me.gpu else mine.clone())
            return summed

        want = sum(x.double() for x in parts)
        result.append((f"all_reduce {width}", call, distance(call(), want)))
    return result


def distance(got: Tensor, want: Any) -> float:
    """||got - want|| / ||want||."""
    return float((got.double() - want).norm() / want.norm())


if __name__ == "__main__":
    world.serve(work)
