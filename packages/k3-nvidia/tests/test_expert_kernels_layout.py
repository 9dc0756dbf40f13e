"""Kernel layout of MXFP4 experts: exact for every byte, invertible, padded with finite scales."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # the same process may run the kernel tests: decided before the first import
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")


from k3_core.operators import ExpertWeights
from k3_nvidia.kernels import experts, moe_layout

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def random_weights(num: int, width: int, latent: int, seed: int = 0) -> ExpertWeights:
    gen = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=gen, dtype=torch.uint8)

    return ExpertWeights(
        draw(0, 256, num, 2 * width, latent // 2), draw(110, 126, num, 2 * width, latent // 32),
        draw(0, 256, num, latent, width // 2), draw(110, 126, num, latent, width // 32),
    )  # fmt: skip


def decode_by_hand(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 weights [16 MT, 64 KB] (row halves in kernel order) by the rule that the docstring of ``moe_layout``
    states."""
    mt4, kb = words.shape[:2]
    out = torch.zeros(mt4 * 64, kb * 64, dtype=torch.float64)
    half = words.to(torch.int32) & 0xFFFF
    scale_bytes = scales.contiguous().view(torch.uint8).reshape(mt4, kb, 4, 8, 2, 2)  # g, r, c
    for m4 in range(mt4):
        for k in range(kb):
            for m in range(4):
                for index in range(256):
                    lane, i = divmod(index, 8)
                    g, t = divmod(lane, 4)
                    u, r, h = i >> 2, (i >> 1) & 1, i & 1
                    bits = int(half[m4, k, m, index])
                    for p in range(4):
                        moved = [bits, bits << 3, bits << 6, 0][p]
                        if p == 3:
                            moved = ((bits << 1) & 0x8000) | ((bits >> 3) & 0x180) | ((bits >> 7) & 0x40)
                        moved &= 0x81C0
                        code = (moved >> 15 << 3) | ((moved >> 6) & 7)
                        s = int(scale_bytes[m4, k, m, g, r, p >> 1])
                        row = (4 * m4 + m) * 16 + 8 * r + g
                        out[row, k * 64 + 16 * p + 8 * u + 2 * t + h] = VALUES[code] * 2.0 ** (s - 127)
    return out


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return VALUES[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)


def test_stated_rule_gives_the_weights() -> None:
    weights = random_weights(1, 64, 128)
    packed = experts.prepare(weights)
    w13 = decode_by_hand(packed.w13[0], packed.s13[0]).reshape(-1, 2, 8, 128)
    want = dequantise(weights.w13[0], weights.w13_scale[0])
    assert torch.equal(w13[:, 0].reshape(64, 128), want[:64])
    assert torch.equal(w13[:, 1].reshape(64, 128), want[64:])
    assert torch.equal(decode_by_hand(packed.w2[0], packed.s2[0]), dequantise(weights.w2[0], weights.w2_scale[0]))


@pytest.mark.parametrize(("width", "latent"), [(64, 128), (96, 192), (192, 128), (384, 64), (32, 64)])
def test_inverse(width: int, latent: int) -> None:
    weights = random_weights(3, width, latent)
    packed = experts.prepare(weights)
    assert packed.width == width
    assert packed.latent == latent
    for e in range(3):
        back = moe_layout.unpack_expert(packed, e)
        for name, want in (
            ("gate", (weights.w13[e, :width], weights.w13_scale[e, :width])),
            ("up", (weights.w13[e, width:], weights.w13_scale[e, width:])),
            ("down", (weights.w2[e], weights.w2_scale[e])),
        ):
            assert torch.equal(back[name][0], want[0]), name
            assert torch.equal(back[name][1], want[1]), name


def test_every_byte_and_every_scale_survive() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    low = byte.reshape(1, 8, 32).repeat(4, 1, 1).reshape(32, 32)
    high = (255 - byte).reshape(1, 8, 32).repeat(4, 1, 1).reshape(32, 32)
    scale = torch.arange(64, dtype=torch.uint8).reshape(32, 2)
    for offset in range(0, 256, 64):
        words, scales = moe_layout.swizzle_rows(low, high, scale + offset, 255 - scale - offset)
        back = moe_layout.unswizzle_rows(words, scales)
        assert all(
            torch.equal(a, b) for a, b in zip(back, (low, high, scale + offset, 255 - scale - offset), strict=True)
        )


def test_bytes_are_not_inflated() -> None:
    weights = random_weights(2, 192, 128)
    packed = experts.prepare(weights)
    assert packed.nbytes == sum(t.numel() for t in weights if t is not None)


def test_padding_has_finite_scales_and_zero_codes() -> None:
    weights = random_weights(1, 96, 64)
    packed = experts.prepare(weights)
    assert packed.padded_width == 128
    whole = moe_layout.SwizzledExperts(packed.w13, packed.s13, packed.w2, packed.s2, 128, 64)
    back = moe_layout.unpack_expert(whole, 0)
    assert not back["gate"][0][96:].any()
    assert not back["up"][0][96:].any()
    assert not back["down"][0][:, 48:].any()
    assert (back["gate"][1][96:] != 255).all()
    assert (back["down"][1][:, 3:] != 255).all()


def test_wide_scales_are_noticed() -> None:
    weights = random_weights(1, 64, 64)
    assert not experts.prepare(weights).wide_scales
    weights.w2_scale[0, 5, 1] = 129  # type: ignore[index]
    assert experts.prepare(weights).wide_scales


def test_one_expert_at_a_time_equals_all_at_once() -> None:
    weights = random_weights(3, 64, 64)
    whole = experts.prepare(weights)
    dst = moe_layout.empty_swizzled(3, 64, 64, "cpu")
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    for e in range(3):
        moe_layout.pack_expert_(
            dst, e, (weights.w13[e, :64], weights.w13_scale[e, :64]), (weights.w13[e, 64:], weights.w13_scale[e, 64:]),
            (weights.w2[e], weights.w2_scale[e]),
        )  # fmt: skip
    for name in ("w13", "s13", "w2", "s2"):
        assert torch.equal(getattr(dst, name), getattr(whole, name))


@pytest.mark.parametrize(
    ("width", "latent", "part"), [(40, 64, "scale group"), (64, 80, "multiple of 64"), (0, 64, "width 0")]
)
def test_refusals(width: int, latent: int, part: str) -> None:
    ok, why = experts.supports(width, latent)
    assert not ok
    assert part in why
    with pytest.raises(ValueError, match="experts"):
        moe_layout.empty_swizzled(1, width, latent, "cpu")


def test_wrong_slice_is_refused() -> None:
    weights = random_weights(1, 64, 64)
    dst = moe_layout.empty_swizzled(1, 64, 64, "cpu")
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    gate = (weights.w13[0], weights.w13_scale[0])
    with pytest.raises(ValueError, match="gate has shapes"):
        moe_layout.pack_expert_(dst, 0, gate, gate, (weights.w2[0], weights.w2_scale[0]))
