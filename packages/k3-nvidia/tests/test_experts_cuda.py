"""experts.cu without a GPU: the source runs on the CPU, fiber by fiber, through the host path and the real work list.

Threads run in random order, copies arrive when they like, products run as late as they may, shared memory and outputs
start as NaN; results are compared with float64. Mutants of the source must be caught. What the emulation cannot show:
visibility between proxies, the accuracy of the special functions, registers that the assembler hands out, and speed.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as test_expert_kernels, whichever is imported first
pytest.importorskip("triton")

from cuda_emulated import emulated

from k3_core.contracts import mxfp4
from k3_nvidia.kernels import experts, experts_cuda, moe_layout, moe_worklist
from k3_nvidia.kernels.moe_layout import SwizzledExperts
from k3_nvidia.tuning.experts import CudaTile, Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the device runs the kernels themselves")
BETA, LINEAR_BETA, TOP_K = 4.0, 25.0, 2
ACT = (1, BETA, LINEAR_BETA)
#: One rounding to bfloat16 is half an ulp at most; sums and activation in fp32 add what is far below a quarter of it.
TOLERANCE = 2**-9 + 2**-11
STREAMED, RESIDENT = CudaTile(2, 2, 160, 4), CudaTile(2, 2, 160, 5, parts=2)


def draw(width: int, latent: int, num: int = 5) -> SwizzledExperts:
    """Random experts: any words are legal codes; scales keep the activations around one."""
    gen = torch.Generator().manual_seed(3)
    out = moe_layout.empty_swizzled(num, width, latent, "cpu")
    for words in (out.w13, out.w2):
        words.random_(-(1 << 15), 1 << 15, generator=gen)
    for scales in (out.s13, out.s2):
        scales.view(torch.uint8).random_(121, 126, generator=gen)
    packed = moe_layout.empty_swizzled(num, width, latent, "cpu")  # with zeros where it is padded
    for e in range(num):
        moe_layout.pack_expert_(packed, e, **moe_layout.unpack_expert(out, e))
    return packed


def ragged(tokens: int, counts: list[int]) -> Tensor:
    """ids int32 [tokens, 2]: expert 0 is everybody's first, the others take counts of them in turn, -1: nobody."""
    ids = torch.full((tokens, TOP_K), -1, dtype=torch.int32)
    ids[:, 0] = 0
    ids[: sum(counts), 1] = torch.repeat_interleave(torch.arange(1, 1 + len(counts)), torch.tensor(counts)).int()
    return ids


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


