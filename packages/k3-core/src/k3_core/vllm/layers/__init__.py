"""Layers of the reference model: weights named as in the checkpoint, state in vLLM's cache, arithmetic in contracts."""
