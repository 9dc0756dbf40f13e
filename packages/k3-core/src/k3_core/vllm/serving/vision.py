"""MoonViT-V2 and the projector on this rank: weights named as in the checkpoint, formulas of ``contracts.vision``.

Attention is the vendor's to choose, PyTorch's fused attention one media item at a time where it has nothing better;
everything between the products keeps the contract's precision (norms and rotation in fp32, one rounding).

With tensor parallelism the tower is data-parallel: its 12 heads do not divide 8 or 16 ranks, and at 401M parameters
every rank can hold it. Each rank encodes whole images, chosen so that patches are spread evenly (also ranks without an
image take part), and the token embeddings are exchanged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_gather

from k3_core.config import VisionConfig
from k3_core.contracts import vision
from k3_core.contracts.norm import rms_norm
from k3_core.vllm.serving.modules import Loadable, parameter, tp

logger = logging.getLogger("vllm.plugins.k3")

#: (q, k, v [P, heads, D] of all items, patches of each item) -> [P, heads, D]: full attention inside each item.
Attend = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]


class _Block(Loadable):
    """One pre-norm block."""

    NAMES = ("norm0", "wqkv", "wo", "norm1", "fc0", "fc1")

    def __init__(self, config: VisionConfig, attend: Attend) -> None:
        super().__init__()
        hidden, attention, inner = config.vt_hidden_size, config.qkv_hidden_size, config.vt_intermediate_size
        self.heads, self.eps, self._attend = config.vt_num_attention_heads, config.norm_eps, attend
        self.norm0, self.norm1 = parameter(hidden), parameter(hidden)
        self.wqkv, self.wo = parameter(3 * attention, hidden), parameter(hidden, attention)
        self.fc0, self.fc1 = parameter(inner, hidden), parameter(hidden, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [P, H] of all items; ``lengths`` are their patches."""
        qkv = functional.linear(rms_norm(x, self.norm0, self.eps, rounding="single"), self.wqkv)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = vision.apply_rope(q, cos, sin), vision.apply_rope(k, cos, sin)
        attended = self._attend(q, k, v, lengths)
        x = x + functional.linear(attended.flatten(1), self.wo)
        inner = functional.linear(rms_norm(x, self.norm1, self.eps, rounding="single"), self.fc0)
        return x + functional.linear(functional.gelu(inner, approximate="tanh"), self.fc1)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """All six tensors; the MLP's stand under ``mlp.`` in the checkpoint."""
        for name in self.NAMES:
            yield f"{'mlp.' if name.startswith('fc') else ''}{name}.weight", getattr(self, name).data


def attend_by_item(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Full attention inside each item: [P, heads, D] of items with ``lengths`` patches -> [P, heads, D]."""
    items = zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)
    return torch.cat([_attend_one(*item) for item in items])


@functools.cache
def _say_plain(kind: str) -> None:
    """Once a device type: its images are slow, and why."""
    logger.warning("Kimi K3: vision attention on %s is plain PyTorch; no fused attention was checked there", kind)


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        if q.device.type != "cpu":
            _say_plain(q.device.type)
        return vision.attend(q, k, v)
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


class VisionTower(Loadable):
    """Patches to merged features."""

    def __init__(self, config: VisionConfig, attend: Attend | None = None) -> None:
        super().__init__()
        self.config = config
        patch, hidden = config.patch_size, config.vt_hidden_size
        self.patch_proj = parameter(hidden, 3, patch, patch)
        self.pos_emb = parameter(config.init_pos_emb_height, config.init_pos_emb_width, hidden)
        self.blocks = nn.ModuleList(
            _Block(config, attend or attend_by_item) for _ in range(config.vt_num_hidden_layers)
        )
        self.final_layernorm = parameter(hidden)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Patches [P, 3, 14, 14] of all items with grids [M, 3] (on the host) -> merged features [L, 4, H]."""
        grids = vision.checked_grids(grid_thws, pixel_values.shape[0], mergeable=True)
        x = vision.patch_embed(pixel_values, self.patch_proj) + vision.positions(self.pos_emb, grid_thws)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = vision.rope_2d(grid_thws, self.config.head_dim, wide, x.device)
        lengths = [t * h * w for t, h, w in grids]
        for block in self.blocks:
            x = block(x, cos, sin, lengths)
        x = rms_norm(x, self.final_layernorm, self.config.norm_eps, rounding="single")
        return vision.merge(x, grid_thws)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Where the checkpoint's ``vision_tower.`` tensors go."""
        yield "patch_embed.proj.weight", self.patch_proj.data
        yield "patch_embed.pos_emb.weight", self.pos_emb.data
        for index, block in enumerate(self.blocks):
            for name, destination in cast(_Block, block).parts():
                yield f"encoder.blocks.{index}.{name}", destination
        yield "encoder.final_layernorm.weight", self.final_layernorm.data


class Projector(Loadable):
    """Merged features to token embeddings."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged, hidden = config.merged_size, config.text_hidden_size
        self.linear_1, self.linear_2 = parameter(merged, merged), parameter(hidden, merged)
        self.post_norm, self.eps = parameter(hidden), config.projector_ln_eps

    def forward(self, merged: Tensor) -> Tensor:
        """[L, 4, H] -> [L, text H]."""
        weights = vision.ProjectorWeights(self.linear_1, self.linear_2, self.post_norm, self.eps)
        return vision.projector(merged, weights)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """The released names are proj.0 and proj.2: between them stands the activation."""
        yield "proj.0.weight", self.linear_1.data
        yield "proj.2.weight", self.linear_2.data
        yield "post_norm.weight", self.post_norm.data


def assign(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Items for each rank: largest first, each to the rank with the fewest patches so far."""
    loads, items = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(patches)), key=lambda i: -patches[i]):
        rank = loads.index(min(loads))
        loads[rank] += patches[item]
        items[rank].append(item)
    return [sorted(own) for own in items]


def encode(tower: VisionTower, projector: Projector, pixel_values: Tensor, grid_thws: Tensor) -> list[Tensor]:
    """Token embeddings of each item: pixel_values [P, 3, 14, 14], grid_thws [M, 3] -> M of [n, text H].

    All ranks of the tensor parallel group must call it with the same items.
    """
    grids = grid_thws.reshape(-1, 3).cpu()
    counts = [t * h * w for t, h, w in grids.tolist()]
    merge = tower.config.merge_kernel_size
    tokens = [(h // merge[0]) * (w // merge[1]) for _, h, w in grids.tolist()]
    size, rank = tp()
    device = projector.linear_2.device
    if size == 1:
        return list(projector(tower(pixel_values.to(device), grids)).split(tokens))
    owners = assign(counts, size)
    sliced = pixel_values.split(counts)
    own = owners[rank]
    longest = max(sum(tokens[i] for i in items) for items in owners)
    padded = torch.zeros(longest, projector.post_norm.shape[0], dtype=projector.linear_2.dtype, device=device)
    if own:
        embedded = projector(tower(torch.cat([sliced[i] for i in own]).to(device), grids[own]))
        padded[: embedded.shape[0]] = embedded
    gathered: Any = tensor_model_parallel_all_gather(padded, dim=0)
    result: dict[int, Tensor] = {}
    for part, items in zip(gathered.split(longest), owners, strict=True):
        lengths = [tokens[i] for i in items]
        result |= dict(zip(items, part[: sum(lengths)].split(lengths), strict=True))
    return [result[i] for i in range(len(counts))]
