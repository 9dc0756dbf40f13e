"""Filling the reference model from a checkpoint that was verified first.

vLLM's loader finds the shards, or downloads them; they are read by ``k3_core.checkpoint``, which compares every header
with the table of tensors the configuration implies before it reads the first weight, and refuses NaN scales as they
pass. A local checkpoint has been verified once before, when the server settled its configuration
(:mod:`k3_core.vllm.limits`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.checkpoint import CheckpointReader
from k3_core.config import K3Config
from k3_core.vllm import compat
from k3_core.vllm.layers.moe import MoE

#: Packed experts are unpacked once after loading if all of them together take at most this; else one at a time by use.
UNPACK_LIMIT = 1 << 30

logger = logging.getLogger("vllm.plugins.k3")

_EXPERT = re.compile(r"(.*\.block_sparse_moe)\.experts\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)$")


def load(model: nn.Module, config: K3Config, weights: Iterable[tuple[str, Tensor]], model_config: Any) -> set[str]:
    """Copy the checkpoint of ``model_config`` into ``model``, then settle how experts are kept.

    Args:
        model: module whose parameter paths are the released names, experts apart.
        config: what the checkpoint must hold.
        weights: vLLM's own iterator; its first step downloads what is not there yet, its tensors are not used.
        model_config: vLLM's, for the place of the checkpoint and the dtype.

    Returns:
        The names of all parameters: everything is loaded.

    Raises:
        CheckpointError: a shard or tensor is missing, unknown, damaged, or of the wrong shape or dtype; one message.
    """
    next(iter(weights), None)
    reader = CheckpointReader(compat.checkpoint_folder(model_config), config)
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for name, tensor in reader.tensors(progress=True):
        _destination(name, parameters, modules).copy_(tensor)
    _settle_experts(model, model_config.dtype)
    return {name for name, _ in model.named_parameters()}


def _destination(name: str, parameters: dict[str, nn.Parameter], modules: dict[str, Any]) -> Tensor:
    expert = _EXPERT.match(name)
    if expert:
        block, index, matrix, kind = expert.groups()
        target: Tensor = modules[block].experts.destination(int(index), matrix, kind)
        return target
    return parameters[name].data


def _settle_experts(model: nn.Module, dtype: torch.dtype) -> None:
    blocks = [module for module in model.modules() if isinstance(module, MoE)]
    needed = sum(block.experts.unpacked_bytes(dtype) for block in blocks)
    if not needed:
        return
    if needed > UNPACK_LIMIT:
        logger.info("Kimi K3 reference: experts stay packed (MXFP4) and are unpacked one at a time when used")
        return
    for block in blocks:
        block.experts.unpack(dtype)
    logger.info("Kimi K3 reference: MXFP4 experts unpacked to %s (%.1f MiB)", dtype, needed / 2**20)
