"""The arena, poisoned allocation and the comparison: each can fail, and says where."""

import math

import pytest
import torch

from k3_core.operators import Bound
from k3_core.operators.spec import EXACT
from k3_core.testing.case import padded
from k3_core.testing.compare import Expected, compare
from k3_core.testing.poison import Arena, bits, poisoned_empty

CPU = torch.device("cpu")


def _arena():
    arena = Arena(CPU)
    arena.add("x", torch.arange(12.0).view(3, 4), (6, 1))
    arena.add("index", torch.tensor([3, 1], dtype=torch.int32), (2,))
    arena.add("pool", torch.ones(2, 3, 2, dtype=torch.bfloat16), (10, 1, 3))
    arena.add("nothing", torch.empty(0, 4))
    arena.build()
    return arena


def test_arena_keeps_values_strides_and_poison():
    arena = _arena()
    x = arena.views["x"]
    assert torch.equal(x, torch.arange(12.0).view(3, 4))
    assert x.stride() == (6, 1)
    assert math.isnan(float(x.as_strided((1,), (1,), x.storage_offset() + 4)))
    assert int(arena.views["index"].as_strided((1,), (1,), arena.views["index"].storage_offset() + 1)) == -1
    assert arena.views["nothing"].shape == (0, 4)
    assert arena.violations({}) == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda v: v["x"].as_strided((1,), (1,), v["x"].storage_offset() + 4).fill_(1.0), "padding of x"),
        (lambda v: v["x"].as_strided((1,), (1,), v["x"].storage_offset() - 1).fill_(1.0), "between the start and x"),
        (lambda v: v["x"].as_strided((1,), (1,), v["x"].storage_offset() + 16).fill_(1.0), "between x and index"),
        (
            lambda v: v["pool"].as_strided((1,), (1,), v["pool"].storage_offset() + 16).fill_(0),
            "between pool and nothing",
        ),
        (lambda v: v["index"][1:].fill_(7), "index[1], which must not change"),
        (lambda v: v["pool"][1, 2, 0].fill_(7), "pool[1, 2, 0], which must not change"),
    ],
)
def test_arena_names_what_was_touched(damage, word):
    arena = _arena()
    damage(arena.views)
    found = arena.violations({})
    assert len(found) == 1
    assert word in found[0]
    arena.reset()
    assert arena.violations({}) == []


def test_arena_allows_what_is_allowed_and_nothing_else():
    arena = _arena()
    arena.views["x"][1] = 5.0
    mask = torch.tensor([[False], [True], [False]])
    assert arena.violations({"x": mask}) == []
    assert arena.violations({"x": True}) == []
    arena.views["x"][2, 0] = float("nan")
    assert "x[2, 0]" in arena.violations({"x": mask})[0]


def test_rewriting_the_same_bits_is_no_violation():
    arena = _arena()
    arena.views["x"].copy_(arena.views["x"].clone())
    assert arena.violations({}) == []


def test_poisoned_empty_and_back():
    before = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    with poisoned_empty():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
        assert torch.ones(2).new_empty(4).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
        assert torch.equal(torch.empty(2, dtype=torch.int32), torch.tensor([-1, -1], dtype=torch.int32))
        assert torch.equal(torch.empty(2, dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8))
        assert torch.zeros(3).eq(0).all()
    assert before == (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    with pytest.raises(RuntimeError, match="inside"), poisoned_empty():
        raise RuntimeError("inside")
    assert before[0] is torch.empty


def test_padded_strides_are_rows_of_sixteen_bytes():
    assert padded(torch.empty(3, 8, dtype=torch.bfloat16)) == (16, 1)
    assert padded(torch.empty(3, 2, 8)) == (20, 8, 1)
    assert padded(torch.empty(0, 2, 8)) == (20, 8, 1)


WANT = torch.tensor([[1.0, -2.0, 3.0, 4.0], [1e-3, 2e-3, -1e-3, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ((0, 3, 4.0), True),
        ((0, 3, 4.03), True),  # within rtol of a large row
        ((1, 3, 1e-5), True),  # within atol * rms of its own row
        ((1, 3, 1e-3), False),  # a small row is judged by its own size
        ((0, 0, float("nan")), False),
        ((0, 0, float("inf")), False),
    ],
)
def test_elements_are_judged_by_their_row(change, ok):
    got = WANT.clone()
    got[change[0], change[1]] = change[2]
    outcome = compare("x", got, Expected(WANT), Bound(norm=0.1, rtol=1e-2, atol=1e-2))
    assert outcome.ok == ok
    if not ok:
        assert outcome.message.startswith(f"x[{change[0]}, {change[1]}] = ")


def test_many_small_errors_fail_the_norm():
    bound = Bound(norm=1e-3, rtol=1e-2)
    outcome = compare("x", WANT * 1.005, Expected(WANT), bound)
    assert not outcome.ok
    assert outcome.error == pytest.approx(5e-3)


def test_zeros_must_be_zeros_and_masked_values_are_not_seen():
    bound = Bound(norm=1e-2, rtol=1e-2, atol=1e-2)
    zero = torch.zeros(2, 3, dtype=torch.float64)
    assert compare("x", zero, Expected(zero), bound).ok
    assert not compare("x", zero + 1e-30, Expected(zero), bound).ok
    got, mask = zero.clone(), torch.tensor([[True], [False]])
    got[1] = float("nan")
    assert compare("x", got, Expected(zero, mask), bound).ok
    assert compare("x", zero + 1e-30, Expected(zero), Bound(norm=1e-2, floor=1e-12)).ok


def test_exact_means_bits_except_for_the_sign_of_zero():
    a = torch.tensor([1.0, 0.0, float("nan")], dtype=torch.bfloat16)
    assert compare("x", a, Expected(a.clone()), EXACT).ok
    assert compare("x", torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16), Expected(a), EXACT).ok
    bits_off = a.clone()
    bits(bits_off)[0] += 1
    outcome = compare("x", bits_off, Expected(a), EXACT)
    assert not outcome.ok
    assert "x[0] = 1.0078125, must be exactly 1.0" in outcome.message
    assert not compare("x", a.float(), Expected(a), EXACT).ok
    assert not compare("x", a[:2], Expected(a), EXACT).ok
