"""The small kernels between a layer's products against the operations they stand for: fp64, padded strides, poison."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_nvidia.kernels import glue

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bfloat16 where hardware rounds to nearest: rounding is judged on the device only.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
#: One rounding to the dtype and a few of fp32 before it (short sums, approximate exponentials).
UNIT = 2.0**-8 if DEVICE == "cuda" else 2.0**-20


def columns(rows: int, *widths: int, seed: int = 0) -> list[torch.Tensor]:
    """Column slices of one padded projection, the padding NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(widths)
    stride = -(-(total + 3) // 16) * 16
    whole = torch.full((rows, stride), float("nan"))
    whole[:, :total] = torch.randn(rows, total, generator=generator)
    return list(whole.to(DEVICE, DTYPE)[:, :total].split(list(widths), dim=1))


def near(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    assert got.shape == want.shape
    bound = 2 * UNIT * scale * (want.abs() + 1.0)
    assert bool(((got.double() - want).abs() <= bound).all()), (got.double() - want).abs().max()


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 6, 128), (16, 3, 32), (5, 12, 24)])
def test_kda_inputs(rows: int, heads: int, dim: int) -> None:
    f, b = columns(rows, dim, heads)
    weight = torch.randn(heads * dim, dim).to(DEVICE, DTYPE)
    z, beta = glue.kda_inputs(f, b, weight)
    near(z, f.double() @ weight.double().t(), scale=16)
    assert beta.dtype == torch.float32
    torch.testing.assert_close(beta, torch.sigmoid(b.float()), rtol=1e-5, atol=1e-6)


def test_kda_inputs_says_what_it_does_not_take() -> None:
    f, b = columns(17, 32, 4)
    with pytest.raises(ValueError, match=r"kda_inputs: f \(17, 32\)"):
        glue.kda_inputs(f, b, torch.zeros(128, 32, device=DEVICE, dtype=DTYPE))


@pytest.mark.parametrize(("rows", "heads"), [(0, 6), (1, 6), (300, 6), (37, 96)])
def test_sigmoid_fp32(rows: int, heads: int) -> None:
    (b,) = columns(rows, heads)
    torch.testing.assert_close(glue.sigmoid_fp32(b), torch.sigmoid(b.float()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "size"), [(0, 48), (1, 1536), (3, 48), (2, 3584)])
def test_rms_norm(rows: int, size: int) -> None:
    (x,) = columns(rows, size)
    weight = torch.randn(size).to(DEVICE, DTYPE)
    near(glue.rms_norm(x, weight, 1e-5), rms(x, weight, 1e-5), scale=4)


@pytest.mark.parametrize("with_q", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("rows", "q_size", "latent", "zeros"), [(1, 1536, 512, 768), (3, 40, 24, 1100), (0, 40, 24, 8)]
)
def test_low_rank_norms(
    rows: int, q_size: int, latent: int, zeros: int, with_q: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glue, "WHOLE_ROWS", 0 if whole else 512)
    q, x = columns(rows, q_size, latent)
    q_weight, weight = torch.randn(q_size).to(DEVICE, DTYPE), torch.randn(latent).to(DEVICE, DTYPE)
    low, normed, nothing = glue.low_rank_norms(
        q if with_q else None, x, q_weight if with_q else None, weight, 1e-6, zeros
    )
    near(normed, rms(x, weight, 1e-6), scale=4)
    assert nothing.shape == (rows, zeros)
    assert not nothing.count_nonzero()
    assert (low is None) is not with_q
    if low is not None:
        near(low, rms(q, q_weight, 1e-6), scale=4)


#: Rows of the requests: a prompt of five, two that decode, one without rows, a prompt of three; two rows are padding.
BOUNDS = [0, 5, 6, 7, 7, 10]
ROWS = 12
#: (column of q, latent or shared; row struck; row that must be marked).
STRIKES = [
    ("latent", 0, 4), ("latent", 4, 4), ("latent", 5, 5), ("latent", 6, 6), ("latent", 8, 9), ("latent", 10, 10),
    ("latent", 11, 11), ("shared", 2, 4), ("shared", 6, 6), ("shared", 7, 9), ("q", 3, 4), ("q", 5, 5),
]  # fmt: skip
Norms = Any


