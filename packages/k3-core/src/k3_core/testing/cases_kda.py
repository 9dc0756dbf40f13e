"""Cases of the sequence operators: short_conv, kda_prefill, gated_norm. Slots, strides, gates, padding, lengths.

What the shapes hide is in the data: slots are shuffled and the rest of the pool is NaN; a new sequence's slot holds NaN
or numbers; sequences without a slot and rows past the last sequence hold NaN inputs; states are not symmetric.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3_core.contracts import kda
from k3_core.operators.spec import Bound
from k3_core.testing import oracle
from k3_core.testing.case import Case, Draw, Inputs, Sizes, far, far_name, far_strides, padded
from k3_core.testing.compare import Expected

W = 4
NAN = float("nan")

#: With all keys nearly equal the corrections v - S k nearly vanish while their rounding errors are those of v, token
#: after token in one direction; bfloat16 operands give 2.5 times the output error of random keys (emulated at D = 16).
_SAME_KEY = 2.5

#: The state is then one outer product into which a chunk's 64 corrected values telescope, each near sqrt(2) v and
#: rounded to bfloat16 (1.6e-3 rms): sqrt(64) * sqrt(2) * 1.6e-3 = 1.8e-2 of a state that starts from zero, where random
#: keys give 4e-3. An element is a product of two normal factors; one in 2 * 10^5 passes 11 sigma, and for one in a
#: thousand runs to hold such an element the bound must be at 17.5 sigma: 0.32.
_SAME_KEY_STATE = Bound(norm=2.5e-2, rtol=2.0**-6, atol=0.32, reason="corrections of equal keys add up; see _SAME_KEY")

#: (name, mean of dt_bias, scale of z): how much a token forgets. K3's lower bound is -5.
GATES: dict[str, tuple[float, float]] = {
    "mixed": (-1.5, 1.5),  # released weights: dt_bias between -8 and 0.2
    "bound": (9.0, 1.0),  # g = -5 nearly everywhere; cumulated over 64 tokens: -320
    "long": (-12.0, 1.0),  # g = -3e-5: a state lost once is missed for ever
}


def gate_parameters(draw: Draw, gate: str, T: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """(z [T, N, K], a_log [N], dt_bias [N, K]) of a regime."""
    mean, scale = GATES[gate]
    return (
        draw.normal(T, N, K, scale=scale),
        draw.normal(N, scale=0.3),
        draw.normal(N, K, scale=0.5 * scale, mean=mean),
    )


def index_stride(options: Any, axis: int = 1) -> tuple[int, ...]:
    """Gaps between index entries hold -1: reading them as if contiguous skips rows."""
    return (3,) if axis == 1 else (11, 1)


def spread(draw: Draw, count: int, slots: int) -> Tensor:
    """Distinct slots from 1..slots-1 in no order."""
    return draw.permutation(slots - 1)[:count] + 1


def pool(draw: Draw, shape: Sequence[int], used: Tensor, scale: float = 0.5) -> Tensor:
    """A pool whose used slots hold numbers and whose other slots are NaN."""
    values = torch.full(tuple(shape), NAN, device=draw.device)
    values[used] = draw.normal(len(used), *shape[1:], scale=scale)
    return values


def sequences(case: Case, draw: Draw) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Index tensors, the pool slots that hold a state, and token rows without a live sequence: bool [T]."""
    lengths, init = case.options["lengths"], case.options["init"]
    B, T, S = len(lengths), case.sizes["T"], case.sizes["S"]
    slots = spread(draw, B, S)
    for b in case.options.get("null", ()):
        slots[b] = 0 if b % 2 == 0 else -1
    cu = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
    flags = torch.tensor([bool(f) for f in init], dtype=torch.bool, device=draw.device)
    dead = torch.ones(T, dtype=torch.bool, device=draw.device)
    for b in range(B):
        dead[int(cu[b]) : int(cu[b + 1])] = bool(slots[b] <= 0)
    # Half of the new sequences find NaN in their slot, half find numbers of the previous owner.
    stale = torch.tensor([bool(f) or b % 2 == 0 for b, f in enumerate(init)], dtype=torch.bool, device=draw.device)
    holds = slots[(slots > 0) & stale]
    dtype = case.options.get("index", torch.int32)
    index = {"slot_mapping": slots.to(dtype), "cu_seqlens": cu.to(torch.int32), "has_initial_state": flags}
    return index, holds, dead


