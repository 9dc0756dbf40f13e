"""MoE beyond the goldens: the formula, ties, groups, tensor and expert parallel shares, packed experts."""

import pytest
import torch
from torch import Tensor

from k3_core.contracts import moe, mxfp4, norm, situ
from k3_core.errors import ConfigError

EXPERTS, LATENT, WIDTH, HIDDEN, TOP_K = 6, 32, 64, 48, 3
ACT = situ.gated_activation("situ", 4.0, 25.0)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def experts(dtype: torch.dtype = torch.float64) -> moe.DenseExperts:
    return moe.DenseExperts(
        normal(EXPERTS, 2 * WIDTH, LATENT, seed=1, dtype=dtype) / LATENT**0.5,
        normal(EXPERTS, LATENT, WIDTH, seed=2, dtype=dtype) / WIDTH**0.5,
    )


def routing(tokens: int, seed: int = 3) -> moe.Routing:
    return moe.route(normal(tokens, EXPERTS, seed=seed), normal(EXPERTS, seed=4) * 0.1, TOP_K)


def by_hand(z: Tensor, r: moe.Routing, e: moe.DenseExperts) -> Tensor:
    out = torch.zeros_like(z)
    for t in range(len(z)):
        for weight, expert in zip(r.weights[t], r.ids[t], strict=True):
            gate, up = (e.w13[expert] @ z[t]).chunk(2)
            out[t] += weight * (e.w2[expert] @ ACT(gate, up))
    return out


def test_experts_formula() -> None:
    z, r, e = normal(7, LATENT), routing(7), experts()
    torch.testing.assert_close(moe.latent_experts(z, r.weights, r.ids, e, ACT), by_hand(z, r, e), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("ranks", "padded"), [(2, 32), (4, 16), (4, 24)])
def test_tensor_parallel_shares(ranks: int, padded: int) -> None:
    """Rows of w1 and w3 and columns of w2 by rank, zero-padded to `padded`; the norm follows the sum."""
    z, r, e = normal(7, LATENT), routing(7), experts()
    own = WIDTH // ranks
    shares = []
    for rank in range(ranks):
        part = slice(rank * own, (rank + 1) * own)
        w1, w3 = e.w13[:, :WIDTH][:, part], e.w13[:, WIDTH:][:, part]
        fill = torch.zeros(EXPERTS, padded - own, LATENT, dtype=z.dtype)
        w13 = torch.cat([w1, fill, w3, fill], dim=1)
        w2 = torch.cat([e.w2[:, :, part], fill.transpose(1, 2)], dim=2)
        shares.append(moe.latent_experts_partial(z, r.weights, r.ids, moe.DenseExperts(w13, w2), ACT))
    weight = 1 + 0.1 * normal(LATENT, seed=9)
    whole = norm.rms_norm(moe.latent_experts(z, r.weights, r.ids, e, ACT), weight, 1e-5)
    reduced = moe.reduce_and_norm(shares, weight, 1e-5, z.dtype)
    torch.testing.assert_close(reduced, whole, atol=1e-12, rtol=0)
    wrong = sum(norm.rms_norm(share, weight, 1e-5) for share in shares)
    assert (wrong - whole).abs().max() > 0.1


