"""The second look at pages of the latent cache (K3_CHECK_LATENT): every row of the context, and nothing else."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.testing import bounds as addresses
from k3_nvidia.kernels import latent_check

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAGE, WIDTH, BLOCKS = 16, 72, 24
#: (tokens before this step, tokens of this step): decoding, a chunk of a prompt, padding, a first prompt, decoding.
REQUESTS = [(50, 1), (37, 5), (90, 0), (0, 4), (16, 1)]
Check = Any


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs a request: each has rows in several places, and the interpreter is slow."""
    monkeypatch.setattr(latent_check, "PROGRAMS", 2 * len(REQUESTS))
    monkeypatch.setattr(latent_check, "ROWS", 8)


class Step:
    """A step over pages that are all NaN but for the rows of its contexts; strides padded, pages in any order."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(6)
        pool = torch.full((BLOCKS, PAGE + 1, WIDTH + 24), float("nan")).to(dtype)
        self.pages = pool.to(DEVICE)[:, :PAGE, :WIDTH]
        order = torch.randperm(BLOCKS, generator=generator).tolist()
        table = torch.full((len(REQUESTS) + 1, 9), order.pop(), dtype=torch.int32)
        for r, (context, new) in enumerate(REQUESTS):
            for place in range(-(-(context + new) // PAGE)):
                table[r, place] = order.pop()
        self.table = table.to(DEVICE)[: len(REQUESTS)]
        ends = torch.tensor([0] + [new for _, new in REQUESTS]).cumsum(0)
        self.bounds = ends.to(torch.int32).to(DEVICE)
        self.lengths = torch.tensor([sum(pair) for pair in REQUESTS], dtype=torch.int32, device=DEVICE)
        self.marks = torch.randn(int(ends[-1]) + 2, 9, generator=generator).to(DEVICE, torch.bfloat16)[:, :5]
        for r, (context, _) in enumerate(REQUESTS):
            for t in range(context):
                self.row(r, t).copy_(torch.randn(WIDTH, generator=generator).to(dtype))

    def row(self, request: int, token: int) -> Tensor:
        """The cached row of a token [WIDTH]."""
        return self.pages[int(self.table[request, token // PAGE]), token % PAGE]

    def marked(self, check: Check) -> list[int]:
        """Rows that are marked; every other value of the marks keeps its bits."""
        before = self.marks.clone()
        with contextlib.nullcontext() if CUDA else addresses.watched():
            check(self.marks, self.pages, self.table, self.lengths, self.bounds)
        rows = [int(row) for row in self.marks[:, 0].isnan().nonzero()]
        kept = [row for row in range(len(before)) if row not in rows]
        assert torch.equal(self.marks[kept], before[kept])
        assert torch.equal(self.marks[:, 1:], before[:, 1:])
        return rows


#: (request, token, column) struck, and the row that says so: the last of its request.
STRIKES = [(0, 0, 0, 0), (0, 49, 71, 0), (0, 31, 64, 0), (1, 36, 3, 5), (1, 16, 40, 5), (4, 15, 63, 10)]


def holds(check: Check, dtype: torch.dtype, values: list[float]) -> None:
    assert Step(dtype).marked(check) == []
    for request, token, column, row in STRIKES if dtype == torch.bfloat16 else STRIKES[3:4]:
        for value in values:
            step = Step(dtype)
            step.row(request, token)[column : column + 1].copy_(torch.tensor([value]).to(dtype))
            assert step.marked(check) == [row], (request, token, column, value)


@pytest.mark.parametrize("dtype", latent_check.EXPONENTS)
def test_every_row_of_the_context_is_seen_and_no_other(dtype: torch.dtype) -> None:
    infinite = [] if dtype == torch.float8_e4m3fn else [float("inf"), float("-inf")]
    holds(latent_check.check, dtype, [float("nan"), *infinite])


def test_requests_without_rows_say_nothing() -> None:
    step = Step(torch.bfloat16)
    step.row(2, 5)[0] = float("nan")
    assert step.marked(latent_check.check) == []


def test_the_largest_values_are_finite() -> None:
    for dtype in latent_check.EXPONENTS:
        step = Step(dtype)
        step.row(0, 3).copy_(torch.full((WIDTH,), torch.finfo(dtype).max).to(dtype))
        assert step.marked(latent_check.check) == []


def _short(marks: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, bounds: Tensor) -> None:
    latent_check.check(marks, pages, table, lengths - 1, bounds)


def _narrow(marks: Tensor, pages: Tensor, *rest: Tensor) -> None:
    latent_check.check(marks, pages[..., :64], *rest)


def _new_rows_too(marks: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, bounds: Tensor) -> None:
    latent_check.check(marks, pages, table, lengths + 1, bounds)


def _one_page(marks: Tensor, pages: Tensor, table: Tensor, *rest: Tensor) -> None:
    latent_check.check(marks, pages, table[:, :1].expand(-1, 9).contiguous(), *rest)


@pytest.mark.parametrize("mutant", [_short, _narrow, _new_rows_too, _one_page])
def test_a_check_that_leaves_something_out_is_noticed(mutant: Check) -> None:
    with pytest.raises(AssertionError):
        holds(mutant, torch.bfloat16, [float("nan")])


def test_what_it_does_not_take() -> None:
    step = Step(torch.bfloat16)
    with pytest.raises(ValueError, match="pages"):
        latent_check.check(step.marks, step.pages.double(), step.table, step.lengths, step.bounds)
    with pytest.raises(ValueError, match="int32"):
        latent_check.check(step.marks, step.pages, step.table, step.lengths.long(), step.bounds)
    with pytest.raises(ValueError, match="for 5 requests"):
        latent_check.check(step.marks, step.pages, step.table[:4], step.lengths, step.bounds)


def test_a_layer_checks_an_fp8_cache_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM binds bytes; which values are not finite depends on the kind."""
    for kind, dtype in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        made = Step(dtype)
        made.row(1, 20)[7:8].copy_(torch.tensor([float("nan")]).to(dtype))
        step = SimpleNamespace(query_start_loc=made.bounds, k3_pages=(made.table, made.lengths))
        latent_check.of_step(made.marks, made.pages.view(torch.uint8), kind, step)
        assert [int(row) for row in made.marks[:, 0].isnan().nonzero()] == [5]
    with pytest.raises(RuntimeError, match="K3_CHECK_LATENT=1: SimpleNamespace keeps no block table"):
        latent_check.of_step(made.marks, made.pages, "auto", SimpleNamespace(query_start_loc=made.bounds))


def test_metadata_keeps_the_tables_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("vllm.model_executor.layers.attention.mla_attention")
    monkeypatch.setattr(
        module.MLACommonMetadataBuilder, "build", lambda self, prefix, common, fast=False: SimpleNamespace(fast=fast)
    )
    latent_check.keep_tables()
    latent_check.keep_tables()
    common = SimpleNamespace(block_table_tensor=object(), seq_lens=object())
    made = module.MLACommonMetadataBuilder.build(None, 0, common, True)
    assert made.k3_pages == (common.block_table_tensor, common.seq_lens)
    assert made.fast


@pytest.mark.parametrize(("asked", "checks"), [("", False), ("0", False), ("1", True)])
def test_it_is_asked_for(asked: str, checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_CHECK_LATENT", asked)
    assert latent_check.wanted() is checks
