"""The A_log padding rule: what is accepted, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.checkpoint import normalize_a_log
from k3_core.errors import CheckpointError


def values(n):
    return torch.arange(1, n + 1, dtype=torch.float32) / 7


@settings(max_examples=60, deadline=None)
@given(heads=st.integers(1, 100), padding=st.integers(0, 40))
def test_a_zero_tail_is_cut(heads, padding):
    stored = torch.cat((values(heads), torch.zeros(padding)))
    found = normalize_a_log(stored, heads)
    assert torch.equal(found, values(heads))
    assert found.dtype == torch.float32
    assert found.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 100),
    padding=st.integers(1, 40),
    at=st.integers(0, 39),
    bad=st.sampled_from([1e-45, -3.0, float("nan"), float("inf")]),
)
def test_any_other_tail_is_refused(heads, padding, at, bad):
    stored = torch.cat((values(heads), torch.zeros(padding)))
    stored[heads + at % padding] = bad
    with pytest.raises(CheckpointError, match="tail is not zero"):
        normalize_a_log(stored, heads)


def test_four_dimensions():
    assert torch.equal(normalize_a_log(values(4).reshape(1, 1, 4, 1), 4), values(4))


def test_a_negative_zero_tail_is_zero():
    assert torch.equal(normalize_a_log(torch.tensor([1.0, -0.0]), 1), torch.tensor([1.0]))


@pytest.mark.parametrize(
    "shape", [(95,), (0,), (1, 96), (96, 1), (1, 1, 128, 1), (1, 96, 1, 1), (2, 1, 96, 1), (96, 128), ()]
)
def test_other_shapes_are_refused(shape):
    with pytest.raises(CheckpointError) as error:
        normalize_a_log(torch.zeros(shape), 96, "layers.3.self_attn.A_log")
    assert "layers.3.self_attn.A_log: shape" in str(error.value)
    assert "expected [96]" in str(error.value)


def test_bf16_is_widened_and_never_aliased():
    stored = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    assert normalize_a_log(stored, 2).tolist() == [0.5, 0.25]
    own = torch.tensor([0.5, 0.25])
    normalize_a_log(own, 2)[0] = 9.0
    assert own[0] == 0.5


def test_bad_values_and_dtypes():
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        normalize_a_log(torch.tensor([1.0, float("nan")]), 2)
    with pytest.raises(CheckpointError, match=r"dtype torch\.uint8"):
        normalize_a_log(torch.zeros(2, dtype=torch.uint8), 2)
