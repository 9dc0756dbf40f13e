"""The `vllm serve` command lines of a plan, one for each node."""

from __future__ import annotations

import shlex

from k3_core.cli.plan.devices import Device
from k3_core.cli.plan.layouts import Layout, Request
from k3_core.config import K3Config

RELEASED = "moonshotai/Kimi-K3"
PORT = 29501


def commands(
    model: str, config: K3Config, layout: Layout, device: Device, request: Request, master: str = "NODE0_ADDRESS"
) -> list[str]:
    """One command a node, node 0 first. ``master`` stands for an address of node 0 that the others reach.

    Node 0 answers requests; the others run ``--headless``. Start them in any order, they wait for each other.
    """
    nodes = -(-layout.devices // device.per_node)
    base = ["vllm", "serve", model, *_parallel(layout), *_limits(request), *_chat(config)]
    if nodes == 1:
        return [shlex.join(base)]
    lines = []
    for node in range(nodes):
        extra = ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", master, "--master-port", str(PORT)]
        if layout.dp > 1:
            extra += ["--data-parallel-address", master]
        lines.append(shlex.join([*base, *extra, *(["--headless"] if node else [])]))
    return lines


def _parallel(layout: Layout) -> list[str]:
    words = ["--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.dp > 1:
        words += ["--data-parallel-size", str(layout.dp)]
    if layout.expert_parallel:
        words += ["--enable-expert-parallel"]
    return words


def _limits(request: Request) -> list[str]:
    words = [
        "--max-model-len", str(request.max_len), "--max-num-seqs", str(request.sequences),
        "--max-num-batched-tokens", str(request.batched_tokens),
        "--gpu-memory-utilization", f"{request.utilisation:g}",
    ]  # fmt: skip
    if request.kv_dtype != "auto":
        words += ["--kv-cache-dtype", request.kv_dtype]
    if request.state_dtype != "float32":
        words += ["--mamba-ssm-cache-dtype", request.state_dtype]
    words += ["--enable-prefix-caching"] if request.prefix_caching else ["--no-enable-prefix-caching"]
    return words + ([] if request.graphs else ["--enforce-eager"])


def _chat(config: K3Config) -> list[str]:
    if config.is_kimi_linear:
        return []
    return ["--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3", "--enable-auto-tool-choice"]
