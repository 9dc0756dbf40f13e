"""Every planted fault is caught by the case that it names; the same wrapper without a fault is not."""

import pytest
import torch

from k3_core.operators import TABLE
from k3_core.testing import conformance
from k3_core.testing.mutants import MUTANTS, identity

#: Faults that must never disappear from the list, whatever else is added.
REQUIRED = {
    "kda_prefill.transposed_state", "kda_decode.transposed_state", "kda_verify.transposed_state",
    "kda_prefill.dropped_state", "kda_prefill.chunk_carry_dropped", "kda_prefill.clamped_gate",
    "attn_res.normalised_sources", "experts.norm_before_reduction", "attn_res.source_missing",
    "kda_prefill.stale_slot", "short_conv.stale_slot", "kda_prefill.padding_unwritten", "kda_verify.padding_unwritten",
    "experts.swapped_gate_up", "situ.situ_swapped", "kda_prefill.beta_twice", "kda_decode.beta_twice",
    "kda_prefill.scale_missing", "attn_res.neighbour_overwritten", "attn_res.prefix_not_updated",
    "attn_res.rounded_late", "route.bias_in_weights", "kda_verify.accepted_off_by_one",
    "kda_decode.conv_off_by_one", "short_conv.conv_state_off_by_one", "attn_res.prefix_stride_ignored",
    "kda_decode.slot_stride_ignored", "kda_decode.null_slot_written", "kda_prefill.null_slot_written",
    "attn_res.not_repeatable",
}  # fmt: skip


def _dtype(operator):
    return torch.float32 if operator == "route" else torch.bfloat16


def _case(operator, name):
    found = [c for c in conformance.cases(operator, dtypes=[_dtype(operator)]) if c.name == name]
    assert len(found) == 1, f"no case {name} of {operator}"
    return found[0]


def test_required_faults_are_planted():
    assert set(MUTANTS) >= REQUIRED
    assert {m.operator for m in MUTANTS.values()} == set(TABLE)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_the_case_it_names(name):
    mutant = MUTANTS[name]
    row = conformance.run_case(_case(mutant.operator, mutant.caught_by), mutant.implementation())
    assert row.verdict == "fail", f"{name} ({mutant.what}) passed {mutant.caught_by}"
    assert "raised" not in row.reason, f"{name} crashed instead of being wrong: {row.reason}"


@pytest.mark.parametrize(("operator", "case"), sorted({(m.operator, m.caught_by) for m in MUTANTS.values()}))
def test_identity_passes_where_mutants_fail(operator, case):
    row = conformance.run_case(_case(operator, case), identity(operator))
    assert row.verdict == "pass", row.reason


def test_failure_names_the_worst_element():
    mutant = MUTANTS["attn_res.row_unwritten"]
    row = conformance.run_case(_case("attn_res", mutant.caught_by), mutant.implementation())
    assert row.reason.startswith("out[16, 0] = nan, must be ")


def test_failure_names_the_memory_that_was_touched():
    mutant = MUTANTS["state_scatter.gap_overwritten"]
    row = conformance.run_case(_case("state_scatter", mutant.caught_by), mutant.implementation())
    assert "wrote into the padding of cache" in row.reason
