"""MXFP4 codes -> tensor-core operands, in registers: what the expert products share (layout: ``moe_layout``).

Two forms of the same decode. **Slices** (products of 8 columns, ``mma``): four operands of 16 columns a block, so that
the right operand's shared loads are free of conflicts. **Joined** (16 columns and more, ``wgmma``): one operand of all
64 columns a block. Then one product covers them, the compiler leaves its steps in flight while later codes of the same
block are decoded (it waits after every product whose result another product of the same iteration takes up), and rows
of activations are read 128 bytes at a time. Steps in flight still read their operand's registers, so the next block's
decode is held back until they are done (``settled``).
"""

# mypy: allow-untyped-defs
# (bodies of Triton kernels have no Python types)
from __future__ import annotations

import triton
import triton.language as tl

from k3_nvidia.kernels.triton_math import dot

# Two half words (a word) -> four bf16 pairs, one a position. Operands: 4 out, word, multiplier of columns 0..31
# twice (one a
# half), multiplier of columns 32..63 twice.
_DECODE = tl.constexpr("""
{
.reg .b32 t, u;
and.b32 $0, $4, 0x81C081C0;
shl.b32 u, $4, 3;
and.b32 $1, u, 0x81C081C0;
shl.b32 u, $4, 6;
and.b32 $2, u, 0x81C081C0;
shl.b32 u, $4, 1;
and.b32 t, u, 0x80008000;
shr.b32 u, $4, 3;
lop3.b32 t, u, 0x01800180, t, 0xEA;
shr.b32 u, $4, 7;
lop3.b32 $3, u, 0x00400040, t, 0xEA;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $5;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $7;
}
""")
# The same with a first product by 2^126, for scale bytes above 128 (their multiplier times 2^126 has no bf16).
_DECODE_WIDE = tl.constexpr(
    _DECODE.value.replace(
        "mul.rn.bf16x2 $0, $0, $5;",
        "mov.b32 u, 0x7E807E80;\n"
        + "\n".join(f"mul.rn.bf16x2 ${i}, ${i}, u;" for i in range(4))
        + "\nmul.rn.bf16x2 $0, $0, $5;",
    )
)
# Two low scale bytes of a word -> two bf16 pairs 2^(s - 1): exponent field s + 126, for s <= 128.
_SCALE = tl.constexpr(
    "{\n.reg .b32 q;\n"
    + "\n".join(f"prmt.b32 q, $2, 0, 0x4{i}4{i}; mad.lo.u32 ${i}, q, 0x80, 0x3F003F00;" for i in range(2))
    + "\n}"
)


@triton.jit
def _wide_scale(scale, half: tl.constexpr):
    """bf16 pair of 2^(s - 127), exact for every byte: 0 is subnormal, 255 NaN."""
    s = (scale >> (8 * half)) & 255
    bits = tl.where(s == 0, 0x40, tl.where(s == 255, 0x7FC0, s << 7))
    return bits | (bits << 16)


