"""`k3 doctor` and `k3 env`: facts without secrets, one conclusion a problem, an exit status that tells."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
from typer.testing import CliRunner

from k3_core import CONTRACT_VERSION
from k3_core.cli import choices, diagnosis, doctor, probe
from k3_core.cli.app import app
from k3_core.cli.diagnosis import InstalledWheel
from k3_core.operators import Implementation, Registry
from k3_core.operators.contract import IMPLEMENTATIONS

CPU = {"kind": "cpu", "runtime": None, "driver": None, "devices": []}
H200 = {
    "kind": "cuda", "runtime": "13.0", "driver": "nvidia 580.1",
    "devices": [{"name": "NVIDIA H200", "arch": "sm_90", "memory": 150_000_000_000}],
}  # fmt: skip
CORE = InstalledWheel("k3-core", "0.1.0", (CONTRACT_VERSION,), ">=0.23,<0.34", has_model=True)
NVIDIA = InstalledWheel("k3-nvidia", "0.1.0", (CONTRACT_VERSION,), ">=0.32,<0.34")


class Machine:
    """A machine to diagnose, instead of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        for name in [*probe.SWITCHES, "K3_VENVS"]:
            monkeypatch.delenv(name, raising=False)
        self.set(CPU, "reference", [CORE])

    def set(
        self, accelerators: dict, vendor: str | None, wheels: list[InstalledWheel], vllm: str | None = None
    ) -> None:
        found = {"vllm": vllm, "transformers": "5.19.0" if vllm else None}
        self.patch.setattr(probe, "accelerators", lambda: accelerators)
        self.patch.setattr(diagnosis, "platform_vendor", lambda machine: (vendor, "a test"))
        self.patch.setattr(diagnosis, "installed_wheels", lambda: wheels)
        self.patch.setattr(diagnosis.versions, "found_version", found.get)
        self.patch.setattr(probe, "version_of", {w.name: w.version for w in wheels}.get)
        self.patch.setattr(probe, "in_tree_k3", lambda: ["vllm/models/kimi_k3"] if vllm else [])
        self.patch.setattr(choices.importlib.metadata, "entry_points", lambda group: ())

    def run(self, *args: str) -> tuple[int, dict]:
        done = CliRunner().invoke(app, ["doctor", "--json", *args])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def errors(report: dict) -> list[str]:
    return [finding["what"] for finding in report["findings"] if finding["level"] == "error"]


def test_without_vllm_is_a_normal_state(machine: Machine) -> None:
    code, report = machine.run()
    assert code == 0
    assert report["ok"]
    assert errors(report) == []
    assert any("vLLM is not installed" in finding["what"] for finding in report["findings"])
    assert {o["operator"]: o["chosen"] for o in report["operators"]}["kda_decode"] == "contract"


def test_a_cpu_server_is_ready(machine: Machine) -> None:
    machine.set(CPU, "reference", [CORE], vllm="0.32.0")
    code, report = machine.run()
    assert (code, report["acting"]) == (0, "k3-core")


def test_a_gpu_without_its_wheel_is_an_error_that_names_the_wheel(machine: Machine) -> None:
    machine.set(H200, "nvidia", [CORE], vllm="0.33.0")
    code, report = machine.run()
    assert code == 1
    (error,) = errors(report)
    assert "k3-nvidia is not installed" in error
    assert "vllm/models/kimi_k3" in error


@pytest.mark.parametrize(("built_for", "verdict"), [(CONTRACT_VERSION - 1, "older"), (CONTRACT_VERSION + 1, "newer")])
def test_a_contract_mismatch_names_both_versions(machine: Machine, built_for: int, verdict: str) -> None:
    wheel = InstalledWheel("k3-nvidia", "9.9", (built_for,), ">=0.32,<0.34")
    machine.set(H200, "nvidia", [CORE, wheel], vllm="0.33.0")
    code, report = machine.run()
    assert code == 1
    assert any(f"contract version {built_for}" in e and f"has {CONTRACT_VERSION}" in e for e in errors(report)), verdict


def test_an_unsupported_vllm_names_it_and_the_range(machine: Machine) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.31.0")
    code, report = machine.run()
    assert code == 1
    assert any("0.31.0" in e and ">=0.32,<0.34" in e for e in errors(report))


def test_a_supported_pair_acts(machine: Machine) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.33.0")
    code, report = machine.run()
    assert (code, report["acting"]) == (0, "k3-nvidia")


@pytest.mark.parametrize(
    ("switch", "value", "word"),
    [
        ("K3_IMPL", "nvida", "nvida"),
        ("VLLM_PLUGINS", "k3_core,lora", "k3_nvidia"),
        ("VLLM_MLA_DISABLE", "1", "VLLM_MLA_DISABLE"),
    ],
)
def test_switches_that_cannot_work_are_errors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, switch: str, value: str, word: str
) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.33.0")
    monkeypatch.setenv(switch, value)
    code, report = machine.run()
    assert code == 1
    assert any(word in e for e in errors(report))
    assert report["switches"][switch] == value


