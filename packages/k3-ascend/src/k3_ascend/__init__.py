"""Kimi K3 for vLLM on Ascend NPUs."""

__version__ = "0.1.0"
