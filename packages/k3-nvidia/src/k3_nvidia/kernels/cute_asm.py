"""Instructions that the CuTe DSL kernels share and that the DSL has no word for; imported by those only, late."""

# mypy: ignore-errors
# (the DSL ships no types)
# No postponed annotations: the DSL reads them.
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def policy(*, loc=None, ip=None):
    """An L2 policy: evict first."""
    return Int64(
        llvm.inline_asm(
            T.i64(), [], "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", has_side_effects=False,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def load16(address, inside, policy, weights, *, loc=None, ip=None):
    """Four words at a global address; zeros, and no access, where ``inside`` is 0. Weights: read once, not kept."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(inside).ir_value(loc=loc, ip=ip)]
    constraints = "=r,=r,=r,=r,l,r"
    if weights:
        operands.append(Int64(policy).ir_value(loc=loc, ip=ip))
        constraints += ",l"
        load = "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $6;"
    else:
        load = "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    code = "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; " + load
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * 4), operands, code + " }", constraints.replace("=r", "=&r"),
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return tuple(Int32(llvm.extractvalue(T.i32(), struct, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def prefetch(address, inside, *, loc=None, ip=None):
    """Ask the L2 for the line at a global address where ``inside`` is not 0; nothing waits for it."""
    llvm.inline_asm(
        None, [Int64(address).ir_value(loc=loc, ip=ip), Int32(inside).ir_value(loc=loc, ip=ip)],
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "l,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def mma(c, a, b, bf16, *, loc=None, ip=None):
    """c += a b on one m16n8k16 tile: c 4 floats, a 4 words, b 2 words."""
    kind = "bf16" if bf16 else "f16"
    code = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (*a, *b)]
    operands += [Float32(v).ir_value(loc=loc, ip=ip) for v in c]
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4), operands, code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return tuple(Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def remote(address, rank, *, loc=None, ip=None):
    """The float at this block's shared address in the shared memory of block ``rank`` of the cluster."""
    return Float32(
        llvm.inline_asm(
            T.f32(), [Int32(address).ir_value(loc=loc, ip=ip), Int32(rank).ir_value(loc=loc, ip=ip)],
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.f32 $0, [a]; }", "=f,r,r",
            has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def store16(address, inside, words, *, loc=None, ip=None):
    """Four words to a global address where ``inside`` is not 0."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(inside).ir_value(loc=loc, ip=ip)]
    operands += [Int32(word).ir_value(loc=loc, ip=ip) for word in words]
    llvm.inline_asm(
        None, operands,
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }",
        "l,r,r,r,r,r,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def push(address, rank, value, *, loc=None, ip=None):
    """A float to this block's shared address in the shared memory of block ``rank`` of the cluster."""
    llvm.inline_asm(
        None,
        [
            Int32(address).ir_value(loc=loc, ip=ip), Int32(rank).ir_value(loc=loc, ip=ip),
            Float32(value).ir_value(loc=loc, ip=ip),
        ],
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; st.shared::cluster.f32 [a], $2; }", "r,r,f,~{memory}",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def select(condition, yes, no, *, loc=None, ip=None):
    """yes where the condition holds, else no: both are Float32 and computed."""
    return Float32(
        arith.select(
            condition.ir_value(loc=loc, ip=ip), Float32(yes).ir_value(loc=loc, ip=ip),
            Float32(no).ir_value(loc=loc, ip=ip), loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """a b + c, rounded once."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c)]
    return Float32(
        llvm.inline_asm(
            T.f32(), operands, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", has_side_effects=False, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def rsqrt(x, *, loc=None, ip=None):
    """1 / sqrt(x), within 2 units of the last place of fp32."""
    return Float32(
        llvm.inline_asm(
            T.f32(), [Float32(x).ir_value(loc=loc, ip=ip)], "rsqrt.approx.f32 $0, $1;", "=f,f", has_side_effects=False,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def unpack(word, bf16, anew=False, *, loc=None, ip=None):
    """The two 16-bit floats of a word, low half first, as fp32. anew: do not keep those of an earlier call for it."""
    if bf16:
        code = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        code = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 2), [Int32(word).ir_value(loc=loc, ip=ip)], code, "=&f,=&f,r",
        has_side_effects=anew, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return tuple(Float32(llvm.extractvalue(T.f32(), struct, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def pack(low, high, bf16, *, loc=None, ip=None):
    """Two fp32 values rounded to nearest even into the halves of a word."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (high, low)]
    kind = "bf16x2" if bf16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False,
            is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip
