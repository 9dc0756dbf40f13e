"""Checks of the contracts against the operator goldens, as functions: tests run them, mutant tests see them fail.

Every tolerance is the golden README's unless its line says why it is another one.
"""

from collections.abc import Callable, Iterator

import golden_data
import torch
from torch import Tensor

from k3_core.contracts import attn_res, kda, mla, moe, norm, situ

EPS = 1e-5
Tensors = dict[str, Tensor]


def close(actual: Tensor, expected: Tensor, atol: float, what: str) -> None:
    """Every element within atol; NaN on either side fails."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= atol).all()), f"{what}: max error {error.max().item():.3g} > {atol:.3g}"


def ulp(values: Tensor) -> Tensor:
    """Spacing of BF16 numbers (8 significant bits) at each value."""
    exponent = torch.floor(torch.log2(values.double().abs().clamp_min(2.0**-126)))
    return torch.exp2(exponent - 7)


def within_ulp(actual: Tensor, expected: Tensor, ulps: float, what: str, *, per_row: bool = False) -> None:
    """Every element within `ulps` BF16 spacings of the expected value, or of its row's largest."""
    spacing = ulp(expected)
    if per_row:
        spacing = spacing.amax(-1, keepdim=True)
    excess = (actual.double() - expected.double()).abs() / spacing
    assert bool((excess <= ulps).all()), f"{what}: {excess.max().item():.3g} ulp > {ulps}"


# --- KDA -------------------------------------------------------------------------------------------------------------
KDA_FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "recurrent": lambda *args: kda.recurrent(*args),
    "chunk 1": lambda *args: kda.chunked(*args, chunk=1),
    "chunk 16": lambda *args: kda.chunked(*args, chunk=16),
    "chunk 37": lambda *args: kda.chunked(*args, chunk=37),
    "chunk 64": lambda *args: kda.chunked(*args, chunk=64),
    "chunk 256": lambda *args: kda.chunked(*args, chunk=256),
}


def kda_cases(d: Tensors) -> Iterator[tuple[str, Tensors, Tensor | None, Tensor | None]]:
    """(golden output key, operands, initial state, cu_seqlens) of every case in ops/kda_op."""

    def operands(prefix: str, bias: str = "dt_bias", **replaced: Tensor) -> Tensors:
        found = {n: d[f"{prefix}.{n}"][0] for n in "qkvgb"} | {"bias": d[bias]}
        return found | replaced

    first = d["h0"][:1]
    for length in (1, 3, 65, 150):
        yield f"T{length}.init", operands(f"T{length}"), first, None
        if f"T{length}.noinit.o" in d:
            yield f"T{length}.noinit", operands(f"T{length}"), None, None
    yield "varlen.init", operands("varlen"), d["h0"], d["varlen.cu_seqlens"]
    yield "stress.hi", operands("stress", "stress.dt_hi"), first, None
    yield "stress.lo", operands("stress", "stress.dt_lo"), first, None
    same = d["stress.k"][0, :1].expand(65, -1, -1)
    yield "stress.samekey", operands("stress", "stress.dt_lo", k=same), first, None
    yield "softplus", operands("stress", g=d["softplus.g"][0]), first, None


def check_kda_op(form: str, dtype: torch.dtype = torch.float64) -> None:
    """Outputs and final states of one form. fp64 inputs are compared as tightly as the fp32 goldens allow."""
    d = golden_data.tensors("ops/kda_op.safetensors")
    run = KDA_FORMS[form]
    # Goldens are stored in fp32: |o| < 0.2 rounds by at most 2^-27 = 7.5e-9, |state| < 4 by 2^-23.
    o_atol, state_atol = (1e-8, 3e-7) if dtype == torch.float64 else (1e-6, 2e-6)
    for name, x, initial, bounds in kda_cases(d):
        lower_bound = None if name == "softplus" else -5.0
        g = kda.gate(x["g"].to(dtype), d["A_log"], x["bias"], lower_bound)
        beta = torch.sigmoid(x["b"].to(dtype))
        state = None if initial is None else initial.to(dtype)
        o, final = run(x["q"].to(dtype), x["k"].to(dtype), x["v"].to(dtype), g, beta, state, bounds)
        close(o, d[f"{name}.o" if f"{name}.o" in d else "softplus.o"][0], o_atol, f"{form} {name} o")
        if f"{name}.state" in d:
            close(final, d[f"{name}.state"], state_atol, f"{form} {name} state")
        if name == "varlen.init":
            close(final[[2, 4]], d["varlen.init.state_of_2_and_4"], state_atol, f"{form} {name} state")


