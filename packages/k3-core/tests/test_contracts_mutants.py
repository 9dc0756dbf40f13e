"""Planted faults that the golden checks must catch; a fault that passes makes the check worthless.

Each case replaces one function of the contracts by a wrong one of the same signature and expects the named check to
fail on its numbers (AssertionError) - any other exception would mean the mutant does not even run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import contract_checks as checks
import pytest
import torch
from torch import Tensor

from k3_core.contracts import attn_res, kda, mla, moe, norm, situ

ORIGINAL: dict[tuple[str, str], Callable[..., Any]] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (kda, ("gate", "recurrent", "chunked", "normalize_qk", "short_conv", "_convolve", "output_norm", "_one_chunk")),
        (kda, ("_decayed_products", "layer")),
        (mla, ("rms_norm", "query", "cache_rows", "split_kv_b", "apply_gate", "_probabilities")),
        (moe, ("route", "router_logits", "reduce_and_norm", "_first_largest")),
        (attn_res, ("_mix_wide", "mix_probabilities", "attn_res", "rms_norm")),
        (situ, ("situ_and_mul",)),
        (norm, ("rms_norm",)),
    )
    for name in names
}


def original(module: ModuleType, name: str) -> Callable[..., Any]:
    return ORIGINAL[module.__name__, name]


# --- the faults ------------------------------------------------------------------------------------------------------
def clamped_softplus_gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    g = original(kda, "gate")(z, a_log, dt_bias, None)
    return g if lower_bound is None else g.clamp_min(lower_bound)


def softplus_for_both(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return original(kda, "gate")(z, a_log, dt_bias, None)


def gate_without_rate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return original(kda, "gate")(z, torch.zeros_like(a_log), dt_bias, lower_bound)


def gate_without_bias(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return original(kda, "gate")(z, a_log, torch.zeros_like(dt_bias), lower_bound)


def gate_in_base_two(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    return original(kda, "gate")(z, a_log, dt_bias, lower_bound) / 0.6931471805599453


def mean_eps(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + kda.L2_EPS) * x.shape[-1] ** -0.5

    return unit(q.to(dtype)) * q.shape[-1] ** -0.5, unit(k.to(dtype))


def unscaled_query(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k = original(kda, "normalize_qk")(q, k, dtype)
    return q * q.shape[-1] ** 0.5, k


def raw_keys(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return original(kda, "normalize_qk")(q, k, dtype)[0], k.to(dtype)


def rounded_keys(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k = original(kda, "normalize_qk")(q, k, dtype)
    return q.bfloat16().to(dtype), k.bfloat16().to(dtype)


def returning(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def mutant(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        o, state = original(kda, name)(*args, **options)
        return o, change(state)

    return mutant


def taking(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[..., tuple[Tensor, Tensor]]:
    def mutant(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        return original(kda, name)(q, k, v, g, beta, None if state is None else change(state), *rest, **options)

    return mutant


def no_boundaries(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Sequences run into one another: only the first starts fresh."""
    q, k, v, g, beta, *rest = args
    state = rest[0] if rest else None
    bounds = rest[1] if len(rest) > 1 else None
    if bounds is None:
        return original(kda, "recurrent")(*args, **options)
    o, final = original(kda, "recurrent")(q, k, v, g, beta, None if state is None else state[:1])
    return o, final.expand(len(bounds) - 1, -1, -1, -1)


