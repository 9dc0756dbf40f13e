"""The worker's start-up: four variants a layout, on scratch; sealed; published for all layers or for none."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_state_copy_support import SHAPE, Layer, Recorder, bits, cache_of, gathered, publish, whole

from k3_ascend import state_copy
from k3_ascend.state_copy import configuration, hooks
from k3_ascend.state_copy.compiler import Direction, Variant
from k3_ascend.state_copy.layout import Layout, PlanKind


def on(generation: str) -> Any:
    return lambda _: generation


def layers_of(*caches: torch.Tensor | None) -> dict[str, Layer]:
    return {f"model.layers.{i}.kda": Layer(f"model.layers.{i}.kda", cache) for i, cache in enumerate(caches)}


def start(layers: dict[str, Layer], compiler: Recorder, generation: str = "950", rows: int = 64) -> Any:
    return state_copy.initialise(layers, max_num_seqs=rows, compiler=compiler, generation=on(generation))


@pytest.mark.parametrize(("generation", "kind"), [("950", PlanKind.FUSED), ("A3", PlanKind.BYTES)])
def test_exactly_four_variants_a_layout_and_layers_share_them(generation: str, kind: PlanKind) -> None:
    compiler = Recorder()
    layers = layers_of(*(cache_of(seed=i) for i in range(69)))
    published = start(layers, compiler, generation)
    four = {Variant(kind, d, i) for d in Direction for i in (torch.int32, torch.int64)}
    assert len(compiler.compiled) == 4
    assert {variant for variant, _ in compiler.compiled} == four
    assert published.layers == tuple(layers)
    assert len(published.tables) == 1
    plans = [state_copy.of(layer) for layer in layers.values()]
    assert len({id(plan.table) for plan in plans}) == 1
    assert len({id(plan) for plan in plans}) == 69, "each layer has its own binding"
    assert [plan.layer_name for plan in plans] == list(layers)


def test_different_layouts_and_alignment_classes_are_prepared_apart() -> None:
    compiler = Recorder()
    caches = (cache_of(), cache_of(gap=64), cache_of(offset=1), cache_of(offset=5), cache_of(dtype=torch.float16))
    published = start(layers_of(*caches), compiler)
    assert len(published.tables) == 4, "addresses 4 and 20 are the same class modulo 16"
    assert len(compiler.compiled) == 16
    assert {table.kind for table in published.tables} == {PlanKind.FUSED, PlanKind.BYTES}
    assert len(published.reasons) == 4


def test_preparation_never_touches_live_cache_and_synchronises_once_a_layout() -> None:
    compiler = Recorder()
    caches = (cache_of(), cache_of(gap=64))
    before = [whole(cache) for cache in caches]
    start(layers_of(*caches), compiler)
    for cache, bytes_ in zip(caches, before, strict=True):
        torch.testing.assert_close(whole(cache), bytes_, rtol=0, atol=0)
    assert compiler.synchronised == 2
    ranges = [(c.untyped_storage().data_ptr(), c.untyped_storage().nbytes()) for c in caches]
    for _, tensors in compiler.launched:
        for tensor in tensors:
            assert all(not start <= tensor.data_ptr() < start + size for start, size in ranges)


def test_scratch_is_freed_and_a_plan_keeps_no_tensor() -> None:
    compiler = Recorder()
    layer = Layer("kda", cache_of())
    start({"kda": layer}, compiler)
    scratch = [weakref.ref(tensor) for _, tensors in compiler.launched for tensor in tensors]
    assert len(scratch) == 14
    compiler.launched.clear()
    gc.collect()
    assert [ref() for ref in scratch if ref() is not None] == []
    plan = state_copy.of(layer)
    cache, indices, flags = layer.recurrent_cache(), torch.tensor([1, -1]), torch.tensor([True, True])
    packed = plan.gather(cache, indices, flags)
    plan.scatter(cache, indices, packed)
    compiler.launched.clear()
    requests = [weakref.ref(t) for t in (indices, flags, packed)]
    del indices, flags, packed
    gc.collect()
    assert [ref() for ref in requests if ref() is not None] == []


@pytest.mark.parametrize("failing", range(8))
def test_all_layers_or_none(failing: int) -> None:
    """The n-th of eight compilations fails: nothing is published, and what was published before is gone."""
    caches = (cache_of(), cache_of(), cache_of(gap=64))
    layers = layers_of(*caches)
    start(layers, Recorder())
    assert all(layer.state_copy is not None for layer in layers.values())

    seen: list[Variant] = []

    def fail(variant: Variant, _: Layout) -> None:
        seen.append(variant)
        if len(seen) == failing + 1:
            raise ValueError("ub overflow")

    name = "model.layers.0.kda" if failing < 4 else "model.layers.2.kda"
    with pytest.raises(RuntimeError, match=rf"{name}.*ub overflow"):
        start(layers, Recorder(fail))
    assert all(layer.state_copy is None for layer in layers.values())
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.kda: no state copy was published"):
        state_copy.of(layers["model.layers.1.kda"])


class Unfinished(Recorder):
    """An error of a launch that surfaces at the synchronisation."""

    def synchronize(self, device: torch.device) -> None:
        raise RuntimeError("vector core exception")


class WrongBytes(Recorder):
    """Compiles, launches, and copies one byte wrong."""

    direction = Direction.SCATTER

    def compile(self, variant: Variant, layout: Layout, cache: Any, indices: Any, flags: Any, packed: Any) -> Any:
        launch = super().compile(variant, layout, cache, indices, flags, packed)

        class Wrong:
            def __call__(inner, cache: Any, indices: Any, flags: Any, packed: Any) -> None:  # noqa: N805
                launch(cache, indices, flags, packed)
                if variant.direction is self.direction:
                    (packed if flags is not None else cache).view(-1)[-1] = 7

            def hooked(inner) -> None:  # noqa: N805
                return None

        return Wrong()


def test_launch_errors_surface_in_the_start_up() -> None:
    layers = layers_of(cache_of())
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.kda.*vector core exception"):
        start(layers, Unfinished())
    assert layers["model.layers.0.kda"].state_copy is None


@pytest.mark.parametrize("direction", list(Direction))
def test_wrong_bytes_on_scratch_abort_the_start_up(direction: Direction) -> None:
    compiler = WrongBytes()
    compiler.direction = direction
    layers = layers_of(cache_of())
    with pytest.raises(RuntimeError, match=rf"layers\.0\.kda.*{direction} int32 copied wrong bytes"):
        start(layers, compiler)
    assert layers["model.layers.0.kda"].state_copy is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (None, "not bound"),
        (torch.tensor([]), "4-D"),
        (torch.zeros(0, 3, 8, 16), "empty"),
        (torch.zeros(3, 8, 16), "4-D"),
        (torch.zeros(3000).as_strided((4, 3, 8, 16), (100, 128, 16, 1)), "overlap"),
    ],
)
def test_an_unbound_cache_or_an_illegal_layout_names_the_layer(bad: torch.Tensor | None, reason: str) -> None:
    layers = layers_of(cache_of(), bad)
    compiler = Recorder()
    with pytest.raises(RuntimeError, match=rf"model\.layers\.1\.kda.*{reason}"):
        start(layers, compiler)
    assert compiler.compiled == [], "layouts are looked at before anything is compiled"
    assert all(layer.state_copy is None for layer in layers.values())


def test_a_cache_of_another_form_is_unbound() -> None:
    layer = Layer("kda", cache_of())
    for value in (torch.tensor([]), [torch.zeros(1)], None):
        layer.kv_cache = value
        with pytest.raises(RuntimeError, match="not bound"):
            layer.recurrent_cache()


def test_no_rows_no_plan() -> None:
    with pytest.raises(RuntimeError, match="max_num_seqs is 0"):
        start(layers_of(cache_of()), Recorder(), rows=0)


@pytest.mark.parametrize(
    "variable",
    ["TRITON_DEBUG", "ASCEND_HOME_PATH", "CANN_X", "TORCH_NPU_X", "NPU_X", "LLVM_X",
     "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"],
)  # fmt: skip
@pytest.mark.parametrize("change", ["set", "other", "gone"])
def test_a_changed_compiler_configuration_is_not_sealed(
    monkeypatch: pytest.MonkeyPatch, variable: str, change: str
) -> None:
    if change == "set":
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, "/private/one")

    def meddle(*_: Any) -> None:
        monkeypatch.delenv(variable) if change == "gone" else monkeypatch.setenv(variable, "/private/two")
        compiler.fail = None

    compiler = Recorder(meddle)
    layers = layers_of(cache_of())
    with pytest.raises(RuntimeError, match=rf"layers\.0\.kda.*configuration changed.*{variable}") as raised:
        start(layers, compiler)
    assert "/private" not in str(raised.value), "values may be private"
    assert layers["model.layers.0.kda"].state_copy is None


def test_other_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(cache_of())
    start(layers, Recorder(lambda *_: monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")))
    assert state_copy.of(layers["model.layers.0.kda"]).table.sealed


def test_versions_are_part_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = configuration.snapshot()
    monkeypatch.setattr(torch, "__version__", "0.0")
    monkeypatch.setattr(configuration.importlib.metadata, "version", lambda name: f"{name} 0")
    assert {"torch version", "triton version", "triton-ascend version"} <= set(
        configuration.drift(before, configuration.snapshot())
    )


def test_a_jit_hook_that_appears_is_not_sealed() -> None:
    compiler = Recorder()
    compiler.fail = lambda *_: compiler.hook_table.update({"JITFunction.cache_hook": print})
    with pytest.raises(RuntimeError, match=r"layers\.0\.kda.*hook appeared.*cache_hook"):
        start(layers_of(cache_of()), compiler)
    compiler = Recorder()
    compiler.hook_table["JITFunction.cache_hook"] = print  # one that was there before is the operator's own
    start(layers_of(cache_of()), compiler)


def test_a_pre_run_hook_is_not_sealed() -> None:
    compiler = Recorder()
    compiler.launch_hook = "a pre-run hook"
    with pytest.raises(RuntimeError, match=r"hook appeared.*pre-run"):
        start(layers_of(cache_of()), compiler)


# --- the runners -----------------------------------------------------------------------------------------------------


def runner_class(order: list[str]) -> type:
    """A runner as vllm-ascend's two are: initialize_kv_cache allocates and binds."""

    class NPUModelRunner:
        def __init__(self, names: tuple[str, ...], rows: int = 8) -> None:
            self.layers = {name: Layer(name, None) for name in names}
            context = dict(self.layers) | {"model.layers.3.mla": object()}
            self.vllm_config = SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context=context),
                scheduler_config=SimpleNamespace(max_num_seqs=rows),
            )

        def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> str:
            order.append("bind")
            assert all(layer.state_copy is None for layer in self.layers.values())
            for i, layer in enumerate(self.layers.values()):
                recurrent = cache_of(seed=i)
                layer.kv_cache = (torch.zeros(len(recurrent), 4), recurrent)
            return f"bound {kv_cache_config} {is_profiling}"

    return NPUModelRunner


