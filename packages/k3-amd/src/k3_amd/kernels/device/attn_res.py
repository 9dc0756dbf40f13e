"""AttnRes for CDNA: every source row of a token is in registers at once; one pass.

Formula and conventions: `k3_core.contracts.attn_res`, operator ``attn_res`` of `k3_core.operators`.

A compute unit has 512 KB of vector registers, twice what it has elsewhere for half as many resident lanes, so a token's
nine rows of 7168 bfloat16 (126 KB) fit beside their fp32 mix: all loads of a token are in flight together, 16 bytes a
lane each (a row is KC pieces of CHUNK elements), and nothing is read twice. Rows enter the softmax
TOGETHER at a time: their two sums (squares, products with the folded weight) cross the waves in one exchange, and only
their fp32 copies are alive. Programs are persistent, so the folded weight is made once.

All arithmetic is fp32; the prefix is rounded to the activation dtype before it is a source; the norm is applied to the
fp32 mix and rounded once.
"""

# Tuples grow inside the kernels, which Triton types by itself.
# mypy: allow-untyped-defs, disable-error-code="assignment, misc, attr-defined"

import triton
import triton.language as tl


@triton.jit
def _sum2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _sum4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sum6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _sum8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _sum10(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9


@triton.jit
def _across(values, COUNT: tl.constexpr):
    """Sum COUNT tensors over their lanes with one exchange between the waves."""
    if COUNT == 2:
        return tl.reduce(values, 0, _sum2)
    elif COUNT == 4:
        return tl.reduce(values, 0, _sum4)
    elif COUNT == 6:
        return tl.reduce(values, 0, _sum6)
    elif COUNT == 8:
        return tl.reduce(values, 0, _sum8)
    else:
        return tl.reduce(values, 0, _sum10)


@triton.jit
def _load_row(ptr, H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr):
    """One row as KC tensors of CHUNK elements; lanes past H read zero."""
    cols = tl.arange(0, CHUNK)
    row = ()
    for c in tl.static_range(KC):
        if (c + 1) * CHUNK <= H:
            row = row + (tl.load(ptr + c * CHUNK + cols),)
        else:
            row = row + (tl.load(ptr + c * CHUNK + cols, mask=c * CHUNK + cols < H, other=0.0),)
    return row


@triton.jit
def _store_row(ptr, row, H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr):
    cols = tl.arange(0, CHUNK)
    for c in tl.static_range(KC):
        if (c + 1) * CHUNK <= H:
            tl.store(ptr + c * CHUNK + cols, row[c])
        else:
            tl.store(ptr + c * CHUNK + cols, row[c], mask=c * CHUNK + cols < H)


@triton.jit
def _lane_sums(row, folded, KC: tl.constexpr):
    """A lane's part of the sum of squares and of the product with the folded weight."""
    x = row[0].to(tl.float32)
    squares = x * x
    products = x * folded[0]
    for c in tl.static_range(1, KC):
        y = row[c].to(tl.float32)
        squares += y * y
        products += y * folded[c]
    return squares, products


@triton.jit
def _fold(
    rows, folded, mixed, top, total, FIRST: tl.constexpr, LAST: tl.constexpr, H: tl.constexpr, eps, KC: tl.constexpr
):
    """Take rows FIRST..LAST-1 into the running softmax: (mixed, largest logit, sum of weights) after them."""
    partial = ()
    for j in tl.static_range(FIRST, LAST):
        partial = partial + _lane_sums(rows[j], folded, KC)
    sums = _across(partial, 2 * (LAST - FIRST))
    logits = ()
    newest = top
    for j in tl.static_range(LAST - FIRST):
        logit = sums[2 * j + 1] * tl.rsqrt(sums[2 * j] / H + eps)
        logits = logits + (logit,)
        newest = tl.maximum(newest, logit)
    kept = tl.exp2((top - newest) * 1.4426950408889634)
    total = total * kept
    weights = ()
    for j in tl.static_range(LAST - FIRST):
        weight = tl.exp2((logits[j] - newest) * 1.4426950408889634)
        weights = weights + (weight,)
        total += weight
    renewed = ()
    for c in tl.static_range(KC):
        value = weights[0] * rows[FIRST][c].to(tl.float32)
        for j in tl.static_range(1, LAST - FIRST):
            value += weights[j] * rows[FIRST + j][c].to(tl.float32)
        if FIRST > 0:
            value += kept * mixed[c]
        renewed = renewed + (value,)
    return renewed, newest, total


@triton.jit(do_not_specialize=["num_tokens", "write_block"])
def attn_res_kernel(
    out_ptr, prefix_ptr, delta_ptr, bank_ptr, norm_ptr, proj_ptr, out_norm_ptr,
    prefix_stride, delta_stride, bank_stride, block_stride, num_tokens, eps, out_eps, write_block,
    NUM_BLOCKS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_WRITE: tl.constexpr, HAS_NORM: tl.constexpr,
    H: tl.constexpr, CHUNK: tl.constexpr, KC: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Grid (programs): token pid, pid + programs, ...; out is contiguous."""
    ROWS: tl.constexpr = NUM_BLOCKS + 1
    if NUM_BLOCKS > 0:
        norm_weight = _load_row(norm_ptr, H, CHUNK, KC)
        proj_weight = _load_row(proj_ptr, H, CHUNK, KC)
        folded = ()
        for c in tl.static_range(KC):
            folded = folded + (norm_weight[c].to(tl.float32) * proj_weight[c].to(tl.float32),)
    step = tl.num_programs(0).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    while token < num_tokens:
        prefix = _load_row(prefix_ptr + token * prefix_stride, H, CHUNK, KC)
        if HAS_DELTA:
            delta = _load_row(delta_ptr + token * delta_stride, H, CHUNK, KC)
        others = ()
        for j in tl.static_range(NUM_BLOCKS):
            others = others + (_load_row(bank_ptr + token * bank_stride + j * block_stride, H, CHUNK, KC),)
        if HAS_DELTA:
            summed = ()
            for c in tl.static_range(KC):
                summed = summed + ((prefix[c].to(tl.float32) + delta[c].to(tl.float32)).to(prefix[c].dtype),)
            _store_row(prefix_ptr + token * prefix_stride, summed, H, CHUNK, KC)
            rows = (summed,) + others
        else:
            rows = (prefix,) + others
        if HAS_WRITE:
            _store_row(bank_ptr + token * bank_stride + write_block * block_stride, rows[0], H, CHUNK, KC)
        mixed = ()
        if NUM_BLOCKS > 0:
            top = -float("inf")
            total = 0.0
            for g in tl.static_range((ROWS + TOGETHER - 1) // TOGETHER):
                mixed, top, total = _fold(
                    rows, folded, mixed, top, total, g * TOGETHER, min((g + 1) * TOGETHER, ROWS), H, eps, KC
                )
            scale = 1.0 / total
        else:
            for c in tl.static_range(KC):
                mixed = mixed + (rows[0][c].to(tl.float32),)
            scale = 1.0
        if HAS_NORM:
            squares = mixed[0] * mixed[0]
            for c in tl.static_range(1, KC):
                squares += mixed[c] * mixed[c]
            # the mean of (mixed * scale)^2, with the scale taken out of the sum
            scale = scale * tl.rsqrt(tl.sum(squares, 0) * (scale * scale) / H + out_eps)
            out_weight = _load_row(out_norm_ptr, H, CHUNK, KC)
        result = ()
        for c in tl.static_range(KC):
            value = mixed[c] * scale
            if HAS_NORM:
                value = value * out_weight[c].to(tl.float32)
            result = result + (value.to(out_ptr.dtype.element_ty),)
        _store_row(out_ptr + token * H, result, H, CHUNK, KC)
        token += step
