"""Rules of the benchmark scripts: when a layer counts as right (it must be able to say no), device time, sanitizers."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LINE: dict[str, Any] = {"rows": 1313, "median": 0.005, "max": 0.19, "beyond": 70, "beyond_bf16_reference": 110}


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"beyond": 60, "beyond_bf16_reference": 0}, True),  # within 5 % of the rows: the golden data's own bound
        ({"beyond": 200, "beyond_bf16_reference": 110}, False),  # more rows off than chance explains
        ({"beyond": 140, "beyond_bf16_reference": 110}, True),
        ({"rows": 108, "beyond": 14, "beyond_bf16_reference": 0}, False),
        ({"median": 0.03}, False),  # a small error in every row
        ({"max": 1.0}, False),  # one row with a lost state
        ({"max": float("nan")}, False),
        ({"median": float("nan")}, False),
    ],
)
def test_layer_rule(script: Callable[[str], Any], change: dict[str, Any], right: bool) -> None:
    assert script("model_check").layer_ok({**LINE, **change}, worst=0.5) is right


@pytest.mark.parametrize(
    ("times", "busy"),
    [
        ([], 0.0),
        ([(5.0, 9.0)], 4.0),
        ([(0.0, 10.0), (2.0, 30.0), (31.0, 40.0)], 40.0),  # overlapped kernels once, a graph's own gap included
        ([(31.0, 40.0), (0.0, 10.0), (2.0, 30.0)], 40.0),
        ([(0.0, 10.0), (100.0, 110.0)], 20.0),  # a wait for the host belongs to no step
        ([(0.0, 50.0), (10.0, 20.0), (60.0, 61.0)], 61.0),
    ],
)
def test_device_time(script: Callable[[str], Any], times: list[tuple[float, float]], busy: float) -> None:
    launches = script("engine_timeline").exposures([("a", 7, *time) for time in times], 20.0)
    assert sum(launch.exposed + launch.gap for launch in launches) == busy


RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (["1 passed", "========= ERROR SUMMARY: 0 errors"], 0),
        (["========= Invalid __global__ read of size 4 bytes", "========= ERROR SUMMARY: 1 error"], 1),
        ([RACES.format(0, 0)], 0),
        ([RACES.format(3, 2), RACES.format(1, 1)], 4),  # processes that the first one started
        (["stopped: out of time"], None),  # no summary is no clean bill
    ],
)
def test_what_a_sanitizer_found(script: Callable[[str], Any], said: list[str], found: int | None) -> None:
    assert script("sanitize").found_by_tool(said) == found


def test_cases_are_spread_over_the_whole_list(script: Callable[[str], Any]) -> None:
    some = script("conformance").some
    assert some(list(range(10)), 4) == [0, 3, 6, 9]
    assert some(list(range(10)), 1) == [0]
    assert some(list(range(3)), 4) == [0, 1, 2]


@pytest.mark.parametrize(
    ("lines", "status", "right"),
    [
        (["========= ERROR SUMMARY: 0 errors"], 0, True),
        (["========= ERROR SUMMARY: 2 errors"], 9, False),
        (["========= ERROR SUMMARY: 0 errors"], 1, False),
        ([], 0, False),
        (
            [json.dumps({"row": {"case": "x", "verdict": "fail", "reason": "off"}}), "= ERROR SUMMARY: 0 errors"],
            0,
            False,
        ),
    ],
)
def test_a_process_under_a_sanitizer(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, lines: list[str], status: int, right: bool
) -> None:
    """The process is a stand-in that says what the tool and the cases would."""
    sanitize, conformance = script("sanitize"), script("conformance")
    program = f"import sys; print({chr(10).join(lines)!r}); sys.exit({status})"
    monkeypatch.setattr(conformance, "command", lambda *_: [sys.executable, "-c", program])
    row = sanitize.part("route", [], ("small",), 4, time.monotonic() + 60)
    assert row["ok"] is right
    assert ("said" in row) is not right


def test_a_process_that_does_not_end_is_ended_with_what_it_started(script: Callable[[str], Any]) -> None:
    """Its rows so far are kept; a grandchild that holds the pipe open would hang the reading."""
    conformance = script("conformance")
    row = json.dumps({"row": {"case": "x", "verdict": "pass"}})
    program = f"import subprocess; print({row!r}, flush=True); subprocess.run(['sleep', '600'])"
    began = time.monotonic()
    page = conformance.collect("route", conformance.child([sys.executable, "-c", program]), 8)
    assert time.monotonic() - began < 60
    assert [one["case"] for one in page["rows"]] == ["x"]
    assert page["status"] != 0
    assert page["words"][-1] == "stopped: out of time"


@pytest.mark.parametrize("preset", ["k3", "linear"])
def test_references_of_the_layer_check_are_the_loaded_ones(
    script: Callable[[str], Any], preset: str, tmp_path: Path
) -> None:
    """Read once and made two: bit for bit what two readings give, routed experts packed or not."""
    from k3_core.checkpoint import write_tiny
    from k3_core.reference import load_model

    folder = write_tiny(tmp_path, preset, seed=1)
    packed = preset == "k3"
    made = script("model_check").load_references(folder, "cpu", packed)
    ids = list(range(20, 40))
    for model, dtype in zip(made, (torch.float32, torch.bfloat16), strict=True):
        assert model.dtype == dtype
        assert torch.equal(model.logits(ids), load_model(folder, dtype, packed_experts=packed).logits(ids))


def test_cases_with_drafts_share_processes_by_configuration(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case and its twin with plain n-grams, one process; all processes at a time, results as they come."""
    drafts = script("drafts")
    groups: list[list[str]] = []

    def work(command: list[str], several: list[dict[str, Any]], processes: int, **_: Any) -> Iterator[Any]:
        groups.append([case["name"] for case in several])
        for case in several:
            yield SimpleNamespace(case=case, ranks=None if case["name"] == "b" else [{}], why="on purpose")

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(drafts, "on_gpu", lambda: True)
    monkeypatch.setattr(drafts.world, "run", work)
    monkeypatch.setattr(drafts, "say", lambda **row: said.append(row))
    limits = SimpleNamespace(together=3, case_seconds=1, deadline=1)
    found = [one.case["name"] for one in drafts.run([{"name": name} for name in ("a", "a ngram", "b", "c")], limits)]
    assert sorted(found) == ["a", "a ngram", "c"]
    assert sorted(groups) == [["a", "a ngram"], ["b"], ["c"]]
    assert [row["case"] for row in said] == ["b"]


def test_every_compiler_of_this_wheel_is_watched(script: Callable[[str], Any]) -> None:
    """A function that compiles a kernel, in whichever source, stands in the list of the late ones."""
    kernels = BENCHMARKS.parent / "src" / "k3_nvidia" / "kernels"
    marks = {"@cute.kernel": "build", "nvrtcCompileProgram(": "compile_source"}
    found = {
        f"k3_nvidia.kernels.{path.stem}:{name}"
        for path in kernels.glob("*.py")
        for mark, name in marks.items()
        if mark in path.read_text()
    }
    assert found == set(script("gpu_smoke").COMPILERS)
    for one in found:
        module, name = one.split(":")
        assert f"def {name}(" in (kernels / f"{module.rpartition('.')[2]}.py").read_text()
