"""Serving by a published plan: what is copied, bit by bit, and what is refused before launch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from ascend_state_copy_support import SHAPE, Layer, Recorder, bits, cache_of, gathered, publish, whole
from ascend_support import has_npu

from k3_ascend import state_copy
from k3_ascend.state_copy import configuration, operators
from k3_ascend.state_copy.layout import PlanKind
from k3_core.errors import UnsupportedError
from k3_core.operators import Implementation, check_signature, operator
from k3_core.testing import conformance

PLANS = [("950", torch.float32), ("950", torch.bfloat16), ("950", torch.float16), ("A2", torch.float32),
         ("A3", torch.bfloat16), ("A2", torch.float16)]  # fmt: skip


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(bits(got), bits(wanted), rtol=0, atol=0)


@pytest.fixture(params=PLANS, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}")
def served(request: pytest.FixtureRequest) -> tuple[state_copy.StateCopy, torch.Tensor, Recorder]:
    """A plan, its cache (gaps, an offset of one element) and the compiler that records launches."""
    generation, dtype = request.param
    compiler = Recorder()
    cache = cache_of(dtype=dtype, offset=1)
    plan = publish(cache, generation=generation, compiler=compiler)
    compiler.launched.clear()
    fused = generation == "950" and dtype is not torch.float16
    assert plan.table.kind is (PlanKind.FUSED if fused else PlanKind.BYTES)
    return plan, cache, compiler


Served = tuple[state_copy.StateCopy, torch.Tensor, Recorder]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_gather_writes_every_row_and_reads_nothing_else(served: Served, index: torch.dtype) -> None:
    plan, cache, _ = served
    before = whole(cache)
    rows = [5, -1, 0, 6, 0, 2, -(2**31), 2**31 - 1]
    flags = [True, True, True, True, True, False, True, True]
    out = torch.full((len(rows), *SHAPE[1:]), float("nan"), dtype=cache.dtype)
    got = plan.gather(cache, torch.tensor(rows, dtype=index), torch.tensor(flags), out=out)
    assert got is out
    same(got, gathered(cache, rows, flags))
    same(plan.gather(cache, torch.tensor(rows, dtype=index)), gathered(cache, rows))
    torch.testing.assert_close(whole(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_scatter_writes_the_selected_payloads_alone(served: Served, index: torch.dtype) -> None:
    plan, cache, _ = served
    packed = cache_of((5, *SHAPE[1:]), cache.dtype, gap=0, seed=3)
    kept = bits(packed)
    other = cache_of(dtype=cache.dtype, offset=1)
    torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)
    plan.scatter(cache, torch.tensor([3, -1, 0, 6, 5], dtype=index), packed)
    for row, slot in ((0, 3), (2, 0), (4, 5)):
        other[slot] = packed[row]
    torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)
    torch.testing.assert_close(bits(packed), kept, rtol=0, atol=0)


def test_nan_payloads_of_skipped_and_new_rows_do_not_leak(served: Served) -> None:
    plan, cache, _ = served
    cache.fill_(float("nan"))
    got = plan.gather(cache, torch.tensor([1, -1, 2]), torch.tensor([False, True, False]))
    assert not bits(got).any(), "zeros, with a positive sign"
    packed = torch.full((2, *SHAPE[1:]), float("nan"), dtype=cache.dtype)
    cache.zero_()
    plan.scatter(cache, torch.tensor([-1, 4]), packed)
    assert cache.isnan().all(-1).all(-1).all(-1).tolist() == [False, False, False, False, True, False]


def test_sixty_five_row_counts_use_the_four_variants(served: Served) -> None:
    plan, cache, compiler = served
    prepared = list(compiler.compiled)
    for rows in range(65):
        for index in (torch.int32, torch.int64):
            slots = (torch.arange(rows) % 8 - 1).to(index)
            same(plan.gather(cache, slots, slots % 2 == 0), gathered(cache, slots.tolist(), (slots % 2 == 0).tolist()))
            if rows <= SHAPE[0]:
                plan.scatter(cache, torch.arange(rows).to(index), plan.gather(cache, torch.arange(rows).to(index)))
    assert compiler.compiled == prepared
    assert len(prepared) == 4
    assert {v for v, _ in compiler.launched} == {v for v, _ in prepared}
    indices = [t[1] for _, t in compiler.launched]
    assert all(i.dtype == v.index_dtype for i, (v, _) in zip(indices, compiler.launched, strict=True))


@pytest.mark.parametrize("cut", ["strided", "expanded", "misaligned"])
def test_only_metadata_that_does_not_fit_is_copied(served: Served, cut: str) -> None:
    plan, cache, compiler = served
    base, marks = torch.tensor([4, 9, 2, 9, -1, 9, 0, 9], dtype=torch.int32), torch.tensor([True, False] * 4)
    if cut == "strided":
        indices, flags = base[::2], marks[::2]
    elif cut == "expanded":
        indices, flags = base[2:3].expand(3), marks[:1].expand(3)
    else:
        indices, flags = base[1:], marks[1:]
    got = plan.gather(cache, indices, flags)
    same(got, gathered(cache, indices.tolist(), flags.tolist()))
    _, (_, seen, seen_flags, _) = compiler.launched[-1]
    assert (seen.dtype, seen_flags.dtype) == (torch.int32, torch.bool)
    assert seen.is_contiguous()
    assert seen.data_ptr() % 16 == 0
    assert seen_flags.data_ptr() % 16 == 0
    assert seen.data_ptr() != indices.data_ptr()
    plan.gather(cache, base, marks)
    _, (_, seen, seen_flags, _) = compiler.launched[-1]
    assert (seen.data_ptr(), seen_flags.data_ptr()) == (base.data_ptr(), marks.data_ptr()), "what fits is not copied"


def test_an_empty_selection_validates_and_launches_nothing(served: Served) -> None:
    plan, cache, compiler = served
    none = torch.empty(0, dtype=torch.int32)
    assert plan.gather(cache, none).shape == (0, *SHAPE[1:])
    assert plan.gather(cache, none, torch.empty(0, dtype=torch.bool)).dtype == cache.dtype
    plan.scatter(cache, none, cache.new_empty(0, *SHAPE[1:]))
    assert compiler.launched == []
    with pytest.raises(RuntimeError, match="prepared for"):
        plan.gather(cache[:3], none)
    with pytest.raises(RuntimeError, match="1 initial-state flags for 0"):
        plan.gather(cache, none, torch.ones(1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="2 packed rows for 0"):
        plan.scatter(cache, none, cache.new_empty(2, *SHAPE[1:]))


def test_store_converts_and_packs_the_final_states(served: Served) -> None:
    plan, cache, _ = served
    states = torch.randn(2, SHAPE[1], SHAPE[3], SHAPE[2], dtype=torch.float64).transpose(-1, -2)
    plan.store(cache, torch.tensor([2, 1]), states)
    same(cache[2], states[0].to(cache.dtype))
    same(cache[1], states[1].to(cache.dtype))


def refused(plan: state_copy.StateCopy, cache: torch.Tensor, what: str, compiler: Recorder) -> None:
    """Both directions are refused, naming the layer, before anything is launched."""
    launched = len(compiler.launched)
    before = whole(cache)
    for index in (torch.int32, torch.int64):
        slots = torch.zeros(1, dtype=index, device=cache.device)
        with pytest.raises(RuntimeError, match=rf"(model\.layers\.0\.kda.*)?{what}"):
            plan.gather(cache, slots)
        packed = cache.new_zeros((1, *cache.shape[1:]))
        with pytest.raises(RuntimeError, match=rf"(model\.layers\.0\.kda.*)?{what}"):
            plan.scatter(cache, slots, packed)
    assert len(compiler.launched) == launched
    torch.testing.assert_close(whole(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["dtype", "pages", "heads", "page stride", "address", "inner stride", "dimensions"])
def test_another_layout_is_refused(served: Served, change: str) -> None:
    plan, cache, compiler = served
    dtype = cache.dtype
    other = {
        "dtype": lambda: cache_of(dtype=torch.float64, offset=1),
        "pages": lambda: cache[:5],
        "heads": lambda: cache_of((6, 2, 8, 16), dtype, gap=176, offset=1),
        "page stride": lambda: cache_of(dtype=dtype, offset=1, gap=64),
        "address": lambda: cache_of(dtype=dtype, offset=2),
        "inner stride": lambda: cache_of(dtype=dtype, offset=1, inner=(128, 1, 8)),
        "dimensions": lambda: cache[0],
    }[change]()
    refused(plan, other, "4-D" if change == "dimensions" else "prepared for", compiler)


def test_an_unsealed_plan_serves_nothing(served: Served) -> None:
    plan, cache, compiler = served
    plan.table.sealed = False
    refused(plan, cache, "not sealed", compiler)


def test_a_hook_after_sealing_is_refused(served: Served) -> None:
    plan, cache, compiler = served
    compiler.launch_hook = "a pre-run hook was added"
    refused(plan, cache, "a pre-run hook was added after the plan was sealed", compiler)


def test_more_rows_than_the_scheduler_admits_are_refused(served: Served) -> None:
    plan, cache, compiler = served
    slots = torch.full((65,), -1)
    with pytest.raises(RuntimeError, match=r"layers\.0\.kda refused: 65 rows, but max_num_seqs is 64"):
        plan.gather(cache, slots)
    with pytest.raises(RuntimeError, match="65 rows"):
        plan.scatter(cache, slots, cache.new_zeros((65, *SHAPE[1:])))
    assert compiler.launched == []


@pytest.mark.parametrize(
    ("indices", "flags", "reason"),
    [
        (torch.zeros(2, 1, dtype=torch.int32), None, "1-D int32 or int64, got 2-D"),
        (torch.zeros(2), None, "got 1-D torch.float32"),
        (torch.zeros(2, dtype=torch.int16), None, "torch.int16"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), None, "on meta"),
        (torch.zeros(2, dtype=torch.int32), torch.ones(2), "1-D bool"),
        (torch.zeros(2, dtype=torch.int32), torch.ones(3, dtype=torch.bool), "3 initial-state flags for 2"),
        (torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.bool, device="meta"), "bool on cpu"),
    ],
)
def test_bad_metadata_is_refused(
    served: Served, indices: torch.Tensor, flags: torch.Tensor | None, reason: str
) -> None:
    plan, cache, compiler = served
    with pytest.raises(RuntimeError, match=reason):
        plan.gather(cache, indices, flags)
    assert compiler.launched == []


def test_bad_packed_states_are_refused(served: Served) -> None:
    plan, cache, compiler = served
    slots = torch.tensor([1, 2])
    dtype = torch.float64

    def packed(rows: int = 2, dtype: torch.dtype = cache.dtype, spare: int = 0) -> torch.Tensor:
        return torch.zeros(rows, SHAPE[1], SHAPE[2], SHAPE[3] + spare, dtype=dtype)[..., : SHAPE[3]]

    storage = torch.zeros(2 * 384 + 1, dtype=cache.dtype)
    cases = {
        "3 packed rows for 2": packed(3),
        "float64": packed(dtype=dtype),
        "must be contiguous": packed(spare=1),
        "packed states are": torch.zeros(2, 3, 16, 8, dtype=cache.dtype),
        "aligned to 16 bytes": storage[1:].view(2, *SHAPE[1:]),
        "address range": cache.as_strided((2, *SHAPE[1:]), (384, 128, 16, 1), 16 // cache.element_size()),
    }
    for reason, bad in cases.items():
        with pytest.raises(RuntimeError, match=reason):
            plan.scatter(cache, slots, bad)
        with pytest.raises(RuntimeError, match=reason):
            plan.gather(cache, slots, out=bad)
    assert compiler.launched == []


def test_the_environment_is_never_scanned_while_serving(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cache, _ = served

    def scan(*_: Any) -> Any:
        raise AssertionError("the configuration was scanned while serving")

    monkeypatch.setattr(configuration, "snapshot", scan)
    monkeypatch.setattr(configuration, "drift", scan)
    monkeypatch.setattr(configuration, "os", None)
    plan.scatter(cache, torch.tensor([1]), plan.gather(cache, torch.tensor([2])))
    same(cache[1], cache[2])


def test_inner_strides_are_the_byte_copy_plan_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused plan refuses them; the byte copy walks them, gaps inside the payload included."""
    for inner in ((128, 1, 8), (400, 20, 1), (1, 48, 3)):
        cache = cache_of(inner=inner)
        plan = publish(cache, generation="950")
        assert plan.table.kind is PlanKind.BYTES
        other = cache_of(inner=inner)
        same(plan.gather(cache, torch.tensor([5, 7, 0])), gathered(cache, [5, 7, 0]))
        packed = cache_of((2, *SHAPE[1:]), gap=0, seed=4)
        plan.scatter(cache, torch.tensor([2, -1]), packed)
        other[2] = packed[0]
        torch.testing.assert_close(whole(cache), whole(other), rtol=0, atol=0)