def exact(weights: SwizzledExperts, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations of rows x in float64, and the matrix of the down product."""
    w = {k: mxfp4.unpack(*v, dtype=torch.float64) for k, v in moe_layout.unpack_expert(weights, index).items()}
    return situ(x.double() @ w["gate"].t(), x.double() @ w["up"].t()), w["down"]


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty

    def empty(*size, **named):  # type: ignore[no-untyped-def]
        out = plain(*size, **named)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", empty)


def errors(
    monkeypatch: pytest.MonkeyPatch, width: int, latent: int, ids: Tensor, tile13: CudaTile, tile2: CudaTile,
    emap: Tensor | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Error norms of both products against float64 of their inputs (infinite where a row is missing or too many)."""
    poisoned(monkeypatch)
    weights, tokens = draw(width, latent), ids.shape[0]
    gen = torch.Generator().manual_seed(1)
    x = torch.full((tokens, latent + 8), float("nan"), dtype=torch.bfloat16)[:, :latent]  # padded strides
    x.copy_(torch.randn(tokens, latent, generator=gen) * 0.5)
    plan = Plan(16, 4, 1, 4, 2, 4, 1, 4, 2, 8, 64, False, cuda13=tile13, cuda2=tile2)
    lst = moe_worklist.build(ids, weights.num_experts, plan.item_n, emap, False, sum(plan.down_n))
    y = experts.run_w13(x, weights, lst, TOP_K, ACT, plan)
    d = experts.run_w2(y, weights, lst, plan)
    flat = ids.flatten().long()
    local = torch.where(flat < 0, -1, flat if emap is None else emap[flat.clamp(min=0)].long())
    order = torch.cat([(local == e).nonzero().flatten() for e in range(weights.num_experts)])
    if not y[len(order) :].isnan().all() or not d[: len(local)][local < 0].isnan().all():
        return float("inf"), float("inf")
    off = torch.zeros(4, dtype=torch.float64)
    for e in range(weights.num_experts):
        at = (local[order] == e).nonzero().flatten()
        want, down = exact(weights, e, x[order[at] // TOP_K])
        got = y[at, :width].double()
        off += torch.stack([(got - want).square().sum(), want.square().sum(), *(
            z.square().sum() for z in (d[order[at]].double() - got @ down.t(), got @ down.t()))])  # fmt: skip
    found = (off[0] / off[1]).sqrt().item(), (off[2] / off[3]).sqrt().item()
    return tuple(f if f == f else float("inf") for f in found)  # type: ignore[return-value]


#: name: width, latent, ids, tiles of gate/up and down. Rows of gate/up: 256 (one part), 384 (two, or one and a half).
CASES = {
    "tp8-like": (128, 192, ragged(160, [0, 1, 37, 18]), STREAMED, RESIDENT),
    "tp16-like": (192, 256, ragged(150, [1, 64, 16]), replace(STREAMED, groups=3, tiles=1), replace(RESIDENT, parts=1)),
    "part of a tile": (96, 128, ragged(33, [32, 1]), replace(STREAMED, widest=48), replace(RESIDENT, widest=48)),
    "several items": (96, 128, ragged(70, [33, 8]), replace(STREAMED, widest=32), CudaTile(2, 2, 32, 5, parts=9)),
    "streamed down": (192, 320, ragged(40, [16, 17]), CudaTile(2, 2, 48, 7), CudaTile(2, 2, 48, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_products_against_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = emulated(monkeypatch)
    found = errors(monkeypatch, *CASES[name])
    assert ran == ["experts_cuda"] * 2
    assert max(found) < TOLERANCE, found


def test_expert_parallel_ranks_leave_other_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch, seed=2)
    ids = ragged(24, [9, 1, 0, 12])
    emap = torch.tensor([-1, 0, 1, 2, 3], dtype=torch.int32)
    tile = replace(STREAMED, widest=32)
    found = errors(monkeypatch, 64, 128, ids, tile, replace(RESIDENT, widest=32, parts=1), emap)
    assert max(found) < TOLERANCE, found


#: (what, text of the source, what replaces it).
MUTANTS = [
    ("operands read before they came", "barrier_wait(shared + FULL + 8 * me.ring.stage, me.ring.phase);", ""),
    ("stages filled while they are read", "            barrier_wait(shared + EMPTY + 8 * ring.stage, ring.phase ^ 1);\n"
     "            if (thread < 32)", "            if (thread < 32)"),
    ("registers of a product in flight", "products_end<1>();", "products_end<2>();"),
    ("a stage given back too early", "TILES == 1 ? 4 - i : 2, gives", "TILES == 1 ? 4 - i : 1, 1"),
    ("the last column block", "kb < columns; kb += 2 / TILES", "kb < columns - 1; kb += 2 / TILES"),
    ("gate and up swapped", "activated(args, c[j][0], c[j][2])", "activated(args, c[j][2], c[j][0])"),
    ("the scale of the other columns", "high = by[i % 2 * 2 + 1]", "high = by[i % 2 * 2]"),
    ("the scale of the other row", "low = by[i % 2 * 2],", "low = by[2 - i % 2 * 2],"),
    ("no swizzle of the tokens", "(piece ^ row % 8) * 16", "piece * 16"),
    ("tokens of the item before", "barrier_wait(shared + EMPTY_TOKENS + 8 * kb, phase ^ 1);", ""),
    ("tokens before they came", "barrier_wait(shared + FULL_TOKENS + 8 * kb, me.items & 1);\n        copies", "copies"),
    ("the last token", "least(row + 16 * i, item.count - 1)", "least(row + 16 * i, item.count - 2)"),
    ("rows of the down product", "from ^ 1)", "from)"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_caught(what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(_: str, source: str) -> str:
        assert source.count(old) == 1, old
        return source.replace(old, new)

    monkeypatch.setattr(experts_cuda, "_multiprocessors", lambda _: 1)  # stages and resident tokens come again
    case = 64, 384, ragged(30, [17, 12]), CudaTile(2, 2, 32, 4), CudaTile(2, 2, 32, 4, parts=1)
    for seed in range(3):
        emulated(monkeypatch, edit, seed)
        try:
            found = errors(monkeypatch, *case)
        except RuntimeError:  # hangs
            return
        if not max(found) < TOLERANCE:
            return
    raise AssertionError(what)
