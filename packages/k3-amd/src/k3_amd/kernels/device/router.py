"""Router choice for CDNA: sigmoid scores, biased top-k, normalised weights. One wave a token.

    s = sigmoid(logits);  chosen = the top_k largest s + bias, ties to the lower expert id
    weight = s[chosen] / (sum s[chosen] + 1e-20) * factor

896 experts are fourteen a lane of one wave (1024 places), so a maximum is a lane's own sixteen values and six exchanges
inside the wave: no LDS, no barrier. The bias enters the choice in fp32 and never the weights.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment

import triton
import triton.language as tl


@triton.jit
def ordered_key(value, there):
    """int32 keys in the order of the fp32 values; NaN is a value like any other, so that chosen ids stay distinct."""
    key = (value + 0.0).to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    lowest: tl.constexpr = -0x7FFFFFFF - 1
    return tl.where(there, tl.maximum(key, lowest + 1), lowest)


@triton.jit
def score(logits):
    """Sigmoid with a division: the weights are compared to 1e-5."""
    return 1.0 / (1.0 + tl.exp2(logits * -1.4426950408889634))


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_experts, top_k, logits_stride, factor,
    EB: tl.constexpr, TK: tl.constexpr, HAS_BIAS: tl.constexpr, RENORM: tl.constexpr,
):  # fmt: skip
    """Grid (tokens). EB, TK: powers of two >= the number of experts and top_k."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EB)
    there = expert < num_experts
    row = logits_ptr + token * logits_stride
    choice = score(tl.load(row + expert, mask=there, other=0.0))
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=there, other=0.0)
    key = ordered_key(choice, there)
    lowest: tl.constexpr = -0x7FFFFFFF - 1
    slot = tl.arange(0, TK)
    ids = tl.zeros((TK,), tl.int32)
    for i in range(0, top_k):
        _, best = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        ids = tl.where(slot == i, best, ids)
        key = tl.where(expert == best, lowest, key)
    used = slot < top_k
    chosen = tl.where(used, score(tl.load(row + ids, mask=used, other=0.0)), 0.0)
    if RENORM:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    out = token * top_k + slot
    tl.store(weights_ptr + out, chosen * factor, mask=used)
    tl.store(ids_ptr + out, ids, mask=used)
