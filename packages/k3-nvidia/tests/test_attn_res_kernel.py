"""The AttnRes kernel against the fp64 oracle: under Triton's interpreter on a CPU, on the device where there is one."""

from __future__ import annotations

import functools
import itertools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.contracts import attn_res as contract
from k3_core.operators import Implementation
from k3_core.operators.triton_host import interpreting
from k3_core.testing import conformance
from k3_core.testing.triton_interpreter import hasten
from k3_nvidia.kernels import attn_res as kernel
from k3_nvidia.kernels import attn_res_cluster

if interpreting():
    hasten()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = ("small", "real") if DEVICE == "cuda" else ("small",)
# The interpreter truncates to bfloat16 where hardware rounds to nearest, so rounding is judged on the device only.
DTYPES = (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.float32,)


def supports(spec):
    ok = spec.dtype in DTYPES
    return ok, "attn_res: " + ("supported" if ok else f"dtype {spec.dtype} is not tested here")


def make(name: str, **config) -> Implementation:
    choice = kernel.Config(**config)

    def attn_res(
        prefix, delta, bank, norm_weight, proj_weight, eps, num_blocks, *,
        write_block=None, output_norm_weight=None, output_norm_eps=None, out=None,
    ):  # fmt: skip
        return kernel.attn_res(
            prefix, delta, bank, norm_weight, proj_weight, eps, num_blocks, write_block=write_block,
            output_norm_weight=output_norm_weight, output_norm_eps=output_norm_eps, out=out, config=choice,
        )  # fmt: skip

    return Implementation("attn_res", name, attn_res, supports)


