"""kda_chunk.cu without a GPU: the same source run on the CPU, a fiber a thread (cuda_emulation.hpp), against fp64.

Threads run in random order and shared memory starts as NaN, so a missing barrier shows. Mutants of the source must be
caught. What the emulation cannot show: the accuracy of the special functions, and speed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as test_kda_kernels, whichever is imported first
pytest.importorskip("triton")

from k3_core.contracts import kda as contract
from k3_nvidia.kernels import cuda_host, kda_chunk_cuda, kda_prefill
from k3_nvidia.kernels.kda_plan import plan_prefill
from k3_nvidia.tuning import kda as tuning

HERE = Path(__file__).resolve().parent
BOUND, DIM, HEADS = -5.0, 128, 2
NAMES = ("w", "ut", "qg", "kg", "a", "gamma")
ROUNDING = 2.0**-9
#: Error norms. One rounding to bfloat16; products of two rounded operands; solved rows, whose M is such products.
TOLERANCE = {
    "qg": 1.05 * ROUNDING, "kg": 1.05 * ROUNDING, "a": 3 * ROUNDING, "w": 2 * ROUNDING, "ut": 2 * ROUNDING,
    "gamma": 1e-6,
}  # fmt: skip
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def build(source: str, folder: Path) -> ctypes.CDLL:
    """The kernel's source as a library for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    (folder / "kernel.cu").write_text(source)
    target = folder / "kernel.so"
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{HERE}", f'-DKERNEL="{folder / "kernel.cu"}"']
    subprocess.run([*command, HERE / "kda_chunk_emulation.cpp", "-o", target], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(cuda_host.source("kda_chunk"), tmp_path_factory.mktemp("kda"))


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


def emulate(library: ctypes.CDLL, inputs: Inputs, chunks: Tensor, outputs: tuple[Tensor, ...], seed: int) -> None:
    arguments = kda_chunk_cuda.arguments(*inputs, BOUND, chunks, *outputs)
    library.kda_chunk_emulated(ctypes.byref(arguments), inputs[0].shape[1], chunks.shape[0], seed)


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


def wrong(library: ctypes.CDLL, kind: str, bounds: list[int], seed: int = 1) -> dict[str, float]:
    """Outputs whose error norm is above their tolerance (or no number)."""
    inputs = draw(bounds[-1], kind)
    chunks = plan_prefill(bounds, HEADS, "cpu").chunks
    got = outputs(chunks.shape[0] * HEADS)
    emulate(library, inputs, chunks, got, seed)
    found = {}
    for name, g, w in zip(NAMES, got, exact(inputs, chunks), strict=True):
        error = ((g.double() - w).norm() / w.norm()).item()
        if not error <= TOLERANCE[name]:
            found[name] = error
    return found


@pytest.mark.parametrize("kind", ["mixed", "bound", "long", "equal", "far"])
def test_every_output_against_fp64(library: ctypes.CDLL, kind: str) -> None:
    assert not wrong(library, kind, [0, 64, 64 + 37, 64 + 38])


def test_any_order_of_threads_gives_the_same_bits(library: ctypes.CDLL) -> None:
    inputs, chunks = draw(64, "mixed"), plan_prefill([0, 64], HEADS, "cpu").chunks
    found = []
    for seed in range(4):
        found.append(outputs(HEADS))
        emulate(library, inputs, chunks, found[-1], seed)
    for a, b in pairwise(found):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


#: (what, text of the source, what replaces it).
MUTANTS = [
    ("a missing barrier before the keys are read", "    sync_all();\n\n    float M[4]", "\n    float M[4]"),
    ("a warp that waits for nobody", "            await(4, 64);\n", ""),
    ("the diagonal in M", "here > col ? M", "here >= col ? M"),
    ("beta of the row instead of the column", "i % 2 ? x.z : x.x", "i % 2 ? x.x : x.z"),
    ("one term of T for U", "mma_bf16(c[e], x.x, lo[b].x[e], lo[b].x[2 + e]);", ""),
    ("the own half's factors against the first half", "half == 0 && upper", "half == 2"),
    ("rows after the end", "const bool in0 = row < rows", "const bool in0 = true"),
    ("a level of the inverse", "level <= 4", "level <= 3"),
]


@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_caught(what: str, old: str, new: str, tmp_path: Path) -> None:
    source = cuda_host.source("kda_chunk")
    assert source.count(old) == 1, what
    library = build(source.replace(old, new), tmp_path)
    cases = [("long", [0, 64]), ("equal", [0, 64]), ("mixed", [0, 37, 100])]
    assert any(wrong(library, kind, bounds, seed) for seed, (kind, bounds) in enumerate(cases)), what


def test_prefill_with_it_is_the_contract(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes behind it, interpreted, on what it writes."""
    calls = []

    def chunk(*inputs: Tensor, blocks: int) -> None:
        calls.append(blocks)
        *tensors, _, chunks = inputs[:9]
        emulate(library, tuple(tensors), chunks, inputs[9:], 1)  # type: ignore[arg-type]

    monkeypatch.setattr(kda_chunk_cuda, "chunk", chunk)
    monkeypatch.setattr(kda_chunk_cuda, "refusal", lambda *_: "")
    monkeypatch.setattr(tuning, "chunk_blocks", lambda: 3)
    bounds = [0, 150, 187]
    q, k, v, z, beta, a_log, dt_bias = draw(bounds[-1], "mixed")
    state = torch.randn(3, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(1))
    start = state.clone()
    slots, fresh = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([True, False])
    plan = plan_prefill(bounds, HEADS, "cpu", segment_chunks=1)
    got = kda_prefill.kda_prefill(
        q, k, v, z, beta, a_log, dt_bias, BOUND, state, slots, torch.tensor(bounds), fresh, plan=plan
    )
    assert calls == [3]
    before = torch.stack([start[2], torch.zeros_like(start[2])]).double()
    wide = [x.double() for x in (q, k, v, contract.gate(z.double(), a_log, dt_bias, BOUND), beta)]
    want, after = contract.recurrent(*wide, before, bounds)
    assert (got.double() - want).norm() / want.norm() < 1e-2
    assert (state[[2, 1]].double() - after).norm() / after.norm() < 1e-2


def test_it_says_what_it_cannot_take() -> None:
    q, k, v, z, beta, *_ = draw(4, "mixed")
    assert "cpu" in kda_chunk_cuda.refusal(q, k, v, z, beta, True)