def read_before_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal of A dropped: a token does not see its own write."""
    o, new = original(kda, "_one_chunk")(q, k, v, g, beta, S)
    own = (q * k).sum(-1, keepdim=True) * beta * v
    return o - own, new


def state_not_carried(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    return original(kda, "_one_chunk")(q, k, v, g, beta, torch.zeros_like(S))


def no_decay_at_chunk_end(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    o, new = original(kda, "_one_chunk")(q, k, v, g, beta, S)
    return o, new + S * (1 - g.sum(-2, keepdim=True).exp())


def no_decay_inside(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    reads, writes, to_end = original(kda, "_decayed_products")(q, k, torch.zeros_like(g))
    return reads, writes, original(kda, "_decayed_products")(q, k, g)[2] + 0 * to_end


def reversed_taps(shifted: list[Tensor], taps: Tensor) -> Tensor:
    return original(kda, "_convolve")(shifted, taps.flip(1))


def no_silu(shifted: list[Tensor], taps: Tensor) -> Tensor:
    return sum(x.float() * taps[:, j] for j, x in enumerate(shifted)).to(shifted[0].dtype)  # type: ignore[union-attr]


def bf16_taps(shifted: list[Tensor], taps: Tensor) -> Tensor:
    return original(kda, "_convolve")(shifted, taps.bfloat16())


def stateless_conv(x: Tensor, weight: Tensor, state: Tensor | None = None, bounds: Any = None) -> tuple[Tensor, Tensor]:
    return original(kda, "short_conv")(x, weight, None, bounds)


def newest_first_conv(x: Tensor, weight: Tensor, state: Tensor | None = None, cu: Any = None) -> tuple[Tensor, Tensor]:
    y, new = original(kda, "short_conv")(x, weight, state, cu)
    return y, new.flip(-1)


def silu_output_gate(o: Tensor, output_gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return original(kda, "output_norm")(o, output_gate, weight, eps) * output_gate


def gate_before_norm(o: Tensor, output_gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    gated = o * torch.sigmoid(output_gate)
    return original(norm, "rms_norm")(gated, weight.to(o.dtype), eps)


def swapped_conv_thirds(x: Tensor, w: kda.KdaWeights, **options: Any) -> Any:
    return original(kda, "layer")(x, replace(w, k_conv=w.v_conv, v_conv=w.k_conv), **options)


def eps_1e_5(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    return original(norm, "rms_norm")(x, weight, 1e-5, **options)


def no_low_rank_norm(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    return x


def normed_shared_part(x: Tensor, kv_a: Tensor, kv_a_norm: Tensor, eps: float = 1e-6) -> Tensor:
    rows = original(mla, "cache_rows")(x, kv_a, kv_a_norm, eps)
    rank = kv_a_norm.shape[0]
    shared = rows[:, rank:]
    return torch.cat([rows[:, :rank], original(norm, "rms_norm")(shared, torch.ones_like(shared[0]), eps)], dim=1)


def swapped_k_and_v(kv_b: Tensor, num_heads: int, nope_dim: int) -> tuple[Tensor, Tensor]:
    w_uk, w_uv = original(mla, "split_kv_b")(kv_b, num_heads, nope_dim)
    return w_uv, w_uk


def no_output_gate(attention: Tensor, gate: Tensor) -> Tensor:
    return attention


def latent_scale(scores: Tensor, scale: float) -> Tensor:
    """The absorbed width taken for the head's: 576^-1/2."""
    return original(mla, "_probabilities")(scores, 576**-0.5)


def not_causal(scores: Tensor, scale: float) -> Tensor:
    return torch.softmax(scores * scale, dim=-1)


