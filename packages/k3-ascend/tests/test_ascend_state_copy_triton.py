"""The Triton plans through Triton's own JIT: variants, specialisation, direct launches, and the kernels' numerics.

Without a device the JIT runs before a fake driver and a fake compiler (see FakeDevice): the binder, specialisation and
cache are Triton's; a compiled kernel runs in Triton's interpreter. On an NPU (or an NVIDIA GPU, a second device for the
same sources) everything is real, graph replay included.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_state_copy_support import (
    SHAPE,
    FakeDevice,
    Layer,
    bits,
    cache_of,
    fake_triton,
    forget,
    gathered,
    load_kernels,
    publish,
    whole,
)
from ascend_support import has_npu

pytest.importorskip("triton", reason="the plans are Triton kernels")

from k3_ascend import state_copy
from k3_ascend.kernels import state_copy as kernels
from k3_ascend.state_copy import compiler as compiler_module
from k3_ascend.state_copy.compiler import BLOCK as SHIPPED_BLOCK
from k3_ascend.state_copy.compiler import TritonCompiler
from k3_ascend.state_copy.layout import PlanKind
from k3_core.operators import Implementation
from k3_core.testing import conformance


def accelerator() -> str | None:
    """ "npu" or "cuda" where one computes, else None."""
    if has_npu():
        return "npu"
    return "cuda" if torch.cuda.is_available() else None


REAL = accelerator()
DEVICE = f"{REAL}:0" if REAL else "cpu"
needs_device = pytest.mark.skipif(REAL is None, reason="needs an NPU or a GPU")
#: Generation that gives each plan on whatever device runs the tests.
PLANS = {"fused": "950", "byte-copy": "A2"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice | None]:
    """None on real hardware; else Triton before a fake device."""
    forget(kernels)
    if REAL is not None:
        yield None
        forget(kernels)
        return
    with fake_triton(monkeypatch) as fake:
        yield fake


def compiled_count() -> int:
    """Compiled kernels that Triton's JIT holds for the state copy."""
    total = 0
    for name in ("gather_pages", "scatter_pages", "gather_runs", "scatter_runs"):
        fn = getattr(kernels, name)
        caches = [c[0] for c in fn.device_caches.values()] if hasattr(fn, "device_caches") else fn.cache.values()
        total += sum(map(len, caches))
    return total


#: The interpreter takes its time by the block; the shipped size runs in test_the_size_of_one_rank_of_eight.
BLOCK = SHIPPED_BLOCK if REAL else 512


def compiler(block: int = BLOCK) -> TritonCompiler:
    # Fewer programs than tasks, so that the loop over tasks runs without a device too.
    return TritonCompiler(programs=None if REAL else 5, block=block)


def plan_on(cache: torch.Tensor, plan: str, rows: int = 64, block: int = BLOCK) -> state_copy.StateCopy:
    return publish(cache, rows=rows, generation=PLANS[plan], compiler=compiler(block))


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(bits(got), bits(wanted), rtol=0, atol=0)


