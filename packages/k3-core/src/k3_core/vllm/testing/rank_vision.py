"""One rank that encodes its share of images: ``python -m k3_core.vllm.testing.rank_vision``, a :mod:`.world` program.

A case: ``folder`` of a checkpoint with a tower, ``ranks``, and ``grids``, [height, width] in patches of each image; its
pixels are random, the same on every rank. The payload: ``owned``, the images this rank encoded itself, and
``embeddings``, what it has in the end of all images (lists).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from k3_core.vllm.testing import world

_state: dict[str, Any] = {}


def pixels(grids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """pixel_values [P, 3, 14, 14] and grid_thws [M, 3] of random images."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(sum(h * w for h, w in grids), 3, 14, 14, generator=generator)
    return values, torch.tensor([(1, h, w) for h, w in grids])


def tower(folder: Path) -> tuple[Any, Any]:
    """The checkpoint's vision tower and projector."""
    from k3_core.checkpoint import CheckpointReader
    from k3_core.vllm.serving import loading, vision

    reader = CheckpointReader(folder)
    assert reader.config.vision is not None
    parts = vision.VisionTower(reader.config.vision), vision.Projector(reader.config.vision)
    places = loading.Destinations()
    for name, module in zip(("vision_tower.", "mm_projector."), parts, strict=True):
        places.add(name, module.parts())
    for name, tensor in reader.tensors(wanted=places.wants):
        places.put(name, tensor)
    assert not places.missing()
    return parts


def join(ranks: int) -> None:
    """vLLM's groups of real processes over gloo."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    rank = int(os.environ["RANK"])
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, "env://", local_rank=rank, backend="gloo")
        initialize_model_parallel(ranks, 1, backend="gloo")


def work(case: dict[str, Any]) -> dict[str, Any]:
    """Encode the case's images together with the other ranks."""
    from k3_core.vllm.serving import vision

    if not _state:
        join(case["ranks"])
        _state["parts"] = tower(Path(case["folder"]))
    values, grids = pixels(case["grids"])
    shares = vision.assign([int(h * w) for _, h, w in grids.tolist()], case["ranks"])
    encoder, projector = _state["parts"]
    with torch.no_grad():
        embeddings = vision.encode(encoder, projector, values, grids)
    return {
        "owned": list(shares[int(os.environ["RANK"])]),
        "embeddings": [one.tolist() for one in embeddings],
    }


if __name__ == "__main__":
    world.serve(work)