def causal_from_the_start(scores: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax((scores * scale).masked_fill(hidden, float("-inf")), dim=-1)


def normalise_then_project(bank: Tensor, prefix: Tensor, w_norm: Tensor, w_proj: Tensor, eps: float) -> Tensor:
    """Sources normalised and rounded to BF16, then projected with BF16 products."""
    sources = torch.cat([bank, prefix[:, None]], dim=1).bfloat16()
    normed = original(norm, "rms_norm")(sources, w_norm, eps)
    return torch.softmax((normed * w_proj.reshape(-1).bfloat16()).sum(-1).to(prefix.dtype).double(), dim=-1)


def unnormalised_logits(bank: Tensor, prefix: Tensor, w_norm: Tensor, w_proj: Tensor, eps: float) -> Tensor:
    sources = torch.cat([bank, prefix[:, None]], dim=1).double()
    return torch.softmax(sources @ (w_norm.double().reshape(-1) * w_proj.double().reshape(-1)), dim=-1)


def tempered(bank: Tensor, prefix: Tensor, w_norm: Tensor, w_proj: Tensor, eps: float) -> Tensor:
    p = original(attn_res, "mix_probabilities")(bank, prefix, w_norm, w_proj, eps)
    return torch.softmax(p.clamp_min(1e-300).log() / prefix.shape[-1] ** 0.5, dim=-1)


def mix_eps_zero(bank: Tensor, prefix: Tensor, w_norm: Tensor, w_proj: Tensor, eps: float) -> Tensor:
    return original(attn_res, "mix_probabilities")(bank, prefix, w_norm, w_proj, 1e-3)


def normalised_values(bank: Tensor, prefix: Tensor, w_norm: Tensor, w_proj: Tensor, eps: float) -> Tensor:
    def unit(x: Tensor) -> Tensor:
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)

    if bank.shape[1] == 0:
        return prefix.double()
    p = original(attn_res, "mix_probabilities")(bank, prefix, w_norm, w_proj, eps).double()
    return torch.einsum("tj,tjh->th", p, torch.cat([unit(bank), unit(prefix)[:, None]], dim=1))


def one_source_missing(bank: Tensor, prefix: Tensor, *rest: Any) -> Tensor:
    return original(attn_res, "_mix_wide")(bank[:, 1:], prefix, *rest)


def step_writes_before_mixing(prefix: Tensor, delta: Tensor | None, bank: Tensor, blocks: int, slot: int | None, *rest: Any, **o: Any) -> Tensor:  # noqa: E501  # fmt: skip
    """The written block already counts as a source."""
    if slot is not None:
        bank[:, slot] = prefix
        blocks = slot + 1
    return original(attn_res, "attn_res")(prefix, delta, bank, blocks, slot, *rest, **o)


def step_forgets_delta(prefix: Tensor, delta: Tensor | None, *rest: Any, **options: Any) -> Tensor:
    return original(attn_res, "attn_res")(prefix, None, *rest, **options)


def step_clears_the_tail(prefix: Tensor, delta: Tensor | None, bank: Tensor, blocks: int, slot: int | None, *rest: Any, **o: Any) -> Tensor:  # noqa: E501  # fmt: skip
    out = original(attn_res, "attn_res")(prefix, delta, bank, blocks, slot, *rest, **o)
    bank[:, blocks + 1 :] = 0
    return out