@pytest.fixture(params=hooks.RUNNERS, ids=lambda r: r[0].removeprefix("vllm_ascend.worker."))
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[type, list[str]]:
    """A stand-in for one of the runner classes, as the only one that is loaded; and the order of events."""
    for module_name, _ in hooks.RUNNERS:
        monkeypatch.delitem(sys.modules, module_name, raising=False)
    order: list[str] = []
    module = ModuleType(request.param[0])
    cls = runner_class(order)
    setattr(module, request.param[1], cls)
    monkeypatch.setitem(sys.modules, request.param[0], module)
    real = hooks.initialise

    def recorded(layers: Any, **keywords: Any) -> Any:
        order.append("publish")
        return real(layers, **keywords)

    monkeypatch.setattr(hooks, "initialise", recorded)
    return cls, order


def test_every_runner_publishes_after_binding(runner: tuple[type, list[str]]) -> None:
    cls, order = runner
    assert len(state_copy.install()) == 1
    assert len(state_copy.install()) == 1, "installing again changes nothing"
    worker = cls(("a", "b"))
    assert worker.initialize_kv_cache("config", is_profiling=True) == "bound config True"
    assert order == ["bind", "publish"]
    for name, layer in worker.layers.items():
        plan = state_copy.of(layer)
        assert (plan.layer_name, plan.table.max_rows) == (name, 8)


