"""MXFP4, the storage of the routed experts' weights (compressed-tensors, `mxfp4-pack-quantized`).

A logical weight W[out, in] is stored as `weight_packed` uint8 [out, in/2] and `weight_scale` uint8 [out, in/32]:

    code(o, 2j)   = packed[o, j] & 15          (low nibble: even column)
    code(o, 2j+1) = packed[o, j] >> 4          (high nibble: odd column)
    W[o, i]       = e2m1(code(o, i)) * 2^(scale[o, i // 32] - 127)

e2m1: bit 3 is the sign, bits 2..0 index (0, 0.5, 1, 1.5, 2, 3, 4, 6); code 8 is -0. The scale is e8m0: byte 0 is
2^-127, byte 255 is NaN. There is no zero point, no global scale and no bias. Source: K3-SPEC 2.2, OCP Microscaling
Formats 1.0.

Tolerance: none, the result is exact. Every value is representable in fp64, fp32 and BF16 (a 2-bit significand, at
worst subnormal) except that fp32 and BF16 overflow to infinity under scale 254 where the code's magnitude is 2 or
more, and under scale 253 where it is 4 or more.
The values come from one table of 65,536 pairs, computed in fp64 and indexed by (scale, byte), so no arithmetic on
subnormals happens at run time that flush-to-zero hardware could spoil.

Edge cases: scale 255 makes every value of its group NaN, the zeros too; scale 0 keeps every code apart (the smallest
non-zero magnitude is 2^-128). `unpack_codes` and `pack_codes` invert each other for all bytes; `pack` inverts `unpack`
wherever the values survived (scale bytes 0..252 from fp32 and BF16, 0..254 from fp64; never 255).
"""

from functools import lru_cache

import torch
from torch import Tensor

from k3_core.errors import CheckpointError

GROUP_SIZE = 32
BIAS = 127
NAN_SCALE = 255
#: Magnitudes of the codes 0..7; codes 8..15 are their negatives (8 is -0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Exponent of the largest magnitude (6 = 1.5 * 2^2).
_E2M1_EMAX = 2


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed weights.

    Args:
        packed: uint8 [..., K/2].
        scale: uint8 [..., K/32], the leading dimensions of `packed`.
        dtype: float64, float32, bfloat16 (exact as the module states) or float16 (rounded, overflows early).

    Returns:
        [..., K] of `dtype` on the device of `packed`, contiguous.

    Raises:
        CheckpointError: operands that are not uint8, or shapes that do not belong together.
    """
    _check(packed, scale)
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"MXFP4 unpacks to a floating dtype, not {dtype}")
    groups = packed.unflatten(-1, (scale.shape[-1], GROUP_SIZE // 2)).to(torch.int32)
    index = groups + (scale.to(torch.int32) << 8).unsqueeze(-1)
    table = _pairs(dtype, packed.device)
    return torch.nn.functional.embedding(index, table).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def unpack_codes(packed: Tensor) -> Tensor:
    """The 4-bit codes: uint8 [..., K/2] -> uint8 [..., K] with values 0..15."""
    _check_uint8("packed", packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def pack_codes(codes: Tensor) -> Tensor:
    """Inverse of `unpack_codes`: uint8 [..., K] with values 0..15 -> uint8 [..., K/2]. K must be even."""
    _check_uint8("codes", codes)
    if codes.shape[-1] % 2:
        raise CheckpointError(f"MXFP4 packs two codes a byte: width {codes.shape[-1]} is odd")
    if codes.numel() and int(codes.max()) > 15:
        raise CheckpointError(f"MXFP4 codes are 0..15, found {int(codes.max())}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def pack(values: Tensor, scale: Tensor) -> Tensor:
    """Pack values that are exactly representable under `scale`; the inverse of `unpack`.

    Args:
        values: float [..., K].
        scale: uint8 [..., K/32].

    Returns:
        uint8 [..., K/2].

    Raises:
        CheckpointError: a value that no code represents (NaN and infinity included); use `quantise` to round.
    """
    _check_uint8("scale", scale)
    if scale.shape[-1] * GROUP_SIZE != values.shape[-1] or scale.shape[:-1] != values.shape[:-1]:
        raise CheckpointError(f"MXFP4 scale {list(scale.shape)} does not belong to values {list(values.shape)}")
    unit = _normalised(values, scale)
    codes = _nearest_codes(unit)
    magnitudes = torch.tensor(E2M1, dtype=torch.float64, device=values.device)
    exact = magnitudes[(codes & 7).long()] == unit.abs()
    if not bool(exact.all()):
        raise CheckpointError(
            f"{int((~exact).sum())} of {exact.numel()} values are not representable in MXFP4 under the given scales"
        )
    return pack_codes(codes)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round float [..., K], K a multiple of 32, to MXFP4: (packed uint8 [..., K/2], scale uint8 [..., K/32]).

    The scale is 2^(floor(log2(max |w|)) - 2), so that the largest magnitude of a group falls into [4, 8) and
    saturates at 6; codes round to nearest, ties to the even code. A group of zeros gets scale byte 0. Source: OCP
    Microscaling Formats 1.0, section 6.3. Raises CheckpointError for widths off the group size and non-finite weights.
    """
    if weight.shape[-1] % GROUP_SIZE:
        raise CheckpointError(f"MXFP4 width {weight.shape[-1]} is not a multiple of {GROUP_SIZE}")
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError("MXFP4 cannot quantise NaN or infinity")
    groups = weight.double().unflatten(-1, (weight.shape[-1] // GROUP_SIZE, GROUP_SIZE))
    top = groups.abs().amax(-1)
    exponent = torch.frexp(top).exponent - 1 - _E2M1_EMAX  # frexp: top = m * 2^e with m in [0.5, 1)
    scale = torch.where(top > 0, (exponent + BIAS).clamp(0, NAN_SCALE - 1), 0).to(torch.uint8)
    return pack_codes(_nearest_codes(_normalised(weight, scale))), scale


def _normalised(values: Tensor, scale: Tensor) -> Tensor:
    """values / 2^(scale-127) in fp64 (exact), NaN where the scale byte is 255."""
    factor = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), BIAS - scale.to(torch.int32))
    factor = torch.where(scale == NAN_SCALE, torch.nan, factor)
    return values.double() * factor.repeat_interleave(GROUP_SIZE, dim=-1)


