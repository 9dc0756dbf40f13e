"""Faults of the sequence operators: state, slots, gates, convolution, verification."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from k3_core.contracts import kda
from k3_core.contracts.norm import rms_norm
from k3_core.testing.mutants.base import Arguments, Body, Run, dense_view, plant, unwritten


def _stale(a: Arguments, run: Run) -> Tensor:
    return run(has_initial_state=torch.ones_like(a["has_initial_state"]))


def _dropped(a: Arguments, run: Run) -> Tensor:
    return run(has_initial_state=torch.zeros_like(a["has_initial_state"]))


def _padding_unwritten(a: Arguments, run: Run) -> Tensor:
    return unwritten(run(), slice(int(a["cu_seqlens"][-1]), None))


def _slot_stride(a: Arguments, run: Run) -> Tensor:
    return run(slot_mapping=dense_view(a["slot_mapping"]))


def _null_written(pools: tuple[str, ...]) -> Body:
    def body(a: Arguments, run: Run) -> Tensor:
        result: Tensor = run()
        if bool((a["slot_mapping"] == 0).any()):
            for name in pools:
                a[name][0] = 0.0
        return result

    return body


def _nan_leaks(a: Arguments, run: Run) -> Tensor:
    """Masking by multiplication: the rows of one sequence reach the others."""
    result: Tensor = run()
    rows = slice(0, int(a["cu_seqlens"][-1])) if "cu_seqlens" in a else slice(None)
    return result.add_((0.0 * a["z"][rows].float().sum()).to(result.dtype))


_CONV_NULL, _PREFILL_NULL = "1_2_3_4_5_0_17.DS.strided.null.C48", "9_5.mixed.L5.null.N2.D16"
_CONV, _PREFILL = "1_2_3_4_5_0_17.SD.null.C48", "all11.mixed.L5.strided.N2.D16"
_LONG = "all11.long.L5.N2.D16"

plant("short_conv", "a new sequence continues from what its slot held", _CONV, name="stale_slot")(_stale)
plant("short_conv", "the cached inputs are not used", _CONV, name="dropped_state")(_dropped)
plant("short_conv", "rows past the last sequence are not written", _CONV, name="padding_unwritten")(_padding_unwritten)
plant("short_conv", "the stride of slot_mapping is ignored", _CONV_NULL, name="slot_stride_ignored")(_slot_stride)
plant("short_conv", "the null slot is written", "4_3_2.SD.strided.null.C48", name="null_slot_written")(
    _null_written(("conv_state",))
)
plant("kda_prefill", "a new sequence continues from what its slot held (stale slot)", _PREFILL, name="stale_slot")(
    _stale
)
plant("kda_prefill", "the state is not carried into the chunk (dropped state)", _LONG, name="dropped_state")(_dropped)
plant("kda_prefill", "rows past the last sequence are not written", _PREFILL, name="padding_unwritten")(
    _padding_unwritten
)
plant("kda_prefill", "the stride of slot_mapping is ignored", _PREFILL, name="slot_stride_ignored")(_slot_stride)
plant("kda_prefill", "the null slot is written", _PREFILL_NULL, name="null_slot_written")(
    _null_written(("recurrent_state",))
)
plant(
    "kda_prefill", "NaN of one sequence reaches the others", "70_33_20.long.L5.nan_sequence.N2.D16", name="nan_leaks"
)(_nan_leaks)


# --- short_conv


@plant("short_conv", "the state is stored one column too far", _CONV)
def _conv_state_off_by_one(a: Arguments, run: Run) -> Tensor:
    before = a["conv_state"].clone()
    result: Tensor = run()
    touched = ((a["conv_state"] != before) & ~(a["conv_state"].isnan() & before.isnan())).flatten(1).any(1)
    a["conv_state"][touched, :, :3] = a["conv_state"][touched, :, :3].roll(1, dims=-1)
    return result


@plant("short_conv", "taps in reverse order", _CONV)
def _taps_reversed(a: Arguments, run: Run) -> Tensor:
    return run(weight=a["weight"].flip(-1))


@plant("short_conv", "the channel-first layout is read as column-first", _CONV)
def _layout_swapped(a: Arguments, run: Run) -> Tensor:
    s, c, p = a["conv_state"].shape
    page = a["conv_state"].stride(0)
    other = (page, p, 1) if a["conv_state"].stride(1) == 1 else (page, 1, c)
    return run(conv_state=a["conv_state"].as_strided((s, c, p), other))


@plant("short_conv", "a sequence shorter than the window forgets the older inputs", _CONV)
def _short_sequence_forgets(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    for b, n in enumerate(a["cu_seqlens"].diff().tolist()):
        slot = int(a["slot_mapping"][b])
        if slot > 0 and 0 < n < 3:
            a["conv_state"][slot, :, : 3 - n] = 0.0
    return result


# --- kda_prefill


@plant("kda_prefill", "the state is stored [K, V]", _LONG)
def _transposed_state(a: Arguments, run: Run) -> Tensor:
    state = a["recurrent_state"]
    if state.shape[-1] != state.shape[-2]:
        return run()
    return run(recurrent_state=state.transpose(-1, -2))


def _with_gate(gate: Callable[..., Tensor]) -> Body:
    def body(a: Arguments, run: Run) -> Any:
        with mock.patch.object(kda, "gate", gate):
            return run()

    return body


def _clamped(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    g = -a_log.float().exp()[:, None] * torch.nn.functional.softplus(z.float() + dt_bias.float())
    return g if lower_bound is None else g.clamp(min=lower_bound)


_GATE = kda.gate


def _base_two(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return _GATE(z, a_log, dt_bias, lower_bound) * 0.6931471805599453


def _biased_twice(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return _GATE(z.float() + dt_bias, a_log, dt_bias, lower_bound)


plant("kda_prefill", "the bound is a clamp of the softplus gate", _PREFILL, name="clamped_gate")(_with_gate(_clamped))
plant("kda_prefill", "g is taken as a binary logarithm", _PREFILL, name="binary_logarithm")(_with_gate(_base_two))
plant("kda_prefill", "dt_bias is added twice", _PREFILL, name="bias_twice")(_with_gate(_biased_twice))
plant(
    "kda_decode",
    "the bound is a clamp of the softplus gate",
    "T33.spec0.mixed.SD.strided.null.i64.N2.D16",
    name="clamped_gate",
)(_with_gate(_clamped))


def _beta_twice(a: Arguments, run: Run) -> Any:
    return run(beta=torch.sigmoid(a["beta"]))


def _beta_squared(a: Arguments, run: Run) -> Any:
    return run(beta=a["beta"].square())


plant("kda_prefill", "beta goes through the sigmoid again (beta applied twice)", _PREFILL)(_beta_twice)
plant("kda_prefill", "beta multiplies the value and the correction", _PREFILL)(_beta_squared)


@plant("kda_prefill", "D^-0.5 is missing", _PREFILL)
def _scale_missing(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    return result.mul_(a["q"].shape[-1] ** 0.5)


def _eps_on_mean(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An RMS norm's eps, which is D times larger than that of the L2 norm."""
    q, k, d = q.to(dtype), k.to(dtype), q.shape[-1]
    return tuple(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + d * 1e-6) * s for x, s in ((q, d**-0.5), (k, 1.0)))  # type: ignore[return-value]


