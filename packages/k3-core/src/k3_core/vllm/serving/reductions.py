"""How the partial results of the routed and the shared experts are summed over ranks: four forms, one table.

With tensor or expert parallelism each rank has a partial latent r [T, L] of the routed experts and a partial s [T, H]
of the shared ones. The latent norm is not linear, so r is summed before it:

    (a) separate    R = sum r;  y = norm(R) W_up^T + sum s                two all-reduces, the second overlapped
    (b) merged      [R | S] = sum [r | s];  y = norm(R) W_up^T + S        one all-reduce of L + H columns
    (c) sharded     R = sum r;  y = sum (s + [0 | norm(R) W_up,rank^T | 0])   each rank up-projects H / ranks columns
    (d) adaptive    (b) for fewer than ``SHARD_TOKENS`` tokens, (c) with a view of the whole W_up's rows from there on

From ``GATHER_TOKENS`` tokens on each rank of (c) and (d) also computes its columns of the latent only, and they are
gathered: z = [x W_down,rank^T]. (a), (b) and (d) hold W_up whole on every rank, (c) a slice, which it adds into the
partial shared result in place. No rank ever adds an uninitialised or stale buffer: a fused reduction's residual operand
must be zeros; none is used.

On one rank there is nothing to sum (form "none"). (c) computes 2 T L H / ranks operations of the up projection instead
of 2 T L H and reads a rank's share of its weight, for one collective more and no byte more. Measured on two H200 of one
host at the released sizes (hidden 7168, latent 3584, bf16; benchmarks/results/ranks.jsonl of k3-nvidia, 2026-11-30), in
CUDA graphs, microseconds of (a) / (b) / (c): 1 token 31 / 30 / 24, 32 tokens 31 / 35 / 28, 512 94 / 119 / 83, 8192
1296 / 1422 / 1105. vLLM's peer-to-peer sum takes 5 us there, so a second one costs less than the rows of W_up that a
rank need not read: (c) is preferred where that sum can be used. Where it cannot (several hosts, or GPUs that do not
reach each other) a collective costs several times that and (d) is preferred; that has not been measured. The latent
gathered / whole: 1024 tokens 82 / 71 us, 2048 139 / 161, 8192 501 / 604. Forms (a) and (c) are also in vLLM's own
implementation of this model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.platforms import current_platform

from k3_core.config import TextConfig
from k3_core.errors import ConfigError
from k3_core.vllm.serving import beside

#: Up to this many tokens (a) overlaps its second all-reduce on another stream; beyond, both are bound by bytes.
OVERLAP_TOKENS = 1024
#: From so many tokens on (d) cuts the up-projection. At the released sizes the whole product takes 67 us of 1024 tokens
#: at 790 TFLOP/s and is bound by its 51 MB of weights below 200 tokens; one more collective costs what its launch does.
SHARD_TOKENS = 1024
#: From so many tokens on (c) and (d) gather the latent: measured on two ranks, which save half of its product.
GATHER_TOKENS = 2048


@dataclass(frozen=True)
class Facts:
    """What decides about a form; all known before weights load.

    ranks: ranks that hold partial results. latent: whether experts work in a latent space (norm and up-projection),
    width: its size.
    shared: whether there are shared experts. scaling: routed_scaling_factor, already inside the routing weights.
    sequence_parallel, micro_batches, sleep_mode: the engine's settings. on_cpu: vLLM repacks weights there. nvidia:
    the GPUs that the forms were timed on; peer_sums: vLLM's sum over GPUs that reach each other's memory can be used
    (known in a worker only, and no condition of any form).
    """

    ranks: int
    latent: bool
    shared: bool
    hidden: int
    scaling: float = 1.0
    sequence_parallel: bool = False
    micro_batches: bool = False
    sleep_mode: bool = False
    on_cpu: bool = False
    width: int = 0
    nvidia: bool = False
    peer_sums: bool = False

    @property
    def gathers(self) -> bool:
        """Whether rows of the down projection's weight can be viewed, by ranks that share its latent evenly."""
        return not self.on_cpu and self.latent and self.width % self.ranks == 0


