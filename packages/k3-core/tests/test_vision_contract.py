"""Tower, positions, rotation, merge and projector against the released code, and the properties they must have."""

import dataclasses
import functools

import golden_data
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3_core.contracts import vision
from k3_core.contracts.norm import VISION_EPS
from k3_core.contracts.vision import BlockWeights, ProjectorWeights, TowerWeights

IMAGES = ["rgb_56x56", "rgba_100x60", "rgb_pad_45x131"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    return golden_data.arrays("k3-tiny-goldens/vision.npz")


@functools.cache
def stored_tensors() -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(golden_data.checkpoint("k3-tiny").glob("*.safetensors"))[-2:]:
        tensors |= load_file(shard)
    return tensors


@functools.cache
def weights(dtype: torch.dtype) -> tuple[TowerWeights, ProjectorWeights]:
    t = {name: tensor.to(dtype) for name, tensor in stored_tensors().items()}
    parts = ("norm0", "wqkv", "wo", "norm1", "mlp.fc0", "mlp.fc1")
    blocks = [BlockWeights(*(t[f"vision_tower.encoder.blocks.{i}.{part}.weight"] for part in parts)) for i in range(2)]
    tower = TowerWeights(
        t["vision_tower.patch_embed.proj.weight"],
        t["vision_tower.patch_embed.pos_emb.weight"],
        blocks,
        t["vision_tower.encoder.final_layernorm.weight"],
        num_heads=4,
    )
    projector = (t[f"mm_projector.{name}.weight"] for name in ("proj.0", "proj.2", "post_norm"))
    return tower, ProjectorWeights(*projector, eps=1e-5)


def item(name: str) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(recorded()[f"{name}.pixel_values"]), torch.from_numpy(recorded()[f"{name}.grid_thw"])


def largest(ours: Tensor, theirs: np.ndarray) -> float:
    return float((ours.double() - torch.from_numpy(theirs).double()).abs().max())


# --- rounding --------------------------------------------------------------------------------------------------------


def test_every_norm_rounds_once_in_bf16():
    """As torch's own RMSNorm does; rounding before the weight, too, would pass the tolerances against the goldens."""
    tower, projector = weights(torch.bfloat16)
    pixels, grids = item("rgb_56x56")
    norm = functools.partial(torch.nn.functional.rms_norm, eps=VISION_EPS)
    layer, heads = tower.blocks[0], tower.num_heads
    x = vision.patch_embed(pixels, tower.patch_proj) + vision.positions(tower.pos_emb, grids)
    hidden, patches = x.shape[-1:], [len(x)]
    cos, sin = vision.rope_2d(grids, layer.wo.shape[1] // heads)

    q, k, v = (norm(x, hidden, layer.norm0) @ layer.wqkv.T).unflatten(-1, (3, heads, -1)).unbind(1)
    after = x + vision.attend(vision.apply_rope(q, cos, sin), vision.apply_rope(k, cos, sin), v).flatten(1) @ layer.wo.T
    inner = torch.nn.functional.gelu(norm(after, hidden, layer.norm1) @ layer.fc0.T, approximate="tanh")
    expected = after + inner @ layer.fc1.T
    got = vision.block(x, layer, heads, cos, sin, patches)
    assert torch.equal(got, expected)

    merged = vision.tower(pixels, grids, dataclasses.replace(tower, blocks=[layer]))
    assert torch.equal(merged, vision.merge(norm(expected, hidden, tower.final_layernorm), grids))
    wide = torch.nn.functional.gelu(merged.flatten(1) @ projector.linear_1.T) @ projector.linear_2.T
    last = torch.nn.functional.rms_norm(wide, wide.shape[-1:], projector.post_norm, projector.eps)
    assert torch.equal(vision.projector(merged, projector), last)


# --- against the released code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*IMAGES, "video_t2"])
def test_tower_and_projector_fp32(name, dtype):
    tower, projector = weights(dtype)
    merged = vision.tower(*item(name), tower)
    assert largest(merged, recorded()[f"{name}.tower_fp32"]) < 1e-4
    assert largest(vision.projector(merged, projector), recorded()[f"{name}.projector_fp32"]) < 1e-4


@pytest.mark.parametrize("name", [*IMAGES, "video_t2"])
def test_projector_bf16(name):
    tower, projector = weights(torch.bfloat16)
    ours = vision.projector(vision.tower(*item(name), tower), projector)
    assert ours.dtype == torch.bfloat16
    difference = ours.float() - torch.from_numpy(recorded()[f"{name}.projector_bf16"])
    assert difference.abs().max() < 0.1
    assert difference.square().mean().sqrt() < 0.02


@pytest.mark.parametrize("name", IMAGES)
def test_norm_eps_is_2_to_minus_23(name):
    """The recorded run with eps 2^-7 is reproduced with that eps, and is far from the right one."""
    tower, _ = weights(torch.float32)
    theirs = recorded()[f"{name}.tower_fp32_eps2m7"]
    assert largest(vision.tower(*item(name), tower, norm_eps=2.0**-7), theirs) < 1e-4
    assert largest(vision.tower(*item(name), tower), theirs) > 0.02
    assert VISION_EPS == 2.0**-23


@pytest.mark.parametrize("tag", ["fp32", "bf16"])
def test_patch_embedding_with_positions(tag):
    tower, _ = weights(DTYPES[tag])
    items = [item(name) for name in IMAGES]
    pixels, grids = torch.cat([p for p, _ in items]), torch.cat([g for _, g in items])
    x = vision.patch_embed(pixels, tower.patch_proj) + vision.positions(tower.pos_emb, grids)
    ulp = 2.0**-7 * float(np.abs(recorded()[f"batched.patch_embed_{tag}"]).max())
    assert largest(x, recorded()[f"batched.patch_embed_{tag}"]) < (1e-5 if tag == "fp32" else ulp)


def test_every_block_of_a_batch():
    tower, _ = weights(torch.float32)
    items = [item(name) for name in IMAGES]
    pixels, grids = torch.cat([p for p, _ in items]), torch.cat([g for _, g in items])
    x = vision.patch_embed(pixels, tower.patch_proj) + vision.positions(tower.pos_emb, grids)
    cos, sin = vision.rope_2d(grids, 32)
    for index, layer in enumerate(tower.blocks):
        x = vision.block(x, layer, 4, cos, sin, [int(g.prod()) for g in grids])
        assert largest(x, recorded()[f"batched.block{index}_fp32"]) < 1e-4


@pytest.mark.parametrize("shape", ["1x2x4", "1x64x64", "1x10x6", "1x100x30", "1x64x2", "1x512x2"])
@pytest.mark.parametrize("tag", ["fp32", "bf16"])
def test_interpolated_positions(shape, tag):
    table = golden_data.arrays("ops/vision_pos.npz")
    theirs = torch.from_numpy(table[f"pos_{shape}_{tag}"])
    grid = torch.tensor([[int(n) for n in shape.split("x")]])
    ours = vision.positions(torch.from_numpy(table["pos_table"]).to(DTYPES[tag]), grid).float()
    ulp = 2.0**-8 * theirs.abs().clamp_min(2.0**-126)  # a BF16 ulp is 2^-8..2^-7 of the value
    assert ((ours - theirs).abs() <= (1e-6 if tag == "fp32" else 2 * ulp)).all()


@pytest.mark.parametrize("shape", ["2x6x4", "4x4x4"])
def test_positions_of_several_frames(shape):
    """The recorded fp32 table comes from a module that had been BF16: its time term holds BF16 values."""
    table = golden_data.arrays("ops/vision_pos.npz")
    space = torch.from_numpy(table["pos_table"])
    t, h, w = (int(n) for n in shape.split("x"))
    in_bf16 = vision.positions(space.bfloat16(), torch.tensor([[t, h, w]])).float()
    assert torch.equal(in_bf16, torch.from_numpy(table[f"pos_{shape}_bf16"]))
    time = vision.time_table(t, 8).bfloat16().float()
    expected = (vision.interpolate_positions(space, h, w)[None] + time[:, None]).flatten(0, 1)
    assert largest(expected, table[f"pos_{shape}_fp32"]) < 1e-6
    exact = vision.positions(space, torch.tensor([[t, h, w]]))
    assert largest(exact, table[f"pos_{shape}_fp32"]) < 2.0**-8
    assert largest(vision.time_table(4, 1024), table["time_table_1024"]) < 1e-6


def test_rotation():
    table = golden_data.arrays("ops/vision_pos.npz")
    cos, sin = vision.rope_2d(torch.from_numpy(table["rope_grid"]), 128)
    assert largest(cos, table["rope_cos"]) < 1e-5
    assert largest(sin, table["rope_sin"]) < 1e-5
    for name in ("rope_q", "rope_k"):
        x = torch.from_numpy(table[name])
        assert largest(vision.apply_rope(x, cos, sin), table[f"{name}_fp32"]) < 1e-5
        rounded = vision.apply_rope(x.bfloat16(), cos, sin).float()
        theirs = torch.from_numpy(table[f"{name}_bf16"])
        assert ((rounded - theirs).abs() <= 2.0**-7 * theirs.abs() + 1e-5).all()


def test_rotation_at_the_corners_of_the_table():
    table = golden_data.arrays("ops/vision_pos.npz")
    for (y, x), cos_row, sin_row in zip(
        table["rope_pts_yx"], table["rope_pts_cos"], table["rope_pts_sin"], strict=True
    ):
        cos, sin = vision.rope_2d(torch.tensor([[1, int(y) + 1, int(x) + 1]]), 128)
        # The recorded angles were formed in fp32: at 511 a half ulp of the angle is 1.5e-5.
        assert largest(cos[-1], cos_row) < 5e-5
        assert largest(sin[-1], sin_row) < 5e-5


# --- properties ------------------------------------------------------------------------------------------------------


def test_x_turns_first():
    cos, _ = vision.rope_2d(torch.tensor([[1, 3, 5]]), 8, torch.float64)
    cos = cos.view(3, 5, 4)
    assert torch.allclose(cos[2, 0, 0::2], torch.ones(2, dtype=torch.float64)), "column 0: even pairs stand still"
    assert torch.allclose(cos[0, 4, 1::2], torch.ones(2, dtype=torch.float64)), "row 0: odd pairs stand still"
    assert cos[0, 4, 0] == pytest.approx(np.cos(4.0))
    assert cos[2, 0, 1] == pytest.approx(np.cos(2.0))
    assert cos[2, 4, 3] == pytest.approx(np.cos(2.0 * 10000 ** (-4 / 8)))


def test_rotation_keeps_lengths_and_depends_on_differences_only():
    generator = torch.Generator().manual_seed(0)
    cos, sin = vision.rope_2d(torch.tensor([[1, 6, 7]]), 16, torch.float64)
    q, k = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    turned_q = vision.apply_rope(q.expand(42, 1, 16), cos, sin)
    turned_k = vision.apply_rope(k.expand(42, 1, 16), cos, sin)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(42, 1))
    scores = (turned_q @ turned_k.flatten(0, 1).T).squeeze(1).view(6, 7, 6, 7)
    assert torch.allclose(scores[1, 2, 3, 4], scores[3, 1, 5, 3])


def test_identity_and_half_pixel_interpolation():
    table = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(vision.interpolate_positions(table, 4, 6), table.flatten(0, 1))
    ours = vision.interpolate_positions(table, 8, 4).view(8, 4, 3)
    for i, j in [(0, 0), (3, 1), (7, 3), (5, 2)]:
        y, x = max((i + 0.5) * 4 / 8 - 0.5, 0), max((j + 0.5) * 6 / 4 - 0.5, 0)
        y0, x0 = int(y), int(x)
        y1, x1, fy, fx = min(y0 + 1, 3), min(x0 + 1, 5), y - y0, x - x0
        top = table[y0, x0] * (1 - fx) + table[y0, x1] * fx
        bottom = table[y1, x0] * (1 - fx) + table[y1, x1] * fx
        assert torch.allclose(ours[i, j], top * (1 - fy) + bottom * fy)


def test_one_frame_has_no_time_term():
    table = torch.zeros(4, 4, 8)
    assert not vision.positions(table, torch.tensor([[1, 4, 4]])).any()
    assert vision.positions(table, torch.tensor([[2, 4, 4]]))[0].any(), "frame 0 of a clip has cos(0) = 1"


def test_merge_order_and_mean_over_frames():
    x = torch.arange(2 * 4 * 6, dtype=torch.float64)[:, None]
    merged = vision.merge(x, torch.tensor([[2, 4, 6]]))
    assert merged.shape == (6, 4, 1)
    first = [0, 1, 6, 7]  # rows 0 and 1, columns 0 and 1, of frame 0; frame 1 is 24 further
    assert merged[0, :, 0].tolist() == [n + 12.0 for n in first]
    assert merged[4, :, 0].tolist() == [n + 12.0 for n in (14, 15, 20, 21)]


def test_items_do_not_see_one_another():
    tower, _ = weights(torch.float64)
    items = [item(name) for name in IMAGES]
    together = vision.tower(torch.cat([p for p, _ in items]), torch.cat([g for _, g in items]), tower)
    apart = torch.cat([vision.tower(p, g, tower) for p, g in items])
    assert torch.allclose(together, apart, rtol=0, atol=1e-10)


def test_attention_in_query_blocks_equals_attention_at_once(monkeypatch):
    q, k, v = torch.randn(3, 50, 2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole = vision.attend(q, k, v)
    monkeypatch.setattr(vision, "_SCORE_ELEMENTS", 700)
    assert torch.allclose(vision.attend(q, k, v), whole, rtol=0, atol=1e-14)


MUTANTS = {
    "tanh GELU in the projector": ("gelu_projector", 3e-4),
    "q and k rows exchanged with v": ("wqkv", 1e-2),
    "fc0 and fc1 norms exchanged": ("norms", 1e-2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    """Each deliberate error moves the result by more than the tolerance that the right one keeps by far."""
    tower, projector = weights(torch.float64)
    kind, floor = MUTANTS[name]
    image = IMAGES[1]
    if kind == "gelu_projector":
        tanh = functools.partial(torch.nn.functional.gelu, approximate="tanh")
        monkeypatch.setattr(vision.F, "gelu", lambda x, approximate: tanh(x))
    else:
        broken = []
        for block in tower.blocks:
            if kind == "wqkv":
                q, k, v = block.wqkv.chunk(3)
                broken.append(dataclasses.replace(block, wqkv=torch.cat([v, k, q])))
            else:
                broken.append(dataclasses.replace(block, norm0=block.norm1, norm1=block.norm0))
        tower = dataclasses.replace(tower, blocks=broken)
    ours = vision.projector(vision.tower(*item(image), tower), projector)
    assert largest(ours, recorded()[f"{image}.projector_fp32"]) > floor


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[1, 3, 4]], "even"),
        ([[1, 4, 4], [1, 2, 2]], "describe 20 patches but 16"),
        ([[5, 4, 4]], "t must be"),
        ([[0, 4, 4]], "t must be"),
        ([1, 4, 4], "items, 3"),
        (np.zeros((0, 3), dtype=np.int64), "items, 3"),
    ],
)
def test_wrong_grids_are_refused(grid, message):
    tower, _ = weights(torch.float32)
    patches = 12 if message == "even" else 16
    with pytest.raises(ValueError, match=message):
        vision.tower(torch.zeros(patches, 3, 14, 14), torch.as_tensor(np.array(grid)), tower)


def test_wrong_patches_are_refused():
    tower, _ = weights(torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        vision.patch_embed(torch.zeros(4, 3, 16, 16), tower.patch_proj)
    with pytest.raises(ValueError, match="multiple of 4"):
        vision.rope_2d(torch.tensor([[1, 2, 2]]), 6)