def _not_normalised(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return kda.torch.nn.functional.normalize(q.to(dtype), dim=-1) * q.shape[-1] ** -0.5, k.to(dtype) * k.shape[
        -1
    ] ** -0.5


def _with_normalize(function: Callable[..., Any]) -> Body:
    def body(a: Arguments, run: Run) -> Any:
        with mock.patch.object(kda, "normalize_qk", function):
            return run()

    return body


plant("kda_prefill", "eps is added to the mean of squares", "40_20.mixed.L5.qk_scale.N2.D16", name="eps_on_mean")(
    _with_normalize(_eps_on_mean)
)
plant("kda_prefill", "k is scaled by D^-0.5 instead of normalised", _PREFILL, name="key_not_normalised")(
    _with_normalize(_not_normalised)
)


@plant("kda_prefill", "the state is lost between chunks of 64", "128.long.L5.N2.D16")
def _chunk_carry_dropped(a: Arguments, run: Run) -> Tensor:
    whole = kda.chunked

    def cut(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, bounds: Tensor) -> Any:
        edges = bounds.tolist()
        ends = [min(i, e) for s, e in pairwise(edges) for i in range(s + 64, e + 64, 64)]
        first = [ends.index(e) - -(-(e - s) // 64) + 1 for s, e in pairwise(edges)]
        last = [ends.index(e) for e in edges[1:]]
        pieces = state.new_zeros(len(ends), *state.shape[1:])
        pieces[first] = state
        o, new = whole(q, k, v, g, beta, pieces, [0, *ends])
        return o, new[last]

    with mock.patch.object(kda, "chunked", cut):
        return run()


# --- the fused steps

_STEP, _STEP_NULL = "T33.spec0.mixed.SD.strided.null.i64.N2.D16", "T7.spec0.long.DS.strided.null.N2.D16"
_ACCEPT = "4_4_4_4.a1_2_3_4.spec3.long.SD.strided.i64.N2.D16"
_UNDRAFTED = "1_1_1_1.a4_3_2_1.spec3.long.DS.N2.D16"
_POOLS = ("conv_state", "recurrent_state")

plant("kda_decode", "the state is stored [K, V]", _STEP_NULL)(_transposed_state)
plant("kda_decode", "beta goes through the sigmoid again", _STEP)(_beta_twice)
plant("kda_decode", "the null slot is written", _STEP_NULL, name="null_slot_written")(_null_written(_POOLS))
plant("kda_decode", "the stride of slot_mapping is ignored", _STEP_NULL, name="slot_stride_ignored")(_slot_stride)
plant("kda_decode", "NaN of one row reaches the others", "T6.spec0.long.SD.nan_row.N2.D16", name="nan_leaks")(
    _nan_leaks
)
plant("kda_decode", "k is scaled by D^-0.5 instead of normalised", _STEP, name="key_not_normalised")(
    _with_normalize(_not_normalised)
)
plant("kda_verify", "the state is stored [K, V]", _ACCEPT)(_transposed_state)
plant("kda_verify", "the null slot is written", "1_1.a1_1.spec2.mixed.SD.null.N2.D16", name="null_slot_written")(
    _null_written(_POOLS)
)
plant("kda_verify", "rows past the last sequence are not written", _ACCEPT, name="padding_unwritten")(
    _padding_unwritten
)
plant("kda_verify", "the stride of slot_mapping is ignored", _ACCEPT, name="slot_stride_ignored")(_slot_stride)


@plant("kda_decode", "the output is read before the state is updated", _STEP)
def _read_before_write(a: Arguments, run: Run) -> Any:
    decode = kda.decode

    def early(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q32, _ = kda.normalize_qk(q, k, torch.float32)
        old = ((state.float() * g.exp().unsqueeze(-2)) @ q32.unsqueeze(-1)).squeeze(-1)
        return old.to(v.dtype), decode(q, k, v, g, beta, state)[1]

    with mock.patch.object(kda, "decode", early):
        return run()


@plant("kda_decode", "padding (-1) takes the last slot of the pool", _STEP_NULL)
def _padding_wraps(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    if bool((a["slot_mapping"] < 0).any()):
        a["recurrent_state"][-1] = 0.0
    return result


@plant("kda_decode", "rows without a slot are not written", _STEP_NULL)
def _null_rows_unwritten(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    result[a["slot_mapping"] <= 0] = float("nan")
    return result


@plant("kda_decode", "the convolution starts one column too late", _STEP)
def _conv_off_by_one(a: Arguments, run: Run) -> Tensor:
    short_conv = kda.short_conv

    def shifted(x: Tensor, weight: Tensor, state: Tensor, bounds: Any) -> tuple[Tensor, Tensor]:
        y, _ = short_conv(x, weight, state.roll(-1, dims=-1), bounds)
        return y, short_conv(x, weight, state, bounds)[1]

    with mock.patch.object(kda, "short_conv", shifted):
        return run()


@plant("kda_decode", "q and k change places", _STEP)
def _thirds_swapped(a: Arguments, run: Run) -> Any:
    decode = kda.decode
    with mock.patch.object(kda, "decode", lambda q, k, v, g, beta, state: decode(k, q, v, g, beta, state)):
        return run()


def _silu_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = rms_norm(o.float(), weight.float(), eps)
    return (normed * torch.nn.functional.silu(gate.float())).to(o.dtype)


def _gate_first(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(o.float() * torch.sigmoid(gate.float()), weight.float(), eps).to(o.dtype)


def _two_roundings(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = rms_norm(o.float(), weight.float(), eps).to(o.dtype)
    return (normed.float() * torch.sigmoid(gate.float())).to(o.dtype)


def _with_norm(function: Callable[..., Tensor]) -> Body:
    def body(a: Arguments, run: Run) -> Any:
        with mock.patch.object(kda, "output_norm", function):
            return run()

    return body


plant("kda_decode", "the output gate is a SiLU", _STEP, name="silu_gate")(_with_norm(_silu_gate))
plant("gated_norm", "the gate is a SiLU", "T5.N2.D16.strided", name="silu_gate")(_with_norm(_silu_gate))
plant("gated_norm", "the gate multiplies before the norm", "T5.N2.D16.strided", name="gate_before_norm")(
    _with_norm(_gate_first)
)
plant("gated_norm", "the normalised value is rounded before the gate", "T33.N1.D128", name="two_roundings")(
    _with_norm(_two_roundings)
)


@plant("kda_verify", "the accepted count is one too small", _ACCEPT)
def _accepted_off_by_one(a: Arguments, run: Run) -> Any:
    return run(num_accepted=(a["num_accepted"] - 1).clamp(min=1))


@plant("kda_verify", "rows that drafted nothing take the plain decode path", _UNDRAFTED)
def _offset_skipped_without_drafts(a: Arguments, run: Run) -> Any:
    lengths = a["cu_seqlens"].diff()
    return run(num_accepted=torch.where(lengths == 1, torch.ones_like(a["num_accepted"]), a["num_accepted"]))


@plant("kda_verify", "the convolution ignores the accepted offset", _ACCEPT)
def _conv_offset_ignored(a: Arguments, run: Run) -> Any:
    verify = kda.short_conv_verify

    def plain(x: Tensor, weight: Tensor, state: Tensor, accepted: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        return verify(x, weight, state, torch.ones_like(accepted), bounds)

    with mock.patch.object(kda, "short_conv_verify", plain):
        return run()


@plant("kda_verify", "the conv state is stored one column too far", _ACCEPT)
def _conv_state_off_by_one_in_verify(a: Arguments, run: Run) -> Any:
    verify = kda.short_conv_verify

    def shifted(x: Tensor, weight: Tensor, state: Tensor, accepted: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        y, new = verify(x, weight, state, accepted, bounds)
        return y, new.roll(1, dims=-1)

    with mock.patch.object(kda, "short_conv_verify", shifted):
        return run()


@plant("kda_verify", "slots of tokens that are not there are written", _UNDRAFTED)
def _all_slots_written(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    for b, n in enumerate(a["cu_seqlens"].diff().tolist()):
        row = a["slot_mapping"][b].tolist()
        if row[0] > 0 and n:
            for slot in row[n:]:
                if slot > 0:
                    a["recurrent_state"][slot] = a["recurrent_state"][row[n - 1]].clone()
    return result


@plant("kda_verify", "only the state after the last token is kept", _ACCEPT)
def _only_last_state(a: Arguments, run: Run) -> Tensor:
    result: Tensor = run()
    for b, n in enumerate(a["cu_seqlens"].diff().tolist()):
        row = a["slot_mapping"][b].tolist()
        if row[0] > 0 and n:
            a["recurrent_state"][[s for s in row[:n] if s > 0]] = a["recurrent_state"][row[n - 1]].clone()
    return result
