"""Device side of :mod:`k3_nvidia.kernels.attn_res_cluster`; imports the CuTe DSL, so only that imports it, late."""

# mypy: ignore-errors
# (the DSL rewrites these functions and ships no types)
# No postponed annotations: the DSL reads them.
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_nvidia.kernels.cute_asm import fma, load16, pack, prefetch, push, rsqrt, select, store16, unpack

WARP = 32
MASKS = (16, 8, 4, 2, 1)
LOG2_E = 1.4426950408889634


def build(cluster, rows, sizes, hidden, threads, lanes, resident, bf16, normed, compile_only_for=None):
    """A function that launches for up to ``rows`` source rows of ``hidden`` elements.

    sizes: of the list of sums (squares of the rows, then their products with the folded weight) as lanes divide it.
    compile_only_for: an architecture; then the compiled object is returned and not loaded.
    """
    warps = threads // WARP
    values = sizes[0]
    group = 1 << (warps - 1).bit_length()  # lanes that add the warps' sums of one value
    per_warp = WARP // group
    passes = -(-values // (warps * per_warp))
    sums = -(-cluster * warps // WARP)
    tight = threads * resident > 512  # registers: rather convert the rows twice than keep them as fp32
    missing = -0x7FFF8000  # a pair of -0.0: added to anything, it is that

    @cute.kernel
    def kernel(
        out: Int64, prefix: Int64, delta: Int64, bank: Int64, norm: Int64, proj: Int64, out_norm: Int64,
        prefix_stride: Int64, delta_stride: Int64, bank_stride: Int64, block_stride: Int64, blocks: Int32,
        has_delta: Int32, write_block: Int32, eps: Float32, out_eps: Float32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        warp, lane = thread // WARP, thread % WARP
        token, rank = Int64(block // cluster), block % cluster
        column = rank * (lanes * 8) + thread * 8
        inside = Int32((thread < lanes) & (column < hidden))
        at = Int64(column) * 2
        prefix_at = prefix + token * prefix_stride * 2 + at
        delta_at = delta + token * delta_stride * 2 + at
        bank_at = bank + token * bank_stride * 2 + at
        if cutlass.const_expr(cluster > 1):
            # every block of the cluster must run before its shared memory is written
            cute.arch.cluster_arrive()
        sector = inside * Int32(lane % 2 == 0)
        prefetch(prefix_at, sector)
        for j in cutlass.range_constexpr(rows - 1):
            prefetch(bank_at + Int64(j) * block_stride * 2, sector * Int32(j < blocks))
        nothing = Int64(0)
        norm_words = load16(norm + at, inside, nothing, False)
        proj_words = load16(proj + at, inside, nothing, False)
        folded = []
        for i in cutlass.range_constexpr(4):
            n0, n1 = unpack(norm_words[i], bf16)
            p0, p1 = unpack(proj_words[i], bf16)
            folded.append(n0 * p0)
            folded.append(n1 * p1)
        if cutlass.const_expr(cluster > 1):
            cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()

        source = []
        base = load16(prefix_at, inside, nothing, False)
        added = load16(delta_at, inside * has_delta, nothing, False)
        source.append(base)
        for j in cutlass.range_constexpr(rows - 1):
            live = inside * Int32(j < blocks)
            source.append(load16(bank_at + Int64(j) * block_stride * 2, live, nothing, False))
        absent = (1 - has_delta) * Int32(missing)
        summed = []
        for i in cutlass.range_constexpr(4):
            b0, b1 = unpack(base[i], bf16)
            a0, a1 = unpack(added[i] | absent, bf16)
            summed.append(pack(b0 + a0, b1 + a1, bf16))
        source[0] = tuple(summed)
        store16(prefix_at, inside * has_delta, summed)
        written = cutlass.max(write_block, 0)
        store16(bank_at + Int64(written) * block_stride * 2, inside * Int32(write_block >= 0), summed)

        # Sums of this lane, then of the warp: lanes halve the list of sums among them while they add, so that each ends
        # with one value's. The lower half of the warp keeps squares, the upper products.
        upper = (lane & MASKS[0]) != 0
        mine = []
        for j in cutlass.range_constexpr(rows):
            square, product = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(4):
                x0, x1 = unpack(source[j][i], bf16)
                square = fma(x1, x1, fma(x0, x0, square))
                product = fma(x1, folded[2 * i + 1], fma(x0, folded[2 * i], product))
            kept, given = select(upper, product, square), select(upper, square, product)
            mine.append(kept + cute.arch.shuffle_sync_bfly(given, offset=MASKS[0]))
        for step in cutlass.range_constexpr(1, 5):
            upper = (lane & MASKS[step]) != 0
            if cutlass.const_expr(step + 1 < len(sizes)):
                half = sizes[step + 1]
                fewer = []
                for i in cutlass.range_constexpr(half):
                    low, high = mine[i], Float32(0.0)
                    if cutlass.const_expr(i + half < sizes[step]):
                        high = mine[i + half]
                    kept, given = select(upper, high, low), select(upper, low, high)
                    fewer.append(kept + cute.arch.shuffle_sync_bfly(given, offset=MASKS[step]))
                mine = fewer
            else:
                mine = [mine[0] + cute.arch.shuffle_sync_bfly(mine[0], offset=MASKS[step])]
        which, known = Int32(0), Int32(1)
        for back in cutlass.range_constexpr(len(sizes) - 1):
            step = len(sizes) - 2 - back
            which = which + Int32((lane & MASKS[step]) != 0) * sizes[step + 1]
            known = known * Int32(which < sizes[step])

        smem = cutlass.utils.SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout(warps * values), 16)
        totals = smem.allocate_tensor(Float32, cute.make_layout(cluster * values), 16)
        norms = smem.allocate_tensor(Float32, cute.make_layout(cluster * warps), 16)
        if known != 0:
            parts[warp * values + which] = mine[0]
        cute.arch.sync_threads()
        # of the block: ``group`` lanes a value, then to every block of the cluster
        member = lane % group
        for turn in cutlass.range_constexpr(passes):
            value = (turn * warps + warp) * per_warp + lane // group
            there = (member < warps) & (value < values)
            part = parts[cutlass.min(member, warps - 1) * values + cutlass.min(value, values - 1)]
            total = select(there, part, Float32(0.0))
            for step in cutlass.range_constexpr(group.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=group >> (step + 1))
            if cutlass.const_expr(cluster > 1):
                slot = (totals.iterator + rank * values + cutlass.min(value, values - 1)).toint()
                for turn_of in cutlass.range_constexpr(-(-cluster // group)):
                    target = member + turn_of * group
                    if (target < cluster) & (value < values):
                        push(slot, target, total)
            else:
                if (member == 0) & (value < values):
                    totals[value] = total
        if cutlass.const_expr(cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(normed):
            scale_words = load16(out_norm + at, inside, nothing, False)
        # of the row: lane j has row j, in every warp the same
        total = Float32(0.0)
        for r in cutlass.range_constexpr(cluster):
            total = total + totals[r * values + cutlass.min(lane, values - 1)]
        product = cute.arch.shuffle_sync(total, offset=cutlass.min(lane + rows, WARP - 1))
        logit = product * rsqrt(total * (1.0 / hidden) + eps)
        logit = select(lane <= blocks, logit, Float32(-float("inf")))
        top = logit
        for step in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=MASKS[step]))
        weight = select(lane <= blocks, cute.math.exp2((logit - top) * LOG2_E, fastmath=True), Float32(0.0))
        share = weight
        for step in cutlass.range_constexpr(5):
            share = share + cute.arch.shuffle_sync_bfly(share, offset=MASKS[step])
        weight = weight / share

        mixed = [Float32(0.0) for _ in range(8)]
        for j in cutlass.range_constexpr(rows):
            w = cute.arch.shuffle_sync(weight, offset=j)
            for i in cutlass.range_constexpr(4):
                x0, x1 = unpack(source[j][i], bf16, tight)
                mixed[2 * i] = fma(w, x0, mixed[2 * i])
                mixed[2 * i + 1] = fma(w, x1, mixed[2 * i + 1])
        if cutlass.const_expr(normed):
            square = Float32(0.0)
            for i in cutlass.range_constexpr(8):
                square = fma(mixed[i], mixed[i], square)
            for step in cutlass.range_constexpr(5):
                square = square + cute.arch.shuffle_sync_bfly(square, offset=MASKS[step])
            if cutlass.const_expr(cluster > 1):
                if lane < cluster:
                    push((norms.iterator + rank * warps + warp).toint(), lane, square)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
            else:
                if lane == 0:
                    norms[warp] = square
                cute.arch.sync_threads()
            square = Float32(0.0)
            for turn in cutlass.range_constexpr(sums):
                entry = turn * WARP + lane
                part = norms[cutlass.min(entry, cluster * warps - 1)]
                square = square + select(entry < cluster * warps, part, Float32(0.0))
            for step in cutlass.range_constexpr(5):
                square = square + cute.arch.shuffle_sync_bfly(square, offset=MASKS[step])
            scale = rsqrt(square * (1.0 / hidden) + out_eps)
            for i in cutlass.range_constexpr(4):
                s0, s1 = unpack(scale_words[i], bf16)
                mixed[2 * i] = mixed[2 * i] * scale * s0
                mixed[2 * i + 1] = mixed[2 * i + 1] * scale * s1
        result = []
        for i in cutlass.range_constexpr(4):
            result.append(pack(mixed[2 * i], mixed[2 * i + 1], bf16))
        store16(out + token * (hidden * 2) + at, inside, result)

    @cute.jit
    def launch(
        out: Int64, prefix: Int64, delta: Int64, bank: Int64, norm: Int64, proj: Int64, out_norm: Int64,
        prefix_stride: Int64, delta_stride: Int64, bank_stride: Int64, block_stride: Int64, tokens: Int32,
        blocks: Int32, has_delta: Int32, write_block: Int32, eps: Float32, out_eps: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        kernel(
            out, prefix, delta, bank, norm, proj, out_norm, prefix_stride, delta_stride, bank_stride, block_stride,
            blocks, has_delta, write_block, eps, out_eps,
        ).launch(
            grid=[tokens * cluster, 1, 1], block=[threads, 1, 1], cluster=[cluster, 1, 1], stream=stream, use_pdl=True,
            min_blocks_per_mp=resident, preferred_smem_carveout=-1,
        )  # fmt: skip

    options = {} if compile_only_for is None else {"options": f"--gpu-arch {compile_only_for} --keep-cubin --keep-ptx"}
    longs, ints = [Int64(256)] * 11, [Int32(1), Int32(1), Int32(1), Int32(-1)]
    compiled = cute.compile(launch, *longs, *ints, Float32(1e-5), Float32(1e-5), cuda.CUstream(0), **options)
    if compile_only_for is not None:
        return compiled

    def call(addresses, strides, tokens, blocks, has_delta, write_block, eps, out_eps, stream):
        compiled(
            *map(Int64, (*addresses, *strides)), *map(Int32, (tokens, blocks, has_delta, write_block)), Float32(eps),
            Float32(out_eps), cuda.CUstream(stream),
        )  # fmt: skip

    return call