def no_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry of the JIT and the compiler raises."""
    import triton
    from triton.runtime.jit import JITFunction

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the JIT was entered while serving")

    for name in ("run", "__getitem__", "__call__", "warmup", "create_binder", "_do_compile", "preload", "_call_hook"):
        if hasattr(JITFunction, name):
            monkeypatch.setattr(JITFunction, name, refuse)
    for module in (triton, triton.compiler, triton.compiler.compiler):
        for name in ("compile", "make_backend"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(triton.compiler.ASTSource, "__init__", refuse)
    if hasattr(triton.compiler.compiler, "ast_to_ttir"):
        monkeypatch.setattr(triton.compiler.compiler, "ast_to_ttir", refuse)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [("fused", torch.float32), ("fused", torch.bfloat16), ("byte-copy", torch.bfloat16), ("byte-copy", torch.float16),
     ("byte-copy", torch.float64)],
)  # fmt: skip
def test_serving_with_the_jit_disabled(
    device: FakeDevice | None, monkeypatch: pytest.MonkeyPatch, plan: str, dtype: torch.dtype
) -> None:
    """65 row counts, two index types, both directions, by four variants and without the JIT."""
    cache = cache_of(dtype=dtype, offset=1, device=DEVICE)
    served = plan_on(cache, plan)
    assert served.table.kind == PlanKind(plan)
    assert compiled_count() == 4
    no_jit(monkeypatch)
    every = REAL or dtype in (torch.float32, torch.float16)
    for rows in range(65) if every else (0, 1, 2, 16, 17, 64):
        slots = [(row * 5) % 8 - 1 for row in range(rows)]
        flags = [row % 3 != 1 for row in range(rows)]
        index = (torch.int32, torch.int64)[rows % 2]
        got = served.gather(
            cache, torch.tensor(slots, dtype=index, device=DEVICE), torch.tensor(flags, device=DEVICE).bool()
        )
        same(got, gathered(cache, slots, flags))
    other = cache_of(dtype=dtype, offset=1)
    for rows, index in ((6, torch.int32), (1, torch.int64), (16, torch.int64)):
        slots = [-1, 6, 3, 0, 7, 5, *[-1] * 10][:rows]
        packed = cache_of((rows, *SHAPE[1:]), dtype, gap=0, seed=rows, device=DEVICE).contiguous()
        served.scatter(cache, torch.tensor(slots, dtype=index, device=DEVICE), packed)
        for row, slot in enumerate(slots):
            if 0 <= slot < SHAPE[0]:
                other[slot] = packed[row].cpu()
    torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)
    assert compiled_count() == 4


@pytest.mark.parametrize("plan", list(PLANS))
def test_the_jit_specialises_on_nothing_that_serving_changes(device: FakeDevice | None, plan: str) -> None:
    """The JIT itself, asked again for other rows, grids and index values, has what it needs: four kernels."""
    cache = cache_of(device=DEVICE)
    served = plan_on(cache, plan)
    for launch in served.table.launches.values():
        variant, kernel = launch.variant, launch.kernel  # type: ignore[attr-defined]
        for rows in (1, 2, 16, 17, 64):
            indices = torch.zeros(rows, dtype=variant.index_dtype, device=DEVICE)
            packed = torch.zeros(rows, *SHAPE[1:], device=DEVICE)
            flags = torch.ones(rows, dtype=torch.bool, device=DEVICE)
            arguments = compiler_module._arguments(variant, cache, indices, flags, packed)
            constants = compiler_module._kernel(variant, served.table.layout, BLOCK)[1]
            kernel[(3,)](*arguments, rows, **constants)
    assert compiled_count() == 4


def test_layers_of_one_layout_share_four_kernels_and_others_add_four(device: FakeDevice | None) -> None:
    caches = [cache_of(seed=i, device=DEVICE) for i in range(5)] + [cache_of(offset=1, device=DEVICE)]
    layers = {f"l{i}": Layer(f"l{i}", cache) for i, cache in enumerate(caches)}
    state_copy.initialise(layers, max_num_seqs=8, compiler=compiler(), generation=lambda _: "950")
    assert compiled_count() == 8, "one more alignment class"
    for layer, cache in zip(layers.values(), caches, strict=True):
        slots = torch.tensor([4, -1], device=DEVICE)
        same(state_copy.of(layer).gather(cache, slots), gathered(cache, [4, -1]))


def test_a_second_lifecycle_compiles_nothing_new_and_is_its_own(device: FakeDevice | None) -> None:
    for _ in range(2):
        cache = cache_of(device=DEVICE)
        served = plan_on(cache, "fused")
        assert compiled_count() == 4
        same(served.gather(cache, torch.tensor([2], device=DEVICE)), gathered(cache, [2]))
        del served, cache


def test_the_stream_is_resolved_at_each_call(device: FakeDevice | None) -> None:
    if device is None:
        pytest.skip("a fake driver counts streams")
    cache = cache_of()
    served = plan_on(cache, "fused")
    device.streams.clear()
    for stream in (11, 12):
        device.stream = stream
        served.gather(cache, torch.tensor([1]))
    assert device.streams == [11, 12]


def test_a_pre_run_hook_after_sealing_is_refused(device: FakeDevice | None) -> None:
    cache = cache_of(device=DEVICE)
    served = plan_on(cache, "fused")
    slots = torch.tensor([1], device=DEVICE)
    kernels.gather_pages.add_pre_run_hook(lambda *_, **__: None)
    try:
        with pytest.raises(RuntimeError, match="pre-run hook was added to the kernel gather_pages after the plan"):
            served.gather(cache, slots)
        served.scatter(cache, slots, torch.zeros(1, *SHAPE[1:], device=DEVICE))
    finally:
        kernels.gather_pages.pre_run_hooks.clear()
    same(served.gather(cache, slots), gathered(cache, [1]))


def test_jit_hooks_are_seen(monkeypatch: pytest.MonkeyPatch, device: FakeDevice | None) -> None:
    import triton

    seen = compiler()
    before = seen.hooks()
    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *_, **__: None)
    else:
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "cache_hook", lambda *_, **__: None)
    assert seen.hooks() != before


def test_inner_strides(device: FakeDevice | None) -> None:
    for inner in ((128, 1, 8), (400, 20, 1)):
        cache, other = cache_of(inner=inner, device=DEVICE), cache_of(inner=inner)
        served = plan_on(cache, "fused")
        assert served.table.kind is PlanKind.BYTES
        slots = torch.tensor([5, 7, 0], device=DEVICE)
        same(served.gather(cache, slots), gathered(cache, [5, 7, 0]))
        packed = torch.randn(2, *SHAPE[1:])
        served.scatter(cache, torch.tensor([2, -1], device=DEVICE), packed.to(DEVICE))
        other[2] = packed[0]
        torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_more_than_four_gib_apart(device: FakeDevice | None, plan: str, index: torch.dtype) -> None:
    page = (1 << 30) + 1024
    raw = torch.empty(2 * page + 384, device=DEVICE)  # a CPU touches the pages that are used only
    cache = raw.as_strided((3, *SHAPE[1:]), (page, 128, 16, 1))
    for slot in range(3):
        cache[slot] = torch.randn(SHAPE[1:])
    served = plan_on(cache, plan)
    same(served.gather(cache, torch.tensor([2, 0, 1], dtype=index, device=DEVICE)), cache[[2, 0, 1]])
    packed = torch.randn(1, *SHAPE[1:]).to(DEVICE)
    served.scatter(cache, torch.tensor([2], dtype=index, device=DEVICE), packed)
    same(cache[2], packed[0])


def test_a_payload_of_several_blocks_with_a_remainder(device: FakeDevice | None) -> None:
    for plan in PLANS:
        cache = cache_of((4, 2, 96, 100), gap=12, device=DEVICE)  # 19,200 elements: blocks and a rest
        other = cache_of((4, 2, 96, 100), gap=12)
        served = plan_on(cache, plan)
        slots, flags = [3, 0, -1, 3, 2], [True, True, True, True, False]
        got = served.gather(cache, torch.tensor(slots, device=DEVICE), torch.tensor(flags, device=DEVICE))
        same(got, gathered(cache, slots, flags))
        packed = torch.randn(2, 2, 96, 100)
        served.scatter(cache, torch.tensor([1, 4], device=DEVICE), packed.to(DEVICE))
        other[1] = packed[0]
        torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)


def planned(name: str, plan: str) -> Implementation:
    def state_gather(cache: Any, indices: Any, has_initial_state: Any, *, out: Any = None) -> Any:
        return plan_on(cache, plan, 16).gather(cache, indices, has_initial_state, out=out)

    def state_scatter(cache: Any, indices: Any, packed: Any) -> None:
        plan_on(cache, plan, 16).scatter(cache, indices, packed)

    return Implementation(name, f"triton-{plan}", state_gather if name == "state_gather" else state_scatter)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", ["state_gather", "state_scatter"])
def test_the_kernels_conform_to_the_table(device: FakeDevice | None, name: str, plan: str) -> None:
    scales = ("small", "real", "huge") if REAL else ("small",)
    dtypes = (torch.float32, torch.bfloat16) if REAL else (torch.bfloat16 if plan == "fused" else torch.float32,)
    report = conformance.run(name, planned(name, plan), DEVICE, scales=scales, dtypes=dtypes)  # type: ignore[arg-type]
    report.raise_if_failed()
    assert {row.verdict for row in report.rows} == {"pass"}


@pytest.mark.slow
def test_the_size_of_one_rank_of_eight(device: FakeDevice | None) -> None:
    """[12, 128, 128] fp32 payloads in pages with a gap: 24 blocks of 8192 a row."""
    assert SHIPPED_BLOCK == 8192
    shape = (9, 12, 128, 128)
    for plan in PLANS:
        cache, other = cache_of(shape, gap=4608 * 3 // 2, device=DEVICE), cache_of(shape, gap=4608 * 3 // 2)
        served = plan_on(cache, plan, block=SHIPPED_BLOCK)
        slots, flags = [8, -1, 3, 0], [True, True, False, True]
        got = served.gather(cache, torch.tensor(slots, device=DEVICE), torch.tensor(flags, device=DEVICE))
        same(got, gathered(cache, slots, flags))
        served.scatter(cache, torch.tensor([5, 9, 1, -1], dtype=torch.int32, device=DEVICE), got)
        other[5], other[1] = got[0].cpu(), got[2].cpu()
        torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)


MUTANTS = {
    "the page offset is multiplied in the index's type": (".to(tl.int64)\n        valid", "\n        valid"),
    "an index past the end is valid": ("(slot < NUM_SLOTS)", "(slot <= NUM_SLOTS)"),
    "a negative index is valid": ("(slot >= 0)", "(slot < NUM_SLOTS)"),
    "row 0 is taken for the null block": ("(slot >= 0)", "(slot > 0)"),
    "flags are ignored": (" & (tl.load(flags + row) != 0)", ""),
    "flags of row 0 are everybody's": ("tl.load(flags + row)", "tl.load(flags)"),
    "pages are taken to touch": ("* PAGE", "* PAYLOAD"),
    "blocks after the first are forgotten": ("num_rows * BLOCKS - first", "num_rows - first"),
    "every block is the first": ("(task % BLOCKS) * BLOCK", "0 * task"),
    "programs after the first repeat its tasks": ("first + step", "step"),
    "the last block is not cut": ("length = PAYLOAD - start", "length = BLOCK + 0 * start"),
    "the last block is not cut in a scatter": ("tl.where(valid, PAYLOAD - start, 0)", "tl.where(valid, BLOCK, 0)"),
    "invalid rows are left": ("if CLEAR:", "if BLOCK < 0:"),
    "new rows are copied": ("mask=offsets < live, other=0)\n        target", "mask=offsets < length)\n        target"),
}  # fmt: skip


@pytest.mark.skipif(REAL is not None, reason="mutants write where they should not; the interpreter bears it")
@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants_are_caught(
    device: FakeDevice | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mutant: str
) -> None:
    """A kernel changed in one place fails, in the start-up's check on scratch or in what it copies."""
    old, new = MUTANTS[mutant]
    source = Path(kernels.__file__).read_text()
    assert old in source
    changed = load_kernels(tmp_path / "mutant_kernels.py", source.replace(old, new))
    import k3_ascend.kernels

    monkeypatch.setattr(k3_ascend.kernels, "state_copy", changed)
    assert probes_fail(), f"not caught: {mutant}"


