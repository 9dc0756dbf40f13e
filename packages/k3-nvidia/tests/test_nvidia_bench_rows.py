"""How measurements become tables: the engine's rows, and AttnRes' tuning table from its sweep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def record(impl: str, experts: str, ms: float, **what: Any) -> dict[str, Any]:
    return {"part": "rank", "shape": "tp16", "impl": impl, "experts": experts, "ms": ms, **what}


def test_the_rival_of_a_row_is_the_faster_one() -> None:
    import engine_rows

    found = engine_rows.rows(
        [
            record("ours", "k3-nvidia", 2.0, decode_batch=1, device_ms=1.0, launches=150),
            record("ours", "k3-nvidia", 4.0, decode_batch=1, device_ms=1.0, launches=150),
            record("upstream", "marlin", 4.0, decode_batch=1, device_ms=1.5),
            record("upstream", "auto", 5.0, decode_batch=1, device_ms=1.25),
            record("upstream", "auto", 5.0, decode_batch=8),
            {"part": "rank", "start_s": 3.0},
        ]
    )
    assert found == {
        "tp16 decode 1": {
            "ours": 3.0, "ours, device": 1.0, "ours, launches": 150, "marlin": 4.0, "marlin, device": 1.5,
            "humming": 5.0, "humming, device": 1.25, "ratio": 0.75, "ratio, device": 0.8,
        }
    }  # fmt: skip


def test_a_run_that_is_recorded_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine_rows

    lines = [record("ours", "k3-nvidia", 2.0, prefill=32768), record("upstream", "marlin", 3.0, prefill=8192)]
    (tmp_path / "engine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command[2:])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(engine_rows.subprocess, "run", run)
    engine_rows.run(tmp_path, ["tp16"])
    assert [command[3] + " " + command[5] for command in ran] == ["upstream marlin", "upstream auto"]
    assert "tp16 prefill 32768" in json.loads((tmp_path / "engine.json").read_text())["rows"]


def test_a_start_is_a_row_of_seconds() -> None:
    import engine_rows

    sides = (("ours", "k3-nvidia", 4.0), ("upstream", "auto", 10.0), ("upstream", "marlin", 16.0))
    found = [
        {"part": "startup", "shape": "tp16", "impl": impl, "experts": experts, "init_s": seconds, "process_s": 60.0}
        for impl, experts, seconds in sides
    ]
    row = {"ours": 4.0, "humming": 10.0, "marlin": 16.0, "ratio": 0.4}
    assert engine_rows.rows(found) == {"tp16 start": row}
    both = [{**record, "caches": "warm"} for record in found]
    both += [{**record, "caches": "cold", "init_s": 9 * record["init_s"]} for record in found]
    assert engine_rows.rows(both) == {
        "tp16 start": row,
        "tp16 cold start": {"ours": 36.0, "humming": 90.0, "marlin": 144.0, "ratio": 0.4},
    }


def test_a_start_is_read_from_the_log() -> None:
    pytest.importorskip("vllm")
    import bench_engine

    from k3_core.operators import compiling

    spent = compiling.Spent()
    with spent.part("launched, 14 step sizes"):
        spent.compiled("Triton", 2.5, False)
    found = bench_engine.told(
        f"(EngineCore pid=3) INFO [warmup.py:9] Kimi K3: kernels compiled or loaded in {spent.told()}"
    )
    assert found["warmup_s"] == 0.0
    assert found["warmup"] == "launched, 14 step sizes 0.0 s; Triton: 1 compiled and 0 loaded in 2.5 s"
    init = "init engine (profile, create kv cache, warmup model) took 23.45 s (compilation: 7.50 s)"
    assert bench_engine.told(init) == {"init_s": 23.45, "compile_s": 7.5}
    assert bench_engine.told("Graph capturing finished in 12 secs, took 0.50 GiB") == {"capture_s": 12.0}
    heard = [(0.0, ""), (1.5, "(pid=1) INFO [a.py:3] weights\n"), (1.51, "x\n"), (4.0, "graphs\n"), (4.75, "end\n")]
    assert bench_engine.waits(heard, 2) == [[1.5, "weights"], [2.49, "graphs"]]
    assert len(bench_engine.waits(heard)) == 3
    caches = bench_engine.own_caches(Path("/empty"))
    assert caches["HOME"] == "/empty"
    assert all(caches[name].startswith("/empty/") for name in bench_engine.CACHES)


def test_attn_res_table_takes_the_best_and_keeps_what_was_not_measured(tmp_path: Path) -> None:
    import bench_attnres

    from k3_nvidia.kernels.attn_res import Config
    from k3_nvidia.tuning import attn_res as tuning

    (ring, other), cluster, block = bench_attnres.MANY[:2], bench_attnres.CLUSTERS[0], bench_attnres.ONE_TOKEN[0]
    names = {bench_attnres.name_of(config): config for config in bench_attnres.SWEEP}
    assert len(names) == len(bench_attnres.SWEEP), "two configurations of one name"
    rows = {
        f"T8192-n1 {bench_attnres.name_of(ring)}": {"us": 100.0},
        f"T8192-n1 {bench_attnres.name_of(other)}": {"us": 120.0},
        f"T8192-n4 {bench_attnres.name_of(ring)}": {"us": 101.0},
        f"T8192-n4 {bench_attnres.name_of(other)}": {"us": 100.0},
        f"T8192-n8 {bench_attnres.name_of(ring)}": {"error": "check failed"},
        f"T1-n8 {bench_attnres.name_of(block)}": {"us": 4.0},
        f"T1-n8 {bench_attnres.name_of(cluster)}": {"us": 3.0},
    }
    results = {"environment": {"device": "a GPU", "date": "2026-11-30 00:00:00Z"}, "rows": rows}
    bench_attnres.write_table(results, tmp_path / "table.json")
    table = json.loads((tmp_path / "table.json").read_text())
    rows = [((row["max_tokens"], row["max_blocks"]), Config(**row["config"])) for row in table["rows"]]
    assert [config for bounds, config in rows if bounds == (3, 64)] == [cluster, block], "and who has no clusters?"
    chosen = dict(rows)
    assert chosen[1 << 20, 2] == ring
    assert chosen[1 << 20, 5] == ring, "one kernel less to compile is worth 2 %"
    assert chosen[1 << 20, 64] == tuning.choose(8192, 8, 7168)
    assert list(chosen) == sorted(chosen), "bounds are tried in their order"
    assert table["measured"].startswith("tokens x blocks 1x8, 8192x1, 8192x4 ")


def test_cases_of_the_small_kernels_are_right_and_count_their_bytes() -> None:
    import bench_glue

    for name, make in bench_glue.CASES.items():
        case = make(bench_glue.RANGES.get(name, (1, 1))[0])
        bench_glue.check(case)
        assert case.bytes > 0, name


@pytest.mark.slow
def test_tiles_of_the_small_kernels_are_right() -> None:
    """Every tile that the sweep may choose, at a size that the interpreter can run, and the present one among them."""
    import bench_glue
    import sweep_glue

    for kernel, (sizes, make) in sweep_glue.KERNELS.items():
        case, variants = make(3 if kernel == "gated_norm" else sizes[0])
        assert len(variants) > 1, kernel
        if kernel == "choice and list":
            continue  # its product needs minutes in the interpreter; the choice is the same one
        for call in variants.values():
            bench_glue.check(bench_glue.Case(call, case.want, case.bytes))


def test_a_tile_takes_the_place_of_another_where_it_gains() -> None:
    import sweep_glue

    rows: dict[str, dict[str, Any]] = {
        "situ dense T1": {"us": {"1-512-4": 2.0, "1-256-2": 1.0, "1-128-1": 0.5}},
        "situ dense T32": {"us": {"1-512-4": 2.0, "1-256-2": 1.9}, "1-128-1 failed": "wrong"},
        "situ shared T1": {"error": "no", "us": {"1-512-4": 2.0, "1-128-1": 0.1}},
        "situ dense T128": {"us": {"4-128-4": 2.0, "8-64-4": 1.99}},
        "choice T1": {"us": {"4": 3.0, "1": 2.0}},
        "choice T32": {"us": {"4": 3.0, "1": 9.0}},
        "choice and list T1": {"us": {"8": 3.0, "4": 2.0}},
        "weighted sum T8": {"us": {"ids 512": 2.0, "every 512": 1.5, "every 128": 1.2}},
    }
    names = sweep_glue.won(rows)
    assert names == {
        "situ up to 64": "1-256-2", "situ up to 2048": "4-128-4", "choice few": "4", "choice listing": "4",
        "weighted sum T8": "every 128",
    }  # fmt: skip
    table = sweep_glue.table_of(names, "a GPU")
    assert [tuple(entry.values()) for entry in table["situ"]][:2] == [(64, 1, 256, 2), (2048, 4, 128, 4)]
    assert table["choice"] == {"listing": 4, "few": 4, "many": 1}
    assert table["measured"].startswith("a GPU, ")
    assert sweep_glue.tuning.table()["measured"] != table["measured"], "the table in use is not the one written"


@pytest.mark.slow
def test_the_sweep_writes_what_it_measured_and_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With invented times, the checks real: a tile that is wrong has no time and cannot win."""
    import sweep_glue

    def times(sides: list[Any], repeat: int) -> list[float]:
        for side in sides:
            side[0]()
        return [float(len(sides) - i) for i in range(len(sides))]  # the later, the faster

    monkeypatch.setattr(sweep_glue, "time_pair_graph", times)
    before = json.dumps(sweep_glue.tuning.table())
    monkeypatch.setitem(sweep_glue.SITU, 64, ((1, 256, 2), (1, 128, 1)))
    right = sweep_glue.situ_tiles

    def one_wrong(case: Any, tokens: int) -> Any:
        return right(case, tokens) | {"9-9-9": lambda: torch.full_like(case.call(), 7.0)}

    make = sweep_glue._of(sweep_glue.bench_glue.CASES["situ shared"], one_wrong)
    monkeypatch.setitem(sweep_glue.KERNELS, "situ shared", ((1, 32), make))
    sweep_glue.run(tmp_path, ["situ shared", "beta T32"])
    found = json.loads((tmp_path / "glue_sweep.json").read_text())
    assert list(found["rows"]) == ["situ shared T1", "situ shared T32", "beta T32"]
    row = found["rows"]["situ shared T1"]
    assert row["us"] == {"1-512-4": 4.0, "1-256-2": 3.0, "1-128-1": 2.0}
    assert row["copy us"] == 1.0
    assert "relative error" in row["9-9-9 failed"]
    table = json.loads((tmp_path / "tuning_glue.json").read_text())
    assert tuple(table["situ"][0].values()) == (64, 1, 128, 1)
    assert table["sigmoid"] == {"elements": 2048, "warps": 4}
    assert json.dumps(sweep_glue.tuning.table()) == before, "the sweep leaves its choices behind"
    sweep_glue.run(tmp_path, ["situ shared", "beta T128"], seconds=-1.0)
    assert json.loads((tmp_path / "glue_sweep.json").read_text())["rows"] == found["rows"], "began after its time"


def test_a_tile_is_the_first_entry_that_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3_nvidia.kernels import situ
    from k3_nvidia.tuning import glue as tuning

    entries = [
        {"up_to": 2, "rows": 1, "columns": 512, "warps": 4},
        {"up_to": None, "rows": 4, "columns": 64, "warps": 2},
    ]
    monkeypatch.setitem(tuning.table(), "situ", entries)
    assert [situ.blocks(rows, 100) for rows in (1, 2, 3, 9999)] == [(1, 128, 4), (1, 128, 4), (4, 64, 2), (4, 64, 2)]
    assert situ.warmup_profiles(None, None) == [{"tokens": 2}]
    monkeypatch.setitem(tuning.table(), "situ", entries[:1])
    with pytest.raises(ValueError, match="tuning of situ has no open-ended entry: none reaches 3"):
        tuning.situ(3)
