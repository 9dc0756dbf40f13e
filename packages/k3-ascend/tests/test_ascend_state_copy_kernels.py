"""The state-copy kernels through Ascend's own compilers: executed on the CPU as linalg, and their unified buffer.

triton-ascend lowers the kernels to linalg, which Debian's MLIR makes into functions (ci/ascend_kernels); plans are
published and served with these as the compiled objects. Then every variant goes through bishengir-compile for three
device generations. Nothing here ran on an NPU.
"""

# ruff: noqa: E402 - the tools must be on the path before they can be imported

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_state_copy_support import bits, cache_of, gathered, load_kernels, publish, whole
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
if (ROOT / "ci/ascend_kernels").is_dir() and str(ROOT / "ci") not in sys.path:
    sys.path.insert(0, str(ROOT / "ci"))
pytest.importorskip("ascend_kernels.execute", reason="the tools are in ci/ of the repository")

from ascend_kernels import bishengir, execute, lower

from k3_ascend.state_copy import compiler
from k3_ascend.state_copy.compiler import ContractCompiler, Direction, Launch, Variant
from k3_ascend.state_copy.layout import Layout, PlanKind

needs_mlir = pytest.mark.skipif(bool(execute.missing()), reason=execute.missing() or "-")
needs_bishengir = pytest.mark.skipif(bool(bishengir.missing()), reason=bishengir.missing() or "-")


