"""The small kernels that are left between products: ours against a copy of as many bytes.

``python bench.py --rows glue``. A TP16 rank's sizes at 1, 32, 128 and 8192 tokens (one prompt where a kernel is of
prompts only). Each kernel is checked against its contract in fp64, then timed in a CUDA graph of rounds over sets of
inputs: for up to 128 tokens one set (launch-bound; its inputs were just written and lie in the L2, as in a step), else
sets that together exceed the L2. The floor is a device copy that moves the same bytes under the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Results, relative_error, require, table, time_pair_graph

from k3_core.contracts import kda, moe, norm, situ
from k3_nvidia.kernels import glue, kda_prefill, moe_combine, router
from k3_nvidia.kernels import situ as situ_kernel
from k3_nvidia.kernels.kda_plan import plan_prefill

TOKENS = (1, 32, 128, 8192)
HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
HEADS, DIM = 6, 128
Q_LORA, KV_LORA, ROPE = 1536, 512, 64
EPS = 1e-5
SETS_BYTES = 256 << 20
GRAPH_CALLS = 16
#: Without a GPU nothing is timed, but the cases can be checked (Triton's interpreter truncates bfloat16, hence fp32).
DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


@dataclass
class Case:
    """call() runs the kernel; want() is the same in fp64, a tensor or several; bytes are read or written once.
    tensors: the kernel's, where a sweep calls it another way."""

    call: Callable[[], Any]
    want: Callable[[], Any]
    bytes: int
    tensors: tuple[torch.Tensor, ...] = ()


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def columns(tokens: int, *widths: int) -> list[torch.Tensor]:
    """Columns of one tensor, as a fused projection leaves them."""
    return list(normal(tokens, sum(widths)).split(widths, -1))


def situ_case(width: int) -> Callable[[int], Case]:
    def make(tokens: int) -> Case:
        x = normal(tokens, 2 * width)
        gate, up = x.double().chunk(2, -1)
        return Case(
            lambda: situ_kernel.situ_and_mul(x, 4.0, 25.0),
            lambda: situ.situ_and_mul(gate, up, 4.0, 25.0),
            tokens * width * 6,
        )

    return make


def gated_norm(tokens: int) -> Case:
    o, weight = normal(tokens, HEADS, DIM), normal(DIM, dtype=torch.float32)
    gate = columns(tokens, HEADS * DIM, 3 * HEADS * DIM)[0].unflatten(-1, (HEADS, DIM))
    return Case(
        lambda: kda_prefill.gated_norm(o, gate, weight, EPS),
        lambda: norm.gated_rms_norm(o.double(), gate.double(), weight.double(), EPS),
        tokens * HEADS * DIM * 6,
    )


def low_rank_norms(tokens: int) -> Case:
    q, latent, shared, gate = columns(tokens, Q_LORA, KV_LORA, ROPE, HEADS * DIM)
    wq, wl = normal(Q_LORA), normal(KV_LORA)
    look = {"shared": shared, "marks": gate, "bounds": torch.zeros(1, dtype=torch.int32, device=q.device)}
    return Case(
        lambda: glue.low_rank_norms(q, latent, wq, wl, EPS, HEADS * DIM, **look)[:2],
        lambda: tuple(
            norm.rms_norm(x.double(), w.double(), EPS, rounding="single") for x, w in ((q, wq), (latent, wl))
        ),
        tokens * 2 * (2 * (Q_LORA + KV_LORA) + ROPE + HEADS * DIM),
    )


def latent_norm(tokens: int) -> Case:
    x, weight = normal(tokens, LATENT), normal(LATENT)
    return Case(
        lambda: glue.rms_norm(x, weight, EPS),
        lambda: norm.rms_norm(x.double(), weight.double(), EPS, rounding="single"),
        tokens * LATENT * 4,
    )


def sigmoid_mul(tokens: int) -> Case:
    x, gate = normal(tokens, HEADS * DIM), columns(tokens, HEADS * DIM, Q_LORA)[0]
    return Case(
        lambda: glue.sigmoid_mul(x, gate),
        lambda: x.double() * torch.sigmoid(gate.double()),
        tokens * HEADS * DIM * 6,
    )


def kda_inputs(tokens: int) -> Case:
    f, b, _ = columns(tokens, DIM, HEADS, 10)
    weight = normal(HEADS * DIM, DIM)
    return Case(
        lambda: glue.kda_inputs(f, b, weight)[0], lambda: f.double() @ weight.double().t(),
        2 * (HEADS * DIM * DIM + tokens * (DIM + HEADS * DIM + 3 * HEADS)),
    )  # fmt: skip


def beta(tokens: int) -> Case:
    b = columns(tokens, HEADS, 10)[0]
    return Case(lambda: glue.sigmoid_fp32(b), lambda: torch.sigmoid(b.double()), tokens * HEADS * 6)


def combine(tokens: int) -> Case:
    d, weights = normal(tokens * TOP_K, LATENT), torch.rand(tokens, TOP_K, device=DEVICE)
    ids = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K, -1)[1].int()
    out = torch.empty(tokens, LATENT, dtype=DTYPE, device=DEVICE)
    few, block = tokens <= router.ONE_LAUNCH_TOKENS, 512 if tokens <= 8 else 1024  # as experts.json has it
    return Case(
        lambda: moe_combine.combine(d, weights, ids, EXPERTS, None, out, block, few, few),
        lambda: (weights.double()[..., None] * d.double().unflatten(0, (tokens, TOP_K))).sum(1),
        tokens * (TOP_K + 1) * LATENT * 2,
        (d, weights, ids, out),
    )