def test_upstream_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.33.0")
    monkeypatch.setenv("K3_IMPL", "upstream")
    code, report = machine.run()
    assert (code, report["acting"]) == (0, None)
    assert any("vLLM's own implementation" in finding["what"] for finding in report["findings"])


def vendor_registry() -> Registry:
    """Two implementations of an operator: the better one refuses this device with a reason."""
    registry = Registry()
    function = IMPLEMENTATIONS["situ"].function
    registry.register(
        Implementation("situ", "cute", function, lambda spec: (False, f"needs sm_100, not {spec.arch}"), 9)
    )
    registry.register(Implementation("situ", "triton", function, lambda spec: (True, f"width {spec.sizes['I']}"), 1))
    return registry


def entry(name: str, value: Any) -> types.SimpleNamespace:
    """An entry point that loads to ``value``."""
    return types.SimpleNamespace(name=name, value="nowhere:thing", load=lambda: value)


def test_the_vendors_table_is_shown_with_reasons(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.33.0")
    monkeypatch.setattr(choices.importlib.metadata, "entry_points", lambda group: (entry("nvidia", vendor_registry),))
    _, report = machine.run("--tp", "16")
    situ = next(o for o in report["operators"] if o["operator"] == "situ")
    assert situ["chosen"] == "triton"
    assert situ["said"] == [["cute", False, "needs sm_100, not sm_90"], ["triton", True, "width 192"]]
    absent = next(o for o in report["operators"] if o["operator"] == "kda_decode")
    assert absent["chosen"] is None


def test_operators_can_be_asked_about_another_device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices.importlib.metadata, "entry_points", lambda group: (entry("nvidia", vendor_registry),))
    code, report = machine.run("--gpu", "b200")
    assert code == 0
    assert report["operators_for"] == {"tp": 8, "implementation": "nvidia", "device": "b200", "arch": "sm_100"}
    situ = next(o for o in report["operators"] if o["operator"] == "situ")
    assert situ["said"][0] == ["cute", False, "needs sm_100, not sm_100"]


@pytest.mark.parametrize("value", [lambda: 1 / 0, lambda: "text"])
def test_a_broken_table_is_an_error_and_stops_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    machine.set(H200, "nvidia", [CORE, NVIDIA], vllm="0.33.0")
    monkeypatch.setattr(choices.importlib.metadata, "entry_points", lambda group: (entry("nvidia", value),))
    code, report = machine.run()
    assert code == 1
    assert any("operators of k3-nvidia do not load" in e for e in errors(report))


def test_a_wheel_that_does_not_import_is_named(machine: Machine) -> None:
    broken = InstalledWheel("k3-amd", "0.1.0", problem="ImportError: no k3_core.vllm")
    machine.set(CPU, "reference", [CORE, broken], vllm="0.32.0")
    code, report = machine.run()
    assert code == 1
    assert "k3-amd 0.1.0 does not import" in errors(report)[0]


def test_text_says_what_to_do(machine: Machine) -> None:
    machine.set(H200, "nvidia", [CORE], vllm="0.33.0")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "-> install k3-nvidia beside vLLM" in done.stdout
    assert "not ok" in done.stdout


def test_this_machine_is_diagnosed_without_an_exception() -> None:
    report = doctor.diagnose(None, 8)
    assert isinstance(report["ok"], bool)
    json.dumps(report, default=str)


def test_env_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_API_TOKEN", "hunter2")
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("K3_MIRROR", "https://user:hunter2@example.org/x")
    for args in (["env"], ["env", "--json"]):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0
        assert "hunter2" not in done.stdout
        assert "K3_API_TOKEN" in done.stdout
    facts = json.loads(done.stdout)
    assert facts["contract_version"] == CONTRACT_VERSION
    assert facts["switches"]["K3_MIRROR"] == "https://...@example.org/x"


def test_the_home_folder_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.Path, "home", lambda: probe.Path("/home/someone"))
    assert probe.redact("LD_PRELOAD", "/home/someone/lib.so") == "~/lib.so"


@pytest.mark.parametrize("fails", [False, True])
def test_the_vendors_wheel_adds_its_lines(fails: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the platform's wheel only; one that fails costs a line."""
    plugin = types.ModuleType("k3_amd_plugin_for_test")

    def diagnose() -> list[str]:
        if fails:
            raise RuntimeError("no device")
        return ["aiter 9.9", "aiter:f, for this; else that"]

    plugin.diagnose = diagnose  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    known = (types.SimpleNamespace(name="k3_amd", module=plugin.__name__),)
    monkeypatch.setattr(diagnosis.importlib.metadata, "entry_points", lambda group: known)
    assert diagnosis.vendor_lines("nvidia") == []
    assert diagnosis.vendor_lines(None) == []
    lines = diagnosis.vendor_lines("amd")
    assert lines == (["k3-amd cannot say more: RuntimeError: no device"] if fails else diagnose())
