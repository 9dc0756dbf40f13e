"""CPU time a token of the contracts, as the reference server uses them.

    python bench_contracts.py [--threads 1] [--repeat 3] [--out FILE]

Rows: KDA token by token, in chunks of 16, 64 and 128, and decoding a batch; AttnRes mix over 8 blocks; experts dense
and unpacked by use. Shapes are those of k3-tiny and of one rank of Kimi K3 at TP 8. Times are process CPU time divided
by tokens, the best of the repetitions. They tell how long a comparison takes and which form to choose on a CPU; they
say nothing about any accelerator.
"""

import argparse
import datetime
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from k3_core.contracts import attn_res, kda, moe, situ

RESULTS = Path(__file__).parent / "results" / "contracts.json"
Row = tuple[str, int, Callable[[], object]]


def kda_rows(heads: int, dim: int, tokens: int, batch: int) -> Iterator[Row]:
    """Prefill of one sequence in every form, and one decode step of a batch."""

    def operands(rows: int) -> list[torch.Tensor]:
        q, k, v = (torch.randn(rows, heads, dim) for _ in range(3))
        return [q, k, v, -5 * torch.rand(rows, heads, dim), torch.rand(rows, heads)]

    x, one = operands(tokens), operands(batch)
    state = torch.randn(batch, heads, dim, dim)
    shape = f"{heads} heads of {dim}"
    yield f"KDA token by token, {tokens} tokens, {shape}", tokens, lambda: kda.recurrent(*x)
    for chunk in (16, 64, 128):
        yield f"KDA chunks of {chunk}, {tokens} tokens, {shape}", tokens, lambda c=chunk: kda.chunked(*x, chunk=c)
    yield f"KDA decode, batch {batch}, {shape}", batch, lambda: kda.decode(*one, state)


def attn_res_rows(hidden: int, tokens: int) -> Iterator[Row]:
    """The mix over eight blocks."""
    bank, prefix = torch.randn(tokens, 8, hidden).bfloat16(), torch.randn(tokens, hidden).bfloat16()
    weights = torch.randn(hidden), torch.randn(hidden)
    yield (
        f"AttnRes mix of 8 blocks, hidden {hidden}, {tokens} tokens",
        tokens,
        lambda: attn_res.mix(bank, prefix, *weights, 1e-5),
    )


def expert_rows(experts: int, latent: int, width: int, top_k: int, tokens: int) -> Iterator[Row]:
    """The routed experts, dense and packed."""
    z = torch.randn(tokens, latent).bfloat16()
    routing = moe.route(torch.randn(tokens, experts), None, top_k)
    act = situ.gated_activation("situ", 4.0, 25.0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(118, 124, shape, dtype=torch.uint8)

    packed = moe.PackedExperts(
        codes(experts, 2 * width, latent // 2),
        scales(experts, 2 * width, latent // 32),
        codes(experts, latent, width // 2),
        scales(experts, latent, width // 32),
    )
    pairs = [packed.weights(e, torch.bfloat16) for e in range(experts)]
    dense = moe.DenseExperts(torch.stack([w13 for w13, _ in pairs]), torch.stack([w2 for _, w2 in pairs]))
    for name, held in (("dense", dense), ("packed", packed)):
        label = f"{experts} {name} experts of {width}, latent {latent}, top {top_k}, {tokens} tokens"
        yield label, tokens, lambda e=held: moe.latent_experts(z, routing.weights, routing.ids, e, act)


def best_microseconds(run: Callable[[], object], tokens: int, repeat: int) -> float:
    """CPU microseconds a token, best of `repeat` after one run to warm up."""
    run()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return round(min(times) / tokens * 1e6, 1)


def cpu_name() -> str:
    """Model of the CPU."""
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for label, tokens, run in (
        *kda_rows(4, 32, 512, 16),
        *kda_rows(12, 128, 512, 16),
        *attn_res_rows(256, 512),
        *attn_res_rows(7168, 64),
        *expert_rows(8, 128, 64, 2, 64),
        *expert_rows(32, 3584, 384, 4, 16),
    ):
        rows.append({"operator": label, "cpu_us_per_token": best_microseconds(run, tokens, args.repeat)})
        print(f"{rows[-1]['cpu_us_per_token']:>10.1f} us/token  {label}", file=sys.stderr, flush=True)
    report = {
        "title": "Contracts: CPU time of the reference operators",
        "command": f"python packages/k3-core/benchmarks/bench_contracts.py --threads {args.threads}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{cpu_name()}, {args.threads} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
        "notes": ["Process CPU time, best of the repetitions; no statement about any accelerator."],
    }
    if args.out != "-":
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