def no_following_norm(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    return x


def swapped_gate_and_up(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    return original(situ, "situ_and_mul")(up, gate, beta, linear_beta)


def situ_without_linear_beta(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    return original(situ, "situ_and_mul")(gate, up, beta, None)


def situ_in_bf16(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    b, c = beta or 1.0, linear_beta
    u = up if c is None else c * torch.tanh(up / c)
    return b * torch.tanh(gate / b) * torch.sigmoid(gate) * u


def silu_instead(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    return situ.silu_and_mul(gate, up)


def bias_in_the_weights(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    r = original(moe, "route")(logits, bias, top_k, **options)
    biased = (torch.sigmoid(logits) + bias).gather(-1, r.ids)
    return moe.Routing(biased / (biased.sum(-1, keepdim=True) + 1e-20) * options.get("scaling", 1.0), r.ids)


def no_bias(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    return original(moe, "route")(logits, None, top_k, **options)


def no_renormalisation(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    return original(moe, "route")(logits, bias, top_k, renormalize=False, **options)


def softmax_scores(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    probabilities = torch.softmax(logits, -1).clamp(1e-7, 1 - 1e-7)
    return original(moe, "route")(torch.logit(probabilities), bias, top_k, **options)


def uniform_on_underflow(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    r = original(moe, "route")(logits, bias, top_k, **options)
    empty = r.weights.sum(-1, keepdim=True) == 0
    return moe.Routing(torch.where(empty, 1 / top_k, r.weights), r.ids)


def no_groups(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    return original(moe, "route")(logits, bias, top_k, scaling=options.get("scaling", 1.0))


def no_scaling(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> moe.Routing:
    return original(moe, "route")(logits, bias, top_k, **(options | {"scaling": 1.0}))


def bf16_router(x: Tensor, weight: Tensor) -> Tensor:
    return (x.bfloat16() @ weight.bfloat16().T).float()


def uncentred_norm(x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    wide = x.double()
    return ((wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


@dataclass(frozen=True)
class Mutant:
    """What is replaced by what, and the check that must notice."""

    module: ModuleType
    name: str
    fault: Callable[..., Any]
    check: Callable[[], None]

    @property
    def id(self) -> str:
        """Readable name."""
        return f"{self.module.__name__.rsplit('.', 1)[-1]}.{self.name}-{self.fault.__name__}"


def op(form: str) -> Callable[[], None]:
    return lambda: checks.check_kda_op(form)


def transposed(state: Tensor) -> Tensor:
    return state.transpose(-1, -2)


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def kda_layer() -> None:
    checks.check_kda_layer(torch.float32, 64)


def mla_layer() -> None:
    checks.check_mla_layer(torch.float32, absorbed=False)


def mla_absorbed() -> None:
    checks.check_mla_layer(torch.float32, absorbed=True)


def router(case: str) -> Callable[[], None]:
    return lambda: checks.check_router(case)


MUTANTS = [
    Mutant(kda, "gate", clamped_softplus_gate, checks.check_kda_gate),
    Mutant(kda, "gate", clamped_softplus_gate, op("recurrent")),
    Mutant(kda, "gate", softplus_for_both, checks.check_kda_gate),
    Mutant(kda, "gate", gate_without_rate, checks.check_kda_gate),
    Mutant(kda, "gate", gate_without_bias, op("recurrent")),
    Mutant(kda, "gate", gate_in_base_two, checks.check_kda_gate),
    Mutant(kda, "normalize_qk", mean_eps, op("recurrent")),
    Mutant(kda, "normalize_qk", unscaled_query, op("recurrent")),
    Mutant(kda, "normalize_qk", raw_keys, op("recurrent")),
    Mutant(kda, "normalize_qk", rounded_keys, op("recurrent")),
    Mutant(kda, "recurrent", named("state_returned_k_major", returning("recurrent", transposed)), op("recurrent")),
    Mutant(kda, "recurrent", named("state_taken_k_major", taking("recurrent", transposed)), op("recurrent")),
    Mutant(kda, "recurrent", named("initial_state_dropped", taking("recurrent", lambda s: None)), op("recurrent")),
    Mutant(kda, "recurrent", no_boundaries, op("recurrent")),
    Mutant(kda, "recurrent", named("state_k_major_in_decode", taking("recurrent", transposed)), kda_layer),
    Mutant(kda, "chunked", named("state_returned_k_major", returning("chunked", transposed)), op("chunk 64")),
    Mutant(kda, "chunked", named("state_between_pieces_k_major", returning("chunked", transposed)), kda_layer),
    Mutant(kda, "chunked", named("final_state_zeroed", returning("chunked", torch.zeros_like)), kda_layer),
    Mutant(kda, "chunked", named("initial_state_dropped", taking("chunked", lambda s: None)), op("chunk 64")),
    Mutant(kda, "_one_chunk", state_not_carried, op("chunk 64")),
    Mutant(kda, "_one_chunk", no_decay_at_chunk_end, op("chunk 64")),
    Mutant(kda, "_one_chunk", read_before_write, op("chunk 64")),
    Mutant(kda, "_decayed_products", no_decay_inside, op("chunk 64")),
    Mutant(kda, "_convolve", reversed_taps, checks.check_short_conv),
    Mutant(kda, "_convolve", no_silu, checks.check_short_conv),
    Mutant(kda, "_convolve", bf16_taps, checks.check_short_conv),
    Mutant(kda, "short_conv", stateless_conv, checks.check_short_conv),
    Mutant(kda, "short_conv", stateless_conv, kda_layer),
    Mutant(kda, "short_conv", newest_first_conv, checks.check_short_conv),
    Mutant(kda, "output_norm", silu_output_gate, kda_layer),
    Mutant(kda, "output_norm", gate_before_norm, kda_layer),
    Mutant(kda, "layer", swapped_conv_thirds, kda_layer),
    Mutant(mla, "rms_norm", eps_1e_5, mla_layer),
    Mutant(mla, "rms_norm", eps_1e_5, mla_absorbed),
    Mutant(mla, "rms_norm", no_low_rank_norm, mla_layer),
    Mutant(mla, "cache_rows", normed_shared_part, mla_layer),
    Mutant(mla, "split_kv_b", swapped_k_and_v, mla_layer),
    Mutant(mla, "apply_gate", no_output_gate, mla_layer),
    Mutant(mla, "_probabilities", latent_scale, mla_absorbed),
    Mutant(mla, "_probabilities", not_causal, mla_layer),
    Mutant(mla, "_probabilities", causal_from_the_start, mla_layer),
    Mutant(attn_res, "mix_probabilities", normalise_then_project, checks.check_attn_res_mix),
    Mutant(attn_res, "mix_probabilities", unnormalised_logits, checks.check_attn_res_mix),
    Mutant(attn_res, "mix_probabilities", tempered, checks.check_attn_res_mix),
    Mutant(attn_res, "mix_probabilities", mix_eps_zero, checks.check_attn_res_mix),
    Mutant(attn_res, "_mix_wide", normalised_values, checks.check_attn_res_mix),
    Mutant(attn_res, "_mix_wide", one_source_missing, checks.check_attn_res_mix),
    Mutant(attn_res, "_mix_wide", one_source_missing, checks.check_attn_res_step),
    Mutant(attn_res, "attn_res", step_writes_before_mixing, checks.check_attn_res_step),
    Mutant(attn_res, "attn_res", step_forgets_delta, checks.check_attn_res_step),
    Mutant(attn_res, "attn_res", step_clears_the_tail, checks.check_attn_res_step),
    Mutant(attn_res, "rms_norm", no_following_norm, checks.check_attn_res_step),
    Mutant(situ, "situ_and_mul", swapped_gate_and_up, checks.check_situ),
    Mutant(situ, "situ_and_mul", situ_without_linear_beta, checks.check_situ),
    Mutant(situ, "situ_and_mul", situ_in_bf16, checks.check_situ),
    Mutant(situ, "situ_and_mul", silu_instead, checks.check_situ),
    Mutant(moe, "route", bias_in_the_weights, router("k3")),
    Mutant(moe, "route", no_bias, router("k3")),
    Mutant(moe, "route", no_renormalisation, router("k3")),
    Mutant(moe, "route", softmax_scores, router("k3")),
    Mutant(moe, "route", bias_in_the_weights, router("ties")),
    Mutant(moe, "route", uniform_on_underflow, router("underflow_saturated_zero")),
    Mutant(moe, "route", no_groups, router("grouped")),
    Mutant(moe, "route", no_scaling, router("grouped")),
    Mutant(moe, "router_logits", bf16_router, router("k3")),
    Mutant(norm, "rms_norm", uncentred_norm, checks.check_norm_rounding),
    Mutant(norm, "rms_norm", no_following_norm, checks.check_norm_rounding),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.id)
def test_fault_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.module, mutant.name, mutant.fault)
    with pytest.raises(AssertionError):
        mutant.check()
