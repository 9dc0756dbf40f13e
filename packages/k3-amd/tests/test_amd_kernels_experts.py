"""Work lists, unpacking and forms of the expert kernels beyond what the conformance suite asks."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import triton
import triton.language as tl

from k3_amd import tuning
from k3_amd.kernels import experts, experts_layout, launch
from k3_amd.kernels.device import experts as device
from k3_core.checkpoint import unpack_mxfp4
from k3_core.contracts import moe, situ
from k3_core.operators import ExpertWeights
from k3_core.testing.triton_interpreter import round_to_nearest

if launch.interpreting():
    round_to_nearest()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def choices(tokens: int, num: int, top_k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "num", "top_k", "block"), [(1, 20, 4, 16), (40, 24, 8, 16), (700, 12, 3, 32), (5, 900, 16, 16)]
)
def test_work_list_is_the_sorted_pairs(tokens: int, num: int, top_k: int, block: int) -> None:
    ids = choices(tokens, num, top_k)
    ids[-1, 0] = -1
    keep = torch.arange(0, num, 2, dtype=torch.int32, device=DEVICE)  # every other expert is here
    emap = torch.full((num,), -1, dtype=torch.int32, device=DEVICE)
    emap[keep.long()] = torch.arange(len(keep), dtype=torch.int32, device=DEVICE)
    lst = experts.build_worklist(ids, len(keep), block, emap)
    local = torch.where(ids >= 0, emap[ids.clamp(min=0).long()], -1).flatten().cpu()
    want = [p for e in range(len(keep)) for p in (local == e).nonzero().flatten().tolist()]
    assert lst.sorted[: len(want)].tolist() == want
    items, position = [], 0
    for e in range(len(keep)):
        count = int((local == e).sum())
        items += [[e, position + j, min(block, count - j), 0] for j in range(0, count, block)]
        position += count
    assert int(lst.number[0]) == len(items) <= lst.max_items
    assert lst.work[: 4 * len(items)].view(-1, 4).tolist() == items


@triton.jit
def _unpack_all(w_ptr, s_ptr, out_ptr, WIDE: tl.constexpr):
    """One row of 64 columns a program."""
    row = tl.program_id(0)
    w = tl.load(w_ptr + row * 32 + tl.arange(0, 32)[None, None, :])
    zero = tl.zeros((1, 1, 1), tl.int32)
    low, high = device.unpack(
        w, tl.load(s_ptr + row * 2 + zero), tl.load(s_ptr + row * 2 + 1 + zero), 1, 64, WIDE
    )  # fmt: skip
    column = tl.arange(0, 32)[None, :]
    tl.store(out_ptr + row * 64 + column, low)
    tl.store(out_ptr + row * 64 + 32 + column, high)


@pytest.mark.parametrize("wide", [False, True])
def test_every_code_and_scale_unpacks_exactly(wide: bool) -> None:
    scales = torch.arange(0, 256 if wide else 129, dtype=torch.uint8)
    rows = len(scales)
    packed = torch.arange(256, dtype=torch.uint8).repeat(1 + rows // 8)[: rows * 32].reshape(rows, 32)
    scale = torch.stack((scales, scales.flip(0)), dim=-1)
    want = unpack_mxfp4(packed, scale, torch.float32)
    out = torch.empty(rows, 64, dtype=torch.bfloat16, device=DEVICE)
    _unpack_all[(rows,)](experts_layout.pair_halves(packed).to(DEVICE), scale.to(DEVICE), out, WIDE=wide)
    # bfloat16 has the codes of every scale but the ends: below 2^-126 a device may flush, 6 * 2^127 and NaN differ.
    plain = (want == 0) | ((want.abs() >= 2.0**-126) & (want.abs() < 2.0**127))
    assert torch.equal(out.float().cpu()[plain], want[plain])
    assert plain.float().mean() > 0.9
    if wide:
        assert out.float().cpu()[scale.repeat_interleave(32, -1) == 255].isnan().all()


def random_experts(num: int, width: int, latent: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator).to(DEVICE)

    return ExpertWeights(draw(0, 256, num, 2 * width, latent // 2), draw(120, 124, num, 2 * width, latent // 32),
                         draw(0, 256, num, latent, width // 2), draw(120, 124, num, latent, width // 32))  # fmt: skip


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Rows through MXFP8 and back: 32 columns share the power of two that fits their largest into e4m3."""
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@pytest.mark.gpu
@gpu
@pytest.mark.skipif(launch.HIP and "gfx950" not in str(CUDA and launch.architecture(torch.device("cuda", 0))),
                    reason="scaled products are gfx950's")  # fmt: skip
