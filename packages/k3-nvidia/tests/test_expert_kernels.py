"""Expert, router, work-list and SiTU kernels: under Triton's interpreter on a CPU, on the device where there is one.

On the device the same tests run at the released sizes and add what only compiled code can show (bit equality of
repeated runs, the decode in inline assembly for every byte and scale, CUDA-graph replay with another routing).
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.operators import CallSpec, ExpertWeights, Implementation
from k3_core.operators.triton_host import interpreting
from k3_core.testing import conformance
from k3_core.testing.triton_interpreter import round_to_nearest
from k3_nvidia.kernels import experts, moe_combine, moe_layout, moe_worklist, router, situ
from k3_nvidia.tuning.experts import Plan, plans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = "real" if DEVICE == "cuda" else "small"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
SMALL = Plan(8, 4, 1, 4, 2, 4, 1, 4, 2, 8, 64, False)  # few programs: the interpreter pays for each

if interpreting():
    round_to_nearest()


def run_experts(
    x, weights, topk_weights, topk_ids, *, hidden_act, situ_beta, situ_linear_beta, expert_map=None, out=None
):  # fmt: skip
    plan = SMALL if DEVICE == "cpu" else None
    return experts.experts(
        x, weights, topk_weights, topk_ids, hidden_act=hidden_act, situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta, expert_map=expert_map, out=out, plan=plan,
    )  # fmt: skip


def supports_experts(spec: CallSpec) -> tuple[bool, str]:
    ok, why = experts.supports(
        spec.sizes["I"], spec.sizes["L"], spec.dtype, quantised=bool(spec.options.get("packed", True))
    )
    return ok, why


def supports_route(spec: CallSpec) -> tuple[bool, str]:
    o = spec.options
    return router.supports(spec.sizes["A"], spec.sizes["X"], o.get("groups", 1), o.get("kept", 1))


def supports_situ(spec: CallSpec) -> tuple[bool, str]:
    return situ.supports(spec.dtype)


EXPERTS = Implementation("experts", "triton", run_experts, supports_experts, prepare=experts.prepare)
ROUTE = Implementation("route", "triton", router.route, supports_route)
SITU = Implementation("situ", "triton", situ.situ_and_mul, supports_situ)


@pytest.mark.slow
def test_experts_conform() -> None:
    conformance.run("experts", EXPERTS, DEVICE, dtypes=(torch.bfloat16,), scales=(SCALE,)).raise_if_failed()


def test_a_wrong_implementation_fails() -> None:
    """The suite bites: swapped halves, a dropped expert, weights off by one scale step, stale rows."""

    def swapped(weights: ExpertWeights) -> Any:
        assert weights.w13_scale is not None
        half = weights.w13.shape[1] // 2
        turn = [*range(half, 2 * half), *range(half)]
        return experts.prepare(weights._replace(w13=weights.w13[:, turn], w13_scale=weights.w13_scale[:, turn]))

    def rescaled(weights: ExpertWeights) -> Any:
        assert weights.w2_scale is not None
        scale = weights.w2_scale.clone()
        scale[:, :, -1] += 1
        return experts.prepare(weights._replace(w2_scale=scale))

    def dropping(x, weights, topk_weights, topk_ids, **kw):
        ids = topk_ids.clone()
        ids[:, 0] = -1
        return run_experts(x, weights, topk_weights, ids, **kw)

    def only(case: Any) -> bool:
        return case.sizes["T"] == 5 if DEVICE == "cpu" else case.sizes["T"] == 8 and case.sizes["I"] == 192

    dropping.__signature__ = inspect.signature(run_experts)  # type: ignore[attr-defined]
    for name, function, prepare in (
        ("swapped", run_experts, swapped),
        ("rescaled", run_experts, rescaled),
        ("dropping", dropping, experts.prepare),
    ):
        mutant = Implementation("experts", name, function, supports_experts, prepare=prepare)
        report = conformance.run("experts", mutant, DEVICE, dtypes=(torch.bfloat16,), scales=(SCALE,), only=only)
        with pytest.raises(AssertionError):
            report.raise_if_failed()


@pytest.mark.slow
def test_route_conforms() -> None:
    conformance.run("route", ROUTE, DEVICE, scales=(SCALE,)).raise_if_failed()


def test_situ_conforms() -> None:
    conformance.run("situ", SITU, DEVICE, dtypes=(torch.float32, torch.bfloat16), scales=(SCALE,)).raise_if_failed()


def choices(tokens: int, num: int, top_k: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num, generator=gen)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32).to(DEVICE)


def check_list(
    lst: moe_worklist.Worklist, ids: torch.Tensor, num: int, block: int, emap: torch.Tensor | None = None
) -> None:
    """The list against a plain loop: ascending experts, ascending tokens, blocks of at most ``block``."""
    flat = ids.flatten().long().cpu()
    if emap is not None:
        flat = torch.where(flat >= 0, emap.cpu()[flat.clamp(min=0)].long(), -1)
    order = [pair for e in range(num) for pair in (flat == e).nonzero().flatten().tolist()]
    assert lst.block_n == block
    for b, number, items, most in (
        (block, lst.number, lst.work, lst.max_items),
        (lst.block_n2, lst.number2, lst.work2, lst.max_items2),
    ):
        start = 0
        work = []
        for e in range(num):
            many = int((flat == e).sum())
            work += [[e, start + j, min(b, many - j), 0] for j in range(0, many, b)]
            start += many
        count = int(number[0])
        assert count == len(work) <= most
        assert items[: 4 * count].view(-1, 4).tolist() == work
    assert lst.sorted[: len(order)].tolist() == order


@pytest.mark.parametrize(
    ("tokens", "num", "top_k", "block"),
    [(1, 24, 8, 8), (7, 20, 3, 8), (7, 20, 3, 4), (70, 9, 5, 16), (150, 12, 3, 16)],
)
def test_work_list(tokens: int, num: int, top_k: int, block: int) -> None:
    ids = choices(tokens, num, top_k)
    check_list(moe_worklist.build(ids, num, block), ids, num, block)
    emap = torch.full((num,), -1, dtype=torch.int32, device=DEVICE)
    emap[num // 3 :] = torch.arange(num - num // 3, dtype=torch.int32, device=DEVICE)
    ids[0, 0] = -1
    check_list(moe_worklist.build(ids, num - num // 3, block, emap), ids, num - num // 3, block, emap)
    second = moe_worklist.build(ids, num, block, block_n2=3 * block)
    assert second.block_n2 == (3 * block if tokens > moe_worklist.ONE_LAUNCH_TOKENS else block)
    check_list(second, ids, num, block)


@pytest.mark.parametrize("tokens", [1, 5, 37, 130])
def test_router_and_list_agree_with_the_parts(tokens: int) -> None:
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 256, generator=gen).bfloat16().to(DEVICE)
    weight = (torch.randn(24, 256, generator=gen) * 0.05).bfloat16().to(DEVICE)
    bias = (torch.randn(24, generator=gen) * 0.1).to(DEVICE)
    got_w, got_ids, lst = router.route_and_list(x, weight, bias, 4, 24, 8, factor=2.5)
    check_list(lst, got_ids, 24, 8)
    logits = router.router_logits(x, weight).sum(0)
    torch.testing.assert_close(
        logits.double().cpu(), x.double().cpu() @ weight.double().cpu().t(), rtol=1e-5, atol=1e-5
    )
    want_w, want_ids = router.route(
        logits, bias, 4, renormalize=True, routed_scaling_factor=2.5, num_expert_group=1, topk_group=1
    )
    assert torch.equal(got_ids, want_ids)
    torch.testing.assert_close(got_w, want_w, rtol=1e-5, atol=1e-7)


def byte_weights(scale_of: Any) -> ExpertWeights:
    """One expert whose gate rows hold every byte under chosen scales."""
    w13 = torch.zeros(1, 128, 64, dtype=torch.uint8)
    w13[0, :64] = torch.arange(256, dtype=torch.uint8).repeat(16).reshape(64, 64)
    s13 = torch.full((1, 128, 4), 127, dtype=torch.uint8)
    s13[0, :64] = scale_of
    return ExpertWeights(
        w13, s13, torch.zeros(1, 128, 32, dtype=torch.uint8), torch.full((1, 128, 2), 127, dtype=torch.uint8)
    )


def decoded(weights: ExpertWeights) -> torch.Tensor:
    """What the kernel's decode yields, read out as an identity product through the down kernel's plain path."""
    lead = ExpertWeights(*(t.to(DEVICE) for t in weights if t is not None))
    down = ExpertWeights(
        torch.zeros(1, 256, 64, dtype=torch.uint8, device=DEVICE),
        torch.full((1, 256, 4), 127, dtype=torch.uint8, device=DEVICE),
        lead.w13[:, :128], lead.w13_scale[:, :128],
    )  # fmt: skip
    packed = experts.prepare(down)
    width = 128
    lst = moe_worklist.build(torch.zeros(width, 1, dtype=torch.int32, device=DEVICE), 1, 16)
    eye = torch.eye(width, dtype=torch.bfloat16, device=DEVICE)
    plan = Plan(16, 4, 1, 4, 2, 4, 1, 4, 2, 2, 64, False)
    return experts.run_w2(eye.float() if interpreting() else eye, packed, lst, plan).float().t().cpu()


@pytest.mark.parametrize("scales", [(0, 1, 2, 64), (127, 128, 120, 100), (129, 200, 250, 252)])
def test_decode_is_exact_for_every_byte(scales: tuple[int, ...]) -> None:
    """Every byte under small, middle and large scale bytes, through the kernel: bit-equal to the definition in bf16."""
    weights = byte_weights(torch.tensor(scales, dtype=torch.uint8))
    assert weights.w13_scale is not None
    packed, scale = weights.w13[0, :64], weights.w13_scale[0, :64]
    from k3_core.contracts.mxfp4 import unpack

    want = unpack(packed, scale, torch.float64).float()
    got = decoded(weights)[:64]
    finite = torch.isfinite(want)
    assert torch.equal(got[finite], want[finite].bfloat16().float())


def test_scale_255_is_nan_and_stays_in_its_row() -> None:
    weights = byte_weights(torch.tensor((127, 127, 127, 127), dtype=torch.uint8))
    assert weights.w13_scale is not None
    weights.w13_scale[0, 5, 2] = 255
    got = decoded(weights)[:64]
    assert got[5].isnan().any()
    assert not got[:5].isnan().any()
    assert not got[6:].isnan().any()


def test_extra_columns_and_wide_kernel_give_the_same_sums() -> None:
    """Tiles are a matter of speed: different widths, kernels and splits agree within rounding of the output."""
    gen = torch.Generator().manual_seed(3)
    weights = ExpertWeights(
        torch.randint(0, 256, (2, 128, 32), generator=gen, dtype=torch.uint8),
        torch.randint(121, 125, (2, 128, 2), generator=gen, dtype=torch.uint8),
        torch.randint(0, 256, (2, 64, 32), generator=gen, dtype=torch.uint8),
        torch.randint(121, 125, (2, 64, 2), generator=gen, dtype=torch.uint8),
    )
    packed = experts.prepare(ExpertWeights(*(t.to(DEVICE) for t in weights if t is not None)))
    x = torch.randn(70, 64, generator=gen).bfloat16().to(DEVICE)
    ids = torch.zeros(70, 1, dtype=torch.int32, device=DEVICE)
    ids[50:] = 1
    ones = torch.ones(70, 1, device=DEVICE)
    outs = []
    tiles = (
        [(8, 0, 2), (32, 32, 2), (32, 32, 0), (16, 0, 0), (64, 0, 2), (128, 0, 0)]
        if DEVICE == "cuda"
        else [(8, 0, 2), (32, 32, 2), (32, 32, 0), (64, 0, 2), (128, 0, 0)]
    )
    for bn, bx, rows in tiles:
        plan = Plan(bn, 4, 1, 4, 2, 4, 1, 4, 2, rows, 64, False, bx)
        outs.append(
            experts.experts(
                x, packed, ones, ids, hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0, plan=plan
            ).float()
        )
    for other in outs[1:]:
        assert ((other - outs[0]).norm() / outs[0].norm()) < 4e-3


# Pairs an expert: every width of a product (a quarter, half, all of a tile, with and without its second accumulator),
# the last column of each and one more, and an expert without a pair.
COUNTS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 0, 96, 128, 129, 146, 160, 161, 260)
SMALL_TILES = ((16, 0, 2), (32, 0, 0), (32, 32, 2), (64, 32, 0), (128, 0, 2), (128, 32, 0))


def reference(x: torch.Tensor, weights: ExpertWeights, ids: torch.Tensor) -> torch.Tensor:
    """float64 of what one expert a token yields, from the definition."""
    from k3_core.contracts.mxfp4 import unpack

    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in ids.unique().tolist():
        at = (ids[:, 0] == e).nonzero().flatten()
        both = x[at].double() @ unpack(weights.w13[e], weights.w13_scale[e], torch.float64).t()
        gate, up = both.chunk(2, dim=-1)
        act = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        out[at] = act @ unpack(weights.w2[e], weights.w2_scale[e], torch.float64).t()
    return out


def counted_case(counts: tuple[int, ...], width: int, latent: int) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    """Weights, x and shuffled ids so that expert e has counts[e] tokens (one expert a token)."""
    gen = torch.Generator().manual_seed(sum(counts))
    num = len(counts)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=gen, dtype=torch.uint8).to(DEVICE)

    weights = ExpertWeights(
        draw(0, 256, num, 2 * width, latent // 2), draw(118, 122, num, 2 * width, latent // 32),
        draw(0, 256, num, latent, width // 2), draw(119, 123, num, latent, width // 32),
    )  # fmt: skip
    ids = torch.repeat_interleave(torch.arange(num), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=gen)].to(torch.int32)[:, None].contiguous().to(DEVICE)
    x = (torch.randn(len(ids), latent, generator=gen) * 0.5).bfloat16().to(DEVICE)
    return weights, x, ids


def check_counted(plan: Plan, counts: tuple[int, ...], width: int, latent: int, rounds: int = 1) -> None:
    """Sums of a plan against float64, every element finite; the same bits in every round."""
    weights, x, ids = counted_case(counts, width, latent)
    packed = experts.prepare(weights)
    ones = torch.ones(len(ids), 1, device=DEVICE)
    want = reference(x, weights, ids)
    first = None
    for _ in range(rounds):
        got = experts.experts(x, packed, ones, ids, hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0, plan=plan)
        assert torch.isfinite(got).all(), plan
        assert (got.double() - want).norm() <= 8e-3 * want.norm(), plan  # operator table: four roundings, doubled
        assert first is None or torch.equal(got, first), plan
        first = got


@pytest.mark.slow
@pytest.mark.parametrize(("bn", "bx", "rows2"), SMALL_TILES)
def test_every_width_of_a_product(bn: int, bx: int, rows2: int) -> None:
    """Items of every size under tiles of every width, in the interpreter too."""
    counts = COUNTS if DEVICE == "cuda" else tuple(c for c in (1, 9, 17, 33, 0, 65, 128, 161) if c <= 2 * (bn + bx))
    plan = Plan(bn, 4, 1, 4, 2, 4, 1, 4, 2, rows2, 64, False, bx)
    check_counted(plan if bn < 128 else replace(plan, block_n2=64, extra_n2=32 - bx), counts, 64, 64)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("width", [192, 384, 3072])
def test_tiles_of_the_tables_at_long_prefill(width: int) -> None:
    """Every tile that a table may choose, with 146 tokens an expert and every program slot of the device taken.

    Products in flight read registers late only while the tensor cores are contended, so an idle device proves nothing.
    """
    import random

    counts = [*COUNTS, *(random.Random(width).randint(110, 180) for _ in range(12 if width == 3072 else 79))]
    table = dict.fromkeys([*plans(experts._device()[0], width), *plans("default", width)])
    for plan in table:
        check_counted(plan, tuple(counts), width, 3584, rounds=3)


@pytest.mark.parametrize(
    ("width", "latent", "top_k", "mapped"),
    [(192, 256, 9, True), (64, 256, 4, False), (384, 3584, 16, False), (192, 3584, 16, True)],
)
def test_one_token_has_kernels_of_its_own(width: int, latent: int, top_k: int, mapped: bool) -> None:
    """Either of the two, and both, give what the general kernels give; experts elsewhere, and what their rows hold,
    leave no trace."""
    if DEVICE == "cpu" and latent > 256:
        pytest.skip("too long for the interpreter")
    num = 20
    weights, x, _ = counted_case((1,) * num, width, latent)
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    ids = choices(1, num + 2 if mapped else num, top_k, seed=5)
    emap = None
    if mapped:
        emap = torch.full((num + 2,), -1, dtype=torch.int32, device=DEVICE)
        emap[2:] = torch.arange(num, dtype=torch.int32, device=DEVICE)
        emap[int(ids[0, 1])] = -1
    used = ids[0].long() if emap is None else emap[ids[0].long()].long()
    spare = next(e for e in range(num) if e not in used.tolist())
    weights.w13_scale[spare] = 255  # NaN, were it read into a sum
    weights.w2_scale[spare] = 255
    packed = experts.prepare(weights)
    routed = torch.rand(1, top_k, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    kw = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0, "expert_map": emap}
    plain = replace(SMALL, mt13=8, mt2=16, combine_block=256)
    want = experts.experts(x[:1], packed, routed, ids, plan=plain, **kw).float()
    assert torch.isfinite(want).all()
    assert want.norm() > 0
    more = 1 if DEVICE == "cuda" else 4  # fewer programs for the interpreter
    for forms in ({"one13": 2}, {"one2": 1}, {"one2": 2, "one_rows": 1, "one13": 1, "one_stages": 4}):
        plan = replace(plain, **{k: v * more if k in ("one13", "one2") else v for k, v in forms.items()})
        assert experts.one_token(packed, 1, top_k, plan) == ("one13" in forms, "one2" in forms)
        got = experts.experts(x[:1], packed, routed, ids, plan=plan, **kw).float()
        assert (got - want).norm() <= 2 * 2**-8 * want.norm(), forms  # roundings of y, of d and of the sum
    assert experts.one_token(packed, 2, top_k, plan) == (False, False)


def test_the_sweep_judges_products_by_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tuning sweep compares tiles with is what the kernels compute, rows of experts elsewhere left out."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import experts_case as case

    monkeypatch.setattr(case, "TOP_K", 3)
    weights, x, _ = counted_case((5,) * 6, 64, 128)
    packed = experts.prepare(weights)
    ids = choices(11, 8, 3)  # experts 6 and 7 are elsewhere
    local = torch.where(ids < 6, ids, -1).flatten().long()
    lst = moe_worklist.build(ids, 6, SMALL.item_n)
    y = experts.run_w13(x[:11], packed, lst, 3, (1, case.BETA, case.LINEAR_BETA), SMALL)
    at, want = case.reference_products("w13", x[:11], packed, local)
    assert 0 < len(at) < ids.numel()
    assert (y[at, :64].double() - want).norm() <= case.PRODUCT_TOLERANCE * want.norm()
    d = experts.run_w2(y, packed, lst, SMALL)
    at, want = case.reference_products("w2", y, packed, local)
    assert (d[at].double() - want).norm() <= case.PRODUCT_TOLERANCE * want.norm()
    packed.s2.view(torch.uint8).sub_(1)  # every scale one step down
    wrong = experts.run_w2(y, packed, lst, SMALL)[at]
    assert (wrong.double() - want).norm() > 0.4 * want.norm()


def test_combine_ignores_what_is_elsewhere() -> None:
    d = torch.full((6, 64), float("nan"), device=DEVICE)
    d[[0, 3]] = 2.0
    ids = torch.tensor([[1, -1, 5], [0, 9, -1]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.5, float("nan"), 1.0], [0.25, 1.0, float("nan")]], device=DEVICE)
    out = torch.full((2, 64), float("nan"), device=DEVICE)
    moe_combine.combine(d, weights, ids, 4, None, out, 64)
    assert out.tolist() == [[1.0] * 64, [0.5] * 64]


def test_combine_with_a_map_gives_the_bits_of_the_local_ids() -> None:
    gen = torch.Generator().manual_seed(9)
    ids = choices(5, 20, 6)
    emap = torch.full((20,), -1, dtype=torch.int32, device=DEVICE)
    emap[[3, 4, 8, 15, 17]] = torch.arange(5, dtype=torch.int32, device=DEVICE)
    local = emap[ids.long()]
    d = torch.randn(30, 64, generator=gen).to(DEVICE)
    d[(local < 0).flatten()] = float("nan")
    weights = torch.rand(5, 6, generator=gen).to(DEVICE)
    weights[local < 0] = float("nan")
    outs = [torch.full((5, 64), float("nan"), device=DEVICE) for _ in range(2)]
    moe_combine.combine(d, weights, ids, 5, emap, outs[0], 64)
    moe_combine.combine(d, weights, local.contiguous(), 5, None, outs[1], 64)
    assert torch.equal(*outs)
    assert torch.isfinite(outs[0]).all()


@pytest.mark.parametrize(("tokens", "top_k", "latent", "block"), [(3, 6, 200, 128), (1, 16, 64, 64), (2, 1, 96, 256)])
def test_combine_without_ids_gives_the_bits_of_combine(tokens: int, top_k: int, latent: int, block: int) -> None:
    """Where every slot counts the ids are not read: other ids, even none of this rank's, change nothing."""
    gen = torch.Generator().manual_seed(tokens)
    padded = torch.full((tokens * top_k, latent + 8), float("nan"), device=DEVICE)
    d = padded[:, :latent].copy_(torch.randn(tokens * top_k, latent, generator=gen))
    weights, ids = torch.rand(tokens, top_k, generator=gen).to(DEVICE), choices(tokens, 20, top_k)
    whole = torch.full((3, tokens, latent + 16), float("nan"), device=DEVICE)
    outs = [x[:, :latent] for x in whole]
    moe_combine.combine(d, weights, ids, 20, None, outs[0], block)
    moe_combine.combine(d, weights, ids, 20, None, outs[1], block, every=True)
    moe_combine.combine(d, weights, torch.full_like(ids, -1), 20, None, outs[2], block, every=True)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.isfinite(outs[0]).all()
    assert whole[:, :, latent:].isnan().all()
    with pytest.raises(ValueError, match="where no map"):
        moe_combine.combine(d, weights, ids, 20, ids[0], outs[0], block, every=True)


