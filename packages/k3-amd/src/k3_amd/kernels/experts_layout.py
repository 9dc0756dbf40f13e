"""MXFP4 expert weights as the CDNA kernels read them: rows stay rows, padded, gate and up apart.

Source (compressed-tensors ``mxfp4-pack-quantized``): ``weight_packed[o, j]`` holds the e2m1 codes of input columns 2j
(low nibble) and 2j+1 (high nibble); ``weight_scale[o, g]`` is the e8m0 byte of columns 32g..32g+31.

Forms:

    unpacked  (gfx942) in each block of 64 columns byte j holds columns j (low nibble) and 32 + j (high): the nibbles of
              a tile are two operands of 32 columns with one scale byte each, and nothing is interleaved
    scaled    (gfx950) the source's order, which is what ``tl.dot_scaled`` takes
    mxfp8     as scaled; the kernels round activations to MXFP8. Lossy, never chosen by itself

Rows and columns are padded to what the tiles need with code 0 and scale byte 127: a padded product is 0, never 0 x NaN.
Width is one rank's expert width: whole experts (3072) under expert parallelism, a slice otherwise; either may be any
multiple of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3_amd.kernels import launch
from k3_core.errors import UnsupportedError
from k3_core.operators import ExpertWeights

#: Widths are padded to this; a scaled matrix instruction takes 128 columns of both operands.
WIDTH_UNIT = {"unpacked": 64, "scaled": 64, "mxfp8": 128}
LATENT_UNIT = 128
#: Scale bytes up to this take one product less (form unpacked).
MAX_FAST_SCALE = 128
FORMS = ("unpacked", "scaled", "mxfp8")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass
class PackedExperts:
    """The routed experts of one layer and rank.

    w13 uint8 [E, 2, I_pad, L/2] (gate, up), s13 uint8 [E, 2, I_pad, L/32]; w2 uint8 [E, L_pad, I_pad/2], s2 uint8
    [E, L_pad, I_pad/32]. width: unpadded I; latent: L. wide_scales: some scale byte exceeds 128.
    """

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    width: int
    latent: int
    form: str
    wide_scales: bool = False

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.w13.shape[0]

    @property
    def padded_width(self) -> int:
        """Width of the rows between the two products."""
        return self.w13.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales in device memory."""
        return sum(t.numel() for t in (self.w13, self.s13, self.w2, self.s2))


def supports_shape(width: int, latent: int) -> tuple[bool, str]:
    """Whether experts of that width and latent size have a layout, and why not."""
    if latent % 64 or latent <= 0:
        return False, f"latent size {latent} is not a multiple of 64"
    if width % 32 or width <= 0:
        return False, f"expert width {width} is not a multiple of 32 (one MXFP4 scale group)"
    return True, ""


def default_form(device: torch.device | str) -> str:
    """scaled on gfx950, unpacked elsewhere (and in the interpreter, which has no scaled product)."""
    arch = launch.architecture(torch.device(device))
    return "scaled" if arch == "gfx950" and not launch.interpreting() else "unpacked"