def test_the_lossy_form_is_the_product_of_rounded_activations() -> None:
    """mxfp8 equals exact arithmetic on activations rounded to MXFP8, and differs from the exact form by that alone."""
    width, latent, tokens, top_k, num = 192, 512, 40, 4, 8
    weights = random_experts(num, width, latent)
    x = torch.randn(tokens, latent, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
    ids, share = choices(tokens, num, top_k), torch.full((tokens, top_k), 0.25, device=DEVICE)
    named = dict(hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0)
    got = {f: experts.experts(x, experts_layout.prepare(weights, f), share, ids, **named).double()
           for f in ("scaled", "unpacked", "mxfp8")}  # fmt: skip
    w13 = unpack_mxfp4(weights.w13, weights.w13_scale, torch.float64)
    w2 = unpack_mxfp4(weights.w2, weights.w2_scale, torch.float64)
    want = torch.zeros_like(got["scaled"])
    rounded = mxfp8(x).double()
    for e in range(num):
        rows, column = (ids == e).nonzero(as_tuple=True)
        gate, up = (rounded[rows] @ w13[e].T).chunk(2, dim=-1)
        y = mxfp8(situ.situ_and_mul(gate, up, 4.0, 25.0).bfloat16()).double()
        want.index_add_(0, rows, (y @ w2[e].T) * share[rows, column].double()[:, None])
    assert (got["mxfp8"] - want).norm() / want.norm() < 1e-2  # bf16 and e4m3 roundings that fall the other way
    assert 1e-2 < (got["mxfp8"] - got["scaled"]).norm() / want.norm() < 0.2
    assert (got["unpacked"] - got["scaled"]).norm() / want.norm() < 3e-3


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("arch", tuning.ARCHITECTURES)
def test_a_captured_call_replays_for_another_routing(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.TABLE, arch)
    num, top_k, tokens = 16, 4, 24
    packed = experts_layout.prepare(random_experts(num, 64, 128))
    x = torch.randn(tokens, 128, device=DEVICE).bfloat16()
    ids, share = choices(tokens, num, top_k), torch.rand(tokens, top_k, device=DEVICE)
    out = torch.empty_like(x)
    named = dict(hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0, out=out)
    experts.experts(x, packed, share, ids, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.experts(x, packed, share, ids, **named)
    for seed in (5, 6):
        ids.copy_(choices(tokens, num, top_k, seed))
        graph.replay()
        replayed = out.clone()
        experts.experts(x, packed, share, ids, **named)
        assert torch.equal(replayed, out)


def test_width_of_a_rank_is_padded_by_the_layout_only() -> None:
    """A third of an expert (96 wide, no power of two) computes what its slice of the whole computes."""
    num, width, latent = 2, 96, 64
    weights = random_experts(num, width, latent)
    x = torch.randn(3, latent, generator=torch.Generator().manual_seed(2)).to(DEVICE).bfloat16()
    ids = choices(3, num, 2)
    share = torch.rand(3, 2, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    got = experts.experts(
        x,
        experts_layout.prepare(weights, "unpacked"),
        share,
        ids,
        hidden_act="silu",
        situ_beta=None,
        situ_linear_beta=None,
    )
    held = moe.PackedExperts(weights.w13, weights.w13_scale, weights.w2, weights.w2_scale)
    want = moe.latent_experts(x.float(), share, ids.long(), held, situ.gated_activation("silu", None, None))
    assert (got.float() - want).norm() / want.norm() < 1e-2
