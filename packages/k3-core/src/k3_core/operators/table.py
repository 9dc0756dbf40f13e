"""The one table of operators: names, signatures, conventions, oracles and tolerances.

Symbols: T tokens (rows), B sequences, N local heads, D head dimension (K3: V = K = D; kda_prefill tells V and K apart),
C = 3*N*D convolution channels (q then k then v), W taps of the short convolution (4), P = W-1+num_spec columns of the
convolution state, Q = 1+num_spec, S slots of a pool, H hidden size, M bank slots, E experts held here, A all experts,
X = routed experts a token, L latent size, I expert width held here, R selected rows.

Conventions that hold in every row: ``z`` is the projection before dt_bias; the gate g is a natural logarithm; ``beta``
is after the sigmoid; q and k arrive unnormalised, the operator normalises them and applies D^-0.5; states are V-major;
``slot_mapping`` is int32 or int64 with any stride, its values <= 0 mean vLLM's null block (0) or padding (< 0): no
state is read or written for them and their output rows are zeros; rows past the last sequence are padding too, and
every output row is written. Values > 0 are unique. Nothing outside the described elements is written.

The same call gives the same bits. Who else is in the batch may change a row within the bounds (another tile, another
split of a sum), never beyond: NaN in one request's inputs or state stays there. An implementation that claims
``batch_invariant`` gives the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterable

from k3_core.operators.spec import EXACT, Arg, Bound, Operator

_U16 = 2.0**-8  # unit roundoff of bfloat16: one rounding moves a value by at most this fraction
_U32 = 2.0**-24  # unit roundoff of float32


def _bounds(f32: dict[str, Bound], bf16: dict[str, Bound]) -> dict[str, dict[str, Bound]]:
    return {"float32": f32, "bfloat16": bf16}


def _out(shape: tuple[str, ...], dtype: str = "act", layout: str = "rows") -> Arg:
    return Arg(
        "out", shape, dtype, "out", layout, optional=True, keyword=True, default=None,  # type: ignore[arg-type]
        note="where to write; None allocates a contiguous tensor; the same object is returned",
    )  # fmt: skip


def _once(extra: float, norm: float, why: str) -> Bound:
    """One rounding to bfloat16 of a value known to ``extra`` (relative to the row's rms)."""
    return Bound(norm=norm, rtol=_U16 * 1.01, atol=extra, reason=why)


_SLOTS = Arg("slot_mapping", ("B",), "index", layout="any", note="<= 0: null block or padding, skip")
_CU = Arg("cu_seqlens", ("B+1",), "i32", note="starts at 0, non-decreasing; empty sequences are legal; may end below T")
_INIT = Arg("has_initial_state", ("B",), "bool", note="false: start from zeros whatever the slot holds (it may be NaN)")
_RECURRENT = Arg("recurrent_state", ("S", "N", "V", "K"), "state", "inout", "pool")
_CONV = Arg(
    "conv_state", ("S", "C", "P"), "act", "inout", "conv_pool",
    note="raw (pre-convolution) inputs, oldest first, in columns 0..W-2 after a prefill or decode step",
)  # fmt: skip
_GATE_PARAMS = (
    Arg("a_log", ("N",), "f32", note="head-wise, already cut to the local heads"),
    Arg("dt_bias", ("N", "K"), "f32"),
    Arg("lower_bound", dtype="float", layout="scalar", optional=True, note="g = lower_bound * sigmoid(exp(a_log) * "
        "(z + dt_bias)); None: g = -exp(a_log) * softplus(z + dt_bias). Not a clamp of the softplus gate"),
)  # fmt: skip
_FUSED_INPUTS = (
    Arg("qkv", ("T", "C"), layout="rows", note="raw projections q | k | v, before the convolution"),
    Arg("z", ("T", "N", "D"), layout="rows", note="forget projection before dt_bias"),
    Arg("beta", ("T", "N"), "f32", layout="rows", note="after the sigmoid"),
    Arg("gate", ("T", "N", "D"), layout="rows", note="output-gate projection before its sigmoid"),
    Arg("conv_weight", ("C", "W"), "f32", note="tap W-1 multiplies the current token"),
    *_GATE_PARAMS,
    Arg("o_norm_weight", ("D",), "param"),
    Arg("o_norm_eps", dtype="float", layout="scalar"),
)

_FP32_KDA = Bound(
    norm=2e-5, rtol=1e-4, atol=1e-4,
    reason="fp32 recurrence: each token adds a few 2^-24 relative, long memory sums them as a random walk "
    "(150 tokens measured 6e-8 of the largest value); the chunked form adds differences of cumulated gates up to 320 "
    "in size, hence 2^-24 * 320 = 2e-5 in the exponent",
)  # fmt: skip
_BF16_KDA_OUT = Bound(
    norm=1e-2, rtol=4 * _U16, atol=5e-2,
    reason="rounding to bfloat16 is 1.6e-3 rms relative; up to five operands may be rounded on the way (q, k, the "
    "inverse, the corrected values, the attention inside the chunk) and the result once: sqrt(6) * 1.6e-3 = 4e-3; an "
    "emulation of that (fp32 with those roundings) gives 4e-3 at D = 128 and 7e-3 at D = 16 with long memory. Five "
    "sigma of the bound for single elements, relative to the terms of S q (k3_core.testing.oracle)",
)  # fmt: skip
_BF16_KDA_STATE = Bound(
    norm=1e-2, rtol=4 * _U16, atol=5e-2,
    reason="as the output: the operands of the state update may be bfloat16, the accumulation is fp32",
)  # fmt: skip
_BF16_STEP_STATE = Bound(
    norm=6e-3, rtol=4 * _U16, atol=3e-2,
    reason="k and v may be rounded to bfloat16 after the convolution (the released code does), the rest is fp32: "
    "sqrt(2) * 1.6e-3 = 2.3e-3 for the part written now, doubled; a bfloat16 cache adds one rounding",
)  # fmt: skip
_BF16_STEP_OUT = Bound(
    norm=1e-2, rtol=4 * _U16, atol=6e-2,
    reason="q, k, v rounded after the convolution, o before the norm and the result: sqrt(5) * 1.6e-3 = 3.6e-3; "
    "e = v - S k and o = S q cancel partly, hence the factor 2.5. Six sigma for single elements",
)  # fmt: skip

ATTN_RES = Operator(
    name="attn_res",
    summary="prefix += delta (rounded), optional bank write, softmax mix over the bank and the prefix, optional norm",
    args=(
        Arg("prefix", ("T", "H"), role="inout", layout="rows", note="updated only if delta is given"),
        Arg("delta", ("T", "H"), layout="rows", optional=True, note="output of the last sublayer, not yet added"),
        Arg("bank", ("T", "M", "H"), role="inout", layout="any", note="last axis contiguous; [T, M] strides arbitrary"),
        Arg("norm_weight", ("H",), "param", note="folded with proj_weight in fp32 before the reduction"),
        Arg("proj_weight", ("H",), "param"),
        Arg("eps", dtype="float", layout="scalar"),
        Arg("num_blocks", dtype="int", layout="scalar",
            note="bank slots 0..num_blocks-1 are sources, the rest may be NaN"),
        Arg("write_block", dtype="int", layout="scalar", optional=True, keyword=True, default=None,
            note="slot that receives the new prefix; must be >= num_blocks, so it is never a source of this call"),
        Arg("output_norm_weight", ("H",), "param", optional=True, keyword=True, default=None),
        Arg("output_norm_eps", dtype="float", layout="scalar", optional=True, keyword=True, default=None,
            note="required with output_norm_weight"),
        _out(("T", "H"), layout="dense"),
    ),
    returns=("out",),
    results=("out", "prefix", "bank"),
    contract="k3_core.contracts.attn_res.mix",
    rules=(
        "the prefix afterwards equals round(prefix + delta) bit for bit, and that rounded value is the source",
        "bank slots other than write_block keep their bits; write_block holds the prefix's bits",
        "sources enter the sum un-normalised; all arithmetic is fp32 or wider; num_blocks = 0 returns the prefix",
        "the result is contiguous; a given out must be contiguous",
        "with the norm fused, the mix may stay in fp32 or be rounded before it (both are measured against fp64)",
    ),
    why="one pass over the bank is the whole cost of the operator, so add, write, mix and norm belong together",
    bounds=_bounds(
        {
            "out": Bound(norm=1e-5, rtol=1e-5, atol=1e-4, reason="logits are sums of H products: sqrt(7168) * 2^-24 = "
                         "5e-6 of their size, and the softmax turns an absolute logit error into a relative one"),
            "out_norm": Bound(norm=1e-5, rtol=1e-5, atol=1e-4, reason="as out; the norm adds 2^-23"),
            "prefix": EXACT,
            "bank": EXACT,
        },
        {
            "out": _once(2e-4, 3e-3, "one rounding (<= 2^-8 of the value, 1.6e-3 rms); logits err as in fp32"),
            "out_norm": Bound(norm=6e-3, rtol=3 * _U16 * 1.01, atol=2e-4,
                              reason="released code rounds the mix, the normalised value and the product; fused "
                              "kernels round once: at most three roundings"),
            "prefix": EXACT,
            "bank": EXACT,
        },
    ),
)  # fmt: skip

SHORT_CONV = Operator(
    name="short_conv",
    summary="depthwise causal convolution of q|k|v over whole sequences, then SiLU; state in and out",
    args=(
        Arg("x", ("T", "C"), layout="rows", note="raw projections"),
        Arg("weight", ("C", "W"), "f32", note="tap W-1 multiplies the current token; no bias"),
        _CONV,
        _SLOTS,
        _CU,
        _INIT,
        _out(("T", "C")),
    ),
    returns=("out",),
    results=("out", "conv_state"),
    contract="k3_core.contracts.kda.short_conv",
    rules=(
        "the left context is columns 0..W-2 of the slot, or zeros if has_initial_state is false",
        "afterwards columns 0..W-2 hold the last W-1 inputs of the sequence, older context included where it is "
        "shorter than that; columns from W-1 on are unspecified; an empty sequence keeps a valid state as it was",
        "accumulation and SiLU in fp32, one rounding",
    ),
    bounds=_bounds(
        {
            "out": Bound(norm=1e-6, rtol=2e-6, atol=2e-6, reason="four products and one SiLU in fp32"),
            "conv_state": EXACT,
        },
        {"out": _once(2e-6, 3e-3, "one rounding after fp32 arithmetic"), "conv_state": EXACT},
    ),
)  # fmt: skip

KDA_PREFILL = Operator(
    name="kda_prefill",
    summary="gate, q/k normalisation and the delta-rule recurrence over whole sequences; state in and out",
    args=(
        Arg("q", ("T", "N", "K"), layout="rows", note="after the convolution, not normalised"),
        Arg("k", ("T", "N", "K"), layout="rows", note="after the convolution, not normalised"),
        Arg("v", ("T", "N", "V"), layout="rows", note="after the convolution"),
        Arg("z", ("T", "N", "K"), layout="rows", note="forget projection before dt_bias"),
        Arg("beta", ("T", "N"), "f32", layout="rows", note="after the sigmoid"),
        *_GATE_PARAMS,
        _RECURRENT,
        _SLOTS,
        _CU,
        _INIT,
        _out(("T", "N", "V")),
    ),
    returns=("out",),
    results=("out", "recurrent_state"),
    contract="k3_core.contracts.kda.recurrent",
    rules=(
        "any chunk size; chunks start at each sequence's first token",
        "the output gate and norm are a separate operator (gated_norm)",
        "an empty sequence keeps a valid state as it was",
        "sequences of one token are legal, although models send decode rows to kda_decode",
    ),
    why="the convolution stays outside: it is bandwidth bound over all channels, the chunk kernel is bound by its "
    "sequential pass, and one convolution launch serves q, k and v; the norm stays outside because the chunk kernel "
    "has no registers to spare for it",
    bounds=_bounds(
        {"out": _FP32_KDA, "recurrent_state": _FP32_KDA},
        {"out": _BF16_KDA_OUT, "recurrent_state": _BF16_KDA_STATE},
    ),
)

GATED_NORM = Operator(
    name="gated_norm",
    summary="RMS norm over each head, times weight, times sigmoid of the gate",
    args=(
        Arg("o", ("T", "N", "D"), layout="rows"),
        Arg("gate", ("T", "N", "D"), layout="rows", note="projection before its sigmoid (not SiLU)"),
        Arg("weight", ("D",), "param"),
        Arg("eps", dtype="float", layout="scalar"),
        _out(("T", "N", "D")),
    ),
    returns=("out",),
    results=("out",),
    contract="k3_core.contracts.kda.output_norm",
    rules=("fp32 inside, one rounding", "an all-zero row gives zeros"),
    bounds=_bounds(
        {"out": Bound(norm=2e-6, rtol=4e-6, atol=1e-6, reason="a mean of D squares, rsqrt and a sigmoid in fp32")},
        {"out": _once(2e-6, 3e-3, "one rounding after fp32 arithmetic")},
    ),
)

KDA_DECODE = Operator(
    name="kda_decode",
    summary="one token a row: convolution, SiLU, gate, recurrence, gated norm; both states updated in place",
    args=(
        *_FUSED_INPUTS,
        _CONV,
        _RECURRENT,
        Arg("slot_mapping", ("T",), "index", layout="any", note="one slot a row; <= 0: null block or padding, skip"),
        _out(("T", "N", "D")),
    ),
    returns=("out",),
    results=("out", "conv_state", "recurrent_state"),
    contract="k3_core.contracts.kda.recurrent",
    rules=(
        "the row's conv state is columns 0..W-2; afterwards they are shifted by one and end with this row's qkv",
        "every row has a valid state (a request's first token goes through short_conv and kda_prefill)",
        "a kernel that computes only the recurrence is wrapped by its launcher, which also launches the rest",
    ),
    why="at one token a row the work is reading and writing the state; five launches around it would cost more than it",
    bounds=_bounds(
        {"out": _FP32_KDA, "recurrent_state": _FP32_KDA, "conv_state": EXACT},
        {"out": _BF16_STEP_OUT, "recurrent_state": _BF16_STEP_STATE, "conv_state": EXACT},
    ),
)

KDA_VERIFY = Operator(
    name="kda_verify",
    summary="kda_decode for 1..Q tokens a sequence, keeping the state after every token: any prefix can be accepted",
    args=(
        *_FUSED_INPUTS,
        _CONV,
        _RECURRENT,
        Arg("slot_mapping", ("B", "Q"), "index", layout="any",
            note="recurrent slot of each token; column 0 is also the conv slot; column 0 <= 0: padding row"),
        Arg("num_accepted", ("B",), "i32", note="tokens of the previous step that were accepted, 1..Q; anything in "
            "padding rows"),
        _CU,
        _out(("T", "N", "D")),
    ),
    returns=("out",),
    results=("out", "conv_state", "recurrent_state"),
    contract="k3_core.contracts.kda.recurrent",
    rules=(
        "the recurrence starts from slot slot_mapping[b, num_accepted[b] - 1]; the state after token j goes to "
        "slot_mapping[b, j]; slots of tokens that are not there keep their bits; a destination <= 0 is skipped",
        "the start state is read before any slot of the row is written (it is one of the destinations)",
        "the conv state of a row is read from column num_accepted - 1 (W-1 columns) and becomes: the last W-2 of "
        "those, then this step's inputs, from column 0 on; columns beyond are unspecified",
        "a row of one token (nothing drafted) still applies the accepted offset",
    ),
    why="as kda_decode; slots per token instead of a replay buffer: the accepted count is known only afterwards",
    bounds=_bounds(
        {"out": _FP32_KDA, "recurrent_state": _FP32_KDA, "conv_state": EXACT},
        {"out": _BF16_STEP_OUT, "recurrent_state": _BF16_STEP_STATE, "conv_state": EXACT},
    ),
)  # fmt: skip

ROUTE = Operator(
    name="route",
    summary="sigmoid scores, biased choice of the top experts (groups included), unbiased normalised weights",
    args=(
        Arg("logits", ("T", "A"), "f32", layout="rows"),
        Arg("correction_bias", ("A",), "f32", optional=True, note="enters the choice, never the weights"),
        Arg("top_k", dtype="int", layout="scalar"),
        Arg("renormalize", dtype="bool", layout="scalar", keyword=True),
        Arg("routed_scaling_factor", dtype="float", layout="scalar", keyword=True),
        Arg("num_expert_group", dtype="int", layout="scalar", keyword=True),
        Arg("topk_group", dtype="int", layout="scalar", keyword=True),
    ),
    returns=("topk_weights", "topk_ids"),
    results=("topk_weights", "topk_ids"),
    contract="k3_core.contracts.moe.route",
    rules=(
        "returns (topk_weights [T, X] float32, topk_ids [T, X] int32), both contiguous; the order inside a row is free",
        "the ids of a row are distinct and in range even if its logits are NaN (its weights may be NaN)",
        "weights = score / (sum of chosen scores + 1e-20) * factor: all-zero scores give zeros, not 1/X",
        "groups: a group's score is the sum of its two best biased scores; experts of other groups are never chosen",
    ),
    bounds={
        "float32": {
            "topk_weights": Bound(norm=2e-6, rtol=1e-5, atol=1e-7, floor=1e-12, reason="one sigmoid and a sum of "
                                  "X terms in fp32, on the ids that were chosen; scores that underflow fp32 are zero"),
            "topk_ids": Bound(atol=1e-5, reason="two experts whose biased scores differ by less than this may be "
                              "swapped; fp32 sigmoid and add err by some 2^-24"),
        }
    },
)  # fmt: skip

EXPERTS = Operator(
    name="experts",
    summary="routed experts on the latent: gate/up, activation, down, weighted sum; this rank's part, not reduced",
    args=(
        Arg("x", ("T", "L"), layout="rows", note="latent after the down-projection"),
        Arg("weights", dtype="object", layout="scalar",
            note="what this implementation's prepare(ExpertWeights) returned"),
        Arg("topk_weights", ("T", "X"), "f32"),
        Arg("topk_ids", ("T", "X"), "i32", note="global ids; < 0: no expert"),
        Arg("hidden_act", dtype="str", layout="scalar", keyword=True, note='"situ" (K3) or "silu" (Kimi-Linear)'),
        Arg("situ_beta", dtype="float", layout="scalar", optional=True, keyword=True),
        Arg("situ_linear_beta", dtype="float", layout="scalar", optional=True, keyword=True),
        Arg("expert_map", ("A",), "i32", optional=True, keyword=True, default=None,
            note="expert parallelism: local index of each global expert, -1 if elsewhere; None: ids are local"),
        _out(("T", "L")),
    ),
    returns=("out",),
    results=("out",),
    contract="k3_core.contracts.moe.latent_experts",
    rules=(
        "ExpertWeights has the released layout, gate rows (w1) before up rows (w3); prepare may permute them",
        "a token none of whose experts is here gets zeros, whatever its latent holds (NaN in padding rows included)",
        "no norm here: routed_expert_norm comes after the reduction over ranks",
    ),
    why="the weights go straight from the checkpoint to the layout of the kernel, so the operator takes the prepared "
    "object; activations stay in bfloat16 (the released configuration quantises weights only)",
    bounds=_bounds(
        {"out": Bound(norm=2e-5, rtol=1e-4, atol=1e-4, reason="two sums of a few thousand fp32 products: "
                      "sqrt(3584) * 2^-24 = 4e-6 each, through an activation of slope about one")},
        {"out": Bound(norm=8e-3, rtol=2 * _U16, atol=4e-2, reason="bfloat16 roundings of the gate/up product, the "
                      "activation, each expert's output and the sum: sqrt(4) * 1.6e-3 = 3.3e-3, doubled because SiTU's "
                      "slope exceeds one; five sigma for single elements. MXFP4 weights are exact in bfloat16")},
    ),
)  # fmt: skip

SITU = Operator(
    name="situ",
    summary="SiTU-GLU of [gate | up]: beta*tanh(gate/beta)*sigmoid(gate) * linear_beta*tanh(up/linear_beta)",
    args=(
        Arg("x", ("T", "2*I"), layout="rows", note="gate half, then up half"),
        Arg("beta", dtype="float", layout="scalar"),
        Arg("linear_beta", dtype="float", layout="scalar", optional=True, note="None: the up half enters unchanged"),
        _out(("T", "I")),
    ),
    returns=("out",),
    results=("out",),
    contract="k3_core.contracts.situ.situ_and_mul",
    rules=("fp32 inside, one rounding; tanh is not approximated in bfloat16",),
    bounds=_bounds(
        {"out": Bound(norm=1e-6, rtol=4e-6, atol=1e-7, reason="three special functions and three products in fp32")},
        {"out": _once(1e-6, 3e-3, "one rounding after fp32 arithmetic")},
    ),
)  # fmt: skip

STATE_GATHER = Operator(
    name="state_gather",
    summary="copy selected cache rows into a packed tensor; invalid or new rows become zeros",
    args=(
        Arg("cache", ("S", "N", "V", "K"), "copy", layout="pool"),
        Arg("indices", ("R",), "index", layout="any", note="valid: 0 <= i < S; repeats are legal; row 0 is ordinary "
            "(callers pass -1 for vLLM's null block)"),
        Arg("has_initial_state", ("R",), "bool", optional=True, layout="any", note="false: zeros; None: all true"),
        _out(("R", "N", "V", "K"), "copy", layout="dense"),
    ),
    returns=("out",),
    results=("out", "cache"),
    contract="k3_core.operators.contract.state_gather",
    rules=("the packed output is written completely", "the cache keeps its bits, gaps between pages included",
           "zero rows launch nothing"),
    bounds={d: {"out": EXACT, "cache": EXACT} for d in ("float32", "bfloat16")},
)  # fmt: skip

STATE_SCATTER = Operator(
    name="state_scatter",
    summary="copy packed rows back into the cache; invalid rows are skipped",
    args=(
        Arg("cache", ("S", "N", "V", "K"), "copy", "inout", "pool"),
        Arg("indices", ("R",), "index", layout="any", note="valid: 0 <= i < S, those unique; row 0 is ordinary"),
        Arg("packed", ("R", "N", "V", "K"), "copy", note="dtype of the cache"),
    ),
    returns=(),
    results=("cache",),
    contract="k3_core.operators.contract.state_scatter",
    rules=("only selected payloads change; gaps between pages keep their bits", "the packed tensor is not changed"),
    bounds={d: {"cache": EXACT} for d in ("float32", "bfloat16")},
)  # fmt: skip

TABLE: dict[str, Operator] = {
    op.name: op
    for op in (
        ATTN_RES, SHORT_CONV, KDA_PREFILL, GATED_NORM, KDA_DECODE, KDA_VERIFY,
        ROUTE, EXPERTS, SITU, STATE_GATHER, STATE_SCATTER,
    )
}  # fmt: skip


def operator(name: str) -> Operator:
    """The operator called name. KeyError names the known ones."""
    if name not in TABLE:
        raise KeyError(f"unknown operator {name!r}; the table has {', '.join(TABLE)}")
    return TABLE[name]


def markdown(operators: Iterable[Operator] | None = None) -> str:
    """The table as a Markdown page, for the documentation."""
    parts = []
    for op in operators or TABLE.values():
        parts += [f"### {op.name}", "", op.summary + ".", "", "| argument | shape | dtype | role | layout | meaning |"]
        parts.append("|---|---|---|---|---|---|")
        for a in op.args:
            name = a.name + (" (keyword)" if a.keyword else "") + (", optional" if a.optional else "")
            shape = f"[{', '.join(a.shape)}]" if a.shape else ""
            note = a.note.replace("|", "\\|")
            parts.append(f"| {name} | {shape} | {a.dtype} | {a.role} | {a.layout} | {note} |")
        parts += ["", *(f"* {rule}" for rule in op.rules), f"* compared with `{op.contract}` in fp64"]
        for dtype, table in op.bounds.items():
            for result, b in table.items():
                limit = "same bits" if b.exact else f"norm {b.norm:.2g}, element {b.rtol:.2g} rel + {b.atol:.2g} rms"
                parts.append(f"* {dtype} {result}: {limit} - {b.reason}")
        parts += ([f"* why this cut: {op.why}"] if op.why else []) + [""]
    return "\n".join(parts)
