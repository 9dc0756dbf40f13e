"""Which topologies a set of devices allows, what each costs on its fullest rank, and which is best, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3_core.checkpoint import Topology, check_topology
from k3_core.cli.plan.cache import CacheShape, cache_shape
from k3_core.cli.plan.devices import GIB, Device
from k3_core.cli.plan.experts import ExpertForm, expert_form
from k3_core.cli.plan.weights import WeightModel
from k3_core.config import K3Config
from k3_core.errors import ConfigError

#: Runtime context and communication buffers of one process (an estimate; not part of any check).
RUNTIME_BYTES = int(1.5 * GIB)
#: Captured decode graphs (an estimate; 0 with --enforce-eager).
GRAPH_BYTES = int(1.0 * GIB)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. ``expert_parallel``: experts are whole, over a stage's ``tp * dp`` ranks."""

    tp: int
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = [f"TP{self.tp}"] + [f"{k}{n}" for k, n in (("PP", self.pp), ("DP", self.dp)) if n > 1]
        return " x ".join(sizes) + (" + EP" if self.expert_parallel else "")


@dataclass(frozen=True)
class Request:
    """What the server is to do. ``batched_tokens`` is the scheduler's budget of one step."""

    max_len: int = 131072
    sequences: int = 32
    batched_tokens: int = 8192
    kv_dtype: str = "auto"
    state_dtype: str = "float32"
    prefix_caching: bool = True
    utilisation: float = 0.92
    graphs: bool = True
    expert_floor: int | None = None


@dataclass
class Plan:
    """One layout, for its fullest rank. ``parts`` in bytes; ``free`` is left for the cache and may be negative."""

    layout: Layout
    stages: list[range]
    parts: dict[str, int]
    budget: int
    free: int
    cache: CacheShape
    num_blocks: int
    tokens: int
    full_sequences: int
    fits: bool
    reasons: list[str] = field(default_factory=list)


