"""The checkpoint whose scales are wide on one rank only, and what ranks.py makes of it (benchmarks/, on a CPU)."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from nvidia_support import VENDOR, Group, groups, run_ranks
from safetensors.torch import load_file, save_file

from k3_core.checkpoint import CheckpointReader
from k3_core.operators import CallSpec
from k3_core.reference import load_model
from k3_core.vllm.testing import rank_engine, world
from k3_core.vllm.testing.suite_load import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCHMARKS))
    yield SimpleNamespace(ranks=importlib.import_module("ranks"), wide=importlib.import_module("wide_case"))
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def folders(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    work = tmp_path_factory.mktemp("checkpoints")
    return {wide: scripts.ranks.checkpoint(work, wide)[0] for wide in (False, True)}


@pytest.fixture(scope="module")
def mutants(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wide on both ranks, on the first alone, and nowhere."""
    found = {}
    for name, which in {"both": (0, 1), "first": (0,), "nowhere": ()}.items():
        found[name] = scripts.ranks.checkpoint(tmp_path_factory.mktemp(name))[0]
        scripts.wide.widen(found[name], which=which)
    return found


# ------------------------------------------------------------------------------------------------------ the checkpoint


def test_wide_scales_are_in_the_second_ranks_part_only(scripts: SimpleNamespace, folders: dict[bool, Path]) -> None:
    """Of a few experts of one layer; the halves are cut here by hand."""
    wide, plain = CheckpointReader(folders[True]), CheckpointReader(folders[False])
    halves: list[set[tuple[str, str]]] = [set(), set()]
    for name, scale in wide.tensors(wanted=lambda name: name.endswith("weight_scale")):
        for rank, part in enumerate(scale.chunk(2, 1 if ".w2." in name else 0)):
            if int(part.max()) > 128:
                halves[rank].add((name.split(".layers.")[1].split(".")[0], name.split(".experts.")[1]))
    both = {("2", f"{expert}.{matrix}.weight_scale") for expert in (1, 4, 6) for matrix in ("w1", "w2")}
    assert halves == [set(), both]
    changed = {name for name, tensor in wide.tensors() if not torch.equal(tensor, plain.read(name))}
    kinds = {
        f"{e}.{m}" for e in (1, 4, 6) for m in ("w1.weight_scale", "w1.weight_packed", *scaled("w2"), *scaled("w3"))
    }
    assert {name.split(".experts.")[1] for name in changed} == kinds
    assert scripts.wide.by_rank(folders[True], 2) == [[], [2]]
    assert scripts.wide.by_rank(folders[True], 1) == [[2]]
    assert scripts.wide.by_rank(folders[False], 2) == [[], []]


def scaled(matrix: str) -> tuple[str, ...]:
    return (f"{matrix}.weight_scale",)


def test_scales_elsewhere_are_noticed(scripts: SimpleNamespace, mutants: dict[str, Path]) -> None:
    found = {name: scripts.wide.by_rank(folder, 2) for name, folder in mutants.items()}
    assert found == {"both": [[2], [2]], "first": [[2], []], "nowhere": [[], []]}