@pytest.mark.parametrize(
    ("pdl", "more", "mapped", "every"),
    [(True, 0, False, True), (False, 0, False, False), (True, 2, False, False), (True, 2, True, False)],
)
def test_ids_are_left_unread_only_where_all_are_here(
    pdl: bool, more: int, mapped: bool, every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router and experts together are their parts in a row, whichever sum is taken; a row whose logits are NaN chooses
    experts like any other, so that all rows of the sum were written, and stays alone with its NaN."""
    weights, x, _ = counted_case((1, 1, 1), 64, 128)
    packed, gen = experts.prepare(weights), torch.Generator().manual_seed(3)
    hidden, gate = torch.randn(3, 128, generator=gen), torch.randn(3 + more, 128, generator=gen)
    hidden[1, 5] = float("nan")
    hidden, gate = hidden.to(DEVICE, torch.bfloat16), gate.to(DEVICE, torch.bfloat16)
    emap = torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32, device=DEVICE) if mapped else None
    plan, taken = replace(SMALL, pdl=pdl), []
    sum_of = experts.combine

    def spied(*args: Any) -> torch.Tensor:
        taken.append(args[-1])
        return sum_of(*args)

    monkeypatch.setattr(experts, "combine", spied)
    kw = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0, "expert_map": emap, "plan": plan}
    got = experts.moe_forward(hidden, x[:3], gate, None, packed, 2, **kw)
    chosen = router.route_and_list(hidden, gate, None, 2, 3, 8, expert_map=emap)
    ids = chosen[1] if mapped or not more else torch.where(chosen[1] < 3, chosen[1], -1)
    assert all(len(set(row)) == 2 for row in chosen[1].tolist())
    assert int(chosen[1].min()) >= 0
    assert int(chosen[1].max()) < 3 + more
    want = experts.experts(x[:3], packed, chosen[0], ids, **kw)
    assert taken == [every, False]
    assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert torch.isfinite(got[[0, 2]]).all()
    assert torch.equal(got[1].isnan(), want[1].isnan())


def test_refusals_name_the_reason() -> None:
    assert "sigmoid" in router.supports(896, 16, score="softmax")[1]
    assert "groups" in router.supports(896, 16, 4, 2)[1]
    assert "MXFP4" in experts.supports(192, 3584, quantised=False)[1]
    assert "bfloat16" in experts.supports(192, 3584, torch.float16)[1]
    assert "capability 7.5" in experts.supports(192, 3584, capability=75)[1]
    with pytest.raises(ValueError, match="prepare"):
        experts.experts(
            torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE), None, torch.ones(1, 1),
            torch.zeros(1, 1, dtype=torch.int32),
            hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0,
        )  # type: ignore[arg-type]  # fmt: skip


def test_items_wider_than_the_down_product_are_refused() -> None:
    """A list of 32 tokens an item and a tile of 8 would leave 24 rows unwritten."""
    weights = moe_layout.empty_swizzled(1, 64, 128, DEVICE)
    lst = moe_worklist.build(torch.zeros(32, 1, dtype=torch.int32, device=DEVICE), 1, 32)
    y = torch.zeros(32, 64, dtype=torch.float32 if interpreting() else torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="items of 32 tokens, the down product's tile holds 8"):
        experts.run_w2(y, weights, lst, SMALL)


def test_warmup_reaches_every_plan() -> None:
    from types import SimpleNamespace

    from k3_nvidia.tuning.experts import choose

    config = SimpleNamespace(text=SimpleNamespace(num_experts=896, num_experts_per_token=16))
    last = [p["tokens"] for p in experts.warmup_profiles(config, SimpleNamespace(max_num_batched_tokens=32768))]
    tokens = [*last, last[-1] + 1]
    for width in (192, 384, 3072):
        assert {choose(t, 16, 896, "default", 90, width) for t in tokens} == set(plans("default", width)), width


def test_unmeasured_devices_have_a_rule() -> None:
    """Another Hopper takes the H200's tiles, a newer device those that fit everywhere, an older one fewer stages."""
    from k3_nvidia.tuning.experts import HOPPER, choose

    for tokens in (1, 8, 128, 1024, 8192):
        args = (tokens, 16, 896)
        hopper, default = choose(*args, HOPPER, 90, 384), choose(*args, "default", 90, 384)
        assert choose(*args, "another", 90, 384) == hopper
        assert choose(*args, "another", 120, 384) == default
        old = choose(*args, "another", 80, 384)
        assert (old.stages13, old.stages2, old.pdl, old.one13) == (2, 2, False, 0)


@gpu
@pytest.mark.gpu
def test_repeated_runs_are_bit_equal_and_graphs_follow_the_routing() -> None:
    gen = torch.Generator(device="cuda").manual_seed(0)
    packed = moe_layout.empty_swizzled(896, 192, 3584, "cuda")
    for t in (packed.w13, packed.w2):
        t.random_(-(1 << 15), 1 << 15, generator=gen)
    for t in (packed.s13, packed.s2):
        t.view(torch.uint8).random_(118, 122, generator=gen)
    hidden = torch.randn(64, 7168, device="cuda", generator=gen).bfloat16()
    latent = torch.randn(64, 3584, device="cuda", generator=gen).bfloat16()
    weight = (torch.randn(896, 7168, device="cuda", generator=gen) * 7168**-0.5).bfloat16()
    kw = {"hidden_act": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}

    def call() -> torch.Tensor:
        return experts.moe_forward(hidden, latent, weight, None, packed, 16, **kw)

    first = call()
    for _ in range(20):
        assert torch.equal(call(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(3):
        hidden.copy_(torch.randn(64, 7168, device="cuda", generator=gen))
        graph.replay()
        assert torch.equal(out, call())


@gpu
@pytest.mark.gpu
def test_device_repack_equals_the_pure_function() -> None:
    gen = torch.Generator().manual_seed(5)
    weights = ExpertWeights(
        torch.randint(0, 256, (3, 384, 96), generator=gen, dtype=torch.uint8),
        torch.randint(0, 256, (3, 384, 6), generator=gen, dtype=torch.uint8),
        torch.randint(0, 256, (3, 192, 96), generator=gen, dtype=torch.uint8),
        torch.randint(0, 256, (3, 192, 6), generator=gen, dtype=torch.uint8),
    )
    host = experts.prepare(weights)
    device = experts.prepare(ExpertWeights(*(t.cuda() for t in weights if t is not None)))
    for name in ("w13", "s13", "w2", "s2"):
        assert torch.equal(getattr(device, name).cpu(), getattr(host, name)), name
