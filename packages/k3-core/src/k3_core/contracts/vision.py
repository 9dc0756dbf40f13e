"""Vision: MoonViT-V2 tower, merge and projector (released `modeling_kimi_k3.py`), as functions on tensors.

A batch holds M media items; `grid_thws` int [M, 3] gives frames, rows and columns of 14 x 14 patches of each, and all
patches stand in one row dimension P = sum t h w (frames, then rows, then columns). Images have t = 1; t up to 4 is what
the position code of the tower can express, the released processor never produces it.

    x  = patches . W_patch + position(h, w)                      patch_embed, positions
    x += W_o attn(rope(q), rope(k), v),  q,k,v = W_qkv norm0(x)  block; attention over all t h w patches of one item
    x += W_1 gelu_tanh(W_0 norm1(x))
    y  = merge(norm_final(x))                                    [L, 4, H], L = sum (h / 2)(w / 2), mean over frames
    e  = norm_post(W_2 gelu_erf(W_1 flatten(y)))                 projector, one row per text token

The two GELUs differ on purpose. No bias anywhere. Weights are [out, in].

Precision: linear layers run in the dtype of their operands; norms, rotation, softmax and GELU compute in float32
(float64 for float64 inputs) and round once to the input dtype. Every norm of the tower has eps 2^-23: the released
layers leave it unset, and torch then takes the machine epsilon of the *accumulation* type, in BF16 as well.

Tolerances an implementation is held to (released code, eager, tiny weights): float32 atol 1e-4 for tower and projector
at values of order 1 (summation order of a few layers; measured 1.2e-5 against float64); BF16 projector atol 0.1 and rms
0.02 (rounding of every linear; measured .055 and .010); rotation float32 1e-5; positions float32 1e-6, BF16 1 ulp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from k3_core.contracts._common import compute_dtype
from k3_core.contracts.norm import VISION_EPS, rms_norm

ROPE_BASE: Final = 10000.0
MAX_FRAMES: Final = 4
"""Frames the time table covers (`init_pos_emb_time`)."""
_SCORE_ELEMENTS: Final = 2**26
"""Attention scores held at a time (256 MB in float32); bounds memory for the largest images."""


@dataclass(frozen=True)
class BlockWeights:
    """One block: norm0, norm1 [H]; wqkv [3 A, H] (rows q, k, v); wo [H, A]; fc0 [I, H]; fc1 [H, I]; A = heads * D."""

    norm0: Tensor
    wqkv: Tensor
    wo: Tensor
    norm1: Tensor
    fc0: Tensor
    fc1: Tensor


@dataclass(frozen=True)
class TowerWeights:
    """The tower: patch_proj [H, 3, 14, 14], pos_emb [rows, columns, H], blocks, final_layernorm [H], heads."""

    patch_proj: Tensor
    pos_emb: Tensor
    blocks: Sequence[BlockWeights]
    final_layernorm: Tensor
    num_heads: int


@dataclass(frozen=True)
class ProjectorWeights:
    """The projector: linear_1 [4 H, 4 H], linear_2 [text H, 4 H], post_norm [text H] with its eps (1e-5)."""

    linear_1: Tensor
    linear_2: Tensor
    post_norm: Tensor
    eps: float


def tower(pixel_values: Tensor, grid_thws: Tensor, weights: TowerWeights, norm_eps: float = VISION_EPS) -> Tensor:
    """Features of all items: pixel_values [P, 3, 14, 14] -> [L, 4, H], items one after the other.

    Runs in the dtype of `weights`; raises ValueError where the patches and the grid disagree.
    """
    grids = checked_grids(grid_thws, pixel_values.shape[0], mergeable=True)
    x = patch_embed(pixel_values, weights.patch_proj) + positions(weights.pos_emb, grid_thws)
    head_dim = weights.blocks[0].wo.shape[1] // weights.num_heads
    cos, sin = rope_2d(grid_thws, head_dim, compute_dtype(x), x.device)
    lengths = [t * h * w for t, h, w in grids]
    for layer in weights.blocks:
        x = block(x, layer, weights.num_heads, cos, sin, lengths, norm_eps)
    return merge(rms_norm(x, weights.final_layernorm, norm_eps, rounding="single"), grid_thws)


def projector(merged: Tensor, weights: ProjectorWeights) -> Tensor:
    """Merged features [L, 4, H] -> token embeddings [L, text H]; erf GELU, one norm at the end."""
    hidden = F.gelu(F.linear(merged.flatten(1), weights.linear_1), approximate="none")
    return rms_norm(F.linear(hidden, weights.linear_2), weights.post_norm, weights.eps, rounding="single")


def patch_embed(pixel_values: Tensor, weight: Tensor) -> Tensor:
    """Patches [P, 3, 14, 14] . weight [H, 3, 14, 14] -> [P, H]; pixels are cast to the weight's dtype first."""
    if pixel_values.shape[1:] != weight.shape[1:]:
        raise ValueError(f"patches of shape {list(pixel_values.shape)} do not fit the weight {list(weight.shape)}")
    return F.linear(pixel_values.to(weight.dtype).flatten(1), weight.flatten(1))


def positions(table: Tensor, grid_thws: Tensor) -> Tensor:
    """Position embeddings of all patches, [P, H] in the table's dtype.

    One frame: the table interpolated to (h, w). Several frames: the same for each, plus `time_table`; a single frame
    gets no time term, not even that of frame 0. The time term is rounded to the table's dtype, as the released
    buffer is cast with the model.
    """
    rows = []
    for t, h, w in checked_grids(grid_thws):
        space = interpolate_positions(table, h, w)
        if t > 1:
            time = time_table(t, table.shape[-1], table.device).to(table.dtype)
            space = (space[None] + time[:, None]).flatten(0, 1)
        rows.append(space)
    return torch.cat(rows)


