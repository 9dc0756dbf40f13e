"""kda_chunk.cu, kda_passes.cu and kda_scan_bulk.cu without a GPU: the sources run on the CPU, fiber by fiber.

Threads run in random order, copies arrive when they like and shared memory starts as NaN, so a missing barrier shows.
Mutants of the sources must be caught. What the emulation cannot show: the accuracy of the special functions, and speed.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as test_kda_kernels, whichever is imported first
pytest.importorskip("triton")

from cuda_emulated import emulated

from k3_core.contracts import kda as contract
from k3_nvidia.kernels import kda_chunk_cuda, kda_passes_cuda, kda_prefill
from k3_nvidia.kernels.kda_plan import plan_prefill
from k3_nvidia.tuning import kda as tuning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the device runs the kernels themselves")
BOUND, DIM, HEADS = -5.0, 128, 2
NAMES = ("w", "ut", "qg", "kg", "a", "gamma")
ROUNDING = 2.0**-9
#: Error norms. One rounding to bfloat16; products of two rounded operands; solved rows, whose M is such products.
TOLERANCE = {
    "qg": 1.05 * ROUNDING, "kg": 1.05 * ROUNDING, "a": 3 * ROUNDING, "w": 2 * ROUNDING, "ut": 2 * ROUNDING,
    "gamma": 1e-6,
}  # fmt: skip
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(tokens: int, kind: str, heads: int = HEADS) -> Inputs:
    """q, k, v as columns of one packed tensor, z, beta, a_log, dt_bias."""
    gen = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    qkv, z, beta = normal(tokens, 3, heads, DIM), normal(tokens, heads, DIM), torch.sigmoid(normal(tokens, heads))
    if kind == "bound":
        z = torch.full_like(z, 20.0)
    if kind in ("long", "equal"):
        z = z - 9
    if kind == "equal":
        qkv[:, 1] = qkv[:1, 1]
        beta = torch.sigmoid(normal(tokens, heads) + 4)
    if kind == "far":  # values and keys far from one
        qkv = qkv * torch.tensor([1e4, 1e4, 1e6])[None, :, None, None]
    q, k, v = qkv.bfloat16().unbind(1)
    return q, k, v, z.bfloat16(), beta, normal(heads) * 0.3, normal(heads, DIM) * 0.5


def outputs(places: int) -> tuple[Tensor, ...]:
    nan = float("nan")
    big = [torch.full((places, 64 * DIM), nan, dtype=torch.bfloat16) for _ in range(4)]
    return *big, torch.full((places, 64 * 64), nan, dtype=torch.bfloat16), torch.full((places, DIM), nan)


def exact(inputs: Inputs, chunks: Tensor) -> list[Tensor]:
    """The formulas of kda_chunk in fp64."""
    q, k, v, z, beta, a_log, dt_bias = (x.double() for x in inputs)
    q, k = contract.normalize_qk(q, k, torch.float64)
    g = contract.gate(z, a_log, dt_bias, BOUND)
    found: list[list[Tensor]] = [[] for _ in NAMES]
    for token, rows, *_ in chunks.tolist():

        def pad(x: Tensor, token: int = token, rows: int = rows) -> Tensor:
            full = x.new_zeros(64, *x.shape[1:])
            full[:rows] = x[token : token + rows]
            return full.transpose(0, 1)

        Q, K, V, G, B = pad(q), pad(k), pad(v), pad(g).cumsum(1), pad(beta[..., None])[..., 0]
        decay = (G[:, :, None] - G[:, None, :]).clamp(max=0).exp()
        M = torch.einsum("nic,njc,nijc->nij", K, K, decay).tril(-1) * B[:, :, None]
        T = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + M) * B[:, None, :]
        end = G[:, -1:]
        A = torch.einsum("nic,njc,nijc->nij", Q, K, decay).tril()
        parts = (-T @ (K * G.exp()), (T @ V).transpose(1, 2), Q * G.exp(), K * (end - G).exp(), A, end[:, 0].exp())
        for store, part in zip(found, parts, strict=True):
            store.append(part.reshape(part.shape[0], -1))
    return [torch.cat(x) for x in found]


def wrong(kind: str, bounds: list[int]) -> dict[str, float]:
    """Outputs of the chunk kernel whose error norm is above their tolerance (or no number)."""
    inputs = draw(bounds[-1], kind)
    chunks = plan_prefill(bounds, HEADS, "cpu").chunks
    got = outputs(chunks.shape[0] * HEADS)
    kda_chunk_cuda.chunk(*inputs, BOUND, chunks, *got, blocks=3)
    found = {}
    for name, g, w in zip(NAMES, got, exact(inputs, chunks), strict=True):
        error = ((g.double() - w).norm() / w.norm()).item()
        if not error <= TOLERANCE[name]:
            found[name] = error
    return found


@pytest.mark.parametrize("kind", ["mixed", "bound", "long", "equal", "far"])
def test_every_output_against_fp64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    assert not wrong(kind, [0, 64, 64 + 37, 64 + 38])


def test_any_order_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, chunks = draw(64, "mixed"), plan_prefill([0, 64], HEADS, "cpu").chunks
    found = []
    for seed in range(4):
        emulated(monkeypatch, seed=seed)
        found.append(outputs(HEADS))
        kda_chunk_cuda.chunk(*inputs, BOUND, chunks, *found[-1], blocks=3)
    for a, b in pairwise(found):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


#: (what, text of the source, what replaces it).
CHUNK_MUTANTS = [
    ("a missing barrier before the keys are read", "sync_all();\n        UNROLL for (int tile",
     "UNROLL for (int tile"),
    ("a warp that waits for nobody", "            await(4, 64);\n", ""),
    ("the diagonal in M", "here > col ? M", "here >= col ? M"),
    ("beta of another column", "i % 2 ? x.z : x.x", "i % 2 ? x.x : x.z"),
    ("one term of T for U", "mma_bf16(rest[e], x.x, lo[b].x[e], lo[b].x[2 + e]);", ""),
    ("the own half's factors against the first half", "tile < 4 ? kout[s].x : kin[s].x", "kin[s].x"),
    ("rows after the end", "const bool in0 = row < rows", "const bool in0 = true"),
    ("a level of the inverse", "level <= 4", "level <= 3"),
]  # fmt: skip


def edit_of(file: str, old: str, new: str):  # type: ignore[no-untyped-def]
    def edit(name: str, source: str) -> str:
        if name != file:
            return source
        assert source.count(old) == 1, old
        return source.replace(old, new)

    return edit


@pytest.mark.parametrize(("what", "old", "new"), CHUNK_MUTANTS, ids=[m[0] for m in CHUNK_MUTANTS])
def test_mutants_of_the_chunk_kernel_are_caught(what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (kind, bounds) in enumerate([("long", [0, 64]), ("equal", [0, 64]), ("mixed", [0, 37, 100])]):
        emulated(monkeypatch, edit_of("kda_chunk", old, new), seed)
        if wrong(kind, bounds):
            return
    raise AssertionError(what)


def prefill_errors(
    monkeypatch: pytest.MonkeyPatch, passes: dict[str, Any], state_dtype: torch.dtype, cut: int
) -> tuple[float, float]:
    """Error norms of outputs and states of a batch against the contract in fp64."""
    monkeypatch.setattr(kda_chunk_cuda, "refusal", lambda *_: "")
    monkeypatch.setattr(kda_passes_cuda, "refusal", lambda *_: "")
    monkeypatch.setattr(tuning, "chunk_cuda", lambda: {"blocks": 3})
    monkeypatch.setattr(tuning, "passes", lambda: passes)
    bounds = [0, 330, 331, 331 + 64]
    q, k, v, z, beta, a_log, dt_bias = draw(bounds[-1], "long")  # else nothing is left of the transitions
    state = torch.randn(5, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(1)).to(state_dtype)
    start = state.clone()
    slots, fresh = torch.tensor([2, 1, 4], dtype=torch.int32), torch.tensor([True, False, True])
    plan = plan_prefill(bounds, HEADS, "cpu", segment_chunks=cut)
    got = kda_prefill.kda_prefill(
        q, k, v, z, beta, a_log, dt_bias, BOUND, state, slots, torch.tensor(bounds), fresh, plan=plan
    )
    assert torch.equal(state[[0, 3]], start[[0, 3]])
    before = torch.stack([start[2], torch.zeros_like(start[2]), start[4]]).double()
    wide = [x.double() for x in (q, k, v, contract.gate(z.double(), a_log, dt_bias, BOUND), beta)]
    want, after = contract.recurrent(*wide, before, bounds)
    states = (state[[2, 1, 4]].double() - after).norm() / after.norm()
    return ((got.double() - want).norm() / want.norm()).item(), states.item()


TRITON: dict[str, Any] = {}
EXPLICIT = {
    "local": {"groups": 2, "stages": 2}, "scan": {"rows": 16, "stages": 2}, "output": {"groups": 1, "stages": 2},
    "overlap": True,
}  # fmt: skip


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [TRITON, EXPLICIT], ids=["triton", "explicit"])
def test_prefill_is_the_contract(
    passes: dict[str, Any], dtype: torch.dtype, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = emulated(monkeypatch)
    out, state = prefill_errors(monkeypatch, passes, dtype, cut)
    cuts = ["kda_pass_cuda", "kda_scan_bulk_cuda"] if cut else []
    assert ran == ["kda_chunk_cuda"] + ([*cuts, "kda_pass_cuda"] if passes else [])
    assert out < 8e-3
    assert state < 8e-3


PASS_MUTANTS = [
    ("chunks read before they came", "        barrier_wait(address(full + 8 * s), (n / STAGES) & 1);\n", ""),
    ("a stage asked for while others read it", "== 4 * GROUPS * (n / STAGES + 1) - 1", "== 4 * GROUPS * (n / STAGES)"),
    ("no decay of the state", "S[j][0] *= gamma.x;", ""),
    ("the transition of two rows swapped", "!values && row == col ?", "!values && row == (col ^ 1) ?"),
    ("the initial state everywhere", "values && (OUTPUT ? !several : first);", "values;"),
    ("pieces of a transition's row in plain order", "(row0 / 16 % 4 * 2 + t / 2) ^ g", "row0 / 16 % 4 * 2 + t / 2"),
    ("a transition's channels in plain order", "y.x = (x[0] & 0xffff) | x[1] << 16;", "y.x = x[0];"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "old", "new"), PASS_MUTANTS, ids=[m[0] for m in PASS_MUTANTS])
def test_mutants_of_the_passes_are_caught(what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch, edit_of("kda_passes", old, new))
    cut = 3 if "a stage" in what else 1  # a stage comes again after three chunks; transitions matter in short segments
    found = prefill_errors(monkeypatch, EXPLICIT, torch.float32, cut)
    assert not max(found) < 8e-3, (what, found)


def test_it_says_what_it_cannot_take() -> None:
    q, k, v, z, beta, *_ = draw(4, "mixed")
    assert "cpu" in kda_chunk_cuda.refusal(q, k, v, z, beta, True)
