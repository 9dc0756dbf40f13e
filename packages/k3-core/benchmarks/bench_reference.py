"""Speed and memory of the reference model on tiny random checkpoints.

    python bench_reference.py [--threads 2] [--prefill 512] [--decode 64] [--out FILE]

Each row is a process of its own: it loads the model, runs the prompt once to warm up and once timed, then decodes
greedily token by token. Prints the report as one line of JSON and one line for people, and writes it to FILE (default:
results/reference.json beside this script; "-" writes nothing).

The figures say how long tests and comparisons take. They are no statement about Kimi K3's speed: the models have a few
million parameters, and the reference computes one sequence at a time without any kernel.

peak_rss_mib is the kernel's high-water mark of the whole process (PyTorch's own part is rss_before_load_mib).
"""

import argparse
import datetime
import json
import math
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from k3_core import checkpoint, reference
from k3_core.config import K3Config

ROWS = [
    ("k3-13", "float32", False),
    ("k3-13", "float32", True),
    ("k3-13", "bfloat16", False),
    ("linear", "float32", False),
]
RESULTS = Path(__file__).parent / "results" / "reference.json"


def resident_mib(key: str) -> float:
    """VmRSS or VmHWM of this process."""
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return round(int(match[1]) / 1024, 1)


def measure(folder: Path, dtype: str, packed: bool, prefill: int, decode: int) -> dict[str, Any]:
    """One row, in this process."""
    before = resident_mib("VmRSS")
    model = reference.load_model(folder, getattr(torch, dtype), packed_experts=packed)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.config.text.vocab_size - 256, (prefill,), generator=generator).tolist()
    model.forward(model.embed(prompt), last_only=True)

    cache = model.new_cache()
    start = time.perf_counter()
    token = int(model.forward(model.embed(prompt), cache, last_only=True).logits[-1].argmax())
    prefill_seconds = time.perf_counter() - start

    start = time.perf_counter()
    for _ in range(decode):
        token = int(model.step([token], cache)[-1].argmax())
    decode_seconds = time.perf_counter() - start
    return {
        "layers": model.config.text.num_hidden_layers,
        "parameters": parameters(model.config),
        "prefill_tokens_per_s": round(prefill / prefill_seconds, 1),
        "decode_tokens_per_s": round(decode / decode_seconds, 1),
        "rss_before_load_mib": before,
        "peak_rss_mib": resident_mib("VmHWM"),
    }


def parameters(config: K3Config) -> int:
    """Weights of the checkpoint; a packed byte holds two, scales are none."""
    return sum(
        math.prod(spec.shape) * (2 if name.endswith("_packed") else 1)
        for name, spec in checkpoint.tensor_table(config).items()
        if not name.endswith("_scale")
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for preset in dict.fromkeys(preset for preset, _, _ in ROWS):
            checkpoint.write_tiny(Path(scratch) / preset, preset)
        for preset, dtype, packed in ROWS:
            command = [sys.executable, __file__, "--measure", str(Path(scratch) / preset), "--dtype", dtype]
            command += ["--threads", str(args.threads), "--prefill", str(args.prefill), "--decode", str(args.decode)]
            command += ["--packed"] if packed else []
            measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            rows.append({"model": preset, "dtype": dtype, "experts": "packed" if packed else "plain"} | measured)
            print(line(rows[-1]), file=sys.stderr)
    return {
        "title": f"Reference model, {args.prefill} tokens of prompt and {args.decode} decoded, one sequence",
        "command": f"python packages/k3-core/benchmarks/bench_reference.py --threads {args.threads}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{cpu_name()}, {args.threads} threads",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
        "notes": ["Tiny random checkpoints: how long comparisons take, no statement about the speed of Kimi K3."],
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']} {row['dtype']}, {row['experts']} experts: prefill {row['prefill_tokens_per_s']:.0f} tokens/s, "
        f"decode {row['decode_tokens_per_s']:.1f} tokens/s, peak RSS {row['peak_rss_mib']:.0f} MiB"
    )


def cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of the reference model on tiny checkpoints (Linux).")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads (default 2)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded (default 64)")
    parser.add_argument("--out", default=str(RESULTS), help='result file; "-" for none')
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--packed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        torch.set_num_threads(args.threads)
        print(json.dumps(measure(args.measure, args.dtype, args.packed, args.prefill, args.decode)))
        return 0
    report = run(args)
    if args.out != "-":
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    print("; ".join(line(row) for row in report["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
