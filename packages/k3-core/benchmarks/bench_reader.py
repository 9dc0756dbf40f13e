"""Memory that streaming a checkpoint takes, on a synthetic one in the released layout.

    python bench_reader.py [--size-gib 4] [--folder DIR] [--out FILE]

Writes the checkpoint (five layers, one shard each, thousands of small MXFP4 tensors a shard as in the release), then
streams it in fresh processes, touching every byte: once whole, once as rank 3 of TP8, once as rank 3 of EP8. Prints one
line of JSON and one line for people; progress goes to stderr.

What is measured, in each process from after the imports and the header check on:
  peak_extra_anonymous_bytes  growth of RssAnon, sampled every 2 ms: memory that is allocated and cannot be reclaimed.
  peak_extra_file_bytes       growth of RssFile, sampled: pages of the mapped shard. They are page cache and can be
                              dropped at any time, but count against a process in tools that look at RSS alone.
  peak_extra_rss_bytes        growth of the kernel's own high-water mark of the sum (VmHWM, reset before): exact.
The bound of 1 GiB is held against the last, the strictest of the three. Speeds are with a warm page cache.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from k3_core.checkpoint import CheckpointReader, Shard, TensorSpec, Topology, shard_plan, tensor_table, tiny_config
from k3_core.checkpoint.tiny import shard_name, shard_of, write_json, write_shards
from k3_core.config import K3Config

BOUND = 1 << 30
RESULTS = Path(__file__).parent / "results" / "reader.json"
STREAMS = ("whole", "tp8", "ep8")
LAYERS = 5


def synthetic_config(size_gib: float) -> K3Config:
    """Kimi K3's structure with small matrices; the number of experts sets the size."""
    latent, width = 512, 1024
    expert = 3 * latent * width * (1 / 2 + 1 / 32)
    experts = max(8, round(size_gib * 2**30 / (LAYERS - 1) / expert))
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": width, "num_attention_heads": 16}
    linear = {"gate_lower_bound": -5.0, "head_dim": 32, "num_heads": 16, "short_conv_kernel_size": 4}
    return tiny_config(
        "k3",
        num_hidden_layers=LAYERS,
        num_key_value_heads=16,
        num_experts=experts,
        routed_expert_hidden_size=latent,
        linear_attn_config=linear | {"use_full_rank_gate": True, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5]},
        **sizes,
    )


def write_synthetic(folder: Path, config: K3Config) -> int:
    """Write the checkpoint from one block of random bytes; returns the bytes of tensor data."""
    block = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table = tensor_table(config)
    shards: dict[int, list[str]] = {}
    for name in table:
        shards.setdefault(shard_of(name, config), []).append(name)

    def generate() -> Iterator[tuple[str, dict[str, Tensor]]]:
        position = 0
        for index in tqdm(sorted(shards), desc="writing", unit="shard"):
            tensors = {}
            for name in shards[index]:
                spec = table[name]
                position = (position + 4099) % (len(block) - spec.nbytes)
                tensors[name] = fill(name, spec, block[position : position + spec.nbytes])
            yield shard_name(index, config), tensors

    write_json(folder / "config.json", config.to_dict())
    write_shards(folder, generate())
    return sum(spec.nbytes for spec in table.values())


def fill(name: str, spec: TensorSpec, raw: Tensor) -> Tensor:
    """Random bytes for packed codes and scales (never 255), small finite values elsewhere; A_log with a zero tail."""
    if spec.dtype == torch.uint8:
        return raw.clone().reshape(spec.shape)
    if name.endswith(".A_log"):
        return torch.zeros(spec.shape)
    count = spec.nbytes // spec.dtype.itemsize
    return (raw[:count].to(torch.float32) / 256 - 0.5).to(spec.dtype).reshape(spec.shape)


class PeakMemory:
    """Growth of this process's resident memory while the block runs."""

    def __enter__(self) -> "PeakMemory":
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.base = self._read()
        self.peak = dict(self.base)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def extra(self, key: str, base: str | None = None) -> int:
        return max(0, self.peak[key] - self.base[base or key])

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._sample()

    def _sample(self) -> None:
        for key, value in self._read().items():
            self.peak[key] = max(self.peak[key], value)

    @staticmethod
    def _read() -> dict[str, int]:
        status = Path("/proc/self/status").read_text()
        pairs = re.findall(r"^(VmHWM|VmRSS|RssAnon|RssFile):\s+(\d+) kB", status, re.MULTILINE)
        return {key: int(value) * 1024 for key, value in pairs}


