"""Engines on one GPU are timed one at a time, in an order that alternates, and none waits for one that is gone."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def turns_of(folder: Path, index: int, of: int, limit: float) -> Any:
    from engine_turns import Turns

    return Turns(folder, index, of, limit)


def run(folder: Path, index: int, of: int, said: list[tuple[int, int]], inside: list[int], rounds: int = 3) -> None:
    """One engine: what it did when; nobody else may be at it."""
    turns = turns_of(folder, index, of, 5)
    try:
        for number in turns.rounds(rounds):
            inside.append(index)
            time.sleep(0.02)
            assert inside == [index], "two at a time"
            said.append((number, index))
            inside.remove(index)
    finally:
        turns.close()


def together(folder: Path, indices: list[int], of: int) -> list[tuple[int, int]]:
    said: list[tuple[int, int]] = []
    inside: list[int] = []
    threads = [threading.Thread(target=run, args=(folder, i, of, said, inside)) for i in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_rounds_alternate(tmp_path: Path) -> None:
    assert together(tmp_path, [2, 0, 1], 3) == [(r, i) for r in range(3) for i in range(3)]


def test_one_engine_never_waits(tmp_path: Path) -> None:
    assert together(tmp_path, [0], 1) == [(0, 0), (1, 0), (2, 0)]


def test_an_engine_that_failed_is_left_behind(tmp_path: Path) -> None:
    turns_of(tmp_path, 1, 3, 5).close()
    assert together(tmp_path, [0, 2], 3) == [(r, i) for r in range(3) for i in (0, 2)]


def test_an_engine_that_does_not_come_is_left_behind(tmp_path: Path) -> None:
    turns = turns_of(tmp_path, 0, 2, 0.2)
    assert turns.ready() == [1]
    assert list(turns.rounds(2)) == [0, 1]


def test_a_turn_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="turn 3 of 3"):
        turns_of(tmp_path, 3, 3, 1)