def interpolate_positions(table: Tensor, h: int, w: int) -> Tensor:
    """table [rows, columns, H] -> [h w, H], row-major.

    Identity where (h, w) is the table's size, else bilinear with half-pixel centres and no antialiasing: output i takes
    source (i + 0.5) rows / h - 0.5, clamped at 0. Computed in float32 (float64 for a float64 table), rounded once.
    """
    if (h, w) == tuple(table.shape[:2]):
        return table.flatten(0, 1)
    grid = table.to(compute_dtype(table)).permute(2, 0, 1)[None]
    resized = F.interpolate(grid, size=(h, w), mode="bilinear", align_corners=False, antialias=False)
    return resized[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


def time_table(frames: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Fixed time embedding [frames, dim] float32: sin(t w_i) then cos(t w_i), w_i = 10000^(-i / (dim / 2))."""
    if not 1 <= frames <= MAX_FRAMES:
        raise ValueError(f"{frames} frames; the time table covers 1 to {MAX_FRAMES}")
    half = dim // 2
    omega = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(frames, dtype=torch.float64)[:, None] * omega
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(torch.float32).to(device)


def rope_2d(
    grid_thws: Tensor, head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [P, head_dim / 2], of the angle of every pair of channels (2i, 2i + 1).

    freq_j = 10000^(-4 j / head_dim). Pair 2j turns by column * freq_j, pair 2j + 1 by row * freq_j: x first. All
    frames of an item use the same angles.
    """
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; 2-D rotation needs a multiple of 4")
    freq = ROPE_BASE ** (-torch.arange(0, head_dim, 4, dtype=torch.float64) / head_dim)
    angles = []
    for t, h, w in checked_grids(grid_thws):
        row = torch.arange(h, dtype=torch.float64)[:, None, None].expand(h, w, 1)
        column = torch.arange(w, dtype=torch.float64)[None, :, None].expand(h, w, 1)
        pairs = torch.stack([column * freq, row * freq], dim=-1).reshape(h * w, head_dim // 2)
        angles.append(pairs.repeat(t, 1))
    angle = torch.cat(angles)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [P, heads, D] by the angles of `rope_2d`; computed in the dtype of cos and sin, rounded once."""
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def block(
    x: Tensor,
    weights: BlockWeights,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    lengths: Sequence[int],
    norm_eps: float = VISION_EPS,
) -> Tensor:
    """One pre-norm block on x [P, H]; `lengths` are the patches of each item, which attend only to one another."""
    qkv = F.linear(rms_norm(x, weights.norm0, norm_eps, rounding="single"), weights.wqkv)
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    items = zip(q.split(list(lengths)), k.split(list(lengths)), v.split(list(lengths)), strict=True)
    attended = torch.cat([attend(*item) for item in items])
    x = x + F.linear(attended.flatten(1), weights.wo)
    inner = F.linear(rms_norm(x, weights.norm1, norm_eps, rounding="single"), weights.fc0)
    return x + F.linear(F.gelu(inner, approximate="tanh"), weights.fc1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full bidirectional attention in one item: [L, heads, D] -> [L, heads, D], scale D^-0.5, softmax in float32."""
    dtype = compute_dtype(q)
    keys, values = k.to(dtype).permute(1, 2, 0), v.to(dtype).transpose(0, 1)
    rows = max(1, _SCORE_ELEMENTS // (k.shape[0] * k.shape[1]))
    parts = []
    for queries in q.to(dtype).transpose(0, 1).split(rows, dim=1):
        scores = queries @ keys / math.sqrt(q.shape[-1])
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, dim=1).transpose(0, 1).to(q.dtype)


def merge(x: Tensor, grid_thws: Tensor) -> Tensor:
    """sd2_tpool: [P, H] -> [L, 4, H]; each 2 x 2 square of patches, order (kh, kw), averaged over frames."""
    merged = []
    grids = checked_grids(grid_thws, x.shape[0], mergeable=True)
    for item, (t, h, w) in zip(x.split([t * h * w for t, h, w in grids]), grids, strict=True):
        squares = item.view(t, h // 2, 2, w // 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
        mean = squares.to(compute_dtype(x)).mean(0).to(x.dtype)
        merged.append(mean.reshape((h // 2) * (w // 2), 4, -1))
    return torch.cat(merged)


def checked_grids(
    grid_thws: Tensor, num_patches: int | None = None, *, mergeable: bool = False
) -> list[tuple[int, int, int]]:
    """The grids as integers.

    Raises ValueError for a wrong shape, empty or (where `mergeable`) odd sides, or another number of patches.
    """
    if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or grid_thws.shape[0] == 0:
        raise ValueError(f"grid_thws has shape {list(grid_thws.shape)}; it must be [items, 3] (t, h, w)")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    for t, h, w in grids:
        if not 1 <= t <= MAX_FRAMES or h < 1 or w < 1:
            raise ValueError(f"grid (t, h, w) = {(t, h, w)}: t must be 1..{MAX_FRAMES}, h and w positive")
        if mergeable and (h % 2 or w % 2):
            raise ValueError(f"grid (t, h, w) = {(t, h, w)}: h and w must be even, 2 x 2 patches make one token")
    total = sum(t * h * w for t, h, w in grids)
    if num_patches is not None and total != num_patches:
        raise ValueError(f"grid_thws describe {total} patches but {num_patches} were given")
    return grids
