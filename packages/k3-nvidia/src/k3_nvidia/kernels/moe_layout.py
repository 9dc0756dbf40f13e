"""MXFP4 expert weights in the order the Hopper kernels read them: a pure re-arrangement of bits, and its inverse.

Source layout (compressed-tensors ``mxfp4-pack-quantized``): ``weight_packed[o, j]`` holds the e2m1 codes of input
columns 2j (low nibble) and 2j+1 (high nibble); ``weight_scale[o, g]`` is the e8m0 byte of columns 32g..32g+31.

Kernel layout. The weight is the left operand of a tensor-core product whose fragment of 16 rows x 16 columns gives
lane ``4 g + t`` rows g and g+8 and columns 2t, 2t+1, 2t+8, 2t+9. A **block** is 16 rows x 64 columns = 512 bytes = 32
lanes x 4 words, so that one 16-byte load of a lane is exactly its operand registers of four fragments and nothing is
exchanged between lanes. Word 2u + r of lane (g, t) of block (mt, kb) holds, in its half h (bits 16h..16h+15), the
codes of

    row mt*16 + 8*r + g,  column kb*64 + 16*p + 8*u + 2*t + h       r, u, h = 0, 1

at position p = 0..3. The positions are chosen so that an and (after a shift) leaves a bf16 subnormal whose value is
the code's value times 2^-126: sign at bit 15, the three code bits at bits 8..6.

    p = 0: sign 15, code 8..6      p = 1: sign 12, code 5..3 (shift left 3)      p = 2: sign 9, code 2..0 (shift left 6)
    p = 3: sign 14 (left 1), exponent bits 11, 10 (right 3), mantissa bit 13 (right 7)

Blocks lie in memory as [row blocks / 4][column blocks][4], so that a tile of 64 rows streams one contiguous run.
Storage is int16 (half words): the compiler then sees four 16-column operands instead of an interleave. The scale
halves of a block are [g][r], the scale byte of columns 0..31 in the low byte and of 32..63 in the high byte.

One product with 2^126 * 2^(scale-127) in bf16 then gives the exact weight.

Rows: in ``w13`` the row pairs (r = 0, 1) are gate and up of the same channel, so the SiTU epilogue finds both in one
thread; in ``w2`` they are the plain rows g and g + 8. Rows are padded to a multiple of ``ROW_UNIT`` and columns to 64
with code 0 and scale byte 0 (a finite exponent: 0 x NaN must never arise).

The idea of swizzling FP4 weights at load so that a lane's load is its tensor-core fragment is well known (Marlin,
FasterTransformer and Triton's Hopper MXFP4 swizzle use relatives of it); the bit positions here are this project's
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_ROWS = 16
BLOCK_COLS = 64
ROW_UNIT = 64
MAX_FAST_SCALE = 128


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _place(code: torch.Tensor, position: int) -> torch.Tensor:
    """Bits (int32, within one half word) of a 4-bit code at position 0..3."""
    sign, low = (code >> 3) & 1, code & 7
    if position < 3:
        return (sign << (15 - 3 * position)) | (low << (6 - 3 * position))
    return (sign << 14) | ((low >> 1) << 10) | ((low & 1) << 13)


def _extract(half: torch.Tensor, position: int) -> torch.Tensor:
    """Inverse of ``_place``."""
    if position < 3:
        return (((half >> (15 - 3 * position)) & 1) << 3) | ((half >> (6 - 3 * position)) & 7)
    return (((half >> 14) & 1) << 3) | (((half >> 10) & 3) << 1) | ((half >> 13) & 1)


def _luts(device: torch.device) -> torch.Tensor:
    """[4, 256] int32: the word bits that a source byte contributes at each position (low nibble half 0, high nibble
    half 1)."""
    byte = torch.arange(256, dtype=torch.int64)
    rows = [_place(byte & 15, p) | (_place(byte >> 4, p) << 16) for p in range(4)]
    table = torch.stack(rows)
    return torch.where(table >= 2**31, table - 2**32, table).to(torch.int32).to(device)


def swizzle_rows(
    low: torch.Tensor, high: torch.Tensor, low_scale: torch.Tensor, high_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-arrange row pairs into the kernel layout.

    ``low``/``high``: uint8 [..., M, K/2], the packed rows with r = 0 and r = 1 (M a multiple of 32, K of 64);
    ``low_scale``/``high_scale``: uint8 [..., M, K/32]. Returns codes int16 [..., M/32, K/64, 4, 256] and scales int16
    [..., M/32, K/64, 4, 16]. Pure; works on any device.
    """
    lead, (rows, half_k) = low.shape[:-2], low.shape[-2:]
    if rows % 32 or half_k % 32:
        raise ValueError(f"swizzle_rows: {rows} rows x {2 * half_k} columns; need multiples of 32 and 64")
    mt, kb, n = rows // 8, half_k // 32, len(lead)
    lut = _luts(low.device)
    sides = []
    for source in (low, high):
        view = source.reshape(*lead, mt, 8, kb, 4, 2, 4)  # g, kb, p, u, t
        words = lut[0][view[..., 0, :, :].to(torch.int64)]
        for p in range(1, 4):
            words |= lut[p][view[..., p, :, :].to(torch.int64)]
        sides.append(words)
    words = torch.stack(sides, dim=-1)  # mt, g, kb, u, t, r
    words = words.permute([*range(n), n, n + 2, n + 1, n + 4, n + 3, n + 5])  # mt, kb, g, t, u, r
    words = words.reshape(*lead, mt // 4, 4, kb, 128).transpose(-3, -2).contiguous()
    pairs = torch.stack((low_scale.reshape(*lead, mt, 8, kb, 2), high_scale.reshape(*lead, mt, 8, kb, 2)), dim=-2)
    scales = pairs.transpose(-4, -3).reshape(*lead, mt // 4, 4, kb, 32)  # g, r, c
    return words.view(torch.int16), scales.transpose(-3, -2).contiguous().view(torch.int16)


def unswizzle_rows(
    words: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of ``swizzle_rows``: (low, high, low_scale, high_scale)."""
    lead, (mt4, kb) = words.shape[:-4], words.shape[-4:-2]
    mt, n = 4 * mt4, len(lead)
    words, scales = (t.transpose(-3, -2).reshape(*lead, mt, kb, t.shape[-1]) for t in (words, scales))
    view = words.reshape(*lead, mt, kb, 8, 4, 2, 2, 2).to(torch.int32) & 0xFFFF  # g, t, u, r, h
    view = view.permute([*range(n), n, n + 2, n + 1, n + 4, n + 3, n + 5, n + 6])  # mt, g, kb, u, t, r, h
    sides = []
    for r in range(2):
        parts = [_extract(view[..., r, 0], p) | (_extract(view[..., r, 1], p) << 4) for p in range(4)]
        sides.append(torch.stack(parts, dim=-3).to(torch.uint8).reshape(*lead, mt * 8, kb * 32))
    bytes_ = scales.contiguous().view(torch.uint8).reshape(*lead, mt, kb, 8, 2, 2).transpose(-4, -3)  # mt, g, kb, r, c
    low_scale, high_scale = (bytes_[..., r, :].reshape(*lead, mt * 8, kb * 2) for r in range(2))
    return sides[0], sides[1], low_scale, high_scale


@dataclass
class SwizzledExperts:
    """The routed experts of one layer and rank in kernel layout.

    ``w13`` int16 [E, I_pad/32, L/64, 4, 256] and ``s13`` int16 [..., 16]: gate and up interleaved by 8 rows; ``w2``
    int16 [E, L/64, I_pad/64, 4, 256] and ``s2``. ``width`` is the unpadded expert width I of this rank, ``latent`` L.
    ``wide_scales``: some scale byte exceeds 128, so the kernels must use the exact path with two products.
    """

    w13: torch.Tensor
    s13: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    width: int
    latent: int
    wide_scales: bool = False

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w13.shape[0]

    @property
    def padded_width(self) -> int:
        """Width of the intermediate rows between the two products (a multiple of 64)."""
        return self.w2.shape[2] * BLOCK_COLS

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales in device memory."""
        return sum(t.numel() * t.element_size() for t in (self.w13, self.s13, self.w2, self.s2))

    def touched_bytes(self, experts: int) -> int:
        """Bytes a step must read when it touches that many experts."""
        return self.nbytes // self.num_experts * experts


def supports_shape(width: int, latent: int) -> tuple[bool, str]:
    """Whether experts of that width and latent size have a kernel layout, and why not."""
    if latent % BLOCK_COLS or latent <= 0:
        return False, f"latent size {latent} is not a multiple of {BLOCK_COLS}"
    if width % 32 or width <= 0:
        return False, f"expert width {width} is not a multiple of 32 (one MXFP4 scale group)"
    return True, ""


def empty_swizzled(num_experts: int, width: int, latent: int, device: torch.device | str) -> SwizzledExperts:
    """Allocate the final storage; fill it expert by expert with ``pack_expert_``."""
    ok, why = supports_shape(width, latent)
    if not ok:
        raise ValueError(f"experts: {why}")
    padded = _round_up(width, BLOCK_COLS)
    mt13, mt2 = 2 * padded // BLOCK_ROWS, _round_up(latent, ROW_UNIT) // BLOCK_ROWS
    kb13, kb2 = latent // BLOCK_COLS, padded // BLOCK_COLS

    def zeros(mt: int, kb: int, last: int) -> torch.Tensor:
        return torch.zeros(num_experts, mt // 4, kb, 4, last, dtype=torch.int16, device=device)

    return SwizzledExperts(
        zeros(mt13, kb13, 256), zeros(mt13, kb13, 16), zeros(mt2, kb2, 256), zeros(mt2, kb2, 16), width, latent
    )


def _pad(t: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    if t.shape[-2] == rows and t.shape[-1] == cols:
        return t
    return torch.nn.functional.pad(t, (0, cols - t.shape[-1], 0, rows - t.shape[-2]))


def pack_expert_(
    dst: SwizzledExperts,
    index: int | slice,
    gate: tuple[torch.Tensor, torch.Tensor],
    up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write one expert (or a slice of experts) into its place: no second copy of the layer exists.

    Each of ``gate``, ``up`` (uint8 [(n,) I, L/2], [(n,) I, L/32]) and ``down`` ([(n,) L, I/2], [(n,) L, I/32]) is
    (packed, scale) as in the checkpoint, already cut to this rank. On a GPU one kernel per matrix does it; elsewhere
    tensor operations. Sets ``dst.wide_scales`` when a scale byte exceeds 128 (scales on a GPU: one host read a call).
    """
    width, latent, padded = dst.width, dst.latent, dst.padded_width
    for name, (packed, scale), shape in (
        ("gate", gate, (width, latent)),
        ("up", up, (width, latent)),
        ("down", down, (latent, width)),
    ):
        want = (shape[0], shape[1] // 2), (shape[0], shape[1] // 32)
        if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
            raise ValueError(f"pack_expert_: {name} must be uint8 codes and uint8 scales")
        if tuple(packed.shape[-2:]) != want[0] or tuple(scale.shape[-2:]) != want[1]:
            raise ValueError(
                f"pack_expert_: {name} has shapes {tuple(packed.shape)} and {tuple(scale.shape)}; "
                f"this rank holds {want}"
            )
    device = dst.w13.device
    if not dst.wide_scales:
        tops = torch.stack([m[1].max() for m in (gate, up, down)])
        dst.wide_scales = bool((tops > MAX_FAST_SCALE).any())
    g, gs, u, us, d, ds = (t.to(device, non_blocking=True) for m in (gate, up, down) for t in m)
    g, u = _pad(g, padded, latent // 2), _pad(u, padded, latent // 2)
    gs, us = _pad(gs, padded, latent // 32), _pad(us, padded, latent // 32)
    rows2 = dst.w2.shape[1] * ROW_UNIT
    d, ds = _pad(d, rows2, padded // 2), _pad(ds, rows2, padded // 32)
    _swizzle_into(dst.w13[index], dst.s13[index], *(_octets(t, 0, 1) for t in (g, u, gs, us)))
    _swizzle_into(dst.w2[index], dst.s2[index], *(_octets(t, r, 2) for t in (d, ds) for r in range(2)))


def _octets(t: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """[(n,) M, C] -> view [(n,) M/(8 step), 8, C] of every ``step``-th run of eight rows, from run ``first`` on."""
    return t.unflatten(-2, (-1, step, 8))[..., first, :, :]


def _swizzle_into(
    words_out: torch.Tensor,
    scales_out: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    low_scale: torch.Tensor,
    high_scale: torch.Tensor,
) -> None:
    if words_out.is_cuda:
        from .moe_repack import repack

        repack(words_out, scales_out, low, high, low_scale, high_scale)
        return
    words, scales = swizzle_rows(*(t.flatten(-3, -2) for t in (low, high, low_scale, high_scale)))
    words_out.copy_(words)
    scales_out.copy_(scales)


def unpack_expert(src: SwizzledExperts, index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Inverse of ``pack_expert_`` for one expert: {"gate", "up", "down"} -> (packed, scale), padding cut off."""
    width, latent = src.width, src.latent
    g, u, gs, us = unswizzle_rows(src.w13[index], src.s13[index])
    lo, hi, los, his = unswizzle_rows(src.w2[index], src.s2[index])

    def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a.reshape(-1, 8, a.shape[-1]), b.reshape(-1, 8, b.shape[-1])), dim=1).reshape(
            -1, a.shape[-1]
        )

    return {
        "gate": (g[:width], gs[:width]),
        "up": (u[:width], us[:width]),
        "down": (rows(lo, hi)[:latent, : width // 2], rows(los, his)[:latent, : width // 32]),
    }