@pytest.mark.parametrize("generation", ["950", "A2"])
def test_pages_more_than_four_gib_apart(generation: str) -> None:
    page = (1 << 30) + 1024  # elements of four bytes: more than 4 GiB, and past int32 from the second page on
    raw = torch.empty(2 * page + 384)  # memory is touched where it is used only
    cache = raw.as_strided((3, *SHAPE[1:]), (page, 128, 16, 1))
    for slot in range(3):
        cache[slot] = torch.randn(SHAPE[1:])
    plan = publish(cache, generation=generation)
    same(plan.gather(cache, torch.tensor([2, 0, 1], dtype=torch.int32)), cache[[2, 0, 1]])
    packed = torch.randn(1, *SHAPE[1:])
    plan.scatter(cache, torch.tensor([2], dtype=torch.int32), packed)
    same(cache[2], packed[0])


def test_vllm_s_null_block_is_the_caller_s_to_mark() -> None:
    slots = torch.tensor([0, 3, -1, 1], dtype=torch.int32)
    marked = state_copy.without_null(slots)
    assert marked.tolist() == [-1, 3, -1, 1]
    assert marked.dtype == torch.int32
    assert state_copy.without_null(slots.long()).dtype == torch.int64
    cache = cache_of()
    plan = publish(cache)
    same(plan.gather(cache, slots)[0], cache[0])  # to the operators, row 0 is ordinary
    assert not plan.gather(cache, marked)[0].any()


