"""The state-copy benchmark: what it records, that pairs alternate, that a run never overwrites another."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the benchmark hashes the kernels it measures, and imports their package")

BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_state_copy.py"
SMALL = ["--device", "cpu", "--rows", "1", "3", "--slots", "5", "--heads", "2", "--head-dim", "8", "--gap", "16",
         "--pairs", "4", "--warmup", "1", "--dtypes", "float32", "bfloat16"]  # fmt: skip


@pytest.fixture
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_state_copy", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_is_recorded(bench: Any, tmp_path: Path) -> None:
    page = json.loads(bench.main([*SMALL, "--out", str(tmp_path), "--seed", "7"]).read_text())
    assert page["seed"] == 7
    assert page["source_sha256"] == bench.source_hash()
    assert len(page["source_sha256"]) == 64
    assert page["environment"]["torch"] == torch.__version__
    assert [(c["dtype"], c["rows"]) for c in page["cases"]] == [
        ("float32", 1), ("float32", 3), ("bfloat16", 1), ("bfloat16", 3),
    ]  # fmt: skip
    for case in page["cases"]:
        assert case["plan"] == "byte-copy"
        for operation in ("gather", "scatter"):
            samples = case["samples"][operation]
            assert samples["order"] == [["plan", "native"], ["native", "plan"]] * 2, "the order alternates"
            assert [list(pair) for pair in samples["wall"]] == samples["order"]
            assert all(value > 0 for pair in samples["wall"] for value in pair.values())
            assert len(samples["event"]) == len(samples["graph"]) == 4
            assert all(value is None for pair in samples["event"] for value in pair.values()), "a CPU has no events"


def test_each_run_has_a_file_of_its_own(bench: Any, tmp_path: Path) -> None:
    written = {bench.main([*SMALL, "--out", str(tmp_path)]) for _ in range(3)}
    assert len(written) == 3
    assert sorted(tmp_path.iterdir()) == sorted(written)


def test_the_hash_is_of_the_sources(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = bench.source_hash()
    assert bench.source_hash() == before
    copy = tmp_path / "bench_state_copy.py"
    copy.write_bytes(BENCHMARK.read_bytes() + b"\n")
    monkeypatch.setattr(bench, "__file__", str(copy))
    assert bench.source_hash() != before
    assert hashlib.sha256(b"").hexdigest() != before


def test_a_wrong_copy_is_not_timed(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = bench.native_gather
    monkeypatch.setattr(bench, "native_gather", lambda *args: right(*args) + 1)
    with pytest.raises(SystemExit, match="nothing is timed"):
        bench.main([*SMALL, "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_more_rows_than_slots_is_an_error(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        bench.main([*SMALL, "--rows", "9", "--out", str(tmp_path)])
