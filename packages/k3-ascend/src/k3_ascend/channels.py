"""The one table of operators: on which device generation each goes through which channel, and what happens otherwise.

The channels:

* ``npu``        torch_npu's own operators (``torch.ops.npu.*``)
* ``_C_ascend``  vllm-ascend's compiled operators (``torch.ops._C_ascend.*``), for the generation it was built for
* ``triton``     this wheel's kernels, compiled by triton-ascend
* ``vllm-ascend`` a layer or a communication path of vllm-ascend that launches operators itself
* ``torch``      the contracts in plain PyTorch: right on any device and slow; chosen with a logged reason only

A row is what is tried, in order; the last entry is what happens where nothing before it can run. Nothing in this table
was run on an NPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3_ascend.generation import Generation

NPU, C_ASCEND, TRITON, VLLM_ASCEND, TORCH = "npu", "_C_ascend", "triton", "vllm-ascend", "torch"


@dataclass(frozen=True)
class Row:
    """One operator: channels to try by generation, the vendor operators behind them, and why so."""

    operator: str
    channels: Mapping[Generation, tuple[str, ...]]
    calls: tuple[str, ...]
    why: str


def _everywhere(*channels: str) -> Mapping[Generation, tuple[str, ...]]:
    return dict.fromkeys(Generation, channels)


ROWS = (
    Row(
        "attn_res",
        _everywhere(TRITON, TORCH),
        (),
        "no vendor operator mixes a bank of blocks; one pass over the rows with bank write and norm",
    ),
    Row(
        "short_conv",
        _everywhere(TRITON, C_ASCEND, TORCH),
        ("_C_ascend::npu_causal_conv1d_custom",),
        "the vendor operator computes in the activations' dtype: K3's fp32 taps would be rounded, so it is for "
        "Kimi-Linear, whose taps are stored in bfloat16. torch_npu's npu_fused_causal_conv1d has three taps and is for "
        "950 only",
    ),
    Row(
        "kda_prefill",
        _everywhere(TRITON, TORCH),
        (),
        "vllm-ascend 0.23 has no operator for the chunked form with a gate per channel (chunk_kda_fwd came later; it "
        "is looked for and only reported)",
    ),
    Row(
        "gated_norm",
        _everywhere(TRITON, NPU, TORCH),
        ("npu::npu_rms_norm",),
        "in fp32, so that norm, weight and gate are rounded once",
    ),
    Row(
        "kda_decode",
        _everywhere(TRITON, C_ASCEND, TORCH),
        ("_C_ascend::npu_recurrent_gated_delta_rule",),
        "the vendor operator takes the gate per channel and, by its source, an fp32 state; torch_npu's operator of "
        "that name documents gk as unsupported and is not used",
    ),
    Row(
        "kda_verify",
        _everywhere(TRITON, TORCH),
        (),
        "the vendor operator documents one state index a token, which cannot name the start state of a row with fewer "
        "drafts than were accepted before",
    ),
    Row(
        "situ",
        _everywhere(TRITON, TORCH),
        (),
        "no vendor operator in 0.23 computes SiTU; npu_swiglu is another function",
    ),
    Row(
        "silu",
        _everywhere(VLLM_ASCEND),
        ("npu::npu_swiglu",),
        "Kimi-Linear's activation, by vllm-ascend's layer; never called for Kimi K3, which a test counts",
    ),
    Row(
        "route",
        _everywhere(NPU, TORCH),
        ("npu::npu_moe_gating_top_k",),
        "sigmoid scores and a biased choice are the operator's own modes; logits and bias stay fp32",
    ),
    Row(
        "experts",
        _everywhere(VLLM_ASCEND),
        (
            "_C_ascend::npu_moe_init_routing_custom",
            "npu::npu_moe_init_routing_v2",
            "npu::npu_grouped_matmul",
            "npu::npu_dynamic_quant",
            "npu::npu_dynamic_mx_quant",
            "npu::npu_moe_token_unpermute",
        ),
        "vllm-ascend's communication paths around two grouped products, with the operator situ between them; its own "
        "expert layer fuses SwiGLU into the quantised products",
    ),
    Row(
        "mla",
        _everywhere(VLLM_ASCEND),
        (
            "npu::npu_kv_rmsnorm_rope_cache",
            "npu::npu_interleave_rope",
            "npu::npu_fused_infer_attention_score",
            "npu::npu_fused_infer_attention_score_v2",
            "npu::npu_transpose_batchmatmul",
            "npu::npu_attention_update",
        ),
        "its MLA backend, given a documented head count (8 to 128; zero heads pad); rotation is by cos 1 and sin 0",
    ),
    Row(
        "norm",
        _everywhere(VLLM_ASCEND),
        ("npu::npu_rms_norm", "_C_ascend::npu_add_rms_norm_bias"),
        "its RMS norm layer",
    ),
    Row(
        "weights",
        _everywhere(NPU),
        ("npu::npu_format_cast", "npu::_npu_format_cast"),
        "data layouts of matrices, as vllm-ascend's setting weight_nz_mode says",
    ),
)  # fmt: skip

TABLE: dict[str, Row] = {row.operator: row for row in ROWS}


def channels(operator: str, generation: Generation) -> tuple[str, ...]:
    """What is tried for ``operator``, best first. KeyError for an operator that is not in the table."""
    return TABLE[operator].channels[generation]


def vendor_calls() -> frozenset[str]:
    """Every vendor operator that the model may call, as ``namespace::name``."""
    return frozenset(call for row in ROWS for call in row.calls)


def markdown() -> str:
    """The table for the documentation."""
    lines = ["| operator | A2 | A3 | 950 | vendor operators | why |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        cells = [", then ".join(row.channels[g]) for g in Generation]
        calls = ", ".join(f"`{call}`" for call in row.calls) or "none"
        lines.append(f"| {row.operator} | {' | '.join(cells)} | {calls} | {row.why} |")
    return "\n".join(lines) + "\n"