def test_a_prefill_in_two_steps_carries_its_states() -> None:
    """Two chunked steps through the cache give the outputs and states of one pass over the whole sequences."""
    from k3_core.contracts import kda

    generator = torch.Generator().manual_seed(5)
    heads, dim, lengths, split = 2, 16, (150, 70, 3), (64, 1, 2)
    slots = torch.tensor([4, 1, 3], dtype=torch.int32)
    cache = cache_of((6, heads, dim, dim), gap=40, seed=2)
    stale = cache.clone()
    plan = publish(cache, generation="950")
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    g = -torch.rand(total, heads, dim, generator=generator, dtype=torch.float64) * 0.02  # memory of hundreds of tokens
    beta = torch.rand(total, heads, generator=generator, dtype=torch.float64)

    starts = torch.tensor((0, *lengths)).cumsum(0)
    whole_o, whole_s = kda.recurrent(q, k, v, g, beta, None, starts)
    outputs = torch.empty_like(whole_o)
    for step in range(2):
        rows, bounds = [], [0]
        for b, (length, first) in enumerate(zip(lengths, split, strict=True)):
            begin, end = (0, first) if step == 0 else (first, length)
            rows += range(int(starts[b]) + begin, int(starts[b]) + end)
            bounds.append(len(rows))
        flags = torch.full((3,), step == 1)
        initial = plan.gather(cache, state_copy.without_null(slots), flags)
        args = (x[rows].float() for x in (q, k, v, g, beta))
        o, final = kda.chunked(*args, initial, torch.tensor(bounds))
        outputs[rows] = o.double()
        plan.store(cache, state_copy.without_null(slots), final)
    # fp32 steps against one fp64 pass: each token adds a few 2^-24 relative, 150 of them as a random walk.
    torch.testing.assert_close(outputs, whole_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache[slots.long()].double(), whole_s, rtol=1e-4, atol=1e-5)
    untouched = [0, 2, 5]
    same(cache[untouched], stale[untouched])


# --- the operator table ----------------------------------------------------------------------------------------------


def planned(name: str, generation: str) -> Implementation:
    """An operator of the table, by a plan that is published for each call's cache."""

    def plan_of(cache: torch.Tensor) -> state_copy.StateCopy:
        layer = Layer("case", cache)
        state_copy.initialise({"case": layer}, max_num_seqs=16, generation=lambda _: generation)
        return state_copy.of(layer)

    def state_gather(cache: Any, indices: Any, has_initial_state: Any, *, out: Any = None) -> Any:
        return operators.state_gather(cache, indices, has_initial_state, out=out, plan=plan_of(cache))

    def state_scatter(cache: Any, indices: Any, packed: Any) -> None:
        operators.state_scatter(cache, indices, packed, plan=plan_of(cache))

    return Implementation(
        name, f"state-copy-{generation}", {f.__name__: f for f in (state_gather, state_scatter)}[name]
    )


@pytest.mark.parametrize("generation", ["950", "A2"])
@pytest.mark.parametrize("name", ["state_gather", "state_scatter"])
def test_the_plans_conform_to_the_table(name: str, generation: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    report = conformance.run(name, planned(name, generation), "cpu", scales=("small",), dtypes=dtypes)
    report.raise_if_failed()
    assert {row.verdict for row in report.rows} == {"pass"}


def test_the_implementations_have_the_table_s_signatures_and_need_a_plan() -> None:
    for implementation in operators.IMPLEMENTATIONS:
        assert check_signature(operator(implementation.operator), implementation.function).ok
    with pytest.raises(UnsupportedError, match=r"plan=state_copy\.of\(layer\)"):
        operators.state_gather(cache_of(), torch.zeros(1).int(), None)
    with pytest.raises(UnsupportedError, match="never on demand"):
        operators.state_scatter(cache_of(), torch.zeros(1).int(), torch.zeros(1, *SHAPE[1:]))


# --- traced ----------------------------------------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the forward context is vLLM's")


def test_fake_tensors_need_metadata_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    compiler = Recorder()
    plan = publish(cache_of(), compiler=compiler)
    compiler.launched.clear()
    with FakeTensorMode():
        cache = torch.empty(9, 2, 8, 16, dtype=torch.bfloat16)  # not the plan's: no plan is looked at
        slots = torch.zeros(5, dtype=torch.int32)
        packed = plan.gather(cache, slots, torch.ones(5, dtype=torch.bool))
        assert (tuple(packed.shape), packed.dtype) == ((5, 2, 8, 16), torch.bfloat16)
        plan.scatter(cache, slots, packed)
        plan.store(cache, slots, packed.float().transpose(-1, -2).contiguous().transpose(-1, -2))
    assert compiler.launched == []


def test_the_fakes_refuse_by_metadata() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    gather, scatter = torch.ops.k3_ascend.kda_state_gather, torch.ops.k3_ascend.kda_state_scatter
    with FakeTensorMode():
        good, slots = torch.empty(4, 3, 8, 16), torch.zeros(2, dtype=torch.int64)
        for cache, indices, reason in (
            (torch.empty(4, 8, 16), slots, "4-D"),
            (torch.empty(0, 3, 8, 16), slots, "no page"),
            (torch.empty(4, 3, 16, 8).transpose(-1, -2), slots, "not dense"),
            (torch.empty(4, 6, 8, 16)[:, ::2], slots, "not dense"),
            (torch.empty(999).as_strided((4, 3, 8, 16), (128, 128, 16, 1)), slots, "overlap"),
            (good, slots.float(), "int32 or int64"),
            (good, slots[None], "1-D"),
            (good, torch.zeros(2, dtype=torch.int64, device="meta"), "meta"),
        ):
            with pytest.raises(RuntimeError, match=reason):
                gather(cache, indices, None, "kda")
            packed = torch.empty(2, *cache.shape[1:])
            with pytest.raises(RuntimeError, match=reason):
                scatter(cache, indices, packed, "kda")
        for packed, reason in (
            (torch.empty(3, 3, 8, 16), "3 packed rows"),
            (torch.empty(2, 3, 16, 8), "packed states are"),
            (torch.empty(2, 3, 8, 16, dtype=torch.bfloat16), "bfloat16"),
            (torch.empty(2, 3, 16, 8).transpose(-1, -2), "contiguous"),
        ):
            with pytest.raises(RuntimeError, match=reason):
                scatter(good, slots, packed, "kda")
        with pytest.raises(RuntimeError, match="3 initial-state flags for 2"):
            gather(good, slots, torch.ones(3, dtype=torch.bool), "kda")


def test_the_scatter_declares_its_write() -> None:
    schema = torch.ops.k3_ascend.kda_state_scatter.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["cache"]
    assert schema.returns == []
    gather = torch.ops.k3_ascend.kda_state_gather.default._schema
    assert not gather.is_mutable
    assert [str(r.type) for r in gather.returns] == ["Tensor"]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Layers of vLLM's forward context, which is set for the test."""
    forward_context = pytest.importorskip("vllm.forward_context")
    from types import SimpleNamespace

    if not has_npu():  # Dynamo asks for the accelerator's stream, which a machine without a driver cannot give
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    layers: dict[str, Any] = {}
    fake = SimpleNamespace(no_compile_layers=layers, attn_metadata=None)
    monkeypatch.setattr(forward_context, "_forward_context", fake)
    return layers


@needs_vllm
def test_the_operators_find_the_plan_by_the_layer_s_name(context: dict[str, Any]) -> None:
    gather, scatter = torch.ops.k3_ascend.kda_state_gather, torch.ops.k3_ascend.kda_state_scatter
    cache, slots = cache_of(), torch.tensor([2, -1])
    layer = Layer("a", cache)
    context.update({"a": layer, "mla": object()})
    for name, reason in (("a", "a: no state copy was published"), ("b", "no KDA layer 'b'"), ("mla", "found object")):
        with pytest.raises(RuntimeError, match=reason):
            gather(cache, slots, None, name)
    state_copy.initialise({"a": layer}, max_num_seqs=4)
    same(gather(cache, slots, None, "a"), gathered(cache, [2, -1]))
    scatter(cache, slots, cache.new_ones(2, *SHAPE[1:]), "a")
    assert bool((cache[2] == 1).all())
    state_copy.withdraw({"a": layer})
    with pytest.raises(RuntimeError, match="no state copy was published"):
        gather(cache, slots, None, "a")


@needs_vllm
@pytest.mark.parametrize("generation", ["950", "A2"])
def test_one_full_graph_of_dynamic_shapes(context: dict[str, Any], generation: str) -> None:
    """Compiled once with the eager backend: other row counts, indices, flags and states do not compile again."""
    import torch._dynamo

    torch._dynamo.reset()
    cache, twin = cache_of(), cache_of()
    compiler = Recorder()
    layer = Layer("a", cache)
    state_copy.initialise({"a": layer}, max_num_seqs=16, compiler=compiler, generation=lambda _: generation)
    context["a"] = layer
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def step(cache: torch.Tensor, slots: torch.Tensor, flags: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        copies = state_copy.of(layer)
        initial = copies.gather(cache, slots, flags)
        copies.store(cache, slots, (initial + delta).double())
        return initial

    for seed, rows in enumerate(([3, -1, 0, 7], [5, 2, 4, 9, 1], [1, 3])):  # a count that is no other axis's size
        slots, delta = torch.tensor(rows, dtype=torch.int32), torch.full((len(rows), *SHAPE[1:]), 0.5 + seed)
        flags = torch.arange(len(rows)) != seed
        wanted = gathered(twin, rows, flags.tolist())
        same(step(cache, slots, flags, delta), wanted)
        for row, slot in enumerate(rows):
            if 0 <= slot < SHAPE[0]:
                twin[slot] = wanted[row] + delta[row]
        torch.testing.assert_close(whole(cache), whole(twin), rtol=0, atol=0)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes if "k3_ascend" in str(node.target)]
    assert targets == ["k3_ascend.kda_state_gather", "k3_ascend.kda_state_scatter"]
    assert len(compiler.compiled) == 4


@needs_vllm
def test_functionalisation_keeps_the_write(context: dict[str, Any]) -> None:
    """The aot_eager backend functionalises: a scatter whose write it dropped would leave the cache as it was."""
    import torch._dynamo

    torch._dynamo.reset()
    cache = cache_of()
    layer = Layer("a", cache)
    state_copy.initialise({"a": layer}, max_num_seqs=16)
    context["a"] = layer

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(cache: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        copies = state_copy.of(layer)
        copies.scatter(cache, slots, packed)
        return copies.gather(cache, slots)

    for rows in ([1, -1], [4, 2, 0]):
        packed = torch.randn(len(rows), *SHAPE[1:])
        got = step(cache, torch.tensor(rows), packed)
        same(got, gathered(cache, rows))
        same(got[0], packed[0])
        same(cache[rows[0]], packed[0])


@needs_vllm
def test_the_operators_pass_torch_s_own_checks(context: dict[str, Any]) -> None:
    from torch.library import opcheck

    cache = cache_of(offset=0)
    layer = Layer("a", cache)
    state_copy.initialise({"a": layer}, max_num_seqs=16)
    context["a"] = layer
    slots, flags = torch.tensor([1, -1, 4], dtype=torch.int32), torch.tensor([True, True, False])
    utils = ("test_schema", "test_faketensor")  # test_schema calls with copies of the inputs, so a layout of its own
    opcheck(torch.ops.k3_ascend.kda_state_gather, (cache, slots, flags, "a"), test_utils=utils[1:])
    packed = torch.randn(3, *SHAPE[1:])
    opcheck(torch.ops.k3_ascend.kda_state_scatter, (cache, slots, packed, "a"), test_utils=utils[1:])
    dense = cache_of(gap=0)
    layer.kv_cache = (torch.zeros(1), dense)
    state_copy.initialise({"a": layer}, max_num_seqs=16)
    opcheck(torch.ops.k3_ascend.kda_state_gather, (dense, slots, flags, "a"), test_utils=utils)
    opcheck(torch.ops.k3_ascend.kda_state_scatter, (dense, slots, packed, "a"), test_utils=utils)


@needs_vllm
def test_a_dispatch_mode_sees_the_operators(context: dict[str, Any]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Census(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    cache = cache_of()
    layer = Layer("a", cache)
    state_copy.initialise({"a": layer}, max_num_seqs=16)
    context["a"] = layer
    with Census() as census:
        packed = state_copy.of(layer).gather(cache, torch.tensor([3]))
        state_copy.of(layer).scatter(cache, torch.tensor([4]), packed)
    assert "k3_ascend.kda_state_gather.default" in census.seen
    assert "k3_ascend.kda_state_scatter.default" in census.seen
    same(cache[4], cache[3])