class LinalgCompiler(ContractCompiler):
    """Compiled objects are what triton-ascend's linalg does on a CPU."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def compile(
        self, variant: Variant, layout: Layout, cache: Tensor, indices: Tensor, flags: Tensor, packed: Tensor
    ) -> Launch:
        launch = LinalgLaunch(self.executor, variant, layout)
        launch(cache, indices, flags, packed)
        return launch


class LinalgLaunch:
    def __init__(self, executor: Any, variant: Variant, layout: Layout) -> None:
        self.executor, self.variant, self.tasks = executor, variant, compiler._tasks(layout, compiler.BLOCK)
        self.kernel, self.constants = compiler._kernel(variant, layout)

    def __call__(self, cache: Tensor, indices: Tensor, flags: Tensor | None, packed: Tensor) -> None:
        rows = indices.shape[0]
        grid = (min(rows * self.tasks, 5), 1, 1)  # fewer programs than tasks
        arguments = compiler._arguments(self.variant, cache, indices, flags, packed)
        self.executor(self.kernel, grid, (*arguments, rows), self.constants)

    def hooked(self) -> None:
        return None


@pytest.fixture(scope="module")
def executor() -> Iterator[Any]:
    # The tool sets this at its first lowering; a start-up that sees it appear refuses to seal, rightly.
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
    with tempfile.TemporaryDirectory() as folder:
        yield execute.Executor(Path(folder))


def copy_both_ways(cache: Tensor, twin: Tensor, generation: str, executor: Any) -> None:
    """Gathers and scatters of a plan, bit by bit, gaps included (unless the allocation is huge)."""
    plan = publish(cache, generation=generation, compiler=LinalgCompiler(executor))
    last = len(cache) - 1
    for index in (torch.int32, torch.int64):
        for slots, flags in (([last, -1, 0, last + 1, 0], [True] * 5), ([1, last], [False, True]), ([0], [True])):
            out = torch.full((len(slots), *cache.shape[1:]), float("nan"), dtype=cache.dtype)
            plan.gather(cache, torch.tensor(slots, dtype=index), torch.tensor(flags), out=out)
            torch.testing.assert_close(bits(out), bits(gathered(twin, slots, flags)), rtol=0, atol=0)
        packed = torch.randn(3, *cache.shape[1:]).to(cache.dtype)
        plan.scatter(cache, torch.tensor([1, -1, last], dtype=index), packed)
        twin[1], twin[last] = packed[0], packed[2]
        torch.testing.assert_close(bits(cache), bits(twin), rtol=0, atol=0)
    if cache.untyped_storage().nbytes() < 1 << 30:
        torch.testing.assert_close(whole(cache), whole(twin), rtol=0, atol=0)


@needs_mlir
@pytest.mark.parametrize(
    ("generation", "dtype", "inner"),
    [("950", torch.float32, None), ("950", torch.bfloat16, None), ("A2", torch.float32, None),
     ("A3", torch.float16, None), ("A2", torch.float32, (2, 400, 20_000))],
)  # fmt: skip
def test_executed_as_linalg(generation: str, dtype: torch.dtype, inner: tuple[int, ...] | None, executor: Any) -> None:
    """[2, 96, 100]: blocks of 8192 and a remainder; strides inside the payload with gaps between the elements."""
    shape = (4, 2, 96, 100) if inner is None else (3, 2, 5, 7)
    cache, twin = (cache_of(shape, dtype, offset=8, gap=24, inner=inner) for _ in range(2))
    copy_both_ways(cache, twin, generation, executor)


@needs_mlir
def test_pages_more_than_four_gib_apart_as_linalg(executor: Any) -> None:
    page = (1 << 30) + 1024
    cache, twin = (torch.empty(2 * page + 400).as_strided((3, 3, 8, 16), (page, 128, 16, 1)) for _ in range(2))
    cache[:] = torch.randn(3, 3, 8, 16)
    twin.copy_(cache)
    copy_both_ways(cache, twin, "950", executor)


@needs_mlir
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(slot >= 0)", "(slot > 0)"),
        ("* PAGE", "* (PAGE - 8)"),
        ("if CLEAR:", "if BLOCK < 0:"),
    ],
)
def test_mutants_are_caught_as_linalg(
    old: str, new: str, executor: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import k3_ascend.kernels
    from k3_ascend.kernels import state_copy as kernels

    source = Path(kernels.__file__).read_text()
    assert old in source
    changed = load_kernels(tmp_path / "mutant_kernels.py", source.replace(old, new))
    monkeypatch.setattr(k3_ascend.kernels, "state_copy", changed)
    cache, twin = (cache_of((4, 2, 96, 100), offset=8, gap=24) for _ in range(2))
    with pytest.raises((AssertionError, RuntimeError)):
        copy_both_ways(cache, twin, "950", execute.Executor(tmp_path / "built"))


#: Unified buffer of a variant in bytes (two buffers of a block where the compiler doubles them): 910B3, 910_93, 950.
BUFFERS = {
    ("dense", torch.float32): (65536, 65536, 32768),
    ("dense", torch.bfloat16): (32768, 32768, 16384),
    ("dense", torch.float16): (32768, 32768, 16384),
    ("dense", torch.float64): (131072, 131072, 65536),
    ("runs", torch.float32): (9216, 9216, 512),
}


@needs_bishengir
@pytest.mark.parametrize(("pages", "dtype"), list(BUFFERS))
def test_the_unified_buffer_and_no_scalar_loop(pages: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All four variants of a layout of one rank of eight: legal, as much buffer as the table says, copied in blocks."""
    inner = (16384, 128, 1) if pages == "dense" else (16384, 1, 128)
    layout = Layout("npu:0", dtype, (1000, 12, 128, 128), (203_520, *inner), 0)
    fused = pages == "dense" and dtype in (torch.float32, torch.bfloat16)
    kinds = (PlanKind.BYTES, PlanKind.FUSED) if fused else (PlanKind.BYTES,)
    taken: dict[str, int] = {}
    for kind in kinds:
        for direction in Direction:
            for index in (torch.int32, torch.int64):
                linalg = lowered(Variant(kind, direction, index), layout)
                assert "ExtractedLoadOrStore" not in linalg, "an access without structure: a loop over elements"
                # One index type and one generation tell what the others would: all three for the gathers of int32.
                every = index is torch.int32 and direction is Direction.GATHER
                for generation, target in bishengir.TARGETS.items() if every else [("910B3", "Ascend910B3")]:
                    result = bishengir.compile_for(
                        linalg, target, tmp_path / f"{kind}-{direction}-{index}-{generation}"
                    )
                    assert not result.error
                    assert not result.scalar
                    assert 0 < result.ub <= 0.85 * result.limit
                    taken[generation] = max(result.ub, taken.get(generation, 0))
    assert tuple(taken[g] for g in bishengir.TARGETS) == BUFFERS[pages, dtype]


def lowered(variant: Variant, layout: Layout) -> str:
    """Linalg of one variant; only types of arguments and constants matter."""
    kernel, constants = compiler._kernel(variant, layout)
    tensors = (torch.zeros(1, dtype=layout.dtype), torch.zeros(1, dtype=variant.index_dtype))
    flags = torch.ones(1, dtype=torch.bool)
    arguments = compiler._arguments(variant, tensors[0], tensors[1], flags, torch.zeros(1, dtype=layout.dtype))
    return str(lower.to_linalg(kernel, lower.variant_of(kernel, (*arguments, 5), constants)))
