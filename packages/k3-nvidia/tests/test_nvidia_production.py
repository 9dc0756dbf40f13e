"""The production checks themselves: the rule they use, that they can fail, and their CPU form on a real engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_smoke
import production
import production_cache
import production_isolation
import production_support as support
from nvidia_support import VENDOR

from k3_core.vllm.serving import isolation

Result, Rule = support.Result, support.Rule
RULE = Rule(0.1, 0.1)


def result(*rows: dict[int, float]) -> Any:
    return Result([max(row, key=lambda t: row[t]) for row in rows], list(rows), "length", 0)


BASE = result({1: -0.5, 2: -1.0}, {3: -0.1, 4: -3.0})
OTHERS: dict[str, tuple[Any, bool]] = {
    "same": (result({1: -0.5, 2: -1.0}, {3: -0.1, 4: -3.0}), True),
    "rounded": (result({1: -0.55, 2: -0.95}, {3: -0.1, 4: -3.05}), True),
    "a value too far": (result({1: -0.5, 2: -1.0}, {3: -0.1, 4: -3.2}), False),
    "a token that was no tie": (result({1: -0.5, 2: -1.0}, {3: -3.0, 4: -0.1}), False),
    "a token nobody expected": (result({9: -0.5, 2: -1.0}, {3: -0.1, 4: -3.0}), False),
    "NaN": (result({1: float("nan"), 2: -1.0}, {3: -0.1, 4: -3.0}), False),
    "too short": (result({1: -0.5, 2: -1.0}), False),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_rule_allows_rounding_and_nothing_else(what: str) -> None:
    other, allowed = OTHERS[what]
    assert support.holds(support.difference(other, BASE), RULE) is allowed
    assert support.judged([support.difference(other, BASE)], RULE)["ok"] is allowed


def test_a_tie_may_fall_either_way_and_ends_the_comparison() -> None:
    tied, other = result({1: -0.70, 2: -0.75}, {3: 0.0}), result({1: -0.74, 2: -0.71}, {8: 0.0})
    found = support.difference(other, tied)
    assert found.gap == pytest.approx(0.05)
    assert support.holds(found, RULE)
    assert not support.holds(found, Rule(0, 0))


def test_states_are_compared_by_bits_and_by_size() -> None:
    states = {(b"x", "layer"): torch.arange(1.0, 9.0), (b"y", "layer"): torch.ones(3)}
    moved = {key: value * (1 + 2**-20) for key, value in states.items()} | {(b"z", "layer"): torch.zeros(1)}
    assert support.compare_states(states, states) == {"snapshots": 2, "same_bits": 2, "worst": 0.0}
    found = support.compare_states(moved, states)
    assert found["snapshots"] == 2
    assert found["same_bits"] == 0
    assert 0 < found["worst"] < 1e-5
    lost = {key: torch.full_like(value, float("nan")) for key, value in states.items()}
    assert support.compare_states(lost, states)["worst"] == float("inf")


def test_every_part_that_is_named_exists() -> None:
    assert list(production.parts()) == ["graphs", "align", "isolation", "soak", "long", "determinism", "restart"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine for the checks below, with chunks that end in the middle of a block."""
    with VENDOR.acting():
        folder = support.checkpoint(tmp_path_factory.mktemp("production"))
        engine = support.Served(
            folder, max_num_batched_tokens=96, enable_prefix_caching=True, max_num_seqs=8, num_gpu_blocks_override=64
        )
        yield engine
        gpu_smoke.stop(None)


@pytest.fixture
def check() -> Any:
    return support.Checks("test")


@pytest.mark.serve
@pytest.mark.slow
def test_poison_ends_one_request_by_name_and_reaches_no_other(served: Any, check: Any) -> None:
    assert isolation.counting()
    attack = production_isolation.Attack(check, served)
    attack.run("NaN in the recurrent state", "greedy", {})
    attack.run("infinity in the logits", "sampled", production_isolation.SAMPLINGS["sampled"])
    attack.run("infinity in the latent of a prompt's token", "greedy", {})
    attack.run("NaN in the latent of a new token", "greedy", {})
    attack.run("NaN in the latent cache", "greedy", {})
    assert check.failed == []


@pytest.mark.serve
@pytest.mark.slow
def test_a_neighbour_that_is_struck_as_well_is_noticed(
    served: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant of the check above: poison that reaches another request's state."""
    honest = production_isolation.Attack.fill

    def wide(self: Any, name: str, which: int, value: float) -> int:
        return sum(honest(self, other, which, value) for other in list(self.served.external))

    monkeypatch.setattr(production_isolation.Attack, "fill", wide)
    attack = production_isolation.Attack(check, served)
    attack.run("NaN in the recurrent state", "greedy", {})
    assert any("others untouched" in name for name in check.failed)


@pytest.mark.serve
@pytest.mark.slow
def test_slots_of_others_keep_their_bytes(served: Any, check: Any) -> None:
    production_isolation.canaries(check, served)
    assert check.failed == []


@pytest.mark.serve
@pytest.mark.slow
def test_snapshots_are_what_a_recomputation_gives_and_a_skipped_copy_is_noticed(served: Any, check: Any) -> None:
    served.clear()
    cases = production_cache.Cases(check, served, production_cache.block_of(served))
    cases.again()
    cases.aborted()
    cases.stale()
    cases.mutant()
    assert check.failed == []