def check_kda_gate(dtype: torch.dtype = torch.float64) -> None:
    """Both decay forms at 121 values of z and 6 rates."""
    d = golden_data.arrays("ops/kda_gate.npz")
    z = torch.from_numpy(d["z"]).to(dtype)
    a_log = torch.from_numpy(d["A_log"])
    heads = len(a_log)
    z = z[:, None, None].expand(-1, heads, 1)
    for key, lower_bound in (("safe", float(d["lower_bound"])), ("softplus", None)):
        expected = torch.from_numpy(d[key])
        actual = kda.gate(z, a_log, torch.zeros(heads, 1), lower_bound)[..., 0].double()
        # fp64: the golden switches softplus to the identity above 20, which drops A * exp(-20) <= 2.3e-8.
        # fp32: |A z| reaches 330 with a relative error of 2e-7 (exp and product), so exp(A z) is off by 7e-5 of itself;
        # below the smallest normal fp32 number nothing is left.
        relative, absolute = (1e-12, 2.3e-8 if lower_bound is None else 0) if dtype == torch.float64 else (7e-5, 1e-36)
        error = (actual - expected).abs()
        assert bool((error <= relative * expected.abs() + absolute).all()), f"gate {key}: {error.max().item():.3g}"


def check_short_conv() -> None:
    """fp32 and BF16 outputs and states, with and without a cache, one and several sequences."""
    d = golden_data.tensors("ops/short_conv.safetensors")
    weight = d["weight"]
    for length in (1, 2, 5, 70):
        x = d[f"T{length}.x"][0]
        for kind, state in (("nocache", None), ("cache", d["cache4"][:1, :, 1:])):
            y, new = kda.short_conv(x, weight, state)
            within_ulp(y, d[f"T{length}.{kind}.y_bf16"][0], 1, f"conv T{length} {kind} bf16")
            assert torch.equal(new, d[f"T{length}.{kind}.state4"][..., 1:]), f"conv T{length} {kind} state"
            y, _ = kda.short_conv(x.float(), weight, None if state is None else state.float())
            close(y, d[f"T{length}.{kind}.y_fp32"][0], 1e-6, f"conv T{length} {kind} fp32")
    bounds = d["varlen.cu_seqlens"]
    for state in (None, d["cache4"][: len(bounds) - 1, :, 1:]):
        y, new = kda.short_conv(d["varlen.x"][0], weight, state, bounds)
        try:
            within_ulp(y, d["varlen.y_bf16"][0], 1, "conv varlen")
        except AssertionError:
            continue
        assert torch.equal(new, d["varlen.state4"][..., 1:]), "conv varlen state"
        return
    raise AssertionError("conv varlen: neither with nor without a cache")


def kda_weights(d: Tensors, dtype: torch.dtype) -> kda.KdaWeights:
    """Weights of the golden KDA layer; what is stored in F32 stays F32."""
    w = {k.removeprefix("kda.w.").removesuffix(".weight"): v for k, v in d.items() if k.startswith("kda.w.")}
    cast = {k: v.to(dtype) if v.dtype == torch.bfloat16 else v for k, v in w.items()}
    names = {"q_conv": "q_conv1d", "k_conv": "k_conv1d", "v_conv": "v_conv1d", "a_log": "A_log"}
    same = ("dt_bias", "o_norm")
    fields = [f for f in kda.KdaWeights.__dataclass_fields__ if f != "g_a"]
    return kda.KdaWeights(**{f: cast[names.get(f, f if f in same else f"{f}_proj")] for f in fields})


