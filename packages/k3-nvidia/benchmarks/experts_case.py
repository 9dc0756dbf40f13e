"""Shapes, data and the float64 reference that the expert benchmarks and the tuning sweep share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness import relative_error, require

from k3_nvidia.kernels import moe_layout
from k3_nvidia.kernels.moe_layout import SwizzledExperts, empty_swizzled

HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
BETA, LINEAR_BETA = 4.0, 25.0
ACT = {"hidden_act": "situ", "situ_beta": BETA, "situ_linear_beta": LINEAR_BETA}
PRODUCT_TOLERANCE = 2**-9 + 2**-11  # one product in bfloat16: half an ulp at most, and its sum and activation in fp32
TOLERANCE = 8e-3  # operator table, experts in bfloat16: four roundings of 1.6e-3, doubled


@dataclass(frozen=True)
class Shape:
    """One rank's experts: how many are here and how wide they are."""

    name: str
    width: int
    local: int

    @property
    def bytes_per_expert(self) -> int:
        """MXFP4 bytes of one expert here: three matrices of codes and scales, unpadded."""
        return 3 * self.width * LATENT // 2 * 17 // 16


TP16, TP8, EP16 = Shape("tp16", 192, 896), Shape("tp8", 384, 896), Shape("ep16", 3072, 56)
SHAPES = {s.name: s for s in (TP16, TP8, EP16)}


def random_experts(shape: Shape, seed: int) -> SwizzledExperts:
    """Random codes with scales that keep activations around one; drawn in kernel layout (any words are legal codes)."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    out = empty_swizzled(shape.local, shape.width, LATENT, "cuda")
    for words in (out.w13, out.w2):
        words.random_(-(1 << 15), 1 << 15, generator=gen)
    for scales, base in ((out.s13, 120), (out.s2, 121)):
        scales.view(torch.uint8).random_(base - 2, base + 2, generator=gen)
    return out


def expert_map(shape: Shape) -> torch.Tensor | None:
    """Global to local expert of rank 0 under expert parallelism, else None."""
    if shape.local == EXPERTS:
        return None
    ids = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    return torch.where(ids < shape.local, ids, -1)


def random_inputs(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Hidden states, latents and a router whose choice is close to uniform."""
    gen = torch.Generator(device="cuda").manual_seed(1000 + seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen, device="cuda")

    return {
        "hidden": normal(tokens, HIDDEN).bfloat16(),
        "latent": (normal(tokens, LATENT) * 0.5).bfloat16(),
        "router": (normal(EXPERTS, HIDDEN) * HIDDEN**-0.5).bfloat16(),
        "bias": normal(EXPERTS) * 0.02,
    }


def reference_route(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights, ids, biased scores) in float64 (logits in fp32 would do; this is the judge)."""
    logits = inputs["hidden"].double() @ inputs["router"].double().t()
    scores = torch.sigmoid(logits)
    biased = scores + inputs["bias"].double()
    ids = biased.topk(TOP_K, dim=-1).indices
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True), ids, biased


_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 weights from the released layout, from the definition."""
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float64, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return table[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=-1)


def reference_experts(
    latent: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: SwizzledExperts, rows: list[int]
) -> torch.Tensor:
    """float64 weighted sum for some token rows; ids are local, anything outside is elsewhere."""
    out = torch.zeros(len(rows), LATENT, dtype=torch.float64, device="cuda")
    picked = ids[rows]
    for e in picked.unique().tolist():
        if not 0 <= e < experts.num_experts:
            continue
        w = {k: dequantise(*v) for k, v in moe_layout.unpack_expert(experts, e).items()}
        at, slot = (picked == e).nonzero(as_tuple=True)
        x = latent[rows][at].double()
        gate, up = x @ w["gate"].t(), x @ w["up"].t()
        act = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
        out[at] += weights[rows][at, slot].double()[:, None] * (act @ w["down"].t())
    return out


def some_experts(local: torch.Tensor, most: int = 5) -> list[int]:
    """Chosen experts with few, middling and many pairs (local: expert of each pair, < 0 elsewhere): counts decide how
    wide a product is."""
    counts = torch.bincount(local[local >= 0])
    touched = [e for e in counts.argsort().tolist() if counts[e] > 0]
    if len(touched) <= most:
        return touched
    return [touched[round(i * (len(touched) - 1) / (most - 1))] for i in range(most)]


def reference_products(
    product: str, rows: torch.Tensor, experts: SwizzledExperts, local: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 result of one product for all pairs of ``some_experts``: where it lies in the kernel's output, and it.

    rows: "w13" the latents [T, L] (output in sorted order), "w2" the activations in sorted order (output in pair
    order). local: expert of each pair (token * top_k + slot), < 0 elsewhere.
    """
    order = torch.where(local >= 0, local, experts.num_experts).argsort(stable=True)
    wide = experts.width if product == "w13" else experts.latent
    places, results = [order[:0]], [rows.new_empty(0, wide, dtype=torch.float64)]  # a rank may hold none of the experts
    for e in some_experts(local):
        at = (local[order] == e).nonzero().flatten()
        w = {k: dequantise(*v) for k, v in moe_layout.unpack_expert(experts, e).items()}
        if product == "w13":
            x = rows[order[at] // TOP_K].double()
            gate, up = x @ w["gate"].t(), x @ w["up"].t()
            y = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
            places.append(at)
            results.append(y)
        else:
            places.append(order[at])
            results.append(rows[at, : experts.width].double() @ w["down"].t())
    return torch.cat(places), torch.cat(results)


def check_experts(out: torch.Tensor, ref: torch.Tensor, rows: list[int], what: str) -> float:
    """Raise CheckFailedError beyond the tolerance; returns the relative error."""
    err = relative_error(out[rows], ref)
    require(err <= TOLERANCE, f"{what}: relative error {err:.2e} against float64, bound {TOLERANCE:.0e}")
    require(bool(torch.isfinite(out).all()), f"{what}: output not finite")
    return err


def sample_rows(tokens: int, most: int = 16) -> list[int]:
    """First, last and some rows between."""
    if tokens <= most:
        return list(range(tokens))
    step = (tokens - 1) / (most - 1)
    return sorted({round(i * step) for i in range(most)})