def test_expert_parallel_shares() -> None:
    z, r, e = normal(7, LATENT), routing(7), experts()
    shares = [
        moe.latent_experts_partial(z, r.weights, r.ids, moe.DenseExperts(e.w13[a:b], e.w2[a:b], a), ACT)
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    whole = moe.latent_experts(z, r.weights, r.ids, e, ACT)
    torch.testing.assert_close(moe.reduce_and_norm(shares, None, 1e-5, z.dtype), whole, atol=1e-12, rtol=0)


def test_absent_experts_contribute_nothing() -> None:
    z, r, e = normal(7, LATENT), routing(7), experts()
    ids = r.ids.clone()
    ids[2], ids[4, 1] = -1, -1
    out = moe.latent_experts(z, r.weights, ids, e, ACT)
    assert not out[2].any()
    kept = r.weights.clone()
    kept[4, 1] = 0
    torch.testing.assert_close(out[4], moe.latent_experts(z, kept, r.ids, e, ACT)[4], atol=1e-13, rtol=0)
    later = moe.DenseExperts(e.w13[3:], e.w2[3:], 3)  # -1 must not wrap round to an expert of a later run
    assert not moe.latent_experts(z, r.weights, torch.full_like(ids, -1), later, ACT).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_equal_their_dense_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    packed = moe.PackedExperts(
        random_bytes(0, 256, EXPERTS, 2 * WIDTH, LATENT // 2),
        random_bytes(120, 126, EXPERTS, 2 * WIDTH, LATENT // 32),
        random_bytes(0, 256, EXPERTS, LATENT, WIDTH // 2),
        random_bytes(120, 126, EXPERTS, LATENT, WIDTH // 32),
    )
    dense = moe.DenseExperts(
        mxfp4.unpack(packed.w13, packed.w13_scale, dtype), mxfp4.unpack(packed.w2, packed.w2_scale, dtype)
    )
    z, r = normal(7, LATENT, dtype=dtype), routing(7)
    weights = r.weights.float()
    assert packed.num_experts == EXPERTS
    a, b = (moe.latent_experts(z, weights, r.ids, e, ACT) for e in (packed, dense))
    assert torch.equal(a, b)
    exact = moe.latent_experts(
        z.double(),
        weights.double(),
        r.ids,
        moe.DenseExperts(dense.w13.double(), dense.w2.double()),
        ACT,
    )
    scale = exact.abs().max().item()
    torch.testing.assert_close(a.double(), exact, atol=scale * (2.0**-7 if dtype == torch.bfloat16 else 1e-5), rtol=0)


def test_ties_go_to_the_lower_id_whatever_the_batch() -> None:
    logits = torch.zeros(5, 8)
    logits[:, 6] = 1
    r = moe.route(logits, torch.zeros(8), 3)
    assert r.ids.tolist() == [[6, 0, 1]] * 5
    assert moe.route(logits[:1], torch.zeros(8), 3).ids.tolist() == [[6, 0, 1]]


def test_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    r = moe.route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, scaling=2.5)
    assert r.ids.tolist() == [[3, 0]]
    scores = torch.sigmoid(logits)[0, [3, 0]]
    torch.testing.assert_close(r.weights[0], 2.5 * scores / scores.sum())
    raw = moe.route(logits, None, 2, renormalize=False)
    torch.testing.assert_close(raw.weights[0], torch.sigmoid(logits)[0, :2])


def test_groups_limit_the_choice_even_to_negative_scores() -> None:
    """Group 1 wins; experts of the losing groups must not come back through a fill value of zero."""
    logits = torch.tensor([[3.0, -9.0, -9.0, 1.0, 1.0, -9.0]])
    bias = torch.tensor([-1.0, -1.0, -1.0, -0.5, -0.5, -1.0])
    r = moe.route(logits, bias, 3, num_groups=2, topk_groups=1)
    assert sorted(r.ids[0].tolist()) == [3, 4, 5]


def test_layer_formula_with_and_without_latent() -> None:
    x = normal(7, HIDDEN)
    router, bias = normal(EXPERTS, HIDDEN, seed=6), normal(EXPERTS, seed=7) * 0.1
    shared = [normal(*s, seed=8 + i) / 7 for i, s in enumerate([(96, HIDDEN), (96, HIDDEN), (HIDDEN, 96)])]
    down, latent_norm, up = normal(LATENT, HIDDEN, seed=11) / 7, 1 + 0.1 * normal(LATENT, seed=12), normal(48, 32) / 6
    e = experts()
    w = moe.MoeWeights(router, bias, e, down, latent_norm, up, *shared)
    y, r = moe.layer(x, w, top_k=TOP_K, activation=ACT, eps=1e-5)
    latent = by_hand(x @ down.T, r, e)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * latent_norm
    expected = latent @ up.T + ACT(x @ shared[0].T, x @ shared[1].T) @ shared[2].T
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    plain = moe.MoeWeights(normal(EXPERTS, LATENT, seed=6), bias, e, None, None, None, None, None, None)
    z = normal(7, LATENT)
    y, r = moe.layer(z, plain, top_k=TOP_K, activation=ACT, eps=1e-5, scaling=2.446)
    torch.testing.assert_close(y, by_hand(z, r, e), atol=1e-12, rtol=0)


def test_refusals() -> None:
    logits = torch.zeros(1, 6)
    for top_k, groups, kept in ((7, 1, 1), (2, 4, 1), (4, 2, 1), (2, 2, 3)):
        with pytest.raises(ConfigError, match="num_expert"):
            moe.route(logits, None, top_k, num_groups=groups, topk_groups=kept)
    with pytest.raises(ConfigError, match="relu"):
        situ.gated_activation("relu")


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1, 1, 0.7158178),
        (-1, 2, -0.5258289),
        (4, 25, 56.959320),
        (10, -30, -82.245822),
        (100, 100, 99.932930),
        (0, 0, 0),
    ],
)
def test_situ_values(gate: float, up: float, expected: float) -> None:
    g, u = torch.tensor([gate, up], dtype=torch.float64)
    assert ACT(g, u).item() == pytest.approx(expected, abs=1e-6)
    assert situ.situ_and_mul(g, u, None, None).item() == pytest.approx((g.tanh() * g.sigmoid() * u).item())
    assert situ.gated_activation("silu")(g, u).item() == pytest.approx((g * g.sigmoid() * u).item())


def test_gated_norm_formula_and_rounding() -> None:
    o, gate, weight = normal(5, 3, 16), normal(5, 3, 16, seed=1), 1 + 0.1 * normal(16, seed=2)
    expected = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight * torch.sigmoid(gate)
    torch.testing.assert_close(norm.gated_rms_norm(o, gate, weight, 1e-5), expected, atol=1e-13, rtol=0)
    narrow = norm.gated_rms_norm(o.bfloat16(), gate.bfloat16(), weight.float(), 1e-5)
    wide = norm.gated_rms_norm(o.bfloat16().float(), gate.bfloat16().float(), weight.float(), 1e-5)
    assert torch.equal(narrow, wide.bfloat16())
    with pytest.raises(ValueError, match="rounding"):
        norm.rms_norm(o, weight, 1e-5, rounding="twice")  # type: ignore[arg-type]


def test_tiny_scores_are_still_renormalised():
    """1e-20 guards a division by zero only: scores of 6e-16 give equal shares."""
    weights = moe.route(torch.full((3, 8), -35.0), None, 4).weights
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25), atol=0, rtol=1e-4)