def empty_packed(
    num_experts: int, width: int, latent: int, device: torch.device | str, form: str | None = None
) -> PackedExperts:
    """Allocate the final storage; fill it expert by expert with ``pack_expert_``.

    form: None for the device's exact one. Raises ValueError for shapes without a layout or an unknown form,
    UnsupportedError for a form that the device's matrix cores do not have.
    """
    ok, why = supports_shape(width, latent)
    if not ok:
        raise ValueError(f"experts: {why}")
    form = form or default_form(device)
    if form not in FORMS:
        raise ValueError(f"experts: form must be one of {FORMS}, got {form!r}")
    arch = launch.architecture(torch.device(device))
    if launch.HIP and form != "unpacked" and arch != "gfx950":
        raise UnsupportedError(f"experts: form {form!r} needs the scaled matrix instructions of gfx950, this is {arch}")
    inner, rows2 = _round_up(width, WIDTH_UNIT[form]), _round_up(latent, LATENT_UNIT)

    def codes(*shape: int) -> Tensor:
        return torch.zeros(num_experts, *shape, dtype=torch.uint8, device=device)

    def scales(*shape: int) -> Tensor:
        return torch.full((num_experts, *shape), 127, dtype=torch.uint8, device=device)

    return PackedExperts(
        codes(2, inner, latent // 2), scales(2, inner, latent // 32), codes(rows2, inner // 2),
        scales(rows2, inner // 32), width, latent, form,
    )  # fmt: skip


def pair_halves(packed: Tensor) -> Tensor:
    """uint8 [..., K/2], neighbouring columns a byte -> byte j of each 64-column block holds columns j and 32 + j."""
    block = packed.unflatten(-1, (-1, 2, 16))  # half of the block, byte
    columns = torch.stack((block & 15, block >> 4), dim=-1).flatten(-2)  # [..., block, half, 32]
    return (columns[..., 0, :] | (columns[..., 1, :] << 4)).flatten(-2)


def neighbouring(paired: Tensor) -> Tensor:
    """Inverse of ``pair_halves``."""
    block = paired.unflatten(-1, (-1, 32))
    columns = torch.stack((block & 15, block >> 4), dim=-2).unflatten(-1, (16, 2))
    return (columns[..., 0] | (columns[..., 1] << 4)).flatten(-3)


def pack_expert_(
    dst: PackedExperts,
    index: int | slice,
    gate: tuple[Tensor, Tensor],
    up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
) -> None:
    """Write one expert (or a slice of experts) into its place: no second copy of the layer exists.

    Each of gate, up (uint8 [(n,) I, L/2], [(n,) I, L/32]) and down ([(n,) L, I/2], [(n,) L, I/32]) is (packed, scale)
    as in the checkpoint, already cut to this rank. Sets ``dst.wide_scales`` where a scale byte exceeds 128 (one host
    read a call until then). Raises ValueError for other shapes or dtypes.
    """
    width, latent = dst.width, dst.latent
    for name, (packed, scale), (rows, columns) in (
        ("gate", gate, (width, latent)), ("up", up, (width, latent)), ("down", down, (latent, width))
    ):  # fmt: skip
        if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
            raise ValueError(f"pack_expert_: {name} must be uint8 codes and uint8 scales")
        want = (rows, columns // 2), (rows, columns // 32)
        if tuple(packed.shape[-2:]) != want[0] or tuple(scale.shape[-2:]) != want[1]:
            raise ValueError(
                f"pack_expert_: {name} is {tuple(packed.shape)} and {tuple(scale.shape)}; this rank holds {want}"
            )
    if not dst.wide_scales:
        dst.wide_scales = bool((torch.stack([m[1].max() for m in (gate, up, down)]) > MAX_FAST_SCALE).any())
    for side, (packed, scale) in enumerate((gate, up)):
        _place(dst.w13[index][..., side, :width, :], packed, dst.form)
        dst.s13[index][..., side, :width, :] = scale.to(dst.s13.device, non_blocking=True)
    _place(dst.w2[index][..., :latent, :], down[0], dst.form)
    dst.s2[index][..., :latent, : width // 32] = down[1].to(dst.s2.device, non_blocking=True)


def _place(target: Tensor, packed: Tensor, form: str) -> None:
    """Copy rows of codes, re-paired where the form asks for it, columns padded with code 0."""
    source = packed.to(target.device, non_blocking=True)
    if form == "unpacked":
        source = pair_halves(torch.nn.functional.pad(source, (0, target.shape[-1] - source.shape[-1])))
    target[..., : source.shape[-1]] = source


def prepare(weights: ExpertWeights, form: str | None = None) -> PackedExperts:
    """``ExpertWeights`` (released layout, gate rows before up rows) -> kernel layout, on the device of the weights.

    Raises ValueError where the weights are not MXFP4.
    """
    if weights.w13_scale is None or weights.w2_scale is None:
        raise ValueError("experts: weights are not MXFP4 (no scales)")
    experts, rows, half = weights.w13.shape
    width = rows // 2
    out = empty_packed(experts, width, half * 2, weights.w13.device, form)
    for first in range(0, experts, 64):  # a few at a time: re-pairing needs scratch
        some = slice(first, min(first + 64, experts))
        w13, s13 = weights.w13[some], weights.w13_scale[some]
        pack_expert_(
            out, some, (w13[:, :width], s13[:, :width]), (w13[:, width:], s13[:, width:]),
            (weights.w2[some], weights.w2_scale[some]),
        )  # fmt: skip
    return out
