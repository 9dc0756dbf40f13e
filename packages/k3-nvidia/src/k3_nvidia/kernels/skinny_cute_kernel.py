"""Device side of :mod:`k3_nvidia.kernels.skinny_cute`; imports the CuTe DSL, so only that module imports it, late."""

# mypy: ignore-errors
# (the DSL rewrites these functions and ships no types)
# No postponed annotations: the DSL reads them.
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from k3_nvidia.kernels.cute_asm import load16, mma, policy, prefetch, remote

# -------------------------------------------------------------------------------------------------------------- kernel


def build(config, columns, bf16, residual, compile_only_for=None):
    """For ``columns`` tiles of eight rows of x: a function (out, x, weight, residual, stream) that launches.

    compile_only_for: an architecture; then the compiled object is returned and not loaded.
    """
    tiles, unroll, warps, cluster = config.tiles, config.unroll, config.warps, config.cluster
    block_n, width = 16 * tiles, 8 * columns
    element = cutlass.BFloat16 if bf16 else cutlass.Float16

    @cute.kernel
    def kernel(
        out: cute.Pointer, x: cute.Pointer, w: cute.Pointer, added: cute.Pointer, rows: Int32, n_size: Int32,
        k_size: Int32, stride_out: Int32, stride_x: Int32, stride_w: Int32, stride_added: Int32,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = thread // 32, thread % 32
        group, quarter = lane // 4, lane % 4
        tile, rank = block // cluster, block % cluster
        evict = policy()
        # chunk of 32 columns of this warp: rank, warp, then unroll, then the next batch
        start = (rank * warps + warp) * (unroll * 32) + quarter * 8
        stride_k = cluster * warps * unroll * 32
        batches = cute.ceil_div(k_size, stride_k)

        w_rows = []
        for r in cutlass.range_constexpr(2 * tiles):
            row = cutlass.min(tile * block_n + r * 8 + group, n_size - 1)
            w_rows.append(w.toint() + (Int64(row) * Int64(stride_w)) * 2)
        x_rows = []
        for c in cutlass.range_constexpr(columns):
            row = cutlass.min(c * 8 + group, rows - 1)
            x_rows.append(x.toint() + (Int64(row) * Int64(stride_x)) * 2)

        now_w = cute.make_rmem_tensor((unroll * 2 * tiles * 4,), Int32)
        now_x = cute.make_rmem_tensor((unroll * columns * 4,), Int32)
        next_w = cute.make_rmem_tensor((unroll * 2 * tiles * 4,), Int32)
        next_x = cute.make_rmem_tensor((unroll * columns * 4,), Int32)
        sums = cute.make_rmem_tensor((tiles * columns * 4,), Float32)
        for i in cutlass.range_constexpr(tiles * columns * 4):
            sums[i] = Float32(0.0)

        # The first weights do not wait for x. Plain loads would be moved behind the wait by the assembler.
        for u in cutlass.range_constexpr(unroll):
            k = start + u * 32
            for r in cutlass.range_constexpr(2 * tiles):
                prefetch(w_rows[r] + Int64(k) * 2, Int32((k < k_size) & (quarter % 2 == 0)))
        cute.arch.griddepcontrol_wait()
        for u in cutlass.range_constexpr(unroll):
            k = start + u * 32
            for r in cutlass.range_constexpr(2 * tiles):
                words = load16(w_rows[r] + Int64(k) * 2, Int32(k < k_size), evict, True)
                for i in cutlass.range_constexpr(4):
                    now_w[(u * 2 * tiles + r) * 4 + i] = words[i]
            for c in cutlass.range_constexpr(columns):
                words = load16(x_rows[c] + Int64(k) * 2, Int32(k < k_size), evict, False)
                for i in cutlass.range_constexpr(4):
                    now_x[(u * columns + c) * 4 + i] = words[i]

        for batch in cutlass.range(batches, unroll=1):
            base = start + (batch + 1) * stride_k
            for u in cutlass.range_constexpr(unroll):
                k = base + u * 32
                for r in cutlass.range_constexpr(2 * tiles):
                    words = load16(w_rows[r] + Int64(k) * 2, Int32(k < k_size), evict, True)
                    for i in cutlass.range_constexpr(4):
                        next_w[(u * 2 * tiles + r) * 4 + i] = words[i]
                for c in cutlass.range_constexpr(columns):
                    words = load16(x_rows[c] + Int64(k) * 2, Int32(k < k_size), evict, False)
                    for i in cutlass.range_constexpr(4):
                        next_x[(u * columns + c) * 4 + i] = words[i]
            for u in cutlass.range_constexpr(unroll):
                for r in cutlass.range_constexpr(tiles):
                    low, high = (u * 2 * tiles + 2 * r) * 4, (u * 2 * tiles + 2 * r + 1) * 4
                    for c in cutlass.range_constexpr(columns):
                        at, b = (r * columns + c) * 4, (u * columns + c) * 4
                        acc = (sums[at], sums[at + 1], sums[at + 2], sums[at + 3])
                        for half in cutlass.range_constexpr(2):
                            h = 2 * half
                            a = (now_w[low + h], now_w[high + h], now_w[low + h + 1], now_w[high + h + 1])
                            acc = mma(acc, a, (now_x[b + h], now_x[b + h + 1]), bf16)
                        for i in cutlass.range_constexpr(4):
                            sums[at + i] = acc[i]
            for i in cutlass.range_constexpr(unroll * 2 * tiles * 4):
                now_w[i] = next_w[i]
            for i in cutlass.range_constexpr(unroll * columns * 4):
                now_x[i] = next_x[i]
        cute.arch.griddepcontrol_launch_dependents()

        # partial sums of the warps: [warp][row of W][row of x]
        smem = cutlass.utils.SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout(warps * block_n * width), 16)
        whole = smem.allocate_tensor(Float32, cute.make_layout(block_n * width), 16)
        for r in cutlass.range_constexpr(tiles):
            for c in cutlass.range_constexpr(columns):
                for i in cutlass.range_constexpr(4):
                    row = r * 16 + group + 8 * (i // 2)
                    column = c * 8 + quarter * 2 + i % 2
                    parts[(warp * block_n + row) * width + column] = sums[(r * columns + c) * 4 + i]
        cute.arch.sync_threads()

        results = cute.make_tensor(out, cute.make_layout((rows, n_size), stride=(stride_out, 1)))
        others = cute.make_tensor(added, cute.make_layout((rows, n_size), stride=(stride_added, 1)))
        rounds = (block_n * width + warps * 32 - 1) // (warps * 32)
        for i in cutlass.range_constexpr(rounds):
            e = thread + i * warps * 32
            if e < block_n * width:
                total = parts[e]
                for v in cutlass.range_constexpr(1, warps):
                    total = total + parts[v * block_n * width + e]
                whole[e] = total
        if cutlass.const_expr(cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if rank == 0:
            for i in cutlass.range_constexpr(rounds):
                e = thread + i * warps * 32
                # neighbouring lanes store neighbouring columns of the result
                row, m = e % block_n, e // block_n
                n = tile * block_n + row
                if (m < rows) & (n < n_size):
                    at = row * width + m
                    total = whole[at]
                    for v in cutlass.range_constexpr(1, cluster):
                        total = total + remote((whole.iterator + at).toint(), v)
                    if cutlass.const_expr(residual):
                        total = total + others[m, n].to(Float32)
                    results[m, n] = total.to(element)
        if cutlass.const_expr(cluster > 1):
            # the shared memory of the others must live until block 0 has read it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def launch(
        out: cute.Pointer, x: cute.Pointer, w: cute.Pointer, added: cute.Pointer, rows: Int32, n_size: Int32,
        k_size: Int32, stride_out: Int32, stride_x: Int32, stride_w: Int32, stride_added: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        grid = cute.ceil_div(n_size, block_n) * cluster
        kernel(out, x, w, added, rows, n_size, k_size, stride_out, stride_x, stride_w, stride_added).launch(
            grid=[grid, 1, 1], block=[warps * 32, 1, 1], cluster=[cluster, 1, 1], stream=stream, use_pdl=True
        )

    def pointer(address, align):
        return make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=align)

    sizes = [Int32(v) for v in (1, 16, 16, 16, 16, 16, 16)]
    pointers = [pointer(a, al) for a, al in ((256, 2), (512, 16), (1024, 16), (2048, 2))]
    options = {} if compile_only_for is None else {"options": f"--gpu-arch {compile_only_for} --keep-cubin --keep-ptx"}
    compiled = cute.compile(launch, *pointers, *sizes, cuda.CUstream(0), **options)
    if compile_only_for is not None:
        return compiled

    def call(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, added: torch.Tensor, stream: int) -> None:
        compiled(
            pointer(out.data_ptr(), 2), pointer(x.data_ptr(), 16), pointer(w.data_ptr(), 16),
            pointer(added.data_ptr(), 2), Int32(x.shape[0]), Int32(w.shape[0]), Int32(w.shape[1]), Int32(out.stride(0)),
            Int32(x.stride(0)), Int32(w.stride(0)), Int32(added.stride(0)), cuda.CUstream(stream),
        )  # fmt: skip

    return call
