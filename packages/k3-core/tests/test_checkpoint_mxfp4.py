"""MXFP4 bytes: exact for all bytes and all scales, in every dtype; packing, rounding, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_core.checkpoint import pack_mxfp4, quantise_mxfp4, unpack_mxfp4
from k3_core.contracts.mxfp4 import E2M1, pack_codes, unpack_codes
from k3_core.errors import CheckpointError

GOLDEN = np.load(Path(__file__).parent / "data" / "checkpoint" / "mxfp4.npz")
INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def every_byte():
    """Row s holds all 256 bytes under scale byte s: packed [256, 256], scale [256, 16]."""
    packed = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    return packed, scale


def assert_same_bits(found, expected):
    """Bit for bit (the sign of zero too); NaNs of any payload are equal."""
    assert found.dtype == expected.dtype
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    integer = INTEGERS[found.dtype]
    assert torch.equal(found.view(integer)[~nan], expected.view(integer)[~nan])


def by_definition(packed, scale):
    """The formula, value by value, in Python's doubles."""
    out = []
    for row, scales in zip(packed.tolist(), scale.tolist(), strict=True):
        values = []
        for j, byte in enumerate(row):
            for code in (byte & 15, byte >> 4):
                exponent = scales[j // 16]
                factor = float("nan") if exponent == 255 else 2.0 ** (exponent - 127)
                values.append((-1.0 if code & 8 else 1.0) * E2M1[code & 7] * factor)
        out.append(values)
    return torch.tensor(out, dtype=torch.float64)


def test_golden():
    packed, scale = torch.from_numpy(GOLDEN["packed"]), torch.from_numpy(GOLDEN["scale"])
    assert_same_bits(unpack_mxfp4(packed, scale, torch.float64), torch.from_numpy(GOLDEN["fp64"]))
    assert_same_bits(unpack_mxfp4(packed, scale, torch.float32), torch.from_numpy(GOLDEN["fp32"]))
    assert_same_bits(unpack_mxfp4(packed, scale, torch.bfloat16).float(), torch.from_numpy(GOLDEN["bf16_as_fp32"]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale(dtype):
    packed, scale = every_byte()
    assert_same_bits(unpack_mxfp4(packed, scale, dtype), by_definition(packed, scale).to(dtype))


def test_the_edges():
    packed = torch.tensor([[0x80, 0x21] + [0x74] * 14], dtype=torch.uint8)  # codes 0, -0, 1, 2, 4, 7, ...

    def row(scale):
        return unpack_mxfp4(packed, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)[0]

    assert torch.isnan(row(255)).all()  # the zeros too
    assert row(0)[2] == 2.0**-128
    assert row(254)[:3].tolist() == [0.0, -0.0, 2.0**126]
    assert torch.isinf(row(254)[4:]).all()
    assert row(253)[4] == 2.0**127
    assert torch.isinf(row(253)[5])
    assert torch.signbit(row(127)[1])


def test_flush_to_zero_does_not_reach_the_values():
    packed, scale = every_byte()
    expected = by_definition(packed, scale).float()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        found = unpack_mxfp4(packed, scale, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(found, expected)


def test_codes_repack_exactly_for_all_bytes():
    packed, _ = every_byte()
    codes = unpack_codes(packed)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]  # low nibble first
    assert torch.equal(pack_codes(codes), packed)


@pytest.mark.parametrize(("dtype", "last"), [(torch.float64, 254), (torch.float32, 252), (torch.bfloat16, 252)])
def test_values_repack_exactly(dtype, last):
    packed, scale = every_byte()
    packed, scale = packed[: last + 1], scale[: last + 1]
    assert torch.equal(pack_mxfp4(unpack_mxfp4(packed, scale, dtype), scale), packed)


def test_packing_refuses_what_it_would_change():
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    for bad in (0.3, 7.0, float("nan"), float("inf")):
        values = torch.zeros(1, 32)
        values[0, 3] = bad
        with pytest.raises(CheckpointError, match="1 of 32 values are not representable"):
            pack_mxfp4(values, one)
    with pytest.raises(CheckpointError, match="32 of 32"):
        pack_mxfp4(torch.zeros(1, 32), torch.full((1, 1), 255, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("packed", "scale", "dtype", "message"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), torch.float32, "packed must be uint8"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1), torch.float32, "scale must be uint8"),
        (torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32, "uint8"),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32, "belong together"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), torch.float32, "belong together"),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32, "belong together"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.int32, "floating dtype"),
    ],
)
def test_unpacking_refuses_operands_that_do_not_fit(packed, scale, dtype, message):
    with pytest.raises(CheckpointError, match=message):
        unpack_mxfp4(packed, scale, dtype)


def test_leading_dimensions_and_views():
    packed, scale = every_byte()
    whole = unpack_mxfp4(packed, scale, torch.float64)
    stacked = unpack_mxfp4(packed.reshape(4, 64, 256), scale.reshape(4, 64, 16), torch.float64)
    assert_same_bits(stacked.reshape(256, 512), whole)
    assert_same_bits(unpack_mxfp4(packed.t()[:16].t(), scale[:, :1], torch.float64), whole[:, :32])
    assert unpack_mxfp4(packed[:0], scale[:0]).shape == (0, 512)


def test_quantising_rounds_to_the_nearest_even_code():
    values = torch.zeros(1, 32)
    inputs = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26, -0.74, 5.01, 0.24, -2.51]
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, -0.5, 6.0, 0.0, -3.0]
    values[0, : len(inputs)] = torch.tensor(inputs)
    packed, scale = quantise_mxfp4(values)
    assert scale.tolist() == [[127]]
    assert unpack_mxfp4(packed, scale)[0, : len(inputs)].tolist() == expected


def test_quantising_saturates_at_six():
    values = torch.full((1, 32), 7.9)
    packed, scale = quantise_mxfp4(values)
    assert scale.item() == 127
    assert (unpack_mxfp4(packed, scale) == 6.0).all()


def test_quantising_extremes():
    for value, byte in ((0.0, 0), (1e-40, 0), (2.0**-126, 0), (2.0**127, 252)):
        packed, scale = quantise_mxfp4(torch.full((1, 32), value))
        assert scale.item() == byte
        assert torch.isfinite(unpack_mxfp4(packed, scale)).all()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            quantise_mxfp4(torch.full((1, 32), bad))
    with pytest.raises(CheckpointError, match="multiple of 32"):
        quantise_mxfp4(torch.zeros(1, 48))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-100, 100), rows=st.integers(1, 3), groups=st.integers(1, 3))
def test_quantising_is_idempotent_and_close(seed, exponent, rows, groups):
    """Half the largest step, which is 2 (from 4 to 6), times 2^scale; up to 2 * 2^scale where [6, 8) saturates."""
    weight = torch.randn(rows, groups * 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scale = quantise_mxfp4(weight)
    values = unpack_mxfp4(packed, scale, torch.float64)
    unit = torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.int() - 127).repeat_interleave(32, -1)
    assert bool(((values - weight).abs() <= 2 * unit).all())
    assert bool(((values - weight).abs() <= unit)[weight.abs() <= 6 * unit].all())
    again, scale_again = quantise_mxfp4(values)
    assert_same_bits(unpack_mxfp4(again, scale_again, torch.float64), values)


def test_code_width_and_range_are_checked():
    with pytest.raises(CheckpointError, match="odd"):
        pack_codes(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"0\.\.15"):
        pack_codes(torch.full((2,), 16, dtype=torch.uint8))


def mutant(packed, scale, dtype, *, swapped=False, bias=127, nan=True, minus_zero=True, group=16):
    """An unpacker with one planted mistake."""
    codes = unpack_codes(packed)
    if swapped:
        codes = codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    value = torch.tensor(E2M1, dtype=torch.float64)[(codes & 7).long()]
    negative = codes >= 8 if minus_zero else codes > 8
    factor = torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.int() - bias)
    if nan:
        factor[scale == 255] = torch.nan
    spread = factor.repeat_interleave(2 * group, -1)
    spread = spread[..., : value.shape[-1]] if group >= 16 else spread.repeat(1, 16 // group)
    return (torch.where(negative, -value, value) * spread).to(dtype)


def test_a_mutant_without_a_mistake_is_equal():
    packed, scale = torch.from_numpy(GOLDEN["packed"]), torch.from_numpy(GOLDEN["scale"])
    assert_same_bits(mutant(packed, scale, torch.float64), torch.from_numpy(GOLDEN["fp64"]))


@pytest.mark.parametrize(
    "mistake",
    [{"swapped": True}, {"bias": 128}, {"nan": False}, {"minus_zero": False}, {"group": 8}],
    ids=lambda mistake: next(iter(mistake)),
)
def test_the_golden_values_catch_mutants(mistake):
    packed, scale = torch.from_numpy(GOLDEN["packed"]), torch.from_numpy(GOLDEN["scale"])
    with pytest.raises(AssertionError):
        assert_same_bits(mutant(packed, scale, torch.float64, **mistake), torch.from_numpy(GOLDEN["fp64"]))