def check_kda_layer(dtype: torch.dtype, chunk: int | None) -> None:
    """The released module: three lengths, states, and prefill of 67 followed by three decode steps."""
    d = golden_data.tensors("ops/attn_layers.safetensors")
    w = kda_weights(d, dtype)
    tag, atol = ("fp32", 1e-5) if dtype == torch.float32 else ("bf16", 0.04)

    def run(x: Tensor, state: kda.KdaState | None = None, chunk: int | None = chunk) -> tuple[Tensor, kda.KdaState]:
        return kda.layer(x, w, num_heads=3, lower_bound=-5.0, eps=EPS, state=state, chunk=chunk)

    for length in (1, 5, 70):
        out, state = run(d[f"kda.T{length}.x"][0].to(dtype))
        close(out, d[f"kda.T{length}.out_{tag}"][0], atol, f"KDA layer T{length} {tag}")
    if dtype == torch.float32:
        close(state.recurrent, d["kda.T70.final_state_fp32"], 1e-5, "KDA layer final state")
        close(state.conv[:, : 3 * 128], d["kda.T70.final_conv_q_fp32"][..., 1:], 1e-5, "KDA layer conv state")
    x = d["kda.T70.x"][0].to(dtype)
    out, state = run(x[:67])
    outs = [out]
    for t in range(67, 70):
        out, state = run(x[t : t + 1], state, None)
        outs.append(out)
    close(torch.cat(outs), d[f"kda.T70.prefill_67_plus_3_decode_{tag}"][0], atol, f"KDA layer decode {tag}")


# --- MLA -------------------------------------------------------------------------------------------------------------
def mla_weights(d: Tensors, dtype: torch.dtype) -> mla.MlaWeights:
    """Weights of the golden MLA layer."""
    w = {k.removeprefix("mla.w.").removesuffix(".weight"): v.to(dtype) for k, v in d.items() if k.startswith("mla.w.")}
    return mla.MlaWeights(
        q_a=w["q_a_proj"],
        q_a_norm=w["q_a_layernorm"],
        q_b=w["q_b_proj"],
        kv_a=w["kv_a_proj_with_mqa"],
        kv_a_norm=w["kv_a_layernorm"],
        kv_b=w["kv_b_proj"],
        g=w["g_proj"],
        o=w["o_proj"],
    )


