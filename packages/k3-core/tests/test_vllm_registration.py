"""Which wheel acts, and that registration is idempotent, complete, reversible and silent about nothing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="registration talks to vLLM")

from k3_core import CONTRACT_VERSION
from k3_core.vllm import plugin, registration, versions
from k3_core.vllm.registration import ARCHITECTURES, Wheel

CORE = plugin.WHEEL
Vendor = Callable[..., Wheel]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with vLLM as it was, on a CPU, without an override; what was registered before comes back."""
    before = registration.active()
    registration.unregister()
    monkeypatch.delenv("K3_IMPL", raising=False)
    monkeypatch.setattr(registration, "_platform", lambda: "reference")
    yield
    monkeypatch.undo()  # what the test itself changed, too: it must not decide what comes back
    registration.unregister()
    if before is not None:
        assert registration.register(before)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The lines logged so far at INFO and above."""
    logger = logging.getLogger("vllm.plugins.k3")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == logger.name]


def vendor(which: str, **changes: object) -> Wheel:
    """A wheel like k3-``which`` with a model."""
    models = dict.fromkeys(ARCHITECTURES, f"k3_{which}.model:Model")
    return replace(replace(CORE, name=f"k3-{which}", vendor=which, models=models), **changes)


def registered() -> dict[str, str]:
    """Architecture -> module that vLLM would load it from."""
    from vllm.model_executor.models import ModelRegistry

    known = {name: ModelRegistry.models.get(name) for name in ARCHITECTURES}
    return {name: getattr(entry, "module_name", "") for name, entry in known.items()}


def everything() -> dict[str, object]:
    """All that registration may change in vLLM."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.tool_parsers import ToolParserManager

    return {
        "models": registered(),
        "hooks": {name: MODELS_CONFIG_MAP.get(name) for name in ARCHITECTURES},
        "tokenizer": TokenizerRegistry.tokenizers.get("kimi_k3"),
        "renderer": RENDERER_REGISTRY.renderers.get("kimi_k3"),
        "reasoning": ReasoningParserManager.lazy_parsers.get("kimi_k3"),
        "tools": ToolParserManager.lazy_parsers.get("kimi_k3"),
    }


def test_core_acts_on_a_cpu_and_registers_everything_under_the_usual_names(lines: Callable[[], list[str]]) -> None:
    plugin.register()
    assert registration.active() == CORE
    state = everything()
    assert all(module.startswith("k3_core.vllm.") for module in registered().values())
    assert state["tokenizer"] == ("k3_core.vllm.tokenizer", "KimiK3Tokenizer")
    assert state["renderer"] == ("k3_core.vllm.renderer", "KimiK3Renderer")
    assert state["reasoning"][0] == state["tools"][0] == "k3_core.vllm.parsers"
    assert lines() == []
    registration.announce()
    registration.announce()
    assert lines() == [f"k3-core {CORE.version} serves Kimi K3 and Kimi-Linear ('reference', chosen by platform)"]


def test_registering_twice_changes_nothing_more(lines: Callable[[], list[str]]) -> None:
    plugin.register()
    once, said = everything(), lines()
    plugin.register()
    assert everything() == once
    assert lines() == said


def test_unregister_leaves_vllm_as_it_was() -> None:
    before = everything()
    plugin.register()
    assert everything() != before
    registration.unregister()
    assert everything() == before