def stages_of(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage as vLLM cuts them: the extra ones go to the stages before the last."""
    sizes = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def workspace_bytes(config: K3Config, layout: Layout, stage: range, request: Request) -> int:
    """Peak of activations in one step, estimated from the largest tensors that live together.

    Residual bank and stream, the projections and chunk workspace of a KDA layer, routed tokens with their expert
    intermediates, and fp32 logits. An estimate: engines reuse and free differently.
    """
    text, tokens = config.text, request.batched_tokens
    item = 4 if config.dtype == "float32" else 2
    blocks = -(-(stage.stop) // text.attn_res_block_size) if text.attn_res_block_size else 0
    stream = tokens * text.hidden_size * (blocks + 4) * item
    kda = tokens * text.linear_attn.projection_size // layout.tp * (6 * item + 8)
    width = text.moe_intermediate_size // (1 if layout.expert_parallel else layout.tp * layout.dp)
    routed = tokens * text.num_experts_per_token // (layout.tp * layout.dp if layout.expert_parallel else 1)
    experts = routed * (text.expert_hidden_size * 2 + 3 * width) * item
    logits = request.sequences * text.vocab_size // layout.tp * 8
    return stream + max(kda, experts) + logits


def possible(devices: int, fixed: Mapping[str, int | bool | None]) -> Iterator[Layout]:
    """Every layout of exactly ``devices`` devices; ``fixed`` sizes (tp, pp, dp, ep) that are None are free."""
    sizes_of = [size for size in range(1, devices + 1) if devices % size == 0]
    for tp in sizes_of:
        for pp in sizes_of:
            if devices % (tp * pp):
                continue
            dp = devices // (tp * pp)
            for expert_parallel in (False, True) if tp * dp > 1 else (False,):
                layout = Layout(tp, pp, dp, expert_parallel)
                sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": expert_parallel}
                if all(fixed.get(key) in (None, value) for key, value in sizes.items()):
                    yield layout


def experts_of(config: K3Config, device: Device, layout: Layout, request: Request) -> ExpertForm:
    """How a rank of ``layout`` stores its experts. Data parallelism is served by vLLM's own model only."""
    ranks = 1 if layout.expert_parallel else layout.tp * layout.dp
    return expert_form(config, device, ranks, upstream=layout.dp > 1, floor=request.expert_floor)


def evaluate(config: K3Config, weights: WeightModel, device: Device, layout: Layout, request: Request) -> Plan:
    """The plan of one layout. Raises ConfigError where the model cannot be cut like that."""
    text = config.text
    if layout.pp > text.num_hidden_layers:
        raise ConfigError(f"pipeline size {layout.pp} exceeds num_hidden_layers = {text.num_hidden_layers}")
    ep = layout.tp * layout.dp if layout.expert_parallel else 1
    topology = Topology(tp_size=layout.tp, ep_size=ep, dp_size=layout.dp, vision_data_parallel=True)
    check_topology(config, topology)
    budget = int(device.memory * request.utilisation)
    stages = stages_of(text.num_hidden_layers, layout.pp)
    expert = experts_of(config, device, layout, request).nbytes
    per_stage = []
    for index, stage in enumerate(stages):
        first, last = index == 0, index == layout.pp - 1
        parts = weights.rank_bytes(topology, stage, first=first, last=last, expert=expert)
        parts["graphs (estimate)"] = GRAPH_BYTES if request.graphs else 0
        parts["workspace (estimate)"] = workspace_bytes(config, layout, stage, request)
        parts["runtime (estimate)"] = RUNTIME_BYTES
        cache = cache_shape(
            config, layout.tp, stage, kv_dtype=request.kv_dtype, state_dtype=request.state_dtype,
            prefix_caching=request.prefix_caching,
        )  # fmt: skip
        free = budget - sum(parts.values())
        per_stage.append((free // cache.block_bytes, free, parts, cache))
    num_blocks, free, parts, cache = min(per_stage, key=lambda stage: stage[0])
    num_blocks = max(num_blocks, 0)
    # Data-parallel replicas have pools of their own, with their share of the sequences.
    share = -(-request.sequences // layout.dp)
    tokens = cache.tokens_in(num_blocks, share) * layout.dp if num_blocks else 0
    full = max(num_blocks - 1, 0) // cache.blocks_of(request.max_len) * layout.dp
    state_blocks = cache.kda_groups * cache.states_per_group * share
    mla_blocks = max(num_blocks - 1 - state_blocks, 0) if full else 0
    parts["KDA state"] = min(state_blocks, num_blocks) * cache.block_bytes
    parts["MLA cache"] = mla_blocks * cache.block_bytes
    return Plan(layout, stages, parts, budget, free, cache, num_blocks, tokens, full, fits=full > 0)


def rank(plans: list[Plan], device: Device, config: K3Config, request: Request, prefer: str = "latency") -> list[Plan]:
    """The plans best first, each with its reasons.

    "latency": what fits, then tensor parallelism inside a node and as wide as possible (every rank reads the least for
    a token), then no exchange of experts between nodes, fewer stages and replicas, experts cut rather than whole unless
    cutting pads them, more room. "room": most tokens first. Rules of thumb from sizes and links, not measurements.
    """
    for plan in plans:
        plan.reasons = list(_reasons(plan, device, config, request))

    def key(plan: Plan) -> tuple[Any, ...]:
        layout = plan.layout
        ranks = layout.tp * layout.dp
        if prefer == "room":
            return not plan.fits, -plan.tokens, layout.pp
        slow_link = layout.tp > device.per_node
        exchange = layout.expert_parallel and ranks > device.per_node
        form = experts_of(config, device, layout, request)
        pads = form.padded > form.width or form.name == "int8"  # more bytes than whole experts would have
        whole = layout.expert_parallel and not pads
        return not plan.fits, slow_link, -layout.tp, exchange, layout.pp * layout.dp, whole, -plan.tokens

    return sorted(plans, key=key)


def _reasons(plan: Plan, device: Device, config: K3Config, request: Request) -> Iterator[str]:
    layout = plan.layout
    if not plan.fits:
        if plan.free < 0:
            yield f"needs {-plan.free / GIB:.1f} GiB more on its fullest rank before any cache"
        else:
            need = plan.cache.blocks_of(request.max_len) * plan.cache.block_bytes
            yield (
                f"one sequence of {request.max_len} tokens needs {need / GIB:.1f} GiB of cache, "
                f"{plan.free / GIB:.1f} are free"
            )
    elif plan.full_sequences < request.sequences:
        yield f"{plan.full_sequences} sequences of full length at once; more share the room when they are shorter"
    if layout.tp > device.per_node:
        reduces = 2 * config.text.num_hidden_layers
        yield f"tensor parallelism crosses nodes: about {reduces} all-reduces a step on the slow link"
    elif layout.pp > 1:
        yield "tensor parallelism stays inside a node; pipeline stages hand over the residual bank once a step"
    if layout.expert_parallel and layout.tp * layout.dp > device.per_node:
        yield "experts are exchanged between nodes in every layer"
    form = experts_of(config, device, layout, request)
    if form.padded > form.width:
        extra = form.padded / form.width - 1
        yield f"expert width {form.width} is padded to {form.padded}: {extra:.0%} more expert memory"
    if form.name in ("w4a8", "int8"):
        yield f"routed experts are requantised to {form.name} (width {form.width} a rank), which loses accuracy"
    heads = config.text.linear_attn.num_heads // layout.tp
    if device.arch == "sm_90" and heads < 12 and not config.is_kimi_linear:
        yield f"{heads} heads a rank: few blocks for KDA prefill, and vLLM's own fused decode kernel refuses them"
    if layout.dp > 1:
        yield (
            f"{layout.dp} replicas of attention: more requests at once, not a faster one; our wheels refuse data "
            "parallelism, K3_IMPL=upstream leaves it to vLLM's own model"
        )
