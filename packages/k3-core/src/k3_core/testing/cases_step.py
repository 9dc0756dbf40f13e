"""Cases of the fused one-token operators: kda_decode and kda_verify."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3_core.contracts import kda
from k3_core.testing import oracle
from k3_core.testing.case import Case, Draw, Inputs, Sizes, far_name, far_strides, padded
from k3_core.testing.cases_kda import (
    NAN,
    W,
    conv_pool_stride,
    convolve,
    far_conv,
    gate_parameters,
    gated_norm,
    pool,
    row_masks,
    spread,
)
from k3_core.testing.compare import Expected

O_EPS = 1e-5
#: Arguments that "huge" cases place far, one a case.
FAR_ARGUMENTS = ("conv_state", "recurrent_state", "qkv", "z", "beta", "gate", "out")
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)


def _fused(case: Case, draw: Draw, dead: Tensor) -> dict[str, Tensor]:
    """Arguments that decode and verify share; rows without a live sequence are NaN."""
    T, N, D = (case.sizes[s] for s in ("T", "N", "D"))
    z, a_log, dt_bias = gate_parameters(draw, case.options["gate"], T, N, D)
    rows = {
        "qkv": draw.normal(T, 3 * N * D),
        "z": z,
        "beta": draw.uniform(T, N, low=0.02, high=0.98),
        "gate": draw.normal(T, N, D, scale=2.0),
    }
    for x in rows.values():
        x[dead] = NAN
    tensors = {name: x if name == "beta" else x.to(case.dtype) for name, x in rows.items()}
    return tensors | {
        "conv_weight": draw.normal(3 * N * D, W, scale=0.5),
        "a_log": a_log,
        "dt_bias": dt_bias,
        "o_norm_weight": draw.uniform(D, low=0.5, high=1.5),
    }


def _strides(case: Case, t: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    o, N, D = case.options, case.sizes["N"], case.sizes["D"]
    strides: dict[str, tuple[int, ...]] = {
        "conv_state": conv_pool_stride(o["layout"], 3 * N * D, case.sizes["P"], 64 if o["strided"] else 0)
    }
    if case.scale == "huge":
        strides |= far_strides(case, **t, out=t["z"]) | far_conv(case, t["conv_state"])
    elif o["strided"]:
        strides |= {name: padded(t[name], 16 * (i + 1)) for i, name in enumerate(("qkv", "z", "gate"))}
        strides |= {"recurrent_state": padded(t["recurrent_state"], 512), "beta": padded(t["beta"], 4)}
        strides["slot_mapping"] = (3,) if t["slot_mapping"].dim() == 1 else (t["slot_mapping"].shape[1] + 3, 1)
        strides["out"] = padded(t["z"], 32)
    return strides


def _finish(case: Case, tensors: dict[str, Tensor], free: Tensor | None = None, slots: tuple[int, ...] = ()) -> Inputs:
    scalars = {"lower_bound": case.options["lower_bound"], "o_norm_eps": O_EPS}
    return Inputs(tensors, scalars, _strides(case, tensors), free, slots)


def make_decode(case: Case, draw: Draw) -> Inputs:
    """One row a sequence; some rows have the null slot or are padding."""
    T, N, D, S, P = (case.sizes[s] for s in ("T", "N", "D", "S", "P"))
    o = case.options
    slots = spread(draw, T, S)
    for b in o["null"]:
        slots[b] = 0 if b % 2 == 0 else -1
    used = slots[slots > 0]
    dead, free, free_slots = slots <= 0, None, tuple[int, ...]()
    if "nan_row" in o:
        free = torch.zeros(T, dtype=torch.bool, device=draw.device)
        free[o["nan_row"]] = True
        dead, free_slots = dead | free, (int(slots[o["nan_row"]]),)
    tensors = _fused(case, draw, dead)
    conv = pool(draw, (S, 3 * N * D, P), used, scale=1.0)
    conv[:, :, W - 1 :] = NAN
    tensors["conv_state"] = conv.to(case.dtype)
    tensors["recurrent_state"] = pool(draw, (S, N, D, D), used).to(o["state_dtype"])
    tensors["slot_mapping"] = slots.to(o["index"])
    return _finish(case, tensors, free, free_slots)


class Layer:
    """The fp64 arithmetic of one token, shared by the two oracles."""

    def __init__(self, inputs: Inputs) -> None:
        t = inputs.tensors
        self.t, self.shape = t, t["z"].shape[1:]
        self.x, self.gate, self.beta = t["qkv"].double(), t["gate"].double(), t["beta"].double()
        lower = inputs.scalars["lower_bound"]
        self.g = kda.gate(t["z"].double(), t["a_log"].double(), t["dt_bias"].double(), lower)

    def token(self, row: int, history: Tensor, state: Tensor) -> oracle.Step:
        """history [C, 3] and state [N, V, K] in fp64 -> output [N, D], new state, scale of the output."""
        one = slice(row, row + 1)
        y = convolve(history, self.x[one], self.t["conv_weight"].double())
        q, k, v = (part.unflatten(-1, self.shape) for part in y.chunk(3, dim=-1))
        o, new, scale = oracle.step(q, k, v, self.g[one], self.beta[one], state.unsqueeze(0))
        out = gated_norm(o, self.gate[one], self.t["o_norm_weight"].double(), O_EPS)
        # The norm divides by rms(o): where o is a small difference of large terms, their error grows with it.
        rms = (o.square().mean(-1, keepdim=True) + O_EPS).sqrt()
        factor = (scale / rms).clamp(min=1.0)
        return oracle.Step(out[0], new[0], (factor * out.square().mean(-1, keepdim=True).sqrt())[0])


def expect_decode(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Row by row."""
    t, layer = inputs.tensors, Layer(inputs)
    out = torch.zeros_like(t["z"], dtype=torch.float64)
    scale = torch.zeros_like(out[..., :1])
    state, conv = t["recurrent_state"].double(), t["conv_state"].clone()
    judged, free_conv = torch.zeros_like(conv, dtype=torch.bool), torch.zeros_like(conv, dtype=torch.bool)
    slots = t["slot_mapping"].tolist()
    for row, slot in enumerate(slots):
        if slot <= 0:
            continue
        old = t["conv_state"][slot, :, : W - 1]
        conv[slot, :, : W - 1] = torch.cat([old[:, 1:], t["qkv"][row].unsqueeze(-1)], dim=1)
        free_conv[slot, :, W - 1 :] = True
        if slot in inputs.free_slots:
            free_conv[slot] = True
            continue
        judged[slot, :, : W - 1] = True
        out[row], state[slot], scale[row] = layer.token(row, old.double(), state[slot])
    keep = None if inputs.free_rows is None else ~inputs.free_rows[:, None, None]
    live = [s for s in slots if s > 0 and s not in inputs.free_slots]
    pool_tensor = t["recurrent_state"]
    return {
        "out": Expected(out, keep, scale=scale),
        "conv_state": Expected(conv, judged, free_conv),
        "recurrent_state": Expected(
            state, row_masks(pool_tensor, live), row_masks(pool_tensor, inputs.free_slots), scale=_rms(state)
        ),
    }


