"""Attention residuals (AttnRes): a softmax over earlier block sums replaces the ordinary residual stream.

Per token a bank of block sums b_0..b_{n-1} and a running prefix p, each [H]. With sources s = (b_0..b_{n-1}, p):

    r_j     = rsqrt(mean(s_j^2) + eps)                              eps = rms_norm_eps
    logit_j = r_j * sum_d s_j[d] * (w_norm[d] * w_proj[d])           the two weights multiplied first, in fp32
    mix     = sum_j softmax(logit)_j * s_j                           sources not normalised

fp32 throughout, one rounding; with an empty bank the mix is p itself, bit for bit. Normalising a source, rounding it
to BF16 and then projecting is not equivalent.

Schedule for layer i of L, block size B (12 in the release), P the prefix, all sums rounded to the model dtype:

    1. h = mix(bank, P) with the attention weights          attn_blocks(i) = ceil(i / B) bank blocks
    2. if i mod B == 0: append P to the bank, P := nothing   write_index(i) = i / B
    3. P := [P +] attention(rms_norm(h))
    4. h = mix(bank, P) with the MLP weights                 mlp_blocks(i) = i // B + 1
    5. P := P + mlp(rms_norm(h))
    after L layers: y = mix(bank, P) with the output weights, output_blocks = ceil(L / B)

There is no other residual add. Bank block 0 is the token embedding.

The fused step `attn_res` is the lazy form a kernel implements: the last sublayer output is added to P inside the next
mix, P is written to the bank there, and the RMSNorm that follows may be applied to the mix before it is rounded.

Tolerances against fp64. mix in BF16: 1 ulp of the largest output of its row (half an ulp is the final rounding; fp32
accumulation over H = 7168 adds at most a few fp32 ulp to a logit, hence less than 1e-4 relative in the output). With
the following norm in BF16: 3 * 2^-8 of the value (three roundings: mix, normalised, product; 2^-8 for a fused kernel
that rounds once) plus 2e-5 of the row's largest. fp32: 2e-5 of the row's largest source. P is exact: it equals the
rounded sum bit for bit.

Source: released modelling code; the lazy order also in vLLM's implementation; report eq. 8-10.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3_core.contracts._common import compute_dtype
from k3_core.contracts.norm import rms_norm
from k3_core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Which bank blocks each sublayer sees and where blocks are written; layers are 0-based.

    num_layers: L; block_size: B = attn_res_block_size.
    """

    num_layers: int
    block_size: int

    def __post_init__(self) -> None:
        """Refuse sizes that cannot describe a stack."""
        for name in ("num_layers", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"AttnRes schedule: {name} must be a positive integer, got {value!r}")

    def _check(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is outside 0..{self.num_layers - 1}")
        return layer

    def attn_blocks(self, layer: int) -> int:
        """Bank blocks that the mix before attention reads."""
        return -(-self._check(layer) // self.block_size)

    def mlp_blocks(self, layer: int) -> int:
        """Bank blocks that the mix before the MLP reads; includes a block written by this layer."""
        return self._check(layer) // self.block_size + 1

    def write_index(self, layer: int) -> int | None:
        """Bank slot into which this layer writes the incoming prefix (after its first mix), or None."""
        return layer // self.block_size if self._check(layer) % self.block_size == 0 else None

    @property
    def output_blocks(self) -> int:
        """Bank blocks that the mix after the last layer reads: also the size of a whole model's bank."""
        return -(-self.num_layers // self.block_size)

    def stage(self, start: int, end: int) -> "Stage":
        """The bank of a pipeline stage running layers start..end-1."""
        if not 0 <= start < end <= self.num_layers:
            raise ConfigError(f"pipeline stage [{start}, {end}) does not lie in 0..{self.num_layers}")
        return Stage(start, end, received_blocks=-(-start // self.block_size), num_slots=-(-end // self.block_size))


@dataclass(frozen=True)
class Stage:
    """Bank sizes of one pipeline stage: blocks that arrive with the hand-off and slots to allocate.

    The stage receives (prefix [T, H], bank [T, received_blocks, H]), the prefix with every pending delta added, and
    sends (prefix, bank [T, num_slots, H]).
    """

    start: int
    end: int
    received_blocks: int
    num_slots: int

    def payload_shapes(self, num_tokens: int, hidden_size: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Shapes of the (prefix, bank) that this stage receives."""
        return (num_tokens, hidden_size), (num_tokens, self.received_blocks, hidden_size)


def mix_probabilities(bank: Tensor, prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Softmax weights of the sources, bank first and prefix last: [T, n+1] in fp32 (fp64 for fp64 sources)."""
    dtype = compute_dtype(bank, prefix)
    sources = _sources(bank, prefix, dtype)
    folded = norm_weight.to(dtype).reshape(-1) * proj_weight.to(dtype).reshape(-1)
    scale = torch.rsqrt(sources.square().mean(-1) + eps)
    return torch.softmax(scale * (sources @ folded), dim=-1)


def mix(bank: Tensor, prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Mix bank [T, n, H] and prefix [T, H] -> [T, H] in prefix's dtype, contiguous.

    norm_weight: [H]; proj_weight: [H] or [1, H]. n = 0 returns a copy of the prefix. Raises ValueError on shapes that
    do not fit.
    """
    return _mix_wide(bank, prefix, norm_weight, proj_weight, eps).to(prefix.dtype)


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    bank: Tensor,
    num_blocks: int,
    write_slot: int | None,
    norm_weight: Tensor,
    proj_weight: Tensor,
    eps: float,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
    *,
    rounding: Literal["reference", "single"] = "reference",
) -> Tensor:
    """One lazy AttnRes step; changes `prefix` and `bank` in place and returns the (normed) mix [T, H].

    prefix: [T, H], becomes round(prefix + delta); delta: [T, H] or None (nothing pending).
    bank: [T, K, H] with K >= num_blocks; only its first num_blocks slots are read, so the rest may be uninitialised.
    write_slot: bank slot that receives the new prefix, or None. Other slots stay bit-unchanged.
    out_norm_weight [H] with out_norm_eps: apply the RMSNorm that follows. rounding "reference" rounds the mix first
    (released code), "single" normalises the fp32 mix and rounds once (fused kernels).
    """
    if not 0 <= num_blocks <= bank.shape[1]:
        raise ValueError(f"num_blocks {num_blocks} does not fit a bank of {bank.shape[1]} slots")
    if delta is not None:
        prefix.copy_((prefix.to(compute_dtype(prefix)) + delta.to(compute_dtype(prefix))).to(prefix.dtype))
    mixed = _mix_wide(bank[:, :num_blocks], prefix, norm_weight, proj_weight, eps)
    if write_slot is not None:
        bank[:, write_slot].copy_(prefix)
    if out_norm_weight is None:
        return mixed.to(prefix.dtype)
    if out_norm_eps is None:
        raise ValueError("out_norm_weight needs out_norm_eps")
    if rounding == "reference":
        return rms_norm(mixed.to(prefix.dtype), out_norm_weight, out_norm_eps)
    return rms_norm(mixed, out_norm_weight, out_norm_eps, rounding="single").to(prefix.dtype)


def _sources(bank: Tensor, prefix: Tensor, dtype: torch.dtype) -> Tensor:
    if bank.dim() != 3 or prefix.dim() != 2 or bank.shape[0] != prefix.shape[0] or bank.shape[2] != prefix.shape[1]:
        raise ValueError(f"bank must be [T, n, H] and prefix [T, H], got {tuple(bank.shape)} and {tuple(prefix.shape)}")
    return torch.cat([bank.to(dtype), prefix.to(dtype).unsqueeze(1)], dim=1)


def _mix_wide(bank: Tensor, prefix: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The mix before rounding: fp32, or fp64 for fp64 sources."""
    dtype = compute_dtype(bank, prefix)
    if bank.shape[1] == 0:
        return prefix.to(dtype, copy=True, memory_format=torch.contiguous_format)
    probabilities = mix_probabilities(bank, prefix, norm_weight, proj_weight, eps)
    return torch.einsum("tj,tjh->th", probabilities, _sources(bank, prefix, dtype))
