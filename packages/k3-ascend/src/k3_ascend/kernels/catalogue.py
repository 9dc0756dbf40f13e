"""Every launcher of this package that the operator table names, as data for a registry."""

from __future__ import annotations

from k3_ascend.kernels import NAME, attn_res, gated_norm, kda_prefill, kda_step, short_conv, situ
from k3_core.operators import Implementation

#: Above the contracts (0), below operators of torch_npu or vllm-ascend where a registry prefers those.
PRIORITY = 10

IMPLEMENTATIONS: dict[str, Implementation] = {
    i.operator: i
    for i in (
        Implementation(
            "attn_res", NAME, attn_res.attn_res, attn_res.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=attn_res.warmup_profiles,
        ),
        Implementation(
            "short_conv", NAME, short_conv.short_conv, short_conv.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=short_conv.warmup_profiles,
        ),
        Implementation(
            "kda_prefill", NAME, kda_prefill.kda_prefill, kda_prefill.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=kda_prefill.warmup_profiles,
        ),
        Implementation(
            "gated_norm", NAME, gated_norm.gated_norm, gated_norm.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=gated_norm.warmup_profiles,
        ),
        Implementation(
            "kda_decode", NAME, kda_step.kda_decode, kda_step.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=kda_step.warmup_profiles,
        ),
        Implementation(
            "kda_verify", NAME, kda_step.kda_verify, kda_step.supports, PRIORITY,
            batch_invariant=True, warmup_profiles=kda_step.warmup_profiles,
        ),
        Implementation(
            "situ", NAME, situ.situ, situ.supports, PRIORITY, batch_invariant=True,
            warmup_profiles=situ.warmup_profiles,
        ),
    )
}  # fmt: skip