def check_mla_layer(dtype: torch.dtype, absorbed: bool) -> None:
    """The released module, unabsorbed and absorbed, whole and decoding from a cache; eps 1e-6 (`small`)."""
    d = golden_data.tensors("ops/attn_layers.safetensors")
    w = mla_weights(d, dtype)
    # fp32: sums over 1536 and 512 in another order, outputs of order 1 (measured 2e-6).
    tag, atol = ("fp32", 1e-5) if dtype == torch.float32 else ("bf16", 0.08)

    def run(x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return mla.layer(x, w, num_heads=3, nope_dim=128, past=past, absorbed=absorbed)

    for case in ("small", "T1", "T5", "T70"):  # small first: there eps 1e-5 is off by 0.6
        out, _ = run(d[f"mla.{case}.x"][0].to(dtype))
        close(out, d[f"mla.{case}.out_{tag}"][0], atol, f"MLA layer {case} {tag}")
    x = d["mla.T70.x"][0].to(dtype)
    out, rows = run(x[:67])
    outs = [out]
    for t in range(67, 70):
        out, rows = run(x[t : t + 1], rows)
        outs.append(out)
    close(torch.cat(outs), d[f"mla.T70.prefill_67_plus_3_decode_{tag}"][0], atol, f"MLA decode {tag}")


# --- AttnRes ---------------------------------------------------------------------------------------------------------
ATTN_RES_CASES = ("n0.T1", "n1.T5", "n4.T5", "n8.T5")


def check_attn_res_mix() -> None:
    """Mix in fp64, fp32 and BF16 with its probabilities."""
    d = golden_data.tensors("ops/attn_res.safetensors")
    w_norm, w_proj = d["w_norm"], d["w_proj"]
    for case in ATTN_RES_CASES:
        bank, prefix, expected = d[f"{case}.bank"], d[f"{case}.prefix"], d[f"{case}.mix_fp64"]
        scale = max(expected.abs().max().item(), 1.0)
        # The golden is stored in fp32: half an fp32 ulp of its largest value.
        close(attn_res.mix(bank.double(), prefix.double(), w_norm, w_proj, EPS), expected, scale * 2.0**-24, case)
        close(attn_res.mix(bank.float(), prefix.float(), w_norm, w_proj, EPS), expected, scale * 2e-5, f"{case} fp32")
        within_ulp(attn_res.mix(bank, prefix, w_norm, w_proj, EPS), expected, 1, f"{case} bf16", per_row=True)
        probabilities = attn_res.mix_probabilities(bank.double(), prefix.double(), w_norm, w_proj, EPS)
        close(probabilities, d[f"{case}.probs_fp64"], 1e-12, f"{case} probabilities")


def check_attn_res_step() -> None:
    """The lazy step on the same data: prefix split into prefix + delta, bank write, fused norm in both roundings."""
    d = golden_data.tensors("ops/attn_res.safetensors")
    for case in ATTN_RES_CASES:
        bank, prefix = d[f"{case}.bank"], d[f"{case}.prefix"]
        blocks = bank.shape[1]
        for with_delta in (False, True):
            # prefix = 0 + delta exactly; slots behind the valid ones hold NaN, as an uninitialised bank may.
            held = torch.cat([bank, torch.full_like(prefix, torch.nan)[:, None].expand(-1, 2, -1)], dim=1)
            before = held.clone()
            start = torch.zeros_like(prefix) if with_delta else prefix.clone()
            out = attn_res.attn_res(
                start, prefix if with_delta else None, held, blocks, blocks, d["w_norm"], d["w_proj"], EPS
            )
            within_ulp(out, d[f"{case}.mix_fp64"], 1, f"{case} step", per_row=True)
            assert out.is_contiguous()
            assert torch.equal(start, prefix), f"{case}: prefix"
            assert torch.equal(held[:, blocks], prefix), f"{case}: written slot"
            others = [j for j in range(blocks + 2) if j != blocks]
            assert torch.equal(held[:, others].view(torch.int16), before[:, others].view(torch.int16)), f"{case}: bank"
        if f"{case}.mix_norm_fp64" in d:
            for rounding in ("reference", "single"):
                out = attn_res.attn_res(
                    prefix.clone(),
                    None,
                    bank.clone(),
                    blocks,
                    None,
                    d["w_norm"],
                    d["w_proj"],
                    EPS,
                    d["ln_weight"],
                    EPS,
                    rounding=rounding,
                )
                # A BF16 rounding is off by at most 2^-8 of the value: three of them (mix, normalised, product) or one;
                # and the fp32 mix by 2e-5 of the row's largest.
                expected = d[f"{case}.mix_norm_fp64"].double()
                bound = (3 if rounding == "reference" else 1) * 2.0**-8 * expected.abs()
                error = (out.double() - expected).abs() - bound - 2e-5 * expected.abs().amax(-1, keepdim=True)
                assert bool((error <= 0).all()), f"{case} norm {rounding}: {error.max().item():.3g} over the bound"
                if rounding == "reference":
                    same = (out == d[f"{case}.mix_norm_ref_bf16"]).double().mean().item()
                    assert same > 0.99, f"{case}: only {same:.3f} of the elements equal the released rounding"


def check_schedule() -> None:
    """The table of the released model (93 layers, block 12)."""
    s = attn_res.Schedule(93, 12)
    layers = (0, 1, 11, 12, 13, 23, 24, 84, 85, 92)
    assert [s.attn_blocks(i) for i in layers] == [0, 1, 1, 1, 2, 2, 2, 7, 8, 8]
    assert [s.mlp_blocks(i) for i in layers] == [1, 1, 1, 2, 2, 2, 3, 8, 8, 8]
    assert s.output_blocks == 8
    writes = {i: s.write_index(i) for i in range(93) if s.write_index(i) is not None}
    assert writes == {12 * j: j for j in range(8)}


# --- activation, router, norms ---------------------------------------------------------------------------------------
def check_situ() -> None:
    """SiTU in fp64, fp32 and BF16, with and without linear_beta."""
    d = golden_data.arrays("ops/situ.npz")
    gate, up = (torch.from_numpy(d[k]) for k in ("gate", "up"))
    beta, linear_beta = float(d["beta"]), float(d["linear_beta"])
    expected = torch.from_numpy(d["fp64"])
    close(situ.situ_and_mul(gate.double(), up.double(), beta, linear_beta), expected, 1e-12, "situ fp64")
    unbounded = torch.from_numpy(d["fp64_no_linear_beta"])
    close(situ.situ_and_mul(gate.double(), up.double(), beta, None), unbounded, 1e-11, "situ without linear_beta")
    fp32 = situ.situ_and_mul(gate, up, beta, linear_beta).double()
    assert bool(((fp32 - expected).abs() <= 2e-6 * expected.abs() + 1e-6).all()), "situ fp32"
    bf16 = situ.situ_and_mul(gate.bfloat16(), up.bfloat16(), beta, linear_beta)
    exact = situ.situ_and_mul(gate.bfloat16().double(), up.bfloat16().double(), beta, linear_beta)
    within_ulp(bf16, exact, 0.51, "situ bf16 (one rounding)")
    if torch.equal(gate.bfloat16().float(), gate) and torch.equal(up.bfloat16().float(), up):
        within_ulp(bf16, torch.from_numpy(d["ref_bf16"]), 1, "situ bf16 against the released function")


ROUTER_CASES: dict[str, dict[str, int | float]] = {
    "k3": {"top_k": 16},
    "ties": {"top_k": 16},
    "underflow_saturated_zero": {"top_k": 16},
    "grouped": {"top_k": 4, "num_groups": 4, "topk_groups": 2, "scaling": 2.446},
}


def check_router(case: str) -> None:
    """Scores, ids (where no tie decides) and weights of one golden case."""
    d = {
        k.removeprefix(f"{case}."): torch.from_numpy(v)
        for k, v in golden_data.arrays("ops/router.npz").items()
        if k.startswith(f"{case}.")
    }
    options = dict(ROUTER_CASES[case])
    logits = moe.router_logits(d["x"], d["weight"])
    close(torch.sigmoid(logits), d["scores_fp32"], 1e-6, f"router {case} scores")
    weights, ids = moe.route(logits, d["bias"], int(options.pop("top_k")), **options)
    order = ids.argsort(-1)
    ids, weights = ids.gather(-1, order), weights.gather(-1, order)
    expected_ids, order = d["ids"].long().sort(-1)
    clear = d["gap_k"] > 1e-5
    assert torch.equal(ids[clear], expected_ids[clear]), f"router {case} ids"
    # Inside ties any of the equal experts may be chosen; scores and weights as multisets are what is determined.
    chosen, expected = (d["scores_fp32"].gather(-1, i).sort(-1).values for i in (ids, expected_ids))
    close(chosen, expected, 1e-6, f"router {case} chosen scores")
    close(weights.sort(-1).values, d["w"].gather(-1, order).sort(-1).values, 1e-6, f"router {case} weights")
    close(weights[clear], d["w"].gather(-1, order)[clear], 1e-6, f"router {case} weights by id")
    spread = ids.diff(dim=-1)
    assert bool((spread > 0).all()), f"router {case}: an expert twice"


def check_norm_rounding() -> None:
    """RMSNorm against fp64: 1 ulp of one rounding, 2 ulp of two, and the two do differ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).bfloat16()
    w = (1 + 0.2 * torch.randn(512, generator=generator)).bfloat16()
    exact = norm.rms_norm(x.double(), w, EPS)
    manual = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()
    close(exact, manual, 1e-12, "RMSNorm formula")
    reference, single = norm.rms_norm(x, w, EPS), norm.rms_norm(x, w, EPS, rounding="single")
    within_ulp(single, exact, 0.51, "single rounding")
    within_ulp(reference, exact, 2, "reference rounding")
    assert not torch.equal(reference, single)