@pytest.mark.parametrize("order", [("nvidia", "reference", "amd"), ("amd", "reference", "nvidia")])
@pytest.mark.parametrize("platform", ["reference", "nvidia", "amd"])
def test_exactly_one_of_several_wheels_acts_in_any_order(
    order: tuple[str, ...], platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_platform", lambda: platform)
    wheels = {name: CORE if name == "reference" else vendor(name) for name in order}
    acted = [name for name in order if registration.register(wheels[name])]
    assert acted == [platform]
    package = "k3_core" if platform == "reference" else f"k3_{platform}"
    assert all(module.startswith(package) for module in registered().values())


def test_two_distributions_of_one_vendor_the_first_acts_and_both_are_named(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(registration, "_platform", lambda: "nvidia")
    fork = vendor("nvidia", name="k3-nvidia-fork", models=dict.fromkeys(ARCHITECTURES, "fork.model:Model"))
    assert registration.register(vendor("nvidia"))
    assert not registration.register(fork)
    assert all(module.startswith("k3_nvidia") for module in registered().values())
    assert sum("k3-nvidia-fork" in line and "k3-nvidia " in line for line in lines()) == 1


@pytest.mark.parametrize("chosen", ["reference", "nvidia", "ascend"])
def test_k3_impl_overrides_the_platform(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_IMPL", chosen)
    wheels = [CORE, vendor("nvidia"), vendor("ascend")]
    assert [wheel.vendor for wheel in wheels if registration.register(wheel)] == [chosen]


def test_k3_impl_upstream_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    before = everything()
    monkeypatch.setenv("K3_IMPL", "upstream")
    for wheel in (CORE, vendor("nvidia")):
        assert not registration.register(wheel)
    assert everything() == before
    assert len(lines()) == 1


def test_an_unknown_k3_impl_is_one_error_line(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    before = everything()
    monkeypatch.setenv("K3_IMPL", "nvida")
    for wheel in (CORE, vendor("nvidia")):
        assert not registration.register(wheel)
    assert everything() == before
    (line,) = lines()
    assert "'nvida'" in line
    assert "nvidia" in line


def test_a_chosen_wheel_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("K3_IMPL", "nvidia")
    monkeypatch.setattr(registration.importlib.metadata, "entry_points", lambda group: ())
    assert not registration.register(CORE)
    _, line = lines()
    assert "k3-nvidia" in line
    assert "not installed" in line


def test_a_wheel_on_another_platform_says_one_line(lines: Callable[[], list[str]]) -> None:
    before = everything()
    for _ in range(2):
        assert not registration.register(vendor("nvidia"))
    assert everything() == before
    (line,) = lines()
    assert "k3-nvidia" in line
    assert "'reference'" in line


def test_a_platform_without_wheel_is_one_line(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    monkeypatch.setattr(registration, "_platform", lambda: None)
    before = everything()
    assert not registration.register(CORE)
    assert everything() == before
    assert len(lines()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm": ">=0.99,<1.0"}, ["vllm", ">=0.99,<1.0", "transformers"]),
        ({"transformers": "<4"}, ["vllm", "transformers", "<4"]),
        ({"contracts": frozenset({CONTRACT_VERSION + 1})}, ["contract", str(CONTRACT_VERSION + 1)]),
        ({"models": {}}, ["no model"]),
    ],
)
def test_a_wheel_that_does_not_fit_says_one_line_and_changes_nothing(
    changes: dict[str, object], words: list[str], lines: Callable[[], list[str]]
) -> None:
    before = everything()
    assert not registration.register(replace(CORE, **changes))
    assert everything() == before
    (line,) = lines()
    assert "\n" not in line
    for word in [CORE.name, CORE.version, *words]:
        assert word in line
    if "contracts" not in changes and "models" not in changes:
        assert str(versions.found_version("vllm")) in line
        assert str(versions.found_version("transformers")) in line


def test_a_failure_half_way_is_rolled_back_and_not_raised(lines: Callable[[], list[str]]) -> None:
    def fails() -> registration.Undo:
        raise RuntimeError("a step of this wheel is broken")

    before = everything()
    assert not registration.register(replace(CORE, steps=(fails,)))
    assert everything() == before
    assert registration.active() is None
    (line,) = lines()
    assert "a step of this wheel is broken" in line


def _in_child(queue: multiprocessing.Queue) -> None:
    from k3_core.vllm import plugin, registration

    plugin.register()
    plugin.register()
    wheel = registration.active()
    queue.put(None if wheel is None else wheel.name)


@pytest.mark.slow
def test_a_spawned_process_registers_for_itself() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_spawned, args=(str(Path(__file__)), queue))
    child.start()
    assert queue.get(timeout=300) == "k3-core"
    child.join(300)
    assert child.exitcode == 0


def _spawned(path: str, queue: multiprocessing.Queue) -> None:
    _in_child(queue)


@pytest.mark.slow
def test_registration_initialises_no_device_and_imports_no_model() -> None:
    program = (
        "import sys\n"
        "from k3_core.vllm import plugin, registration\n"
        "plugin.register()\n"
        "import torch\n"
        "assert registration.active() is not None\n"
        "assert not torch.cuda.is_initialized()\n"
        "loaded = [name for name in sys.modules if name.startswith('k3_core.')]\n"
        "late = ('.model', '.processor', '.renderer', '.limits', '.text_model')\n"
        "assert not [name for name in loaded if name.endswith(late)], loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


FAKE_WHEEL = """
from dataclasses import replace
from k3_core.vllm import plugin, registration
def register():
    models = dict.fromkeys(registration.ARCHITECTURES, "{package}.model:Model")
    registration.register(replace(plugin.WHEEL, name="{package}", models=models))
"""


def fake_distribution(folder: Path, package: str) -> None:
    """An installed wheel with one entry point, as vLLM finds it."""
    folder.mkdir()
    (folder / f"{package}.py").write_text(FAKE_WHEEL.format(package=package))
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{package} = {package}:register\n")


@pytest.mark.slow
@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_of_two_installed_wheels_with_the_same_architecture_exactly_one_acts(
    order: tuple[str, str], tmp_path: Path
) -> None:
    for package in order:
        fake_distribution(tmp_path / package, package)
    program = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from k3_core.vllm import registration\n"
        "from vllm.model_executor.models import ModelRegistry\n"
        "modules = {ModelRegistry.models[name].module_name for name in registration.ARCHITECTURES}\n"
        "print('ACTS', registration.active().name, *modules)\n"
    )
    paths = [str(tmp_path / package) for package in order] + [path for path in sys.path if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "first,second"}
    env.pop("K3_IMPL", None)
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ACTS")]
    _, name, *modules = line.split()
    assert modules == [f"{name}.model"]
    assert result.stderr.count("already serves Kimi K3") + result.stdout.count("already serves Kimi K3") == 1


def test_versions_prefer_the_loaded_module_over_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.7+cpu")
    assert versions.found_version("vllm") == "0.31.7+cpu"
    assert versions.found_version("a_module_that_is_not_there") is None


@pytest.mark.parametrize(
    ("found", "satisfied"),
    [("0.32.0+cpu", True), ("0.33.1.dev4+g1234", True), ("0.34.0", False), ("0.22.9", False), ("unknown", False)],
)
def test_local_and_development_builds_count_by_their_number(found: str, satisfied: bool) -> None:
    assert versions.Requirement("vllm", versions.CORE_VLLM, found).satisfied is satisfied