VARIANTS = [
    dict(chunk=1024, warps=8, group=3, prefetch=True, programs=1),
    dict(chunk=1024, warps=16, group=5, prefetch=False, programs=0),
    dict(chunk=64, warps=4, group=1, prefetch=True, programs=1),
    dict(chunk=1024, warps=8, group=1, prefetch=False, programs=2, ring=4),
    dict(chunk=64, warps=4, group=1, prefetch=False, programs=0, ring=3),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
@pytest.mark.parametrize("scale", SCALES)
def test_conforms(variant, scale):
    implementation = make("triton", **variant)
    only = None if DEVICE == "cuda" else (lambda case: index_of(case.id) % len(VARIANTS) == VARIANTS.index(variant))
    report = conformance.run("attn_res", implementation, DEVICE, dtypes=DTYPES, scales=(scale,), only=only)
    report.raise_if_failed()


@functools.cache
def case_ids() -> tuple[str, ...]:
    return tuple(c.id for c in conformance.cases("attn_res", dtypes=(torch.float32,)))


def index_of(case_id: str) -> int:
    """The interpreter is slow: there, every case is run by one variant, not by all."""
    return case_ids().index(case_id)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_a_token_of_nan_stays_alone(variant):
    """Programs walk several tokens: nothing of one may reach the next, whatever it held."""
    tokens, blocks, hidden = 6, 2, 64
    prefix, delta = torch.randn(tokens, hidden, device=DEVICE), torch.randn(tokens, hidden, device=DEVICE)
    bank, norm, proj = torch.randn(tokens, 3, hidden, device=DEVICE), *torch.randn(2, hidden, device=DEVICE)
    config = kernel.Config(**{**variant, "programs": 1})
    results = []
    for poison in (False, True):
        p, d, b = prefix.clone(), delta.clone(), bank.clone()
        if poison:
            d[0], b[2, 1], p[5] = float("nan"), float("inf"), float("nan")
        results.append(
            kernel.attn_res(p, d, b, norm, proj, 1e-5, blocks, output_norm_weight=norm, output_norm_eps=1e-5,
                            config=config)
        )  # fmt: skip
    assert torch.equal(results[0][[1, 3, 4]], results[1][[1, 3, 4]])
    assert results[1][[0, 2, 5]].isnan().all()


def test_lanes_halve_the_sums_among_them():
    """The tree of the cluster kernel, lane by lane: each value's sum ends in one lane of a group that agree on it."""
    for rows in attn_res_cluster.ROWS:
        sizes = attn_res_cluster.halvings(2 * rows)
        data = torch.randint(-99, 99, (32, 2 * rows)).tolist()
        lists, masks = [list(row) for row in data], (16, 8, 4, 2, 1)
        for step, mask in enumerate(masks):
            if step + 1 < len(sizes):
                half = sizes[step + 1]
                padded = [[*mine, *[0] * (2 * half - len(mine))] for mine in lists]
                lists = [
                    [padded[lane][i + at] + padded[lane ^ mask][i + at] for i in range(half)]
                    for lane in range(32)
                    for at in [half if lane & mask else 0]
                ]
            else:
                lists = [[lists[lane][0] + lists[lane ^ mask][0]] for lane in range(32)]
        found = {}
        for lane in range(32):
            which, known = 0, True
            for step in reversed(range(len(sizes) - 1)):
                which += sizes[step + 1] if lane & masks[step] else 0
                known &= which < sizes[step]
            if known:
                assert found.setdefault(which, lists[lane][0]) == lists[lane][0]
        assert found == {value: sum(row[value] for row in data) for value in range(2 * rows)}


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("hidden", [7168, 4096, 2304])
def test_every_column_has_a_lane_of_the_cluster(hidden, cluster):
    threads, lanes, resident = attn_res_cluster.geometry(hidden, cluster)
    assert threads % 32 == 0
    assert threads * resident <= 1024
    assert lanes <= threads <= attn_res_cluster.MAX_THREADS
    assert hidden <= cluster * lanes * 8


@pytest.mark.parametrize("clusters", [False, True])
def test_clusters_are_passed_over_where_they_cannot_be_used(clusters, monkeypatch):
    from k3_nvidia.tuning import attn_res as tuning

    fast, other = kernel.Config(0, 0, 0, False, 0, cluster=4), kernel.Config(1024, 8, 3, True, 1)
    monkeypatch.setattr(tuning, "_table", lambda: [(8, 8, fast), (1 << 20, 64, other)])
    assert tuning.choose(4, 4, 7168, clusters) == (fast if clusters else other)
    assert tuning.choose(9, 4, 7168, clusters) == other


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cluster_conforms(cluster, dtype):
    """Against fp64 at the released width, every number of blocks, with and without delta, bank write and norm."""
    ok, why = attn_res_cluster.available()
    if not ok:
        pytest.skip(why)
    tokens, hidden = 5, 7168
    for blocks, with_delta, write, normed in itertools.product(
        range(1, 9), (True, False), (True, False), (True, False)
    ):
        if (blocks + with_delta + write + normed) % 2 and blocks < 8:
            continue
        generator = torch.Generator("cuda").manual_seed(blocks)
        make = functools.partial(torch.randn, generator=generator, device="cuda")
        wide = make(tokens, 2 * hidden).to(dtype)
        prefix, delta = wide[:, :hidden], make(tokens, hidden).to(dtype) if with_delta else None
        bank = torch.full((tokens, 10, hidden), float("nan"), dtype=dtype, device="cuda")
        bank[:, :blocks] = make(tokens, blocks, hidden).to(dtype)
        norm, proj, out_norm = make(hidden).to(dtype), (make(hidden) * 0.05).to(dtype), make(hidden).to(dtype)
        summed = prefix.clone() if delta is None else (prefix.float() + delta.float()).to(dtype)
        before, beside = bank.clone(), wide[:, hidden:].clone()
        mixed = contract.mix(bank[:, :blocks].double(), summed.double(), norm.double(), proj.double(), 1e-5)
        if normed:
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-5) * out_norm.double()
        named = {"output_norm_weight": out_norm, "output_norm_eps": 1e-5} if normed else {}
        results = []
        for _ in range(2):
            given, bank_now = wide.clone(), before.clone()
            got = kernel.attn_res(
                given[:, :hidden], delta, bank_now, norm, proj, 1e-5, blocks, write_block=9 if write else None,
                config=kernel.Config(0, 0, 0, False, 0, cluster=cluster), **named,
            )  # fmt: skip
            results.append(got)
            assert torch.equal(given[:, :hidden], summed)
            assert torch.equal(given[:, hidden:], beside)
            if write:
                assert torch.equal(bank_now[:, 9], summed)
                bank_now[:, 9] = before[:, 9]
            assert torch.equal(bank_now.view(torch.int16), before.view(torch.int16))
        assert torch.equal(*results)
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        off = (results[0].double() - mixed).abs()
        # one rounding; fp32 sums of 7168 products and an exponential approximated to 2^-22 a unit of the logit
        assert (off <= unit * mixed.abs() + 2e-4 * mixed.abs().max()).all(), (blocks, with_delta, write, normed)


def test_tuned_choice_covers_every_size():
    from k3_nvidia.tuning import attn_res as tuning

    for tokens in (1, 7, 132, 133, 8192, 1 << 20):
        for blocks in range(12):
            assert isinstance(tuning.choose(tokens, blocks, 7168), kernel.Config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(prefix=t["prefix"].double()), "float64"),
        (lambda t: t.update(bank=t["bank"].transpose(1, 2).contiguous().transpose(1, 2)), "stride"),
        (lambda t: t.update(num_blocks=5), "num_blocks 5"),
        (lambda t: t.update(write_block=1), "write_block 1"),
        (lambda t: t.update(delta=t["prefix"][:-1]), "delta"),
        (lambda t: t.update(prefix=t["prefix"][:, :60], bank=t["bank"][:, :, :60], delta=None), "multiple of 8"),
    ],
)
def test_refuses_before_launch(change, says):
    args = dict(
        prefix=torch.randn(3, 64).bfloat16(), delta=torch.randn(3, 64).bfloat16(),
        bank=torch.randn(3, 4, 64).bfloat16(), num_blocks=2, write_block=None,
    )  # fmt: skip
    change(args)
    ok, reason = kernel.supports(**args)
    assert not ok
    assert says in reason
