"""Ranks that are processes, and drafts, in vLLM's engine: the GPU's checks (benchmarks/) by the same code on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from nvidia_support import Group, groups

from k3_core.checkpoint import write_tiny
from k3_core.vllm.serving import vision
from k3_core.vllm.testing import world
from k3_core.vllm.testing.draft_engine import following, wrong_place
from k3_core.vllm.testing.rank_vision import pixels, tower

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def rows(script: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """What one of the scripts writes; it must succeed."""
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        env={**os.environ, "OUT": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = [json.loads(line) for line in (folder / f"{Path(script).stem}.jsonl").read_text().splitlines()]
    wrong = [row for row in found if row.get("ok") is False]
    assert run.returncode == 0, f"{wrong}\n{run.stderr[-2000:]}"
    return found


@pytest.mark.serve
@pytest.mark.slow
def test_engines_over_ranks_and_stages_say_what_one_says(tmp_path: Path) -> None:
    """Expert parallel over two ranks; two stages of two ranks, cut inside a block, the second summing a slice each."""
    options = ("--parts", "engines", "--kinds", "ep2,tp2pp2", "--forms", "sharded", "--launch", "external")
    found = {row["case"]: row for row in rows("ranks.py", tmp_path, *options) if "case" in row}
    assert set(found) == {"one eager", "ep2 sharded eager", "tp2pp2 sharded eager"}
    for row in found.values():
        assert row["one"]["same_tokens"] == row["one"]["requests"] == 6
    stages = [facts["layers"] for facts in found["tp2pp2 sharded eager"]["facts"]]
    assert stages == [[0, 4], [0, 4], [4, 8], [4, 8]]


@pytest.mark.serve
@pytest.mark.slow
def test_forms_of_the_reduction_are_right_over_real_ranks(tmp_path: Path) -> None:
    found = [row for row in rows("ranks.py", tmp_path, "--parts", "reductions", "--tokens", "1,33") if "what" in row]
    forms = {"merged", "separate", "sharded", "adaptive"}
    assert {row["what"].split()[0] for row in found} == {*forms, "latent", "all_reduce"}
    assert {row["tokens"] for row in found} == {1, 33}


@pytest.mark.serve
@pytest.mark.slow
def test_seven_drafts_accepted_in_part_change_no_token(tmp_path: Path) -> None:
    """And a latent cache in FP8 is refused on a CPU before weights load."""
    found = {row["case"]: row for row in rows("drafts.py", tmp_path, "--drafts", "7") if "case" in row}
    assert set(found) == {"eager plain", "eager k=7 none", "refused on a CPU"}
    drafts = found["eager k=7 none"]["drafts"]
    assert 0 < drafts["accepted_tokens"] < drafts["draft_tokens"]
    for one in found["eager k=7 none"]["rounds"]:
        assert one["plain"]["same_tokens"] == one["plain"]["requests"] == 5


@pytest.mark.parametrize("count", [1, 3, 7])
def test_scripted_proposals_are_right_up_to_the_wrong_token(count: int) -> None:
    text = list(range(100, 200))
    places = set()
    for length in range(1, 90):
        proposed, true = following([text], text[:length], count), text[length : length + count]
        wrong = wrong_place(length, count)
        places.add(wrong)
        assert [a == b for a, b in zip(proposed, true, strict=True)] == [i != wrong for i in range(count)]
    assert places == set(range(count + 1))
    assert following([text], [1, 2, 3], count) == []


@pytest.mark.slow
def test_eight_processes_encode_one_image_and_more_images_than_ranks(tmp_path: Path) -> None:
    """Seven ranks have nothing to encode, take part nevertheless, and all have all embeddings in the end."""
    folder = write_tiny(tmp_path / "k3", "k3", seed=3)
    sizes = {"one": [[4, 6]], "eleven": [[2, 2 + 2 * (i % 4)] for i in range(10)] + [[8, 8]]}
    cases = [{"name": name, "folder": str(folder), "ranks": 8, "grids": grids} for name, grids in sizes.items()]
    found = list(
        world.run(
            [sys.executable, "-m", "k3_core.vllm.testing.rank_vision"],
            cases,
            8,
            case_seconds=240,
            deadline=time.monotonic() + 300,
            environment={"OMP_NUM_THREADS": "1", "K3_IMPL": "nvidia"},
            per_rank=lambda rank: {"VLLM_DIST_IDENT": f"k3-vision-{rank}"},
        )
    )
    parts = tower(folder)
    for result in found:
        assert result.ranks is not None, result.why
        grids = result.case["grids"]
        owned = [rank["owned"] for rank in result.ranks]
        assert sorted(item for items in owned for item in items) == list(range(len(grids)))
        assert sum(not items for items in owned) == max(8 - len(grids), 0)
        with groups(Group(), Group()), torch.no_grad():
            alone = vision.encode(*parts, *pixels(grids))
        for rank in result.ranks:
            assert rank["embeddings"] == result.ranks[0]["embeddings"]
            for got, want in zip(rank["embeddings"], alone, strict=True):
                torch.testing.assert_close(torch.tensor(got), want, atol=1e-5, rtol=1e-5)
