"""The low-latency matrix product against an fp64 oracle: interpreted on a CPU, on the device where there is one.

Tolerance: fp32 sums of K exact products differ from the true value by at most K 2^-24 sum |x w| (any order), then one
rounding to nearest of the result's dtype: at most half a step, 2^-8 of the value for bfloat16 and 2^-11 for float16.
The residual nearly cancels the product, so that a product rounded before the sum shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.operators.triton_host import interpreting
from k3_nvidia.kernels import skinny_gemm as kernel
from k3_nvidia.kernels.skinny_gemm import Config

if interpreting():
    from k3_core.testing.triton_interpreter import round_to_nearest

    round_to_nearest()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAN = float("nan")
Run = Callable[..., torch.Tensor]

# (M, N, K): more and less than a tile, tails in both, several steps, K shorter than one step and of odd 16 bytes
SHAPES = [
    (1, 24, 256),
    (3, 40, 192),
    (4, 16, 1032),
    (2, 70, 64),
    (7, 40, 512),
    (8, 64, 328),
    (16, 70, 640),
    (9, 16, 8),
    (17, 70, 192),
    (32, 40, 328),
]
VECTOR = [
    Config("vector", 8, 128, 1, 1), Config("vector", 16, 64, 3, 1), Config("vector", 4, 512, 2, 2),
    Config("vector", 8, 128, 1, 1, hold=1), Config("vector", 16, 64, 3, 1, hold=2),
]  # fmt: skip
DOT = [
    Config("dot", 16, 64, 1, 4, 3), Config("dot", 64, 128, 3, 4, 2), Config("dot", 16, 64, 1, 4, 3, hold=1),
    Config("dot", 64, 128, 2, 4, 2, hold=2), Config("dot", 64, 128, 1, 4, 2, hold=2),
]  # fmt: skip
CASES = [(c, s) for c in VECTOR for s in SHAPES if s[0] <= kernel.MAX_VECTOR_ROWS] + [
    (c, s) for c in DOT for s in SHAPES
]


def padded(rows: int, columns: int, dtype: torch.dtype, seed: int | None, pad: int = 16) -> torch.Tensor:
    """Normal values (NaN without a seed) in rows of a wider buffer that is NaN elsewhere."""
    wide = torch.full((rows, columns + pad), NAN, dtype=dtype)
    if seed is not None:
        wide[:, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide.to(DEVICE)[:, :columns]


def judge(run: Run, shape: tuple[int, int, int], dtype: torch.dtype, residual: bool) -> None:
    """Assert that ``run(x, weight, residual, out)`` is right, writes nothing else and repeats itself."""
    m, n, k = shape
    x, weight = padded(m, k, dtype, 1), padded(n, k, dtype, 2, pad=8)
    before = x.clone(), weight.clone()
    products = x.double() @ weight.double().t()
    added = padded(m, n, dtype, 3) if residual else None
    if added is not None:
        added -= products.to(dtype)
    buffer = torch.full((m + 1, n + 24), NAN, dtype=dtype, device=DEVICE)
    got = run(x, weight, added, buffer[:m, :n])
    want = products if added is None else products + added.double()
    size = x.double().abs() @ weight.double().abs().t() + (0 if added is None else added.double().abs())
    bound = UNIT[dtype] * want.abs() + (k + 1) * 2.0**-24 * size + 2.0**-25
    off = (got.double() - want).abs()
    assert bool((off <= bound).all()), f"{(off / bound).max().item():.3g} of the bound"
    assert bool(buffer[m:].isnan().all()), "wrote past the rows"
    assert bool(buffer[:, n:].isnan().all()), "wrote past the columns"
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])
    again = run(x, weight, added, torch.full_like(got, NAN))
    assert torch.equal(got, again), "the same input gave other bits"


def ours(config: Config) -> Run:
    return lambda x, weight, residual, out: kernel.skinny_gemm(x, weight, config, residual, out)


@pytest.mark.parametrize(
    ("config", "shape"), CASES, ids=lambda v: f"{v.name}-h{v.hold}" if isinstance(v, Config) else str(v)
)
def test_conforms(config: Config, shape: tuple[int, int, int]) -> None:
    # Both dtypes and both epilogues over the shapes, each once a configuration: the interpreter is slow.
    index = SHAPES.index(shape)
    judge(ours(config), shape, (torch.bfloat16, torch.float16)[index % 2], residual=index % 4 in (1, 2))


def _swap_rows(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    return out.copy_(kernel.skinny_gemm(x, w, VECTOR[0], r).flip(0))


def _round_first(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    return out.copy_((x.double() @ w.double().t()).to(x.dtype) + r)


def _drop_tail(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    k = x.shape[1] // 128 * 128
    return kernel.skinny_gemm(x[:, :k], w[:, :k], VECTOR[0], r, out)


def _low_precision_sums(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    total = torch.zeros_like(out)
    for start in range(0, x.shape[1], 64):
        total += (x[:, start : start + 64].float() @ w[:, start : start + 64].float().t()).to(x.dtype)
    return out.copy_(total + r)


def _past_the_end(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    result = kernel.skinny_gemm(x, w, VECTOR[0], r, out)
    out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[1]).fill_(0)
    return result


def _only_first_cut(x: Any, w: Any, r: Any, out: Any) -> torch.Tensor:
    k = x.shape[1] // 2 // 8 * 8
    return kernel.skinny_gemm(x[:, :k], w[:, :k], VECTOR[0], r, out)


MUTANTS = [_swap_rows, _round_first, _drop_tail, _low_precision_sums, _past_the_end, _only_first_cut]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants_are_caught(mutant: Run) -> None:
    with pytest.raises(AssertionError):
        judge(mutant, (3, 40, 1032), torch.bfloat16, residual=True)


def test_counters_are_zero_again() -> None:
    shape = (2, 70, 512)
    for config in (VECTOR[1], DOT[1]):
        judge(ours(config), shape, torch.bfloat16, residual=False)
        assert int(kernel._ticket(padded(1, 8, torch.float16, 0).device).sum()) == 0


def test_a_capture_gets_counters_that_are_zero_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroing inside a capture happens when that graph runs: another graph may run before."""
    stream, capturing = 1, False
    monkeypatch.setattr(kernel, "_tickets", {})
    monkeypatch.setattr(kernel, "_spare", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    zeros = torch.zeros
    made: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: (made.append(size[0]), zeros(*size))[1])
    device = torch.device("cuda", 0)
    capturing = True
    assert kernel._ticket(device) is not kernel._ticket(device), "nothing spare: each call its own"
    capturing = False
    eager = kernel._ticket(device)
    assert kernel._ticket(device) is eager
    capturing = True
    assert kernel._ticket(device) is eager
    made.clear()
    sets = {eager.data_ptr()}
    for number in range(kernel._SPARE_SETS):
        stream = 2 + number
        sets.add(kernel._ticket(device).data_ptr())
    assert not made
    assert len(sets) == 1 + kernel._SPARE_SETS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.update(x=a["x"].double()), "float64"),
        (lambda a: a.update(x=a["x"].half()), "float16"),
        (lambda a: a.update(x=a["x"][:, :60], weight=a["weight"][:, :60]), "multiple of 8"),
        (lambda a: a.update(x=a["x"].expand(33, -1)), "33 rows"),
        (lambda a: a.update(x=a["x"][:0]), "0 rows"),
        (lambda a: a.update(x=a["x"][:, :32]), "not [M, K]"),
        (lambda a: a.update(weight=a["weight"].t().contiguous().t()), "rows of weight"),
        (lambda a: a.update(residual=torch.zeros(1, 8).bfloat16()), "residual"),
        (lambda a: a.update(out=torch.zeros(1, 8).bfloat16()), "out must be"),
    ],
)
def test_refuses_before_launch(change: Callable[[dict[str, Any]], None], says: str) -> None:
    args: dict[str, Any] = {"x": torch.randn(1, 64).bfloat16(), "weight": torch.randn(16, 64).bfloat16()}
    change(args)
    with pytest.raises(ValueError, match=re.escape(says)):
        kernel.skinny_gemm(config=VECTOR[0], **args)


def test_the_vector_kernel_has_a_largest_batch() -> None:
    with pytest.raises(ValueError, match="up to 4 rows"):
        kernel.skinny_gemm(torch.zeros(5, 64).half(), torch.zeros(16, 64).half(), VECTOR[0])