def _nearest_codes(unit: Tensor) -> Tensor:
    """Nearest codes of scaled fp64 values, ties to the even code, saturating at +-6; the sign of zero is kept."""
    limits = []
    for code in range(7):
        middle = (E2M1[code] + E2M1[code + 1]) / 2
        tie_goes_up = code % 2 == 1
        limits.append(
            torch.nextafter(torch.tensor(middle, dtype=torch.float64), torch.tensor(0.0).double()).item()
            if tie_goes_up
            else middle
        )
    magnitude = torch.bucketize(unit.abs(), torch.tensor(limits, dtype=torch.float64, device=unit.device))
    return (magnitude + 8 * torch.signbit(unit)).to(torch.uint8)


@lru_cache(maxsize=16)
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table [65536, 2] of (low, high) values of byte b under scale s at row 256 s + b, with fp32's overflow."""
    byte = torch.arange(256)
    codes = torch.stack((byte & 15, byte >> 4), dim=-1)
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[codes & 7]
    signed = torch.where(codes >= 8, -magnitude, magnitude)
    factor = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - BIAS)
    factor[NAN_SCALE] = torch.nan
    return (factor[:, None, None] * signed).to(dtype).reshape(-1, 2).to(device)


def _check(packed: Tensor, scale: Tensor) -> None:
    _check_uint8("packed", packed)
    _check_uint8("scale", scale)
    if packed.ndim != scale.ndim or packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] != scale.shape[-1] * 16:
        raise CheckpointError(
            f"MXFP4 operands do not belong together: packed {list(packed.shape)} needs scale "
            f"{[*packed.shape[:-1], packed.shape[-1] / 16]}, got {list(scale.shape)}"
        )


def _check_uint8(what: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise CheckpointError(f"MXFP4 {what} must be uint8, got {tensor.dtype}; other dtypes would lose bits silently")
