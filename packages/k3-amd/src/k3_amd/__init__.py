"""Kimi K3 for vLLM on AMD GPUs."""

__version__ = "0.1.0"
