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
