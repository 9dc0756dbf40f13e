"""The demo: a tiny random Kimi K3 in the released layout, served by the real ``vllm serve`` on loopback, asked over the
OpenAI client for a chat about a picture and for a streamed completion. Run it with ``python3.11 ci demo``.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from k3_core.checkpoint import write_tiny

HOME = Path(__file__).resolve().parent.parent / ".demo"
NAME = "kimi-k3-tiny"
console = Console()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def picture() -> str:
    """A small drawing as a data URL."""
    image = Image.new("RGB", (120, 80), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((10, 10, 60, 70), fill="crimson")
    draw.ellipse((65, 15, 115, 65), fill="royalblue")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def start(port: int, checkpoint: Path, log: Path) -> subprocess.Popen:
    vllm = Path(sys.executable).parent / "vllm"
    command = [
        str(vllm), "serve", str(checkpoint), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "256",
        "--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3", "--enable-auto-tool-choice",
    ]  # fmt: skip
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ,
    }  # fmt: skip
    console.print("[dim]$ vllm serve", *command[2:], highlight=False)
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def wait_until_up(server: subprocess.Popen, port: int, log: Path, limit: float = 300) -> None:
    started = time.monotonic()
    with console.status("vLLM is starting") as status:
        while time.monotonic() - started < limit:
            if server.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                console.print(f"server up after {time.monotonic() - started:.0f} s")
                return
            except OSError:
                status.update(f"vLLM is starting ({time.monotonic() - started:.0f} s)")
                time.sleep(1)
    console.print("[red]the server did not come up; the end of its log:")
    console.print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), markup=False, highlight=False)
    raise SystemExit(1)


def stop(server: subprocess.Popen) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def show(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    for key, value in rows:
        table.add_row(key, value)
    console.print(table)


def chat(client: OpenAI) -> None:
    """One chat with a picture, not streamed."""
    reply = client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "system", "content": "You describe pictures."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": picture()}},
                    {"type": "text", "text": "What is in this picture?"},
                ],
            },
        ],
        max_tokens=24,
        temperature=0,
    )
    message, usage = reply.choices[0].message, reply.usage
    reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None)
    show(
        "chat with a picture (random weights: the words mean nothing)",
        [
            ("reasoning", repr(reasoning)),
            ("content", repr(message.content)),
            ("finish", str(reply.choices[0].finish_reason)),
            ("tokens", f"{usage.prompt_tokens} in, {usage.completion_tokens} out"),
        ],
    )


def completion(client: OpenAI) -> None:
    """One streamed completion."""
    pieces, usage, started = [], None, time.monotonic()
    stream = client.completions.create(
        model=NAME, prompt="The quick brown fox", max_tokens=32, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for event in stream:
        if event.choices:
            pieces.append(event.choices[0].text)
        usage = event.usage or usage
    speed = usage.completion_tokens / (time.monotonic() - started)
    show(
        "streamed completion",
        [
            ("text", repr("".join(pieces))),
            ("pieces", str(len(pieces))),
            (
                "tokens",
                f"{usage.prompt_tokens} in, {usage.completion_tokens} out, {speed:.1f} tokens/s",
            ),
        ],
    )


def served_by(port: int, log: Path) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5) as answer:
        version = answer.read().decode()
    said = [line for line in log.read_text(errors="replace").splitlines() if " serves Kimi K3" in line]
    show(
        "what served them",
        [
            ("server", version),
            ("k3-core", importlib.metadata.version("k3-core")),
            ("log", said[0].split("] ", 1)[-1].strip() if said else "no line of ours in the log"),
        ],
    )


def main() -> None:
    """Make the checkpoint, start the server, ask, stop."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keep", action="store_true", help="leave the server running and say how to reach it")
    options.add_argument("--port", type=int, default=0)
    args = options.parse_args()
    HOME.mkdir(exist_ok=True)
    checkpoint, log, port = HOME / "checkpoint", HOME / "server.log", args.port or free_port()
    if not (checkpoint / "model.safetensors.index.json").exists():
        write_tiny(checkpoint, "k3", seed=0)
    console.print(f"tiny checkpoint in the released layout: {checkpoint}", highlight=False)
    server = start(port, checkpoint, log)
    kept = False
    try:
        wait_until_up(server, port, log)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        chat(client)
        completion(client)
        served_by(port, log)
        kept = args.keep
    finally:
        if not kept:
            stop(server)
    if kept:
        where = f"http://127.0.0.1:{port}/v1"
        console.print(f"still serving at {where} as {NAME}; stop it with: kill {server.pid}", highlight=False)
    else:
        console.print("server stopped")


if __name__ == "__main__":
    main()