def _rms(state: Tensor) -> Tensor:
    """Scale of a state: its rms over both axes."""
    return state.square().mean((-2, -1), keepdim=True).sqrt()


def make_verify(case: Case, draw: Draw) -> Inputs:
    """Rows of 1..Q tokens; the slot that the recurrence starts from holds numbers, the row's others NaN."""
    N, D, S, P, Q = (case.sizes[s] for s in ("N", "D", "S", "P", "Q"))
    o = case.options
    lengths, accepted = o["lengths"], o["accepted"]
    B, T = len(lengths), case.sizes["T"]
    slots = spread(draw, B * Q, S).view(B, Q)
    for b in o["null"]:
        slots[b] = 0 if b % 2 == 0 else -1
    live = slots[:, 0] > 0
    if o.get("short_table"):
        # Columns past the row's tokens point nowhere, unless the recurrence starts there.
        for b in range(B):
            for j in range(lengths[b], Q):
                slots[b, j] = slots[b, j] if j == accepted[b] - 1 else 0
    start = torch.tensor([int(slots[b, accepted[b] - 1]) for b in range(B) if live[b]], dtype=torch.long)
    cu = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
    dead = torch.ones(T, dtype=torch.bool, device=draw.device)
    for b in range(B):
        dead[int(cu[b]) : int(cu[b + 1])] = not bool(live[b])
    tensors = _fused(case, draw, dead)
    conv = torch.full((S, 3 * N * D, P), NAN, device=draw.device)
    for b in range(B):
        if live[b]:
            first = accepted[b] - 1
            # History of the accepted count; columns before it are older inputs, columns after it were rejected.
            conv[int(slots[b, 0])] = draw.normal(3 * N * D, P)
            conv[int(slots[b, 0]), :, first + W - 1 :] = NAN
    counts = torch.tensor([a if bool(live[b]) else (0, -1, 99)[b % 3] for b, a in enumerate(accepted)])
    tensors |= {
        "conv_state": conv.to(case.dtype),
        "recurrent_state": pool(draw, (S, N, D, D), start.to(draw.device)).to(o["state_dtype"]),
        "slot_mapping": slots.to(o["index"]),
        "num_accepted": counts.to(draw.device, torch.int32),
        "cu_seqlens": cu.to(torch.int32),
    }
    return _finish(case, tensors)