@pytest.mark.skipif(REAL is not None, reason="as the mutants")
def test_the_probes_pass_without_a_mutant(device: FakeDevice | None) -> None:
    assert not probes_fail()


def probes_fail() -> bool:
    """Whether copies through guarded caches go wrong: small dense pages, several blocks, pages far apart."""
    far = (1 << 30) + 1024
    raw = torch.empty(2 * far + 400)  # memory is touched where it is used only
    caches = (
        cache_of(offset=4, gap=400),
        cache_of((4, 2, 96, 100), gap=20_000, offset=20_000),
        raw.as_strided((3, *SHAPE[1:]), (far, 128, 16, 1)),
    )
    caches[2][:] = torch.randn(3, *SHAPE[1:])
    try:
        for plan in PLANS:
            for cache in caches:
                probe(cache, plan)
    except Exception:  # a refusal of the start-up, a wrong bit, an access outside: all of them are caught mutants
        return True
    return False


def probe(cache: torch.Tensor, plan: str) -> None:
    served = plan_on(cache, plan)
    slots = [2, -1, 0, len(cache), 2, 1]
    flags = [True, True, True, True, False, True]
    spare = torch.full((len(slots) + 2, *cache.shape[1:]), 7.0)  # rows before and after what is written
    out = spare[1:-1]
    served.gather(cache, torch.tensor(slots, dtype=torch.int32), torch.tensor(flags), out=out)
    same(out, gathered(cache, slots, flags))
    assert bool((spare[0] == 7).all() and (spare[-1] == 7).all())
    far = cache.untyped_storage().nbytes() > 1 << 30
    before = None if far else whole(cache)
    kept = cache.clone()
    packed = torch.randn(4, *cache.shape[1:])
    served.scatter(cache, torch.tensor([1, -1, len(cache), 0], dtype=torch.int32), packed)
    kept[1], kept[0] = packed[0], packed[3]
    same(cache, kept)
    if before is not None:
        cache[0], cache[1] = gathered_from(before, cache, 0), gathered_from(before, cache, 1)
        torch.testing.assert_close(whole(cache), before, rtol=0, atol=0)