def test_with_kernel_sized_heads_the_rule_would_notice_wide_scales_read_as_zero(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The checkpoint as on a GPU: outputs as large as they were, bf16 as near, and the wide values count in them."""
    monkeypatch.setattr(importlib.import_module("runs"), "on_gpu", lambda: True)
    plain, wide = (scripts.ranks.checkpoint(tmp_path, kind)[0] for kind in (False, True))
    assert scripts.wide.by_rank(wide, 2) == [[], [2]]
    ids = importlib.import_module("gpu_smoke").prompts((200,), seed=1)[0]

    def said(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return load_model(folder, dtype).logits(ids).float().log_softmax(-1)

    exact, before, rounded = said(wide), said(plain), said(wide, torch.bfloat16)
    assert bool(exact.isfinite().all())
    assert 0.95 < float(exact.std() / before.std()) < 1.05

    def p90(other: torch.Tensor, exact: torch.Tensor) -> float:
        """As runs.py has it: of the likely tokens' log probabilities."""
        likely = exact.topk(20).indices
        return float((other - exact).gather(-1, likely).abs().quantile(0.9))

    yardstick = p90(rounded, exact)
    assert yardstick < 2 * p90(said(plain, torch.bfloat16), before)
    for matrix in ("w1", "w2"):
        broken = Path(shutil.copytree(wide, tmp_path / matrix))
        (shard,) = broken.glob("model-00003-*")
        tensors = load_file(shard)
        for name in [name for name in tensors if name.endswith(f".{matrix}.weight_scale")]:
            tensors[name][tensors[name] > 128] = 0
        save_file(tensors, shard, metadata={"format": "pt"})
        assert p90(said(broken), exact) > 2 * yardstick + 0.02, matrix


# ----------------------------------------------------------------------------------- the ranks' models and their kinds


@pytest.fixture
def kernels_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are stored as on an H200; nothing is computed with them."""
    pytest.importorskip("triton", reason="the kernels' module imports it")
    dispatch = VENDOR.module("dispatch")

    def choose(name: str, dtype: Any, sizes: Any, options: Any = None, want: str | None = None) -> Any:
        spec = CallSpec(name, "cuda", dtype, "sm_90", dict(sizes), dict(options or {}))
        return dispatch.registry().choose(spec, want).implementation

    monkeypatch.setattr(dispatch, "choose", choose)


def facts_of(folder: Path) -> list[dict[str, Any]]:
    """What two ranks' models say of themselves."""
    stacks = [load(VENDOR, folder, 2, rank).model for rank in range(2)]
    return [{"wide_layers": rank_engine.wide_layers(s), "kinds": s.first_of_each_kind()} for s in stacks]


def test_ranks_models_are_of_different_kinds_and_warm_up_the_same_layers(
    scripts: SimpleNamespace, folders: dict[bool, Path], mutants: dict[str, Path], kernels_layout: None
) -> None:
    """Mutants of the checkpoint are refused by the check of the engines' facts."""
    claimed, right = [[], [2]], scripts.wide.right_facts
    honest = facts_of(folders[True])
    assert [one["wide_layers"] for one in honest] == claimed
    first, second = (one["kinds"] for one in honest)
    assert sorted({*first, 2}) == second != first
    assert right(honest, claimed, variants=True)
    assert not right([one | {"kinds": first} for one in honest], claimed, variants=True)
    for name, folder in mutants.items():
        assert not right(facts_of(folder), claimed, variants=False), name
    group = Group(2)
    with groups(group, Group()):
        stacks = [load(VENDOR, folders[True], 2, rank).model for rank in range(2)]

        def warmed(rank: int) -> list[int]:
            with stacks[rank].one_of_each_kind() as layers:
                return list(layers)

        assert run_ranks(group, warmed) == [second, second]


# ---------------------------------------------------------------------------------------------------------- the script


def limits(kinds: str) -> SimpleNamespace:
    return SimpleNamespace(
        kinds=kinds, forms="merged,sharded", modes="eager", launch="external", together=1,
        case_seconds=60.0, deadline=time.monotonic() + 120,
    )  # fmt: skip


def test_each_checkpoint_has_its_run_of_one_rank(scripts: SimpleNamespace, folders: dict[bool, Path]) -> None:
    def named(kinds: str) -> list[tuple[int, list[str]]]:
        needed = {wide: folders[wide] for wide in {kind.endswith("wide") for kind in kinds.split(",")}}
        return [(n, [one["name"] for one in todo]) for n, todo in scripts.ranks.groups(limits(kinds), needed, {})]

    alone = [(1, ["one wide eager"]), (2, ["tp2wide merged eager"])]
    assert named("tp2wide") == alone
    both = named("tp2,tp2wide")
    assert sorted(both) == sorted([*alone, (1, ["one eager"]), (2, ["tp2 merged eager"]), (2, ["tp2 sharded eager"])])


#: A rank that says what a case says of it, or never anything.
STAND_IN = """
import os, sys, time
from k3_core.vllm.testing import world
wrong, rank = sys.argv[1], int(os.environ["RANK"])
def work(case):
    if wrong == "hang" and "tp2wide" in case["name"] and rank == 0:
        time.sleep(600)
    text = "wide" if "wide" in case["folder"] else "plain"
    wide = case.get("wide", [[], []])[rank]
    if wrong == "both" and "tp2wide" in case["name"]:
        wide = [2]
    output = {"tokens": [len(text)], "logprobs": [{str(len(text)): -1.0}]}
    form = case["options"].get("additional_config", {}).get("k3_moe_reduction", "none")
    facts = {"forms": [form], "expert_parallel": False, "layers": [0, 8], "wide_layers": wide, "kinds": []}
    return {"outputs": [output], "facts": facts, "start_s": 0.0, "generate_s": 0.0}
world.serve(work)
"""


@pytest.mark.parametrize(
    ("wrong", "verdicts"),
    [
        ("", {"one eager": True, "tp2 merged eager": True, "one wide eager": True, "tp2wide merged eager": True}),
        ("both", {"one eager": True, "tp2 merged eager": True, "one wide eager": True, "tp2wide merged eager": False}),
        ("hang", {"one eager": True, "tp2 merged eager": True, "one wide eager": True, "tp2wide merged eager": False}),
    ],
)
def test_rows_of_stand_ins(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wrong: str, verdicts: dict[str, bool]
) -> None:
    """Runs are compared with one rank of their own checkpoint; scales elsewhere and a rank that hangs fail a row."""
    said: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(scripts.ranks, "say", lambda **row: said.__setitem__(row["case"], row))
    stand_in = [sys.executable, "-c", STAND_IN, wrong]
    monkeypatch.setattr(scripts.ranks.world, "run", functools.partial(run_instead, world.run, stand_in))
    wanted = limits("tp2,tp2wide")
    wanted.forms = "merged"
    assert scripts.ranks.run_engines(wanted) is all(verdicts.values())
    assert {name: row["ok"] for name, row in said.items()} == verdicts
    row = said["tp2wide merged eager"]
    if wrong == "hang":
        assert "no result in time from ranks [0" in row["why"]
    else:
        assert [one["wide_layers"] for one in row["facts"]] == ([[2], [2]] if wrong else [[], [2]])
        assert row["as_asked"] is not bool(wrong)


def run_instead(
    run: Any, program: list[str], command: list[str], cases: list[dict[str, Any]], *rest: Any, **named: Any
) -> Iterator[world.Result]:
    """``world.run`` with another program; a case that is to hang has little time."""
    if program[-1] == "hang" and "tp2wide" in cases[0]["name"]:
        named["case_seconds"] = 6.0
    yield from run(program, cases, *rest, **named)


def test_ranks_that_vllm_starts_cannot_show_where_the_scales_are(scripts: SimpleNamespace) -> None:
    asked: dict[str, Any] = {"options": {}, "name": "x"}
    unknown = [{"facts": {}}]
    assert scripts.ranks.as_asked(world.Result(asked, unknown))
    assert not scripts.ranks.as_asked(world.Result(asked | {"wide": [[], [2]]}, unknown))


@pytest.mark.serve
@pytest.mark.slow
def test_two_ranks_one_of_them_wide_say_what_one_says(tmp_path: Path) -> None:
    options = ("--parts", "engines", "--kinds", "tp2wide", "--forms", "merged", "--launch", "external")
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ranks.py"), *options],
        env={**os.environ, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    rows = [json.loads(line) for line in (tmp_path / "ranks.jsonl").read_text().splitlines()]
    assert run.returncode == 0, f"{[row for row in rows if row.get('ok') is False]}\n{run.stderr[-2000:]}"
    found = {row["case"]: row for row in rows if "case" in row}
    assert set(found) == {"one wide eager", "tp2wide merged eager"}
    wide = {name: [one["wide_layers"] for one in row["facts"]] for name, row in found.items()}
    assert wide == {"one wide eager": [[2]], "tp2wide merged eager": [[], [2]]}
    assert all(row["one"]["same_tokens"] == row["one"]["requests"] == 6 for row in found.values())