def expect_verify(case: Case, inputs: Inputs) -> dict[str, Expected]:
    """Token by token from the accepted slot, a state kept after each."""
    t, layer = inputs.tensors, Layer(inputs)
    out = torch.zeros_like(t["z"], dtype=torch.float64)
    scale = torch.zeros_like(out[..., :1])
    state, conv = t["recurrent_state"].double(), t["conv_state"].clone()
    judged, free = torch.zeros_like(conv, dtype=torch.bool), torch.zeros_like(conv, dtype=torch.bool)
    bounds, written = t["cu_seqlens"].tolist(), []
    for b, row_slots in enumerate(t["slot_mapping"].tolist()):
        begin, end = bounds[b], bounds[b + 1]
        if row_slots[0] <= 0 or begin == end:
            continue
        first = int(t["num_accepted"][b]) - 1
        window = torch.cat([t["conv_state"][row_slots[0], :, first : first + W - 1], t["qkv"][begin:end].T], dim=1)
        current = t["recurrent_state"][row_slots[first]].double()
        for j in range(end - begin):
            row = begin + j
            out[row], current, scale[row] = layer.token(row, window[:, j : j + W - 1].double(), current)
            if row_slots[j] > 0:
                state[row_slots[j]] = current
                written.append(row_slots[j])
        width = window.shape[1] - 1
        conv[row_slots[0], :, :width] = window[:, 1:]
        judged[row_slots[0], :, :width], free[row_slots[0], :, width:] = True, True
    masks = row_masks(t["recurrent_state"], written)
    return {
        "out": Expected(out, scale=scale),
        "conv_state": Expected(conv, judged, free),
        "recurrent_state": Expected(state, masks, scale=_rms(state)),
    }


def _options(dtype: torch.dtype, more: dict[str, Any]) -> dict[str, Any]:
    state = torch.float64 if dtype is torch.float64 else torch.float32
    base = {"gate": "mixed", "strided": False, "layout": "SD", "null": (), "lower_bound": -5.0}
    return {**base, "index": torch.int32, "state_dtype": state, "num_spec": 0, **more}


def _label(o: dict[str, Any], N: int, D: int) -> str:
    on = [o["layout"], *(k for k in ("strided", "short_table") if o.get(k)), *(["null"] if o["null"] else [])]
    on += ["nan_row"] if "nan_row" in o else []
    on += ["softplus"] if o["lower_bound"] is None else []
    on += ["bf16state"] if o["state_dtype"] is torch.bfloat16 else []
    on += ["i64"] if o["index"] is torch.int64 else []
    return ".".join([o["gate"], *on, f"N{N}.D{D}"]) + far_name(o)


