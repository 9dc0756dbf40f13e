"""Kimi K3 for vLLM on NVIDIA GPUs."""

__version__ = "0.1.0"
