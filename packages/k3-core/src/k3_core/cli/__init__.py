"""The `k3` command: `k3 tiny`, `k3 verify`, `k3 env`. Works with vLLM absent."""

from k3_core.cli.app import main

__all__ = ["main"]