def _peer_sums() -> bool:
    """Whether the tensor parallel group of this process sums over peers; False where there is no group yet."""
    try:
        group = get_tp_group()
    except AssertionError:  # vLLM's way to say that none was made: asked before the workers start
        return False
    own = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
    return own is not None and not own.disabled


def facts(text: TextConfig, vllm_config: Any) -> Facts:
    """The facts of a model under the engine's settings."""
    return Facts(
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        latent=text.routed_expert_hidden_size is not None,
        shared=text.num_shared_experts > 0,
        hidden=text.hidden_size,
        scaling=text.routed_scaling_factor,
        sleep_mode=bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
        on_cpu=current_platform.is_cpu(),
        width=text.routed_expert_hidden_size or 0,
        nvidia=current_platform.is_cuda(),
        peer_sums=_peer_sums(),
    )


@dataclass(frozen=True)
class Form:
    """One way to sum. conditions: facts -> None, or the reason why this form cannot be used."""

    name: str
    summary: str
    refuse: Callable[[Facts], str | None]


def _refuse_none(f: Facts) -> str | None:
    return None if f.ranks == 1 else f"{f.ranks} ranks hold partial sums"


def _refuse_separate(f: Facts) -> str | None:
    return "one rank has nothing to sum" if f.ranks == 1 else None


def _refuse_merged(f: Facts) -> str | None:
    if f.ranks == 1:
        return "one rank has nothing to sum"
    if not f.shared:
        return "without shared experts there is one partial sum only"
    if f.sequence_parallel:
        return "sequence parallelism scatters the shared result, the latent must be whole"
    return None


def _refuse_sharded(f: Facts) -> str | None:
    if f.ranks == 1:
        return "one rank has nothing to sum"
    if not f.latent:
        return "without a latent there is no up-projection to cut"
    if not f.shared:
        return "the slices are added into the unreduced shared result, and there are no shared experts"
    if f.sequence_parallel:
        return "sequence parallelism scatters the shared result before the slices could be added"
    if f.micro_batches:
        return "micro-batches would run two dependent all-reduces of different batches on one communicator"
    if f.hidden % f.ranks:
        return f"{f.ranks} ranks do not divide the hidden size {f.hidden}"
    return None


def _refuse_adaptive(f: Facts) -> str | None:
    if f.on_cpu:
        return "vLLM repacks weights on a CPU, which leaves no rows of the up-projection to view"
    return _refuse_merged(f) or _refuse_sharded(f)


#: In order of preference where nobody measured (``preferred``). Scaling and sleep mode exclude none of them here: the
#: factor is in the routing weights before any sum, and no form keeps a buffer between calls that sleeping could lose.
FORMS = (
    Form("none", "one rank: nothing to sum", _refuse_none),
    Form("merged", "(b) one all-reduce of latent and shared partial results", _refuse_merged),
    Form("sharded", "(c) two all-reduces, each rank up-projects a slice", _refuse_sharded),
    Form("adaptive", "(d) (b) for short batches, (c) for long ones", _refuse_adaptive),
    Form("separate", "(a) two all-reduces, overlapped", _refuse_separate),
)


def table(facts: Facts) -> list[tuple[str, str, str | None]]:
    """(name, summary, why it cannot be used or None) of every form."""
    return [(form.name, form.summary, form.refuse(facts)) for form in FORMS]


def preferred(facts: Facts) -> list[str]:
    """Names of the forms, the one to be taken first if it can be used: see the figures above."""
    first = ("none", "sharded" if facts.peer_sums else "adaptive") if facts.nvidia else ()
    return list(dict.fromkeys([*first, *(form.name for form in FORMS)]))


def choose(facts: Facts, want: str | None = None) -> str:
    """The first form that can be used, or the wanted one. Raises ConfigError where that cannot be used."""
    reasons = {name: why for name, _, why in table(facts)}
    if want is None:
        return next(name for name in preferred(facts) if reasons[name] is None)
    if want not in reasons:
        raise ConfigError(f"MoE reduction {want!r} is unknown; use one of {', '.join(reasons)}")
    if reasons[want] is not None:
        raise ConfigError(f"MoE reduction {want!r} cannot be used: {reasons[want]}")
    return want


