"""The AttnRes kernel against the fp64 oracle: under Triton's interpreter on a CPU, on the device where there is one."""

from __future__ import annotations

import functools
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.operators import Implementation
from k3_core.testing import conformance
from k3_nvidia.kernels import attn_res as kernel

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
