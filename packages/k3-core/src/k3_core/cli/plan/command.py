"""The command: options in, tables or JSON out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from k3_core.cli import output
from k3_core.cli.plan import layouts, serve
from k3_core.cli.plan.devices import Device, device
from k3_core.cli.plan.layouts import Plan, Request
from k3_core.cli.plan.weights import PARTS, WeightModel
from k3_core.config import K3Config, load_config
from k3_core.errors import ConfigError

#: The released configuration, so that planning needs no download.
RELEASED_CONFIG = Path(__file__).with_name("kimi_k3.json")
SHOWN = 5


def plan(
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, b300, gb300, mi300x, mi325x, mi350x, mi355x, ascend-a2, "
                                          "ascend-a3, or any name with --memory-gib.")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Nodes.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Accelerators a node (default: the usual).")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of one accelerator, replacing the table's.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Only this tensor parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Only this pipeline size.")] = None,
    dp: Annotated[int, typer.Option(min=1, help="Data parallel size; above 1 only vLLM's own model serves it.")] = 1,
    ep: Annotated[bool | None, typer.Option("--ep/--no-ep", help="Only with or without expert parallelism.")] = None,
    max_len: Annotated[int, typer.Option(min=1, help="Longest sequence to serve.")] = 131072,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences served together.")] = 32,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one scheduler step.")] = 8192,
    kv_dtype: Annotated[str, typer.Option(help="MLA cache: auto or fp8.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="KDA recurrent state: float32 or bfloat16.")] = "float32",
    prefix_caching: Annotated[bool, typer.Option(help="Keep snapshots for prefix hits.")] = True,
    graphs: Annotated[bool, typer.Option(help="Captured decode graphs (--no-graphs: --enforce-eager).")] = True,
    utilisation: Annotated[float, typer.Option(min=0.1, max=1.0, help="Share of memory that vLLM may use.")] = 0.92,
    expert_floor: Annotated[int | None, typer.Option(
        min=1, help="Least width of cut experts (vLLM's own model: 256); default: as the vendor's wheel pads.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder or config.json; default: the release.")] = None,
    prefer: Annotated[str, typer.Option(help="What ranks first: latency or room.")] = "latency",
    show_all: Annotated[bool, typer.Option("--all", help="Also what does not fit and what cannot be cut.")] = False,
    as_json: output.AsJson = False,
) -> None:  # fmt: skip
    """Bytes per accelerator by part, how many tokens fit, ranked topologies and their `vllm serve` command lines.

    Weights and cache pages are computed as the loader and vLLM compute them; graphs, workspace and runtime are
    estimates and say so. Exit status 1 when nothing fits.
    """
    if kv_dtype not in ("auto", "fp8") or state_dtype not in ("float32", "bfloat16"):
        raise ConfigError("--kv-dtype is auto or fp8, --state-dtype is float32 or bfloat16")
    if prefer not in ("latency", "room"):
        raise ConfigError(f"--prefer {prefer}: expected latency or room")
    config = load_config(checkpoint or RELEASED_CONFIG)
    target = device(gpu, memory_gib, gpus_per_node)
    request = Request(
        max_len, seqs, batched_tokens, kv_dtype, state_dtype, prefix_caching, utilisation, graphs, expert_floor
    )
    _check_length(config, max_len)
    plans, refused = _all(
        config, target, nodes * target.per_node, request, prefer, {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
    )
    model = serve.RELEASED
    if checkpoint is not None:
        model = str(checkpoint.parent if checkpoint.is_file() else checkpoint)
    if as_json:
        output.emit(report(model, config, target, nodes, request, plans, refused))
    else:
        _show(model, config, target, nodes, request, plans, refused, show_all)
    if not any(p.fits for p in plans):
        raise typer.Exit(1)


def _check_length(config: K3Config, max_len: int) -> None:
    if max_len > config.text.max_position_embeddings:
        raise ConfigError(
            f"--max-len {max_len} exceeds max_position_embeddings = {config.text.max_position_embeddings}"
        )


def _all(
    config: K3Config,
    target: Device,
    devices: int,
    request: Request,
    prefer: str,
    fixed: dict[str, int | bool | None],
) -> tuple[list[Plan], list[tuple[str, str]]]:
    weights = WeightModel(config)
    plans, refused = [], []
    for layout in layouts.possible(devices, fixed):
        try:
            plans.append(layouts.evaluate(config, weights, target, layout, request))
        except ConfigError as error:
            refused.append((str(layout), str(error)))
    if not plans and not refused:
        asked = ", ".join(f"--{key} {value}" for key, value in fixed.items() if value is not None)
        raise ConfigError(f"{asked}: no topology of exactly {devices} accelerators has these sizes")
    return layouts.rank(plans, target, config, request, prefer), refused


def report(
    model: str, config: K3Config, target: Device, nodes: int, request: Request, plans: list[Plan],
    refused: list[tuple[str, str]],
) -> dict[str, Any]:  # fmt: skip
    """The JSON object of a plan: bytes are integers, lists are best first."""
    return {
        "model": model,
        "device": {"name": target.name, "arch": target.arch, "memory": target.memory, "per_node": target.per_node,
                   "proof": target.proof, "experts": target.experts, "notes": list(target.notes)},
        "nodes": nodes,
        "request": {**request.__dict__},
        "topologies": [
            {
                "name": str(p.layout), "tp": p.layout.tp, "pp": p.layout.pp, "dp": p.layout.dp,
                "ep": p.layout.expert_parallel, "fits": p.fits, "bytes": p.parts, "budget": p.budget, "free": p.free,
                "stages": [[s.start, s.stop] for s in p.stages],
                "cache": {"block_size": p.cache.block_size, "page_bytes": p.cache.page_bytes,
                          "state_bytes_a_layer": p.cache.state_bytes,
                          "latent_bytes_a_token_a_layer": p.cache.latent_bytes,
                          "block_bytes": p.cache.block_bytes, "num_blocks": p.num_blocks},
                "tokens": p.tokens, "sequences_of_max_len": p.full_sequences, "reasons": p.reasons,
                "commands": serve.commands(model, config, p.layout, target, request) if p.fits else [],
            }
            for p in plans
        ],
        "refused": [{"name": name, "reason": why} for name, why in refused],
    }  # fmt: skip


def _show(
    model: str, config: K3Config, target: Device, nodes: int, request: Request, plans: list[Plan],
    refused: list[tuple[str, str]], show_all: bool,
) -> None:  # fmt: skip
    output.say(
        f"{model} on {nodes} x {target.per_node} {target.name} ({output.size(target.memory)} each, {target.proof}); "
        f"vLLM may use {request.utilisation:.0%}"
    )
    for note in (target.experts, *target.notes):
        output.say(f"  {note}")
    fitting = [p for p in plans if p.fits]
    shown = plans if show_all else (fitting[:SHOWN] or plans[:SHOWN])
    columns = ("topology", "weights", "free for cache", "tokens", "full sequences")
    rows = [
        (
            p.layout,
            output.size(sum(p.parts[part] for part in PARTS)),
            output.size(p.free) if p.free > 0 else "none",
            f"{p.tokens:,}",
            p.full_sequences,
        )
        for p in shown
    ]
    title = "Topologies, best first" if fitting else "Nothing fits; the closest"
    output.table(f"{title} (full sequence: {request.max_len:,} tokens)", columns, rows, right=columns[1:])
    for p in shown:
        output.say("\n  - ".join([f"{p.layout}:", *p.reasons]) if p.reasons else f"{p.layout}")
    if shown:
        best = shown[0]
        output.table(
            f"{best.layout}: one accelerator (its fullest rank)",
            ("part", "size", "share"),
            [(k, output.size(v), f"{v / target.memory:.1%}") for k, v in best.parts.items()],
            right=("size", "share"),
        )
        state = best.cache.kda_groups * best.cache.states_per_group * best.cache.block_bytes
        output.say(
            f"one sequence: {output.size(state)} of KDA state, "
            f"{best.cache.latent_bytes:,} bytes a token in each MLA layer, blocks of {best.cache.block_size} tokens"
        )
    if fitting:
        for node, line in enumerate(serve.commands(model, config, fitting[0].layout, target, request)):
            output.say(f"\nnode {node}:\n{line}")
    if show_all and refused:
        output.table("Cannot be cut", ("topology", "why"), refused)
