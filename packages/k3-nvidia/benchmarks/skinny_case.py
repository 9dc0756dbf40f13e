"""The cases of ``bench_skinny``: matrix sizes of K3's projections, configurations worth a try, and what becomes of the
results: a summary for the benchmark page and the tuning table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from k3_core.config import K3Config, load_config
from k3_nvidia.kernels.skinny_gemm import MAX_VECTOR_ROWS, Config, block_m
from k3_nvidia.tuning import skinny as tuning

BATCHES = (1, 8, 16, 32, 4, 2)
MULTIPROCESSORS = 132
Point = tuple[int, int, int]


# ------------------------------------------------------------------------------------------------------------- shapes


def projections(config: K3Config, ranks: int) -> dict[str, tuple[int, int]]:
    """name -> (N, K) of every dense matrix of one rank, as the serving layers fuse, pad and cut them."""
    text = config.text
    linear, hidden = text.linear_attn, text.hidden_size
    heads, dim = linear.num_heads // ranks, linear.head_dim
    attention = text.num_attention_heads // ranks
    shared, dense = text.shared_intermediate_size // ranks, text.intermediate_size // ranks

    def pad(rows: int) -> int:
        return -(-rows // 16) * 16

    assert text.q_lora_rank is not None
    assert text.routed_expert_hidden_size is not None
    latent = text.routed_expert_hidden_size
    mla = text.q_lora_rank + text.kv_lora_rank + text.qk_rope_head_dim + attention * text.v_head_dim
    return {
        "kda.in_proj": (pad(4 * heads * dim + dim + heads), hidden),
        "kda.f_b_proj": (heads * dim, dim),
        "kda.o_proj": (hidden, heads * dim),
        "mla.in_proj": (pad(mla), hidden),
        "mla.q_b_proj": (attention * text.qk_head_dim, text.q_lora_rank),
        "mla.kv_b_proj": (attention * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank),
        "mla.o_proj": (hidden, attention * text.v_head_dim),
        "moe.in_proj": (pad(latent + 2 * shared), hidden),
        "latent.up": (hidden, latent),
        "latent.up sharded": (hidden // ranks, latent),
        "shared.down": (hidden, shared),
        "dense.gate_up": (2 * dense, hidden),
        "dense.down": (hidden, dense),
        "router": (text.num_experts, hidden),
        "lm_head": (text.vocab_size // ranks, hidden),
    }


def points() -> dict[tuple[int, int], list[str]]:
    """(N, K) -> names of the projections that have it, over both rank sizes."""
    config = load_config(json.loads((files("k3_core.cli.plan") / "kimi_k3.json").read_text()))
    found: dict[tuple[int, int], list[str]] = {}
    for ranks in (16, 8):
        for name, size in projections(config, ranks).items():
            found.setdefault(size, []).append(f"tp{ranks}.{name}")
    return found


# ----------------------------------------------------------------------------------------------------- configurations


def _cuts(total: int, wanted: float, least: int) -> int:
    """The divisor of ``total`` steps nearest to ``wanted`` cuts that leaves at least ``least`` steps to each."""
    divisors = [d for d in range(1, total + 1) if total % d == 0 and total // d >= least] or [1]
    return min(divisors, key=lambda d: abs(d - wanted))


def _vector(m: int, n: int, k: int) -> Iterator[Config]:
    if k >= 4096:
        tiles = [(8, 1024, 4), (4, 1024, 4), (8, 512, 2), (4, 512, 2)]
    elif k >= 1024:
        tiles = [(8, 512, 2), (4, 512, 2), (8, 256, 1), (4, 256, 1)]
    elif k >= 512:
        tiles = [(8, 256, 1), (4, 256, 1), (16, 256, 1), (16, 256, 2)]
    else:
        tiles = [(16, 128, 1), (8, 128, 1), (8, 64, 1)]
    for block_n, block_k, warps in tiles:
        if block_n * m > 32:  # sums and two steps of weights must fit the registers
            continue
        programs = -(-n // block_n)
        steps = -(-k // block_k)
        # twelve warps a multiprocessor, each with block_n * 512 bytes a step outstanding
        wanted = MULTIPROCESSORS * 12 / (programs * warps)
        for splits in {1, _cuts(steps, wanted, 2) if wanted >= 1.5 else 1}:
            yield Config("vector", block_n, block_k, splits, warps, 1, True)


def _dot(m: int, n: int, k: int) -> Iterator[Config]:
    tiles = [(64, 128, 5, 4), (64, 128, 8, 4), (64, 64, 10, 4), (32, 128, 6, 4), (32, 256, 4, 4)]
    if m > 16:  # x takes half as much of the ring as 64 rows of weights
        tiles = [(64, 128, 4, 4), (64, 128, 6, 4), (64, 64, 8, 4), (128, 64, 4, 4), (128, 128, 4, 8)]
    elif n >= 4096 and k >= 2048:
        tiles += [(64, 256, 3, 4), (128, 64, 6, 4)]
    if k <= 256:
        tiles = [(16, 128, 2, 1), (32, 128, 2, 2), (64, 128, 2, 4)]
    for block_n, block_k, stages, warps in tiles:
        programs, steps = -(-n // block_n), -(-k // block_k)
        options = {1} if programs >= 48 else set()
        if programs < 200:
            options |= {_cuts(steps, w * MULTIPROCESSORS / programs, 3) for w in (1, 2)}
        for splits in sorted(options):
            yield Config("dot", block_n, block_k, splits, warps, stages, True)


def candidates(m: int, n: int, k: int) -> list[Config]:
    """The Triton configurations that are worth a try."""
    return [*(_vector(m, n, k) if m <= MAX_VECTOR_ROWS else ()), *(_dot(m, n, k))]


def variant(config: Config, m: int, n: int, k: int) -> tuple[Any, ...]:
    """What decides the compiled binary."""
    rows = m if config.kind == "vector" else block_m(m)
    even = n % config.block_n == 0, k % (config.block_k * config.splits) == 0
    return rows, even, *asdict(config).values()


# ------------------------------------------------------------------------------------------------------------ results


def table_entry(name: str, us: float) -> dict[str, Any]:
    """An entry of the tuning table from the name a configuration has in the results."""
    kind, *parts = name.split("-")
    number = {part[0]: int(part[1:]) for part in parts if part != "pdl"}
    if kind == "cute":
        config: dict[str, Any] = {
            "tiles": number["r"], "unroll": number["u"], "warps": number["w"], "cluster": number["c"],
        }  # fmt: skip
        return {"kernel": "cute", "us": round(us, 2), "config": config}
    config = {
        "kind": kind, "block_n": number["n"], "block_k": number["k"], "splits": number["s"], "warps": number["w"],
        "stages": number["p"], "pdl": "pdl" in parts,
    }  # fmt: skip
    return {"kernel": "triton", "us": round(us, 2), "config": config}


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    """Kernels that beat cuBLAS by the margin, best first; CuTe only where it beats Triton by as much."""
    rival = row["cublas_us"]
    ours = [(us, name) for name, us in row["marginal"].items() if name != "cublas"]
    best = [table_entry(name, us) for us, name in sorted(ours)[:1] if us <= tuning.MARGIN * rival]
    # the shards timed cuBLAS too: their figures count relative to that
    if "cute" in row and row["cute_cublas_us"]:
        us = row["cute_us"] / row["cute_cublas_us"] * rival
        if us <= tuning.CUTE_MARGIN * min([rival, *(entry["us"] for entry in best)]):
            best.insert(0, table_entry(row["cute"], us))
    shape = {key: row[key] for key in ("m", "n", "k")}
    return {**shape, "cublas_us": round(rival, 2), "floor_us": round(row["floor_us"], 2), "best": best}


def write_table(results: dict[str, Any], path: Path) -> None:
    """``tuning/skinny.json`` from a results file; other devices' tables in it stay.

    The router and, for few rows, KDA's f_b have kernels of their own; kv_b is no product of a decoding step, which
    multiplies by its halves in vLLM's attention.
    """
    environment = results["environment"]
    elsewhere = ("router", "f_b_proj", "kv_b_proj")
    rows = [
        table_row(row)
        for row in results["rows"].values()
        if "marginal" in row and not all(name.endswith(elsewhere) for name in row["projections"])
    ]
    rows.sort(key=lambda row: (row["n"], row["k"], row["m"]))
    data = json.loads(path.read_text())
    old = data["devices"].get(environment["device"], {"rows": []})["rows"]
    held = {(row["m"], row["n"], row["k"]): row["hold"] for row in old if "hold" in row}
    for row in rows:  # measured in a whole step (tuning/skinny.py), whatever kernel it is
        if found := held.get((row["m"], row["n"], row["k"])):
            row["hold"] = found
    data["devices"][environment["device"]] = {
        "date": environment["date"],
        "measured": f"{environment['dtype']}, torch {environment['torch']}, triton {environment['triton']}, marginal "
        "microseconds behind the kernel that writes x, L2 cold (benchmarks/bench_skinny.py)",
        "rows": rows,
    }
    save_table(data, path)


def save_table(data: dict[str, Any], path: Path) -> None:
    """``tuning/skinny.json``, one row a line."""
    text = json.dumps(data, indent=1)
    for device in data["devices"].values():
        for row in device["rows"]:
            text = text.replace(json.dumps(row, indent=1).replace("\n", "\n    "), json.dumps(row))
    assert json.loads(text) == data
    path.write_text(text + "\n")


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """What the benchmark page shows: a row a case, without the losing configurations."""
    rows = {}
    for row in results["rows"].values():
        if "marginal" not in row:
            continue
        chosen = table_row(row)["best"]
        us = min([row["cublas_us"], *(entry["us"] for entry in chosen)])
        name = next(iter(row["projections"]))
        rows[f"M={row['m']} {name} {row['n']}x{row['k']}"] = {
            "MB": round(2e-6 * row["n"] * row["k"], 1), "us": round(us, 2), "cublas us": round(row["cublas_us"], 2),
            "floor us": round(row["floor_us"], 2), "/ cublas": round(us / row["cublas_us"], 2),
            "/ floor": round(us / row["floor_us"], 2), "kernel": chosen[0]["kernel"] if chosen else "cublas",
            "configuration": row["winner"] if chosen else "",
        }  # fmt: skip
    notes = [
        "Marginal time of a product behind the kernel that writes x, weights cold; the floor is the bytes of W, x and "
        "y at the bandwidth of a device copy. A product that moves nothing costs about 2 us in this measure."
    ]
    return {"title": "low-latency projections", "environment": results["environment"], "rows": rows, "notes": notes}