def route(tokens: int) -> Case:
    logits, bias = normal(tokens, EXPERTS, dtype=torch.float32), torch.zeros(EXPERTS, device=DEVICE)
    options: dict[str, Any] = {"renormalize": True}

    def spread(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tokens, EXPERTS, dtype=torch.float64, device=DEVICE).scatter(1, ids.long(), weights.double())

    case = Case(
        lambda: router.route(
            logits, bias, TOP_K, routed_scaling_factor=1.0, num_expert_group=1, topk_group=1, **options
        )[0],
        lambda: moe.route(logits, bias, TOP_K, **options)[0],
        tokens * (4 * EXPERTS + 8 * TOP_K),
    )
    got = router.route(logits, bias, TOP_K, routed_scaling_factor=1.0, num_expert_group=1, topk_group=1, **options)
    error = relative_error(spread(*got), spread(*moe.route(logits, bias, TOP_K, **options)))
    require(error < 1e-5, f"route: relative error {error:.2e}")
    return case


def short_conv(tokens: int) -> Case:
    width = 3 * HEADS * DIM
    x, weight = columns(tokens, width, HEADS * DIM)[0], normal(width, 4, dtype=torch.float32)
    state = torch.zeros(2, width, 3, dtype=DTYPE, device=DEVICE)
    where, bounds = (torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in ([1], [0, tokens]))
    fresh, plan = torch.zeros(1, dtype=torch.bool, device=DEVICE), plan_prefill([0, tokens], HEADS, DEVICE)
    return Case(
        lambda: kda_prefill.short_conv(x, weight, state, where, bounds, fresh, plan=plan),
        lambda: kda.short_conv(x.double(), weight.double())[0],
        tokens * width * 4,
    )


CASES: dict[str, Callable[[int], Case]] = {
    "situ dense": situ_case(33792 // 16),
    "situ shared": situ_case(2 * 3072 // 16),
    "gated_norm": gated_norm,
    "low_rank_norms": low_rank_norms,
    "latent norm": latent_norm,
    "sigmoid_mul": sigmoid_mul,
    "kda_inputs": kda_inputs,
    "beta": beta,
    "weighted sum": combine,
    "route": route,
    "short_conv": short_conv,
}
#: Fewest and most tokens where a kernel is not used at all of them; a step's convolution is in its own kernel.
RANGES = {"kda_inputs": (1, glue.MAX_ROWS), "beta": (glue.MAX_ROWS + 1, TOKENS[-1]), "short_conv": (2, TOKENS[-1])}


def check(case: Case) -> None:
    got, want = case.call(), case.want()
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    error = max(relative_error(a, b) for a, b in pairs)
    require(error < 6e-3, f"relative error {error:.2e} against fp64")


def measure(make: Callable[[int], Case], tokens: int) -> dict[str, Any]:
    """Ours and a copy of as many bytes, in graphs of the same number of calls over as many sets."""
    first = make(tokens)
    count = 1 if tokens <= 128 else max(2, min(GRAPH_CALLS, SETS_BYTES // first.bytes))
    sets = [first, *(make(tokens) for _ in range(count - 1))]
    half = max(first.bytes // 2, 16)
    copies = [torch.zeros(2, half, dtype=torch.uint8, device=DEVICE) for _ in sets]
    ours, floor = time_pair_graph(
        [[case.call for case in sets], [lambda pair=pair: pair[1].copy_(pair[0]) for pair in copies]],
        repeat=-(-GRAPH_CALLS // len(sets)),
    )
    return {"tokens": tokens, "MB": round(first.bytes / 1e6, 3), "us": ours, "copy us": floor, "/ copy": ours / floor}


def run(out: Path, slices: Sequence[str]) -> None:
    """Rows ``<kernel> T<tokens>`` of glue.json."""
    results = Results(out / "glue.json")
    results.notes = [
        "Kernels of a TP16 rank between its products, in a CUDA graph, beside a device copy that moves as many bytes "
        "under the same rule: up to 128 tokens inputs in the L2, beyond cold."
    ]
    shown = []
    for name, make in CASES.items():
        fewest, most = RANGES.get(name, (1, TOKENS[-1]))
        for tokens in TOKENS:
            key = f"{name} T{tokens}"
            if not fewest <= tokens <= most:
                continue
            if slices and not any(part in key for part in slices):
                continue
            row = results.check_then_time(
                key, lambda make=make, tokens=tokens: check(make(tokens)),
                lambda make=make, tokens=tokens: measure(make, tokens),
            )  # fmt: skip
            if row and "error" in row:
                print(key, row["error"], flush=True)
            elif row:
                shown.append([key, row["us"], row["copy us"], row["/ copy"]])
                print(shown[-1], flush=True)
            torch.cuda.empty_cache()
    print(table(shown, ["row", "us", "copy us", "x floor"]))


if __name__ == "__main__":
    import os

    run(Path(os.environ.get("OUT", Path(__file__).parent / "results")), [])
