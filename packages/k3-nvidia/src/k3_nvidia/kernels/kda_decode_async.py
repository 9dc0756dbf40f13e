"""KDA decode with explicit layouts: the whole state of a head on its way to shared memory before anything is computed.

kda_step's Triton form starts its copies at the loop, after convolution and gate, and hands q, k, v and decay to the
layouts of the state with a shuffle through shared memory each. Here every copy is issued as soon as the slot is known,
the convolution runs while they are in flight, and its results are written to shared memory once.

Formulas, bits of the arithmetic and safety: kda_step.kda_decode_kernel. fp32 states of 128 channels, sm_90 on.
"""

# Device functions have no Python types: their arguments are pointers and blocks.
# mypy: allow-untyped-defs, disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from k3_core.operators.triton_host import Launcher


@gluon.jit
def _dependents(WAIT: gl.constexpr):
    """Waits for the kernel before this one, then lets the next one be launched."""
    if WAIT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _sigmoid(x):
    """As kda_math.sigmoid."""
    r = gl.rsqrt(1.0 + gl.exp2(x * -1.4426950408889634))
    return r * r


@gluon.jit
def _softplus(x):
    """As kda_math.softplus."""
    e = gl.exp2(gl.minimum(x, 20.0) * 1.4426950408889634)
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return gl.where(x > 20.0, x, gl.where(x < -4.0, small, gl.log(1.0 + e)))


@gluon.jit
def _gate_log2(x, rate, lower_bound, BOUNDED: gl.constexpr):
    """As kda_math.gate_log2 of z + bias."""
    if BOUNDED:  # noqa: SIM108
        g = (lower_bound * 1.4426950408889634) * _sigmoid(rate * x)
    else:
        g = (rate * -1.4426950408889634) * _softplus(x)
    return g