def test_a_derived_runner_publishes_once(runner: tuple[type, list[str]]) -> None:
    cls, order = runner
    state_copy.install()

    class Derived(cls):  # type: ignore[misc, valid-type]
        def initialize_kv_cache(self, kv_cache_config: Any) -> None:
            super().initialize_kv_cache(kv_cache_config)
            order.append("derived")

    Derived(("a",)).initialize_kv_cache(1)
    assert order == ["bind", "publish", "derived"]


def test_other_models_pass_through(runner: tuple[type, list[str]]) -> None:
    cls, order = runner
    state_copy.install()
    cls(()).initialize_kv_cache(1)
    assert order == ["bind"]


def test_a_failed_start_up_aborts_the_worker(runner: tuple[type, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    cls, _ = runner
    state_copy.install()
    worker = cls(("model.layers.0.kda", "model.layers.1.kda"))
    monkeypatch.setattr(
        "k3_ascend.state_copy.compiler.default", lambda _: Recorder(lambda *_: (_ for _ in ()).throw(OSError("full")))
    )
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.kda.*full"):
        worker.initialize_kv_cache(1)
    assert all(layer.state_copy is None for layer in worker.layers.values())


def test_binding_again_publishes_again(runner: tuple[type, list[str]]) -> None:
    cls, order = runner
    state_copy.install()
    worker = cls(("a",))
    worker.initialize_kv_cache(1)
    first = state_copy.of(worker.layers["a"])
    worker.initialize_kv_cache(2)
    assert state_copy.of(worker.layers["a"]) is not first
    assert order == ["bind", "publish"] * 2


def test_two_worker_lifecycles_in_one_process(runner: tuple[type, list[str]]) -> None:
    """The second worker shares no plan, table or cache with the first, which leaves nothing behind."""
    cls, _ = runner
    state_copy.install()
    first = cls(("a", "b"), rows=4)
    first.initialize_kv_cache(1)
    plan = state_copy.of(first.layers["a"])
    gone = [weakref.ref(first.layers["a"]), weakref.ref(plan)]
    table = weakref.ref(plan.table)
    del first, plan
    gc.collect()
    assert [ref() for ref in (*gone, table) if ref() is not None] == []

    state_copy.install()
    second = cls(("a", "c"), rows=16)
    second.initialize_kv_cache(1)
    layer = second.layers["a"]
    served = state_copy.of(layer)
    assert served.table.max_rows == 16
    cache = layer.recurrent_cache()
    got = served.gather(cache, torch.tensor([5, -1, 0]))
    torch.testing.assert_close(bits(got), bits(gathered(cache, [5, -1, 0])), rtol=0, atol=0)


def test_lifecycles_may_overlap(runner: tuple[type, list[str]]) -> None:
    cls, _ = runner
    state_copy.install()
    workers = [cls(("a",), rows=4), cls(("a",), rows=2)]
    for worker in workers:
        worker.initialize_kv_cache(1)
    with pytest.raises(RuntimeError, match="max_num_seqs is 2"):
        state_copy.of(workers[1].layers["a"]).gather(workers[1].layers["a"].recurrent_cache(), torch.zeros(3).int())
    plan, cache = state_copy.of(workers[0].layers["a"]), workers[0].layers["a"].recurrent_cache()
    assert plan.gather(cache, torch.zeros(3).int()).shape == (3, *SHAPE[1:])


def test_nothing_is_wrapped_where_no_runner_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module_name, _ in hooks.RUNNERS:
        monkeypatch.delitem(sys.modules, module_name, raising=False)
    assert state_copy.install() == ()


def test_a_runner_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name, cls = hooks.RUNNERS[0]
    module = ModuleType(name)
    setattr(module, cls, type(cls, (runner_class([]),), {}))
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="no initialize_kv_cache of its own"):
        state_copy.install()


@pytest.mark.parametrize(("module_name", "class_name"), hooks.RUNNERS)
def test_the_real_runners_have_the_method(module_name: str, class_name: str) -> None:
    """Read, not imported: the runner's own class body defines initialize_kv_cache(self, kv_cache_config, ...)."""
    import ast
    import importlib.util
    from pathlib import Path

    top = importlib.util.find_spec(module_name.partition(".")[0])
    if top is None or not top.submodule_search_locations:
        pytest.skip(f"{module_name.partition('.')[0]} is not installed")
    path = Path(top.submodule_search_locations[0]).joinpath(*module_name.split(".")[1:]).with_suffix(".py")
    (cls,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    (method,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "initialize_kv_cache")
    assert [a.arg for a in method.args.args[:2]] == ["self", "kv_cache_config"]


def test_a_published_layer_says_so_in_one_place() -> None:
    plan = publish(cache_of(), name="x")
    assert plan.layer_name == "x"
    assert plan.table.sealed
