"""Cases of attn_res: every block count, writes, norms, strides, rounding traps, NaN where nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3_core.contracts.attn_res import mix
from k3_core.operators.spec import EXACT
from k3_core.testing.case import Case, Draw, Inputs, Sizes, far_name, far_strides, padded
from k3_core.testing.compare import Expected

EPS, NORM_EPS = 1e-5, 1e-5


def make(case: Case, draw: Draw) -> Inputs:
    """Sources of unequal size, so that the softmax is neither flat nor a single one."""
    T, H, M = (case.sizes[s] for s in ("T", "H", "M"))
    o = case.options
    n, write, dt = o["num_blocks"], o["write_block"], case.dtype
    large = o.get("large", 1.0)
    prefix = draw.normal(T, H, scale=1.5 * large)
    delta = draw.normal(T, H, scale=0.4 * large)
    bank = draw.normal(T, M, H) * draw.uniform(T, M, 1, low=0.3, high=2.0) * large
    norm_weight, proj_weight = draw.uniform(H, low=0.5, high=1.5), draw.normal(H, scale=H**-0.5 * 2)
    if o.get("special"):
        bank[0::3, 0] = 0.0  # an all-zero source: rsqrt(eps) times zero
        if n > 1:
            bank[1::3, 1] = bank[1::3, 0]
        prefix[2::3] *= 30.0  # one source far larger: un-normalised values, normalised logits
    bank[:, n:] = float("nan")
    tensors = {
        "prefix": prefix.to(dt),
        "bank": bank.to(dt),
        "norm_weight": norm_weight.to(dt),
        "proj_weight": proj_weight.to(dt),
    }
    if o["delta"]:
        tensors["delta"] = delta.to(dt)
    scalars: dict[str, Any] = {"eps": EPS, "num_blocks": n, "write_block": write}
    if o["norm"]:
        tensors["output_norm_weight"] = draw.uniform(H, low=0.5, high=1.5).to(dt)
        scalars["output_norm_eps"] = NORM_EPS
    free_rows = None
    if o.get("neighbour_nan"):
        free_rows = torch.zeros(T, dtype=torch.bool, device=draw.device)
        free_rows[T // 2] = True
        tensors["prefix"][T // 2] = float("nan")
    strides: dict[str, tuple[int, ...]] = {}
    if o["strided"]:
        strides = {
            name: padded(tensors[name], 16 * 2**i) for i, name in enumerate(("prefix", "delta")) if name in tensors
        }
        strides["bank"] = (M * (H + 8) + 16, H + 8, 1)
    if case.scale == "huge":
        strides = far_strides(case, **tensors)
    return Inputs(tensors, scalars, strides, free_rows)


def expect(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """fp64 mix of the rounded prefix; prefix and bank exactly."""
    t, s = inputs.tensors, inputs.scalars
    prefix = t["prefix"]
    if "delta" in t:
        prefix = (prefix.float() + t["delta"].float()).to(prefix.dtype)
    n, write, M = s["num_blocks"], s["write_block"], t["bank"].shape[1]
    mixed = mix(t["bank"][:, :n].double(), prefix.double(), t["norm_weight"].double(), t["proj_weight"].double(), EPS)
    out: Tensor = mixed
    if "output_norm_weight" in t:
        scale = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + NORM_EPS)
        out = mixed * scale * t["output_norm_weight"].double()
    keep = None if inputs.free_rows is None else ~inputs.free_rows.unsqueeze(-1)
    bound, name = None, "out_norm" if "output_norm_weight" in t else "out"
    if n == 0 and name == "out":
        out, bound = prefix.clone(), EXACT
    bank, written = t["bank"].clone(), torch.zeros(1, M, 1, dtype=torch.bool, device=prefix.device)
    if write is not None:
        bank[:, write], written[:, write] = prefix, True
    changes = torch.full((1, 1), "delta" in t, device=prefix.device)
    return {
        "out": Expected(out, mask=keep, bound=bound, name=name),
        "prefix": Expected(prefix, mask=changes),
        "bank": Expected(bank, mask=written),
    }


def _case(dtype: torch.dtype, scale: Sizes, T: int, H: int, M: int, n: int, **more: Any) -> Case:
    options = {"num_blocks": n, "write_block": None, "delta": True, "norm": False, "strided": False, **more}
    on = [k for k in ("delta", "norm", "strided", "special", "neighbour_nan") if options.get(k)]
    name = ".".join([f"n{n}", *on, *([f"write{options['write_block']}"] if options["write_block"] is not None else [])])
    name += f".x{options['large']:g}" if "large" in options else ""
    name += far_name(options)
    return Case("attn_res", f"{name}.T{T}.H{H}", dtype, make, expect, {"T": T, "H": H, "M": M}, options, scale)


def cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """All cases of one dtype and size class."""
    if scale == "huge":
        for far in ("bank", "prefix", "delta"):
            yield _case(dtype, scale, 5, 7168, 9, 8, write_block=8, norm=True, far=(far,))
        return
    H, T = (64, 17) if scale == "small" else (7168, 67)
    for n in range(9):
        # As a model calls it: plain before most sublayers, writing where a block ends, the last block without a slot.
        yield _case(
            dtype, scale, T, H, 9, n, norm=n % 2 == 0, write_block=n if n % 3 == 0 else None, strided=n % 2 == 1
        )
    for T1 in (0, 1, 2, 5) if scale == "small" else (0, 1, 128, 513):
        yield _case(dtype, scale, T1, H, 3, 2, norm=True, write_block=2, strided=True)
    yield _case(dtype, scale, T, H, 4, 2, delta=False)
    yield _case(dtype, scale, T, H, 4, 2, delta=False, norm=True, write_block=3, strided=True)
    yield _case(dtype, scale, T, H, 2, 0, delta=False, write_block=0)
    yield _case(dtype, scale, T, H, 8, 8, special=True, strided=True)
    yield _case(dtype, scale, T, H, 8, 3, special=True, norm=True)
    yield _case(dtype, scale, T, H, 4, 3, large=64.0, strided=True)
    yield _case(dtype, scale, T, H, 4, 3, large=64.0, delta=True, write_block=3)
    yield _case(dtype, scale, T, H, 4, 3, norm=True, neighbour_nan=True)
    yield _case(dtype, scale, T, H, 12, 11, norm=True, write_block=11)
    for other in (8, 24, 40, 1000) if scale == "small" else (512, 1032, 4096, 7176):
        yield _case(dtype, scale, 3, other, 3, 3, norm=True, strided=True)