@gluon.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slot_ptr", "beta_ptr"])
def kda_decode_async_kernel(
    qkv_ptr, z_ptr, beta_ptr, gate_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_ptr, state_ptr,
    slot_ptr, out_ptr, lower_bound, eps,
    qkv_stride, z_stride, beta_stride, gate_stride, out_stride, weight_stride,
    conv_stride, channel_stride, column_stride, state_stride, slot_stride,
    BOUNDED: gl.constexpr, H: gl.constexpr, D: gl.constexpr, BV: gl.constexpr, W: gl.constexpr, EVICT: gl.constexpr,
    DIRECT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (heads, rows), W warps; blocks of BV value rows, all in flight at once in D D fp32 of shared memory.

    DIRECT (BV = D): to registers instead, as early.
    """
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    along: gl.constexpr = gl.SliceLayout(0, tile)  # channels of a row: the same in every warp
    down: gl.constexpr = gl.SliceLayout(1, tile)  # value rows
    flat: gl.constexpr = gl.BlockedLayout([4 * D // (32 * W)], [32], [W], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    head = gl.program_id(0)
    row = gl.program_id(1)
    _dependents(PDL)
    token = row.to(gl.int64)
    slot = gl.load(slot_ptr + token * slot_stride).to(gl.int64)
    c = gl.arange(0, D, layout=along)
    out_at = out_ptr + token * out_stride + head * D + c
    if slot <= 0:
        gl.store(out_at, gl.full([D], 0.0, out_ptr.dtype.element_ty, layout=along))
    else:
        base = state_ptr + (slot * state_stride + head * (D * D))
        r = gl.arange(0, BV, layout=down)
        at = base + (gl.expand_dims(r, 1) * D + gl.expand_dims(c, 0))
        if DIRECT:
            whole = gl.load(at, eviction_policy=EVICT)
        else:
            held = gl.allocate_shared_memory(gl.float32, [D // BV, BV, D], rows)
            for n in gl.static_range(D // BV):
                async_copy.async_copy_global_to_shared(held.index(n), at + n * (BV * D), eviction_policy=EVICT)
                async_copy.commit_group()
        # q | k | v | z as one flat vector: see kda_step._step_inputs.
        e = gl.arange(0, 4 * D, layout=flat)
        part = e // D
        channel = (part * H + head) * D + e % D
        here = part < 3
        conv_at = conv_ptr + slot * conv_stride + channel.to(gl.int64) * channel_stride
        w_at = weight_ptr + channel.to(gl.int64) * weight_stride
        h0 = gl.load(conv_at, mask=here, other=0.0)
        h1 = gl.load(conv_at + column_stride, mask=here, other=0.0)
        h2 = gl.load(conv_at + 2 * column_stride, mask=here, other=0.0)
        x = gl.load(qkv_ptr + token * qkv_stride + channel, mask=here, other=0.0)
        z = gl.load(z_ptr + token * z_stride + head * D + e - 3 * D, mask=part == 3, other=0.0).to(gl.float32)
        beta = gl.load(beta_ptr + token * beta_stride + head)
        w0 = gl.load(w_at, mask=here, other=0.0)
        w1 = gl.load(w_at + 1, mask=here, other=0.0)
        w2 = gl.load(w_at + 2, mask=here, other=0.0)
        w3 = gl.load(w_at + 3, mask=here, other=0.0)
        bias = gl.load(dt_bias_ptr + head * D + e - 3 * D, mask=part == 3, other=0.0)
        rate = gl.exp(gl.load(a_log_ptr + head))
        gate = gl.load(gate_ptr + token * gate_stride + head * D + c).to(gl.float32)
        norm = gl.load(norm_ptr + c).to(gl.float32)
        y = w0 * h0.to(gl.float32)
        y += w1 * h1.to(gl.float32)
        y += w2 * h2.to(gl.float32)
        y += w3 * x.to(gl.float32)
        # 4 D elements are a multiple of the threads: each thread moves its own columns, nobody else reads them.
        gl.store(conv_at, h1, mask=here)
        gl.store(conv_at + column_stride, h2, mask=here)
        gl.store(conv_at + 2 * column_stride, x, mask=here)
        y = (y * _sigmoid(y)).to(x.dtype).to(gl.float32)
        y = gl.where(here, y, gl.exp2(_gate_log2(z + bias, rate, lower_bound, BOUNDED)))
        mixed = gl.allocate_shared_memory(gl.float32, [4 * D], plain, y)
        q = mixed.slice(0, D).load(along)
        k = mixed.slice(D, D).load(along)
        decay = mixed.slice(3 * D, D).load(along)
        rq = gl.rsqrt(gl.sum(gl.expand_dims(q * q, 0), axis=1) + 1e-6) * (D**-0.5)
        rk = gl.rsqrt(gl.sum(gl.expand_dims(k * k, 0), axis=1) + 1e-6)
        kq = gl.sum(gl.expand_dims(k * q, 0), axis=1)
        kept = gl.allocate_shared_memory(gl.float32, [D], plain)
        for n in gl.static_range(D // BV):
            if DIRECT:
                S = whole
            else:
                async_copy.wait_group(D // BV - 1 - n)
                S = held.index(n).load(tile)
            S = S * gl.expand_dims(decay, 0)
            v = mixed.slice(2 * D + n * BV, BV).load(down)
            a = gl.sum(S * gl.expand_dims(k, 0), axis=1)
            b = gl.sum(S * gl.expand_dims(q, 0), axis=1)
            u = beta * (v - rk * a) * rk
            S = S + gl.expand_dims(u, 1) * gl.expand_dims(k, 0)
            gl.store(at + n * (BV * D), S, eviction_policy=EVICT)
            kept.slice(n * BV, BV).store(rq * (b + u * kq))
        o = kept.load(along)
        scale = gl.rsqrt(gl.sum(gl.expand_dims(o * o, 0), axis=1) * (1.0 / D) + eps)
        o = gl.expand_dims(o * norm * _sigmoid(gate), 0) * gl.expand_dims(scale, 1)
        gl.store(gl.expand_dims(out_at, 0), o.to(out_ptr.dtype.element_ty))


launch = Launcher(kda_decode_async_kernel)