def marked(norms: Norms, strikes: list[tuple[str, int, int]], value: float, with_q: bool, more: list[int]) -> None:
    """Strike rows of one projection and compare marks, results and everything that must keep its bits."""
    parts = columns(ROWS, 40, 24, 16, 33, seed=4)
    names = ("q", "latent", "shared", "gate")
    for name, row, _ in strikes:
        x = parts[names.index(name)]
        x[row, (7 * row + 3) % x.shape[1]] = value
    before = parts[0]._base.clone() if parts[0]._base is not None else None
    q, latent, shared, gate = parts
    kept, weights = gate.clone(), [torch.randn(40).to(DEVICE, DTYPE), torch.randn(24).to(DEVICE, DTYPE)]
    bounds = torch.tensor([*BOUNDS, *more], dtype=torch.int32, device=DEVICE)
    low, normed, nothing = norms(
        q if with_q else None, latent, weights[0] if with_q else None, weights[1], 1e-6, 70,
        shared=shared, marks=gate, bounds=bounds,
    )  # fmt: skip
    seen = {target for name, _, target in strikes if with_q or name != "q"}
    assert set(gate[:, 0].isnan().nonzero().flatten().tolist()) == seen
    clean = [row for row in range(ROWS) if row not in seen]
    assert torch.equal(gate[clean], kept[clean])
    assert torch.equal(gate[:, 1:], kept[:, 1:])
    assert before is None or torch.equal(shared.nan_to_num(), before[:, 64:80].nan_to_num())
    assert not nothing.count_nonzero()
    plain = glue.low_rank_norms(q if with_q else None, latent, weights[0] if with_q else None, weights[1], 1e-6, 70)
    for ours, theirs in ((low, plain[0]), (normed, plain[1])):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_are_not_finite_mark_the_last_row_of_their_request(
    value: float, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's middle row is in nobody's logits: its request's last row has to say it."""
    monkeypatch.setattr(glue, "WHOLE_ROWS", 0 if whole else 512)
    for strike in STRIKES:
        marked(glue.low_rank_norms, [strike], value, True, [])
    marked(glue.low_rank_norms, STRIKES[1:3] + STRIKES[8:11], value, False, [])
    marked(glue.low_rank_norms, [], value, True, [])


def test_bounds_may_be_padded_and_long() -> None:
    """A captured step has bounds for more requests than it runs; what stands there names no row."""
    for more in ([10, 10, 10], [0, 0, 0], [10] * 300):
        marked(glue.low_rank_norms, STRIKES[4:9], float("nan"), True, more)
    rows = 300
    _, latent, shared, gate = columns(rows, 8, 24, 16, 9)
    latent[[0, 127, 128, 255, 299]] = float("inf")
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    weight = torch.ones(24, device=DEVICE, dtype=DTYPE)
    glue.low_rank_norms(None, latent, None, weight, 1e-6, 8, shared=shared, marks=gate, bounds=bounds)
    assert gate[:, 0].isnan().nonzero().flatten().tolist() == [0, 127, 128, 255, 299]


def _own_row_only(*args: Any, bounds: torch.Tensor, **named: Any) -> Any:
    return glue.low_rank_norms(*args, bounds=bounds[:1], **named)


def _latent_only(q: Any, latent: Any, q_weight: Any, *args: Any, shared: torch.Tensor, **named: Any) -> Any:
    return glue.low_rank_norms(q, latent, q_weight, *args, shared=shared[:, :0], **named)


def _blind(*args: Any, shared: torch.Tensor, marks: torch.Tensor, bounds: torch.Tensor) -> Any:
    return glue.low_rank_norms(*args)


@pytest.mark.parametrize(("mutant", "strike"), [(_own_row_only, 0), (_latent_only, 7), (_blind, 2)])
def test_a_mark_that_is_missing_or_elsewhere_is_noticed(mutant: Norms, strike: int) -> None:
    with pytest.raises(AssertionError):
        marked(mutant, [STRIKES[strike]], float("nan"), True, [])


def test_marks_are_refused_without_what_they_need() -> None:
    q, x, shared, gate = columns(2, 16, 24, 8, 8)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    for named in (
        {"marks": gate, "bounds": bounds}, {"marks": gate, "shared": shared},
        {"marks": gate, "shared": shared, "bounds": bounds.long()},
        {"marks": gate[:1], "shared": shared, "bounds": bounds},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="low_rank_norms"):
            glue.low_rank_norms(q, x, q[0], x[0], 1e-6, 4, **named)


def test_low_rank_norms_refuses_strangers() -> None:
    q, x = columns(2, 16)[0], columns(2, 48)[0]
    with pytest.raises(ValueError, match="is not beside"):
        glue.low_rank_norms(q, x, q[0], x[0], 1e-6, 4)


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 768), (7, 1500)])
def test_sigmoid_mul(rows: int, width: int) -> None:
    x, gate = columns(rows, width, width)
    near(glue.sigmoid_mul(x, gate), x.double() * torch.sigmoid(gate.double()), scale=2)


@pytest.mark.skipif(DEVICE == "cpu", reason="bits of rounding need hardware")
def test_bits_equal_the_operations_they_stand_for() -> None:
    x, gate = columns(64, 768, 768)
    want = x * torch.sigmoid(gate)
    assert (glue.sigmoid_mul(x, gate) != want).float().mean() < 1e-3  # the exponentials are approximate on both sides


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("rms_norm", lambda x, w, eps: (x.float() * w.float()).to(x.dtype)),
        ("rms_norm", lambda x, w, eps: glue.rms_norm(x * 2, w, 1.0)),
        ("sigmoid_mul", lambda x, gate: x * gate),
    ],
)
def test_the_checks_can_fail(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "rms_norm":
        (x,) = columns(2, 48)
        weight = torch.randn(48).to(DEVICE, DTYPE)
        with pytest.raises(AssertionError):
            near(broken(x, weight, 1e-5), rms(x, weight, 1e-5), scale=4)
        return
    x, gate = columns(2, 48, 48)
    with pytest.raises(AssertionError):
        near(broken(x, gate), x.double() * torch.sigmoid(gate.double()), scale=2)