def gathered_from(raw: torch.Tensor, cache: torch.Tensor, slot: int) -> torch.Tensor:
    """One page of a copied allocation."""
    return raw.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())[slot]


# --- on hardware only ------------------------------------------------------------------------------------------------


@needs_device
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_graph_replays_with_other_indices_and_flags(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, twin = cache_of(device=DEVICE), cache_of(device=DEVICE)
    served = plan_on(cache, plan)
    no_jit(monkeypatch)
    torch_device = getattr(torch, str(REAL))
    slots = torch.tensor([0, -1, 2, 6], dtype=torch.int32, device=DEVICE)
    strided = torch.zeros(8, dtype=torch.int64, device=DEVICE)[::2]
    flags = torch.tensor([True, True, False, True], device=DEVICE)
    delta = torch.ones(4, *SHAPE[1:], device=DEVICE)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        initial = served.gather(cache, slots, flags)
        served.store(cache, slots, initial + delta)
        return initial, served.gather(cache, strided)

    graph_type = torch_device.NPUGraph if REAL == "npu" else torch_device.CUDAGraph
    graph = graph_type()
    stream = torch_device.Stream()
    with torch_device.stream(stream):
        step()
    stream.synchronize()
    cache.copy_(twin)
    with torch_device.graph(graph):
        initial, second = step()
    for seed, rows in enumerate(([0, -1, 2, 6], [5, 3, -1, 1], [-1, -1, -1, -1], [2, 4, 0, 3])):
        marks = [(seed + i) % 3 != 0 for i in range(4)]
        slots.copy_(torch.tensor(rows))
        strided.copy_(torch.tensor([seed, 7, 0, -1]))
        flags.copy_(torch.tensor(marks))
        delta.fill_(seed + 1)
        graph.replay()
        torch_device.synchronize()
        wanted = gathered(twin, rows, marks)
        same(initial, wanted)
        for row, slot in enumerate(rows):
            if 0 <= slot < SHAPE[0]:
                twin[slot] = wanted[row] + delta[row]
        torch.testing.assert_close(whole(cache), whole(twin), rtol=0, atol=0)
        same(second, gathered(twin, [seed, 7, 0, -1]))