def measure(folder: Path, stream: str) -> dict[str, Any]:
    """Stream the checkpoint in this process, touching every byte that is read."""
    torch.set_num_threads(1)
    reader = CheckpointReader(folder)
    plan: dict[str, Shard] | None = None
    if stream == "tp8":
        plan = shard_plan(reader.config, Topology(tp_size=8, tp_rank=3))
    elif stream == "ep8":
        plan = shard_plan(reader.config, Topology(ep_size=8, ep_rank=3))
    total, checksum, start = 0, 0, time.perf_counter()
    with PeakMemory() as memory:
        for _, tensor in reader.tensors(plan, progress=True):
            checksum ^= int(tensor.view(torch.uint8).max()) if tensor.ndim else 0
            total += tensor.numel() * tensor.element_size()
            del tensor
    seconds = time.perf_counter() - start
    return {
        "tensor_bytes": total,
        "seconds": round(seconds, 2),
        "bytes_per_second": round(total / seconds),
        "peak_extra_anonymous_bytes": memory.extra("RssAnon"),
        "peak_extra_file_bytes": memory.extra("RssFile"),
        "peak_extra_rss_bytes": memory.extra("VmHWM", "VmRSS"),
    }


def run(folder: Path, size_gib: float) -> dict[str, Any]:
    config = synthetic_config(size_gib)
    total = write_synthetic(folder, config)
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    streams = {}
    for stream in STREAMS:
        command = [sys.executable, __file__, "--measure", stream, "--folder", str(folder)]
        streams[stream] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {
        "benchmark": "checkpoint reader, peak extra memory",
        "checkpoint_bytes": total,
        "largest_shard_bytes": max(shards),
        "num_tensors": len(tensor_table(config)),
        "bound_bytes": BOUND,
        "bound_held": all(s["peak_extra_rss_bytes"] < BOUND for s in streams.values()),
        "streams": streams,
    }


def page(report: dict[str, Any], size_gib: float) -> dict[str, Any]:
    """The report in the form that the documentation renders."""
    return {
        "title": "Checkpoint reader, peak extra memory",
        "command": f"python packages/k3-core/benchmarks/bench_reader.py --size-gib {size_gib:g}",
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": [
            {
                "stream": name,
                "read (MiB)": round(stream["tensor_bytes"] / 2**20),
                "GiB/s": round(stream["bytes_per_second"] / 2**30, 2),
                "extra RSS (MiB)": round(stream["peak_extra_rss_bytes"] / 2**20),
                "of it anonymous (MiB)": round(stream["peak_extra_anonymous_bytes"] / 2**20),
                "of it mapped file (MiB)": round(stream["peak_extra_file_bytes"] / 2**20),
            }
            for name, stream in report["streams"].items()
        ],
        "notes": [
            f"A synthetic checkpoint of {report['checkpoint_bytes'] / 2**30:.2f} GiB, {report['num_tensors']} tensors, "
            f"largest shard {report['largest_shard_bytes'] / 2**30:.2f} GiB, warm page cache. The bound of 1 GiB on "
            f"the extra RSS was {'held' if report['bound_held'] else 'EXCEEDED'}.",
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak extra memory of the streaming checkpoint reader (Linux).")
    parser.add_argument("--size-gib", type=float, default=4.0, help="size of the synthetic checkpoint (default 4)")
    parser.add_argument("--folder", type=Path, help="where to write it (default: a temporary folder)")
    parser.add_argument("--out", default=str(RESULTS), help='result file; "-" for none')
    parser.add_argument("--measure", choices=STREAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.folder, args.measure)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = run(Path(folder), args.size_gib)
    if args.out != "-":
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(page(report, args.size_gib), indent=1) + "\n")
    print(json.dumps(report))
    worst = max(report["streams"].values(), key=lambda stream: stream["peak_extra_rss_bytes"])
    mib = {key: worst[f"peak_extra_{key}_bytes"] / 2**20 for key in ("rss", "anonymous", "file")}
    print(
        f"{report['checkpoint_bytes'] / 2**30:.2f} GiB in {report['num_tensors']} tensors: peak extra RSS "
        f"{mib['rss']:.0f} MiB (anonymous {mib['anonymous']:.0f}, mapped file {mib['file']:.0f}); bound 1024 MiB "
        f"{'held' if report['bound_held'] else 'EXCEEDED'}"
    )
    return 0 if report["bound_held"] else 1


if __name__ == "__main__":
    sys.exit(main())
