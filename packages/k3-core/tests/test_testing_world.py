"""Ranks that are watched from outside: results in order, and what becomes of those that fail, hang or take too long."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from k3_core.vllm.testing import world

PROGRAM = """
import os, time
from k3_core.vllm.testing.world import serve
served = []
def work(case):
    served.append(case["name"])
    rank = int(os.environ["RANK"])
    if case.get("raise_in") == rank:
        raise RuntimeError("on purpose")
    if case.get("hang_in") == rank:
        time.sleep(600)
    if case.get("end_in") == rank:
        print("last words", flush=True)
        os._exit(3)
    if case.get("needs_new_ranks") and len(served) > 1:
        raise RuntimeError("something is left over")
    return {"rank": rank, "served": list(served), "port": os.environ["MASTER_PORT"], "more": os.environ.get("MORE")}
serve(work)
"""


def results(cases: list[dict[str, Any]], seconds: float = 60, case_seconds: float = 30) -> list[world.Result]:
    """Two ranks of the program above."""
    command = [sys.executable, "-c", PROGRAM]
    deadline = time.monotonic() + seconds
    more = {"per_rank": lambda rank: {"MORE": f"rank {rank}"}}
    return list(world.run(command, cases, 2, case_seconds=case_seconds, deadline=deadline, **more))


def test_every_rank_answers_every_case_in_order() -> None:
    first, second = results([{"name": "a"}, {"name": "b"}])
    assert first.ranks is not None
    assert second.ranks is not None
    assert [one["rank"] for one in first.ranks] == [0, 1]
    assert [one["more"] for one in first.ranks] == ["rank 0", "rank 1"]
    assert second.ranks[1]["served"] == ["a", "b"], "the same ranks serve all cases"
    assert first.ranks[0]["port"] == first.ranks[1]["port"] != second.ranks[0]["port"]


@pytest.mark.parametrize(
    ("fault", "words"), [("raise_in", "on purpose"), ("end_in", "last words"), ("hang_in", "no result in time")]
)
def test_a_rank_that_fails_ends_its_case_and_no_other(fault: str, words: str) -> None:
    bad, good = results([{"name": "bad", fault: 1}, {"name": "good"}], case_seconds=5)
    assert bad.ranks is None
    assert words in bad.why
    assert good.ranks is not None
    assert good.ranks[0]["served"] == ["good"], "new ranks serve what is left"


def test_a_case_that_fails_in_used_ranks_is_tried_in_new_ones_and_says_so() -> None:
    first, second = results([{"name": "first"}, {"name": "second", "needs_new_ranks": True}])
    assert first.ranks is not None
    assert second.ranks is not None
    assert second.ranks[0]["served"] == ["second"]
    assert "something is left over" in second.before
    assert not first.before


def test_a_case_that_always_fails_is_tried_twice_only() -> None:
    found = results([{"name": "first"}, {"name": "bad", "raise_in": 0}, {"name": "last"}])
    assert [result.ranks is not None for result in found] == [True, False, True]
    assert "on purpose" in found[1].why
    assert "on purpose" in found[1].before


def test_after_the_deadline_nothing_is_waited_for() -> None:
    began = time.monotonic()
    found = results([{"name": "hangs", "hang_in": 0}, {"name": "late"}], seconds=3, case_seconds=600)
    assert [result.ranks for result in found] == [None, None]
    assert time.monotonic() - began < 30