def _decode_case(dtype: torch.dtype, scale: Sizes, T: int, N: int, D: int, **more: Any) -> Case:
    o = _options(dtype, more)
    sizes = {"T": T, "N": N, "D": D, "C": 3 * N * D, "W": W, "P": W - 1 + o["num_spec"], "S": T + 2 + T // 2}
    if scale == "huge":
        sizes["S"] = T + 1
    name = f"T{T}.spec{o['num_spec']}.{_label(o, N, D)}"
    return Case("kda_decode", name, dtype, make_decode, expect_decode, sizes, o, scale)


def decode_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """kda_decode."""
    if scale == "huge":
        for far in FAR_ARGUMENTS:
            yield _decode_case(dtype, scale, 3, 2, 128, gate="long", far=(far,))
        return
    N, D, i64 = (2, 16, torch.int64) if scale == "small" else (6, 128, torch.int64)
    for gate in ("mixed", "bound", "long"):
        yield _decode_case(dtype, scale, 7, N, D, gate=gate, null=(2, 5), strided=gate == "long", layout="DS")
    yield _decode_case(dtype, scale, 1, N, D)
    yield _decode_case(dtype, scale, 0, N, D)
    yield _decode_case(dtype, scale, 3, N, D, null=(0, 1, 2), strided=True)
    yield _decode_case(dtype, scale, 33, N, D, index=i64, strided=True, null=(7, 30, 31, 32))
    yield _decode_case(dtype, scale, 5, N, D, num_spec=7, layout="DS", strided=True)
    yield _decode_case(dtype, scale, 5, N, D, num_spec=2, index=i64)
    yield _decode_case(dtype, scale, 6, N, D, lower_bound=None, gate="mixed")
    yield _decode_case(dtype, scale, 6, N, D, nan_row=3, gate="long")
    if dtype is torch.bfloat16:
        yield _decode_case(dtype, scale, 4, N, D, state_dtype=torch.bfloat16, gate="long")
    if scale == "small":
        yield _decode_case(dtype, scale, 4, 3, 8, strided=True)
        return
    for heads in HEADS:
        yield _decode_case(dtype, scale, 9, heads, D, strided=heads % 2 == 0, null=(4,), gate="long")
    for T in (64, 200):
        yield _decode_case(dtype, scale, T, 12, D, null=(3, T - 1))


def _verify_case(
    dtype: torch.dtype, scale: Sizes, N: int, D: int, num_spec: int, lengths: tuple[int, ...],
    accepted: tuple[int, ...], extra: int = 2, **more: Any,
) -> Case:  # fmt: skip
    o = _options(dtype, {**more, "num_spec": num_spec, "lengths": lengths, "accepted": accepted})
    B, Q = len(lengths), 1 + num_spec
    sizes = {"T": sum(lengths) + extra, "B": B, "Q": Q, "N": N, "D": D, "C": 3 * N * D, "W": W, "P": W - 1 + num_spec}
    sizes["S"] = B * Q + (1 if scale == "huge" else 3)
    name = f"{'_'.join(map(str, lengths))}.a{'_'.join(map(str, accepted))}.spec{num_spec}.{_label(o, N, D)}"
    return Case("kda_verify", name, dtype, make_verify, expect_verify, sizes, o, scale)


def verify_cases(dtype: torch.dtype, scale: Sizes) -> Iterator[Case]:
    """kda_verify: every accepted count, rows without drafts, padding rows, tables that end early."""
    if scale == "huge":
        for far in FAR_ARGUMENTS:
            yield _verify_case(dtype, scale, 2, 128, 1, (2,), (2,), gate="long", far=(far,))
        return
    N, D = (2, 16) if scale == "small" else (6, 128)
    i64 = torch.int64
    yield _verify_case(dtype, scale, N, D, 1, (2, 1, 2), (1, 2, 2), gate="long")
    yield _verify_case(dtype, scale, N, D, 3, (4, 4, 4, 4), (1, 2, 3, 4), gate="long", strided=True, index=i64)
    yield _verify_case(dtype, scale, N, D, 3, (1, 1, 1, 1), (4, 3, 2, 1), gate="long", layout="DS")
    yield _verify_case(dtype, scale, N, D, 7, (8, 3, 0, 1, 5), (1, 8, 1, 5, 2), null=(2,), short_table=True)
    yield _verify_case(dtype, scale, N, D, 7, (8, 1, 4, 1), (3, 8, 7, 1), null=(1,), strided=True, layout="DS")
    yield _verify_case(dtype, scale, N, D, 2, (3, 3), (3, 1), extra=0, lower_bound=None)
    yield _verify_case(dtype, scale, N, D, 2, (1, 1), (1, 1), null=(0, 1), extra=4)
    if dtype is torch.bfloat16:
        yield _verify_case(dtype, scale, N, D, 2, (3, 2), (2, 3), state_dtype=torch.bfloat16, gate="long")
    if scale == "real":
        for heads in HEADS:
            lengths, accepted = (4, 1, 3, 2), (2, 4, 1, 3)
            yield _verify_case(dtype, scale, heads, D, 3, lengths, accepted, strided=heads % 2 == 0, null=(3,))
