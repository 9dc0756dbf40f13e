"""MLA beyond the goldens: the formula, packed sequences, prefill cut anywhere, Kimi-Linear's variant."""

import pytest
import torch
from torch import Tensor

from k3_core.contracts import mla

HEADS, NOPE, ROPE, VALUE, RANK, HIDDEN = 3, 16, 8, 12, 20, 32


def weights(*, low_rank: bool = True, gated: bool = True, dtype: torch.dtype = torch.float64) -> mla.MlaWeights:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    return mla.MlaWeights(
        q_a=matrix(24, HIDDEN) if low_rank else None,
        q_a_norm=1 + 0.1 * matrix(1, 24)[0] if low_rank else None,
        q_b=matrix(HEADS * (NOPE + ROPE), 24 if low_rank else HIDDEN),
        kv_a=matrix(RANK + ROPE, HIDDEN),
        kv_a_norm=1 + 0.1 * matrix(1, RANK)[0],
        kv_b=matrix(HEADS * (NOPE + VALUE), RANK),
        g=matrix(HEADS * VALUE, HIDDEN) if gated else None,
        o=matrix(HIDDEN, HEADS * VALUE),
    )


def run(x: Tensor, w: mla.MlaWeights, **options: object) -> tuple[Tensor, Tensor]:
    return mla.layer(x, w, num_heads=HEADS, nope_dim=NOPE, **options)


def by_hand(x: Tensor, w: mla.MlaWeights) -> Tensor:
    """The formula of the docstring, head by head and token by token."""

    def normed(c: Tensor, weight: Tensor) -> Tensor:
        return c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    low = x if w.q_a is None or w.q_a_norm is None else normed(x @ w.q_a.T, w.q_a_norm)
    q = low @ w.q_b.T
    latent, shared = (x @ w.kv_a.T)[:, :RANK], (x @ w.kv_a.T)[:, RANK:]
    kv = normed(latent, w.kv_a_norm) @ w.kv_b.T
    out = torch.zeros(len(x), HEADS * VALUE, dtype=x.dtype)
    for h in range(HEADS):
        k = torch.cat([kv[:, h * (NOPE + VALUE) :][:, :NOPE], shared], dim=1)
        v = kv[:, h * (NOPE + VALUE) + NOPE :][:, :VALUE]
        query = q[:, h * (NOPE + ROPE) :][:, : NOPE + ROPE]
        for t in range(len(x)):
            share = torch.softmax(k[: t + 1] @ query[t] / (NOPE + ROPE) ** 0.5, 0)
            out[t, h * VALUE : (h + 1) * VALUE] = share @ v[: t + 1]
    if w.g is not None:
        out = out * torch.sigmoid(x @ w.g.T)
    return out @ w.o.T


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize(("low_rank", "gated"), [(True, True), (False, False)])
def test_formula(absorbed: bool, low_rank: bool, gated: bool) -> None:
    x, w = torch.randn(11, HIDDEN, dtype=torch.float64), weights(low_rank=low_rank, gated=gated)
    out, rows = run(x, w, absorbed=absorbed)
    torch.testing.assert_close(out, by_hand(x, w), atol=1e-12, rtol=0)
    assert rows.shape == (11, RANK + ROPE)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("cut", [1, 4, 10])
def test_prefill_in_two_pieces_equals_one(cut: int, absorbed: bool) -> None:
    x, w = torch.randn(11, HIDDEN, dtype=torch.float64), weights()
    whole, rows = run(x, w)
    first, past = run(x[:cut], w)
    second, end = run(x[cut:], w, past=past, absorbed=absorbed)
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(end, rows, atol=1e-13, rtol=0)


def test_packed_sequences() -> None:
    w = weights()
    q = torch.randn(9, HEADS, NOPE + ROPE, dtype=torch.float64)
    rows = torch.randn(15, RANK + ROPE, dtype=torch.float64)
    bounds_q, bounds_k = [0, 1, 1, 6, 8], torch.tensor([0, 5, 5, 11, 13])
    for absorbed in (False, True):
        out = mla.attend(q, rows, w.kv_b, NOPE, absorbed=absorbed, cu_seqlens_q=bounds_q, cu_seqlens_k=bounds_k)
        for s in range(4):
            part = slice(bounds_q[s], bounds_q[s + 1])
            if part.start < part.stop:
                alone = mla.attend(q[part], rows[bounds_k[s] : bounds_k[s + 1]], w.kv_b, NOPE)
                torch.testing.assert_close(out[part], alone, atol=1e-12, rtol=0)
        assert not out[8:].any(), "padding rows are zero"


def test_low_rank_eps_shows_where_the_latent_is_small() -> None:
    x, w = 1e-3 * torch.randn(6, HIDDEN, dtype=torch.float64), weights()
    released, _ = run(x, w)
    other, _ = run(x, w, low_rank_eps=1e-5)
    assert (released - other).abs().max() > 0.1 * released.abs().max()


def test_split_kv_b_is_a_view_of_the_row_blocks() -> None:
    kv_b = weights().kv_b
    w_uk, w_uv = mla.split_kv_b(kv_b, HEADS, NOPE)
    assert torch.equal(w_uk[1], kv_b[NOPE + VALUE : NOPE + VALUE + NOPE])
    assert torch.equal(w_uv[1], kv_b[NOPE + VALUE + NOPE : 2 * (NOPE + VALUE)])
    assert w_uk.data_ptr() == kv_b.data_ptr()


def test_refusals() -> None:
    q, rows = torch.zeros(4, HEADS, NOPE + ROPE), torch.zeros(3, RANK + ROPE)
    kv_b = weights(dtype=torch.float32).kv_b
    with pytest.raises(ValueError, match="more queries"):
        mla.attend(q, rows, kv_b, NOPE)
    with pytest.raises(ValueError, match="key sequences"):
        mla.attend(q, rows, kv_b, NOPE, cu_seqlens_q=[0, 2, 4])


def test_the_gate_is_rounded_before_the_product() -> None:
    """As released: a BF16 sigmoid, then a BF16 product. One rounding would pass the goldens' tolerance."""
    generator = torch.Generator().manual_seed(1)
    attention, gate = torch.randn(2, 64, 48, generator=generator).bfloat16().unbind(0)
    expected = attention * torch.sigmoid(gate.float()).bfloat16()
    assert torch.equal(mla.apply_gate(attention, gate), expected)
    assert not torch.equal((attention.float() * torch.sigmoid(gate.float())).bfloat16(), expected)