def live_sequences(t: dict[str, Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, slot, begin, end) of the sequences that have a slot."""
    bounds = t["cu_seqlens"].tolist()
    for b, slot in enumerate(t["slot_mapping"].tolist()):
        if slot > 0:
            yield b, slot, bounds[b], bounds[b + 1]


def row_masks(pool_tensor: Tensor, slots: Sequence[int]) -> Tensor:
    """Mask of whole slots, broadcastable to the pool."""
    mask = torch.zeros(
        pool_tensor.shape[0], *[1] * (pool_tensor.dim() - 1), dtype=torch.bool, device=pool_tensor.device
    )
    mask[list(slots)] = True
    return mask


def make_conv(case: Case, draw: Draw) -> Inputs:
    """Raw projections and a pool of their last inputs."""
    T, C, S, P = (case.sizes[s] for s in ("T", "C", "S", "P"))
    index, holds, dead = sequences(case, draw)
    x, state = draw.normal(T, C), pool(draw, (S, C, P), holds, scale=1.0)
    if P > W - 1:
        state[:, :, W - 1 :] = NAN
    x[dead] = NAN
    tensors = {
        "x": x.to(case.dtype), "weight": draw.normal(C, W, scale=0.5), "conv_state": state.to(case.dtype), **index
    }  # fmt: skip
    return Inputs(tensors, strides=_conv_strides(case, tensors))


def conv_pool_stride(layout: str, C: int, P: int, gap: int) -> tuple[int, int, int]:
    """SD: channels contiguous (vLLM's default, as a transposed view); DS: columns contiguous."""
    return (C * P + gap, 1, C) if layout == "SD" else (C * P + gap, P, 1)


def _conv_strides(case: Case, t: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    gap = 64 if case.options["strided"] else 0
    strides: dict[str, tuple[int, ...]] = {
        "conv_state": conv_pool_stride(case.options["layout"], case.sizes["C"], case.sizes["P"], gap)
    }
    if case.scale == "huge":
        strides |= far_strides(case, x=t["x"], out=t["x"]) | far_conv(case, t["conv_state"])
    if case.options["strided"]:
        strides |= {"x": padded(t["x"]), "slot_mapping": (3,), "out": padded(t["x"], 32)}
    return strides


def far_conv(case: Case, pool_tensor: Tensor) -> dict[str, tuple[int, ...]]:
    """The conv pool's strides where a "huge" case places it far: channels contiguous."""
    if "conv_state" not in case.options["far"]:
        return {}
    return {"conv_state": (far(pool_tensor)[0], 1, pool_tensor.shape[1])}


def expect_conv(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Each sequence written out: window, four taps, SiLU."""
    t = inputs.tensors
    x, weight = t["x"].double(), t["weight"].double()
    out, state = torch.zeros_like(x), t["conv_state"].clone()
    judged, free = torch.zeros_like(state, dtype=torch.bool), torch.zeros_like(state, dtype=torch.bool)
    for b, slot, begin, end in live_sequences(t):
        if begin == end:
            free[slot] = not bool(t["has_initial_state"][b])
            continue
        old = t["conv_state"][slot, :, : W - 1]
        history = old if bool(t["has_initial_state"][b]) else torch.zeros_like(old)
        out[begin:end] = convolve(history.double(), x[begin:end], weight)
        state[slot, :, : W - 1] = torch.cat([history, t["x"][begin:end].T], dim=1)[:, -(W - 1) :]
        judged[slot, :, : W - 1], free[slot, :, W - 1 :] = True, True
    return {"out": Expected(out), "conv_state": Expected(state, judged, free)}


def convolve(history: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """silu(sum_j w[c, j] u[t - 3 + j, c]) in fp64: history [C, 3], x [n, C], weight [C, 4] -> [n, C]."""
    u = torch.cat([history.T, x])
    n = x.shape[0]
    y = sum((weight[:, j] * u[j : j + n] for j in range(W)), torch.zeros_like(x))
    return y * torch.sigmoid(y)


def make_prefill(case: Case, draw: Draw) -> Inputs:
    """Post-convolution q, k, v and a pool of states."""
    T, N, K, V, S = (case.sizes[s] for s in ("T", "N", "K", "V", "S"))
    o, dt = case.options, case.dtype
    index, holds, dead = sequences(case, draw)
    z, a_log, dt_bias = gate_parameters(draw, o["gate"], T, N, K)
    scale = o.get("qk_scale", 1.0)
    q, k, v = draw.normal(T, N, K, scale=scale), draw.normal(T, N, K, scale=scale), draw.normal(T, N, V)
    beta = draw.uniform(T, N, low=0.02, high=0.98)
    if o.get("same_key"):
        # Every token writes to one direction with beta near one: the triangular system is as full as it gets.
        k, beta = k[:1].expand(T, N, K) + 0.05 * k, draw.uniform(T, N, low=0.9, high=0.999)
    if o.get("previous"):
        # Each token asks for the key before its own, and keys are at right angles: all it gets it owes to the token
        # before, at the bound e^-5 of it. A chunk, half or segment that loses what crosses its edge loses a whole row.
        k = torch.eye(K, dtype=k.dtype, device=k.device)[torch.arange(T, device=k.device) % K][:, None].repeat(1, N, 1)
        q = k.roll(1, 0)
    inputs = {"q": q, "k": k, "v": v, "z": z}
    free_rows, free_slots = None, tuple[int, ...]()
    if "nan_sequence" in o:
        begin, end = (int(i) for i in index["cu_seqlens"][o["nan_sequence"] : o["nan_sequence"] + 2])
        free_rows = torch.zeros(T, dtype=torch.bool, device=draw.device)
        free_rows[begin:end] = True
        free_slots = (int(index["slot_mapping"][o["nan_sequence"]]),)
        dead = dead | free_rows
    tensors = {name: _with_nan(x, dead).to(dt) for name, x in inputs.items()}
    tensors |= {"beta": _with_nan(beta, dead), "a_log": a_log, "dt_bias": dt_bias}
    tensors["recurrent_state"] = pool(draw, (S, N, V, K), holds).to(o["state_dtype"])
    tensors |= index
    strides: dict[str, tuple[int, ...]] = {}
    if case.scale == "huge":
        strides = far_strides(case, **tensors, out=tensors["v"])
    elif o["strided"]:
        strides = {name: padded(tensors[name], 16 * (i + 1)) for i, name in enumerate(inputs)}
        strides |= {"recurrent_state": padded(tensors["recurrent_state"], 512), "slot_mapping": (3,)}
        strides |= {"beta": padded(beta, 4), "out": padded(tensors["v"], 32)}
    return Inputs(tensors, {"lower_bound": o["lower_bound"]}, strides, free_rows, free_slots)


def _with_nan(x: Tensor, rows: Tensor) -> Tensor:
    x = x.clone()
    x[rows] = NAN
    return x


def expect_prefill(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """The recurrence over the live sequences, fp64."""
    t = inputs.tensors
    q, k, v, z, beta = (t[n].double() for n in ("q", "k", "v", "z", "beta"))
    g = kda.gate(z, t["a_log"].double(), t["dt_bias"].double(), inputs.scalars["lower_bound"])
    out, state = torch.zeros_like(v), t["recurrent_state"].double()
    judged: list[int] = []
    free: list[int] = []
    rows: list[int] = []
    lengths: list[int] = []
    old: list[Tensor] = []
    scale = torch.zeros_like(v[..., :1])
    for b, slot, begin, end in live_sequences(t):
        fresh = not bool(t["has_initial_state"][b])
        if begin == end or slot in inputs.free_slots:
            free += [slot] if fresh or begin != end else []
            continue
        rows += range(begin, end)
        lengths.append(end - begin)
        old.append(torch.zeros_like(state[slot]) if fresh else state[slot])
        judged.append(slot)
    if judged:
        q, k, v, g, beta = (x[rows] for x in (q, k, v, g, beta))
        out[rows], state[judged], scale[rows] = oracle.run(q, k, v, g, beta, torch.stack(old), lengths)
    keep = None if inputs.free_rows is None else ~inputs.free_rows[:, None, None]
    pool_tensor, same = t["recurrent_state"], bool(case.options.get("same_key"))
    rounded = same and case.dtype is torch.bfloat16
    return {
        "out": Expected(out, keep, scale=scale * (_SAME_KEY if same else 1.0)),
        "recurrent_state": Expected(
            state,
            row_masks(pool_tensor, judged),
            row_masks(pool_tensor, free),
            scale=state.square().mean((-2, -1), keepdim=True).sqrt(),
            bound=_SAME_KEY_STATE if rounded else None,
        ),
    }


def make_norm(case: Case, draw: Draw) -> Inputs:
    """Rows of very different size, one of zeros."""
    T, N, D = (case.sizes[s] for s in ("T", "N", "D"))
    o = draw.normal(T, N, D) * draw.uniform(T, N, 1, low=-5.0, high=1.0).exp()
    o[:1] = 0.0
    tensors = {"o": o.to(case.dtype), "gate": draw.normal(T, N, D, scale=3.0).to(case.dtype)}
    tensors["weight"] = draw.uniform(D, low=0.5, high=1.5)
    strides = {"o": padded(tensors["o"]), "gate": padded(tensors["gate"], 48), "out": padded(tensors["o"], 32)}
    if case.scale == "huge":
        strides = far_strides(case, o=tensors["o"], gate=tensors["gate"], out=tensors["o"])
    return Inputs(tensors, {"eps": 1e-5}, strides if case.options["strided"] else {})


def expect_norm(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """o * rsqrt(mean o^2 + eps) * weight * sigmoid(gate)."""
    t = inputs.tensors
    return {"out": Expected(gated_norm(t["o"].double(), t["gate"].double(), t["weight"].double(), 1e-5))}


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in fp64."""
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)


I64 = torch.int64
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 150, 0)
_CUTS = ((64,), (128,), (1,), (150,), (65, 0, 1, 64), (1, 1, 1, 33), (3, 1, 150, 63, 64, 1))


def _conv_case(dtype: torch.dtype, scale: Sizes, C: int, lengths: Sequence[int], extra: int = 2, **more: Any) -> Case:
    o: dict[str, Any] = {"lengths": tuple(lengths), "layout": "SD", "strided": False, "num_spec": 0, **more}
    o.setdefault("init", tuple(i % 3 != 1 for i in range(len(lengths))))
    sizes = {
        "T": sum(lengths) + extra,
        "B": len(lengths),
        "C": C,
        "S": len(lengths) + 1 if scale == "huge" else 2 * len(lengths) + 3,
        "P": 3 + o["num_spec"],
        "W": W,
    }
    on = [o["layout"], *(["strided"] if o["strided"] else []), *([f"spec{o['num_spec']}"] if o["num_spec"] else [])]
    on += ["null"] if o.get("null") else []
    name = f"{'_'.join(map(str, lengths))}.{'.'.join(on)}.C{C}{far_name(o)}"
    return Case("short_conv", name, dtype, make_conv, expect_conv, sizes, o, scale)


def conv_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """short_conv."""
    if scale == "huge":
        for far_one in ("conv_state", "x", "out"):
            yield _conv_case(dtype, scale, 3 * 2 * 128, (65, 3), far=(far_one,))
        return
    for C in (48,) if scale == "small" else (3 * 6 * 128, 3 * 12 * 128, 3 * 96 * 128):
        for i, layout in enumerate(("SD", "DS")):
            yield _conv_case(dtype, scale, C, (1, 2, 3, 4, 5, 0, 17), layout=layout, strided=bool(i), null=(3, 4))
            yield _conv_case(
                dtype, scale, C, (5, 1, 0, 2, 64), layout=layout, strided=not i, num_spec=7, index=torch.int64
            )
        yield _conv_case(dtype, scale, C, (150,), extra=0)
        yield _conv_case(dtype, scale, C, (7,), extra=0, init=(False,), layout="DS")
        yield _conv_case(dtype, scale, C, (4, 3, 2), extra=9, null=(0, 1, 2), strided=True)


def _prefill_case(
    dtype: torch.dtype,
    scale: Sizes,
    N: int,
    D: int,
    lengths: Sequence[int],
    gate: str = "mixed",
    extra: int = 3,
    **more: Any,
) -> Case:
    o: dict[str, Any] = {"lengths": tuple(lengths), "gate": gate, "strided": False, "lower_bound": -5.0, **more}
    o.setdefault("state_dtype", torch.float64 if dtype is torch.float64 else torch.float32)
    o.setdefault("init", tuple(i % 3 != 1 for i in range(len(lengths))))
    B = len(lengths)
    sizes = {"T": sum(lengths) + extra, "B": B, "N": N, "K": D, "V": o.get("V", D), "S": B + 2 + B // 2}
    if scale == "huge":
        sizes["S"] = B + 1
    bound = "softplus" if o["lower_bound"] is None else f"L{-o['lower_bound']:g}"
    on: list[str] = [
        k
        for k in ("strided", "same_key", "previous", "nan_sequence", "null", "qk_scale")
        if k in o and o[k] not in (False, ())
    ]
    on += ["bf16state"] if o["state_dtype"] is torch.bfloat16 else []
    lens = "_".join(map(str, lengths)) if B < 8 else f"all{B}"
    shape = f"N{N}.D{D}" + (f".V{o['V']}" if "V" in o else "") + far_name(o)
    name = ".".join([lens, gate, bound, *on, *(["fresh"] if not any(o["init"]) else []), shape])
    return Case("kda_prefill", name, dtype, make_prefill, expect_prefill, sizes, o, scale)


def prefill_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """kda_prefill."""
    if scale == "huge":
        for far_one in ("recurrent_state", "q", "k", "v", "z", "beta", "out"):
            yield _prefill_case(dtype, scale, 2, 128, (65, 3), "long", far=(far_one,))
        return
    N, D = (2, 16) if scale == "small" else (6, 128)
    for gate in GATES:
        yield _prefill_case(dtype, scale, N, D, LENGTHS, gate, strided=gate == "mixed", index=torch.int64)
    for lengths in _CUTS:
        yield _prefill_case(dtype, scale, N, D, lengths, "long", null=(2,) if len(lengths) > 3 else ())
        yield _prefill_case(dtype, scale, N, D, lengths, extra=0, init=(False,) * len(lengths), strided=True)
    for lower in (None, -1.0, -3.0):
        yield _prefill_case(dtype, scale, N, D, (65, 17), lower_bound=lower)
    yield _prefill_case(dtype, scale, N, D, (150, 40), "long", lower_bound=None, strided=True)
    yield _prefill_case(dtype, scale, N, D, (130, 64), "long", same_key=True)
    yield _prefill_case(dtype, scale, N, D, (130, 20), "bound", previous=True)
    yield _prefill_case(dtype, scale, N, D, (70, 33, 20), "long", nan_sequence=1)
    yield _prefill_case(dtype, scale, N, D, (40, 20), qk_scale=2e-3)  # |k|^2 near 1e-6: where the eps is added shows
    if dtype is torch.bfloat16:
        yield _prefill_case(dtype, scale, N, D, (1, 66, 30), state_dtype=torch.bfloat16, strided=True)
    yield _prefill_case(dtype, scale, N, D, (9, 5), extra=7, null=(0, 1))
    if scale == "small":
        yield _prefill_case(dtype, scale, N, D, (66, 5), "mixed", V=24)
        yield _prefill_case(dtype, scale, 3, 8, (33, 5), "bound", strided=True)
    else:
        for heads in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 96):
            yield _prefill_case(dtype, scale, heads, D, (130, 1, 63), strided=heads % 2 == 0)
        yield _prefill_case(dtype, scale, 12, D, (1024, 77, 513), "long")


def norm_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """gated_norm."""
    shapes: Sequence[tuple[int, int, int]] = ((5, 2, 16), (1, 3, 32), (0, 2, 16), (33, 1, 128))
    if scale != "small":
        shapes = ((3, 2, 128),) if scale == "huge" else tuple((67, n, 128) for n in (6, 12, 96))
    far_ones = ("o", "gate", "out") if scale == "huge" else ("",)
    for i, (T, N, D) in enumerate(shapes):
        for far_one in far_ones:
            sizes, o = {"T": T, "N": N, "D": D}, {"strided": i % 2 == 0, "far": (far_one,) if far_one else ()}
            name = f"T{T}.N{N}.D{D}" + (".strided" if o["strided"] else "") + far_name(o)
            yield Case("gated_norm", name, dtype, make_norm, expect_norm, sizes, o, scale)