@dataclass
class Finish:
    """norm and up-projection after the sum: r [T, L] -> [T, H], or a slice of it; identity without a latent.

    up: a linear layer whose ``weight`` is [H, L] (on a GPU; vLLM repacks weights on a CPU). add: a vendor's product
    with a sum, (normed, shared) -> normed W_up^T + shared rounded once, or None for operands that it does not take.
    """

    norm: Callable[[Tensor], Tensor] | None
    up: Any | None
    add: Callable[[Tensor, Tensor], Tensor | None] | None = None

    def __call__(self, routed: Tensor) -> Tensor:
        """Apply both."""
        normed = routed if self.norm is None else self.norm(routed)
        if self.up is None:
            return normed
        projected: Tensor = self.up(normed)
        return projected

    def rows(self, first: int, count: int) -> Finish:
        """The same with ``count`` rows of the up-projection's weight from ``first`` on, a view; not on a CPU."""
        assert self.up is not None
        return Finish(self.norm, _Slice(self.up.weight[first : first + count]))

    def plus(self, routed: Tensor, shared: Tensor) -> Tensor:
        """The same plus ``shared`` [T, H], which may be changed; on a GPU the product adds it before it rounds."""
        if self.up is None or not (routed.is_cuda or self.add):
            return self(routed) + shared
        normed = routed if self.norm is None else self.norm(routed)
        added = None if self.add is None else self.add(normed, shared)
        if added is not None:
            return added
        if not routed.is_cuda:
            projected: Tensor = self.up(normed)
            return projected + shared
        return shared.addmm_(normed, self.up.weight.t())


@dataclass
class _Slice:
    """Rows of a linear layer's weight, as a linear layer."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def none(routed: Tensor, shared: Tensor | None, finish: Finish) -> Tensor:
    """One rank."""
    return finish(routed) if shared is None else finish.plus(routed, shared)


def merged(routed: Tensor, shared: Tensor | None, finish: Finish) -> Tensor:
    """(b)."""
    assert shared is not None
    both = tensor_model_parallel_all_reduce(torch.cat([routed, shared], dim=-1))
    routed, shared = both.split([routed.shape[-1], shared.shape[-1]], dim=-1)
    return finish.plus(routed, shared)


def separate(routed: Tensor, shared: Tensor | None, finish: Finish) -> Tensor:
    """(a). The shared sum runs beside norm and up-projection on a GPU, for batches bound by launches."""
    whole = tensor_model_parallel_all_reduce(routed)
    if shared is None:
        return finish(whole)
    if not shared.is_cuda or shared.shape[0] > OVERLAP_TOKENS:
        return finish.plus(whole, tensor_model_parallel_all_reduce(shared))
    side = beside.side(shared.device)
    with side.work():
        finished = finish(whole)
    summed = tensor_model_parallel_all_reduce(shared)
    side.join()
    finished.record_stream(torch.cuda.current_stream())
    return finished.add_(summed)


def sharded(routed: Tensor, shared: Tensor | None, finish: Finish, rank: int) -> Tensor:
    """(c). ``finish`` gives this rank's columns, which are added into the partial shared result in place."""
    assert shared is not None
    columns = finish(tensor_model_parallel_all_reduce(routed))
    width = columns.shape[-1]
    shared[:, rank * width : (rank + 1) * width].add_(columns)
    result: Tensor = tensor_model_parallel_all_reduce(shared)
    return result


def adaptive(routed: Tensor, shared: Tensor | None, finish: Finish, rank: int, ranks: int) -> Tensor:
    """(d). ``finish`` has the whole up-projection. A graph holds one number of tokens and so one of the two forms."""
    if routed.shape[0] < SHARD_TOKENS:
        return merged(routed, shared, finish)
    assert shared is not None
    rows = shared.shape[-1] // ranks
    return sharded(routed, shared, finish.rows(rank * rows, rows), rank)


def gathered(x: Tensor, weight: Tensor, rank: int, ranks: int) -> Tensor:
    """x [T, H] times all rows of ``weight`` [L, H] -> [T, L], of which each rank computes L / ranks columns."""
    rows = weight.shape[0] // ranks
    mine = torch.nn.functional.linear(x, weight[rank * rows : (rank + 1) * rows])
    result: Tensor = tensor_model_parallel_all_gather(mine, dim=-1)
    return result
