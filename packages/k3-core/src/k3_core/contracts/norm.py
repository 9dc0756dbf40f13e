"""RMS norms of Kimi K3 and where they round.

    rms_norm(x, w, eps)        = x * rsqrt(mean_d(x^2) + eps) * w
    gated_rms_norm(o, z, w)    = o * rsqrt(mean_d(o^2) + eps) * w * sigmoid(z)

eps is added to the mean (not to the sum as in KDA's L2 norm of q and k). Three values of eps occur: `rms_norm_eps` of
the config (1e-5) nearly everywhere, 1e-6 for the two low-rank norms of MLA (the released class default; the config's
eps is not passed to them) and 2^-23 in the vision tower.

Rounding with BF16 inputs. Text norms of the released code square and scale in fp32, round the normalised value to
BF16 and multiply by the BF16 weight, which rounds again (`rounding="reference"`). torch.nn.RMSNorm, used by the
vision tower, and fused kernels multiply in fp32 and round once (`rounding="single"`). A BF16 rounding is off by at
most 2^-8 of the value, so an implementation is held to 2 * 2^-8 relative of the fp64 value with reference rounding and
2^-8 with a single one, and to 1e-6 relative in fp32 (a mean over 7168 squares in pairwise order). KDA's gated norm
rounds once, after the gate.

Source: released modelling code (KimiRMSNorm, FusedRMSNormGated as called there); torch.nn.RMSNorm for the tower.
"""

from typing import Literal

import torch
from torch import Tensor

from k3_core.contracts._common import compute_dtype

LOW_RANK_EPS = 1e-6
VISION_EPS = 2.0**-23


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, rounding: Literal["reference", "single"] = "reference"
) -> Tensor:
    """RMSNorm over the last axis: x [..., D], weight [D] -> [..., D] in x's dtype.

    rounding: "reference" rounds to x's dtype before multiplying by the weight, "single" only at the end.
    """
    dtype = compute_dtype(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounding == "reference":
        # The product of two BF16 values formed in fp32 and rounded once is the BF16 product.
        normed = normed.to(x.dtype).to(dtype)
    elif rounding != "single":
        raise ValueError(f'rounding must be "reference" or "single", got {rounding!r}')
    return (normed * weight.to(dtype)).to(x.dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output norm: o, gate [..., D], weight [D] fp32 -> [..., D] in o's dtype, one rounding.

    The gate is a sigmoid (not SiLU) and multiplies after the norm and its weight. `gate` is the raw projection.
    """
    dtype = compute_dtype(o, gate)
    wide = o.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    return (normed * torch.sigmoid(gate.to(dtype))).to(o.dtype)