@triton.jit
def _plain_value(bits, scale, half: tl.constexpr):
    """fp32 of bf16 bits (subnormal) times 2^126 times the scale: what the interpreter runs."""
    multiplier = (_wide_scale(scale, half) << 16).to(tl.float32, bitcast=True)
    return (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37 * multiplier


@triton.jit
def _parts(codes, scale, MT: tl.constexpr, KT: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Codes [MT, KT, 256] and scale words [MT, KT, 8] -> bf16 (fp32 in the interpreter) of the four positions, each
    [MT, KT, g, t, u, r, h]."""
    shape: tl.constexpr = (MT, KT, 8, 4, 2, 2, 2)  # g, t, u, r, h
    codes = tl.reshape(codes, shape)
    pair = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 1, 2, 1)) * 16
    scale = tl.reshape(scale, (MT, KT, 8, 1, 1, 1, 1)) >> pair  # the two bytes of row half r come down
    if INTERPRET:
        scale = tl.broadcast_to(scale, shape)
        w = codes.to(tl.int32) & 0xFFFF
        p0 = _plain_value(w & 0x81C0, scale, 0)
        p1 = _plain_value((w << 3) & 0x81C0, scale, 0)
        p2 = _plain_value((w << 6) & 0x81C0, scale, 1)
        p3 = _plain_value(((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040), scale, 1)
    else:
        if WIDE:
            s0, s1 = _wide_scale(scale, 0), _wide_scale(scale, 1)
        else:
            s0, s1 = tl.inline_asm_elementwise(
                _SCALE, "=&r,=&r,r", [scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        s0 = tl.broadcast_to(s0, shape)
        s1 = tl.broadcast_to(s1, shape)
        asm: tl.constexpr = _DECODE_WIDE if WIDE else _DECODE
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, s0, s1],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return p0, p1, p2, p3


@triton.jit
def _slice(part, MT: tl.constexpr, KT: tl.constexpr):
    """[MT, KT, g, t, u, r, h] -> [MT r g, KT u t h]."""
    return tl.reshape(tl.permute(part, (0, 5, 2, 1, 4, 3, 6)), (MT * 16, KT * 16))


@triton.jit
def decode(
    codes, scale, MT: tl.constexpr, KT: tl.constexpr, JOIN: tl.constexpr, WIDE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Codes [MT, KT, 256] and scale words [MT, KT, 8] -> [16 MT, 64 KT] (JOIN), or four [16 MT, 16 KT]: columns
    16 p .. of each block."""
    p0, p1, p2, p3 = _parts(codes, scale, MT, KT, WIDE, INTERPRET)
    if JOIN:
        both = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # position = 2 * (last axis but one) + last axis
        return tl.reshape(tl.permute(both, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (MT * 16, KT * 64))
    else:
        return _slice(p0, MT, KT), _slice(p1, MT, KT), _slice(p2, MT, KT), _slice(p3, MT, KT)


@triton.jit
def settled(codes):
    """The codes, once no ``wgmma`` of this warp is in flight (sm_90a only; each thread holds eight codes or more).

    A product whose left operand is in registers reads them after it was issued. Triton 3.6 leaves such products in
    flight over the end of a loop's iteration (triton-lang/triton issue 9433), and to the assembler those registers are
    free as soon as the next iteration writes the operand, so they change under the product. Every decode in a loop
    whose sum is carried on takes its codes through here; the wait costs what the last products still need, after the
    barrier and the loads of the block. ``tests/sass_hazards.py`` looks for what is left.
    """
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", "=r,=r,=r,=r,0,1,2,3", [codes], dtype=tl.int16, is_pure=False, pack=8
    )


@triton.jit
def ahead(ptrs):
    """Ask for the lines of these pointers to be in the L2; they stay where they are until somebody loads them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def columns(KT: tl.constexpr, JOIN: tl.constexpr):
    """Column offsets that ``load`` starts from: all 64 KT, or the first slice of KT blocks, as [.., 1]."""
    if JOIN:
        return tl.arange(0, KT * 64)[:, None]
    else:
        k = tl.arange(0, KT * 16)
        return ((k // 16) * 64 + k % 16)[:, None]


@triton.jit
def load(ptrs, valid, JOIN: tl.constexpr):
    """The right operand for ``decode``'s result, from pointers to the ``columns``."""
    mask = valid[None, :]
    if JOIN:
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        return (
            tl.load(ptrs, mask=mask, other=0.0),
            tl.load(ptrs + 16, mask=mask, other=0.0),
            tl.load(ptrs + 32, mask=mask, other=0.0),
            tl.load(ptrs + 48, mask=mask, other=0.0),
        )


@triton.jit
def multiply(w, x, acc, JOIN: tl.constexpr, INTERPRET: tl.constexpr):
    """Product of ``decode``'s and ``load``'s results on top of acc."""
    if JOIN:
        return dot(w, x, acc, INTERPRET)
    else:
        acc = dot(w[0], x[0], acc, INTERPRET)
        acc = dot(w[1], x[1], acc, INTERPRET)
        acc = dot(w[2], x[2], acc, INTERPRET)
        return dot(w[3], x[3], acc, INTERPRET)
