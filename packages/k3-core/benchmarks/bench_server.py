"""Throughput and memory of the CPU reference behind the real ``vllm serve``, on tiny random checkpoints.

    python bench_server.py [--presets k3,linear] [--requests 16] [--out FILE]

Starts the server on loopback, sends one warm-up request, then streams completions of random prompts at concurrency 1
and 8, and reads the resident memory of the whole process tree. The figures say how long client tests take; the models
have a few million parameters, so they say nothing about Kimi K3's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from openai import OpenAI
from rich.progress import track

from k3_core.checkpoint import write_tiny

RESULTS = Path(__file__).parent / "results" / "server.json"
PROMPT, OUTPUT = 128, 64


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[int, subprocess.Popen, float]]:
    """(port, process, seconds until it answered) of a server that is stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(folder), "--served-model-name", "tiny", "--host",
        "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8",
    ]  # fmt: skip
    env = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    log = folder / "server.log"
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        while True:
            if process.poll() is not None or time.monotonic() - started > 300:
                raise SystemExit("the server did not start:\n" + "\n".join(log.read_text().splitlines()[-20:]))
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            time.sleep(0.5)
        yield port, process, time.monotonic() - started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def tree_mib(process: subprocess.Popen) -> tuple[float, int]:
    """(proportional resident memory of the process and its children, number of processes)."""
    root = psutil.Process(process.pid)
    members = [root, *root.children(recursive=True)]
    return sum(p.memory_full_info().pss for p in members) / 2**20, len(members)


def one(client: OpenAI, prompt: list[int]) -> tuple[float, float, int]:
    """(seconds to the first token, seconds in all, tokens) of one streamed completion."""
    started, first, tokens = time.perf_counter(), 0.0, 0
    stream = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=OUTPUT, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    for event in stream:
        if event.choices and not first:
            first = time.perf_counter() - started
        if event.usage:
            tokens = event.usage.completion_tokens
    return first, time.perf_counter() - started, tokens


def measure(preset: str, requests: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as home:
        folder = write_tiny(Path(home) / preset, preset, seed=0)
        with served(folder) as (port, process, start_seconds):
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300, max_retries=0)
            draw = random.Random(0)
            prompts = [[draw.randrange(500) for _ in range(PROMPT)] for _ in range(requests)]
            one(client, [1, 2, 3])
            for concurrency in (1, 8):
                begin = time.perf_counter()
                with ThreadPoolExecutor(concurrency) as pool:
                    done = list(pool.map(lambda p: one(client, p), prompts[: requests if concurrency > 1 else 4]))
                seconds = time.perf_counter() - begin
                memory, processes = tree_mib(process)
                rows.append(
                    {
                        "checkpoint": preset,
                        "concurrency": concurrency,
                        "requests": len(done),
                        "output tokens/s": round(sum(d[2] for d in done) / seconds, 1),
                        "median time to first token (s)": round(sorted(d[0] for d in done)[len(done) // 2], 3),
                        "memory of all processes (MiB, PSS)": round(memory),
                        "processes": processes,
                        "start to healthy (s)": round(start_seconds, 1),
                    }
                )
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--presets", default="k3,linear")
    options.add_argument("--requests", type=int, default=16)
    options.add_argument("--out", default=str(RESULTS), help='"-" writes nothing')
    args = options.parse_args()
    rows: list[dict[str, Any]] = []
    for preset in track(args.presets.split(","), description="serving"):
        rows += measure(preset, args.requests)
    import vllm

    report = {
        "title": "Reference server",
        "command": "python3.11 ci bench-core",
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
        "notes": [
            f"Prompts of {PROMPT} random tokens, {OUTPUT} output tokens, streamed, float32, tiny random weights."
        ],
    }
    if args.out != "-":
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
