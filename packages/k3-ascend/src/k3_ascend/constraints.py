"""Constraints of vendor operators that their documentation states, as data with a check.

``quote`` is a passage of torch_npu 2.10.0.post4's own documentation (``torch_npu/_op_plugin_docs.py``); a test looks it
up there, so that a release which says something else is noticed. A constraint without a quote comes from where
``source`` says. ``check`` takes the arguments of a call by schema name and says what is wrong, or None.

Meta functions are no substitute: ``npu::npu_recurrent_gated_delta_rule`` has ``gk`` in its schema and passes fake
tests, and its documentation says that it is not supported.
"""

# Quotes are Chinese, with its punctuation.
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Arguments = Mapping[str, Any]
Check = Callable[[Arguments], str | None]

_HALF = (torch.float16, torch.bfloat16)
_FLOAT = (*_HALF, torch.float32)


@dataclass(frozen=True)
class Constraint:
    """One documented rule of one operator (``namespace::name``)."""

    operator: str
    rule: str
    check: Check
    quote: str = ""
    source: str = ""


def _expect(holds: bool, found: Any) -> str | None:
    return None if holds else f"found {found}"


def _gating_bias(a: Arguments) -> str | None:
    bias = a["bias"]
    return None if bias is None else _expect(bias.dtype == a["x"].dtype, (bias.dtype, a["x"].dtype))


def _gating_k(a: Arguments) -> str | None:
    experts, k = a["x"].shape[-1], a["k"]
    return _expect(1 <= k <= experts / a["group_count"] * a["k_group"], (k, experts))


def _matmul_scale(a: Arguments) -> str | None:
    """int8 rows with a scale a token: the result is bfloat16 where the scale is, or int4 weights with int64 scales."""
    if not a["per_token_scale"] or a["x"][0].dtype != torch.int8:
        return None
    scale, weight = a["scale"][0].dtype, a["weight"][0].dtype
    if weight == torch.int32:
        return _expect(scale == torch.int64, scale)
    return _expect(scale == torch.bfloat16 and a["per_token_scale"][0].dtype == torch.float32, scale)


def _inner(a: Arguments) -> str | None:
    sizes = [t.shape[-1] for t in (*a["x"], *a["weight"])]
    return _expect(max(sizes) < 65536, sizes)


def _prefill_tnd(a: Arguments) -> str | None:
    if a["input_layout"] != "TND":
        return None
    return _expect(
        a["num_heads"] in (8, 16, 32, 64, 128) and a["num_key_value_heads"] == a["num_heads"], a["num_heads"]
    )


def _decode_heads(a: Arguments) -> str | None:
    if a["query_rope"] is None:
        return None
    return _expect(a["num_query_heads"] in (1, 2, 4, 8, 16, 32, 64, 128), a["num_query_heads"])


def _decode_pages(a: Arguments) -> str | None:
    if a["query_rope"] is None:
        return None
    return _expect(a["block_table"] is not None and a["block_size"] in (16, 128), a["block_size"])


def _decode_layout(a: Arguments) -> str | None:
    known = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
    return None if a["query_rope"] is None else _expect(a["input_layout"] in known, a["input_layout"])


def _delta_rule_sizes(a: Arguments) -> str | None:
    sizes = (*a["key"].shape[1:], *a["value"].shape[1:])
    return _expect(max(sizes) <= 256, sizes)


def _delta_rule_rows(a: Arguments) -> str | None:
    found = [a[name].dtype for name in ("query", "key", "value", "beta")]
    return _expect(all(d == torch.bfloat16 for d in found), found)


def _never(a: Arguments) -> str | None:
    return "this operator must not be called"


#: The rule that Kimi-Linear, whose activation is SiLU, is exempt from.
NOT_SWIGLU = "never called: Kimi K3's activation is not SwiGLU"

CONSTRAINTS = (
    Constraint(
        "npu::npu_rms_norm",
        "float16, bfloat16 or float32; gamma has the dtype of the input",
        lambda a: _expect(
            a["input"].dtype in _FLOAT and a["gamma"].dtype == a["input"].dtype, (a["input"].dtype, a["gamma"].dtype)
        ),
        quote="数据类型需要和self保持一致",
    ),
    Constraint(
        "npu::npu_rms_norm",
        "2 to 8 dimensions",
        lambda a: _expect(2 <= a["input"].dim() <= 8, a["input"].shape),
        quote="输入shape支持2-8维",
    ),
    Constraint(
        "npu::npu_moe_gating_top_k",
        "at most 2048 experts",
        lambda a: _expect(a["x"].shape[-1] <= 2048, a["x"].shape),
        quote="最后一维的大小（即专家数）要求不大于`2048`",
    ),
    Constraint(
        "npu::npu_moe_gating_top_k",
        "the bias has the dtype of the logits",
        _gating_bias,
        quote="数据类型需要与`x`保持一致",
    ),
    Constraint(
        "npu::npu_moe_gating_top_k",
        "renorm is 0",
        lambda a: _expect(a["renorm"] == 0, a["renorm"]),
        quote="表示先进行norm再进行topk计算。当前仅支持`0`",
    ),
    Constraint(
        "npu::npu_moe_gating_top_k",
        "k fits the chosen groups",
        _gating_k,
        quote="要求`1 <= k <= x_shape[-1] / group_count * k_group`",
    ),
    Constraint(
        "npu::npu_grouped_matmul",
        "one matrix of rows and one of weights: split_item 2 or 3, weights [E, K, N], at most 1024 groups",
        lambda a: _expect(
            a["split_item"] in (2, 3) and a["weight"][0].dim() == 3 and len(a["group_list"]) <= 1024,
            (a["split_item"], a["weight"][0].shape),
        ),
        quote="group_list第1维最大支持1024, 即最多支持1024个group",
    ),
    Constraint("npu::npu_grouped_matmul", "inner axes below 65536", _inner, quote="最后一维大小都应小于InnerLimit"),
    Constraint(
        "npu::npu_grouped_matmul",
        "group_list is int64",
        lambda a: _expect(a["group_list"].dtype == torch.int64, a["group_list"].dtype),
        quote="数据类型支持torch.int64",
    ),
    Constraint(
        "npu::npu_grouped_matmul",
        "no activation inside",
        lambda a: _expect(a["act_type"] in (0, None), a["act_type"]),
        source="SiTU is none of the documented activations",
    ),
    Constraint(
        "npu::npu_grouped_matmul",
        "int8 rows and a scale a token: bfloat16 scale with int8 weights; int4 weights (not in the documented table) "
        "as vllm-ascend 0.23 passes them",
        _matmul_scale,
        quote="per-token量化",
    ),
    Constraint(
        "npu::npu_dynamic_quant",
        "float16 or bfloat16 rows",
        lambda a: _expect(a["input"].dtype in _HALF and a["input"].dim() > 1, a["input"].dtype),
        quote="输入x的维度必须大于1",
    ),
    Constraint(
        "npu::npu_moe_token_unpermute",
        "bfloat16 rows and weights",
        lambda a: _expect(
            a["permuted_tokens"].dtype == torch.bfloat16 and a["probs"].dtype == torch.bfloat16,
            (a["permuted_tokens"].dtype, a["probs"].dtype),
        ),
        quote="支持的数据类型BFLOAT16",
    ),
    Constraint(
        "npu::npu_moe_init_routing_v2",
        "at most 10240 experts, counts asked for",
        lambda a: _expect(0 < a["expert_num"] <= 10240 and a["expert_tokens_num_flag"], a["expert_num"]),
        quote="其他模式取值范围为(0, 10240]",
    ),
    Constraint(
        "npu::npu_fused_infer_attention_score",
        "packed rows: 8, 16, 32, 64 or 128 heads, as many of keys and values",
        _prefill_tnd,
        quote="N等于8/16/32/64/128, 且Q_N、K_N、V_N相等",
    ),
    Constraint(
        "npu::npu_fused_infer_attention_score",
        "packed rows: bfloat16",
        lambda a: _expect(a["input_layout"] != "TND" or a["query"].dtype == torch.bfloat16, a["query"].dtype),
        quote="数据类型仅支持BFLOAT16",
    ),
    Constraint(
        "npu::npu_fused_infer_attention_score_v2",
        "latent attention: a power of two of query heads",
        _decode_heads,
        quote="query_rope配置时要求query的s为1-16、n为1/2/4/8/16/32/64/128",
    ),
    Constraint(
        "npu::npu_fused_infer_attention_score_v2",
        "latent attention: over pages of 16 or 128 tokens",
        _decode_pages,
        quote="必须开启PageAttention，此时block_size支持16、128",
    ),
    Constraint(
        "npu::npu_fused_infer_attention_score_v2",
        "latent attention: documented layouts",
        _decode_layout,
        quote="input_layout形状支持BSH、BSND、BNSD、BNSD_NBSD、BSND_NBSD、BSH_NBSD、TND、TND_NTD",
    ),
    Constraint(
        "npu::npu_recurrent_gated_delta_rule",
        "never called: its gate per channel is documented as unsupported",
        _never,
        quote="gk (Tensor)：可选输入，衰减系数，当前版本暂不支持，传None即可",
    ),
    Constraint(
        "_C_ascend::npu_recurrent_gated_delta_rule",
        "at most 256 heads of 256",
        _delta_rule_sizes,
        source="documentation of torch_npu's operator of that name, whose limits are assumed for vllm-ascend's",
    ),
    Constraint(
        "_C_ascend::npu_recurrent_gated_delta_rule",
        "bfloat16 rows and beta",
        _delta_rule_rows,
        source="documentation of torch_npu's operator of that name",
    ),
    *(
        Constraint(name, NOT_SWIGLU, _never, source="the activation of Kimi K3 is SiTU")
        for name in (
            "npu::npu_swiglu",
            "npu::npu_clipped_swiglu",
            "npu::npu_swiglu_quant",
            "npu::npu_dequant_swiglu_quant",
            "npu::npu_grouped_matmul_swiglu_quant",
            "npu::npu_grouped_matmul_swiglu_quant_v2",
            "_C_ascend::npu_dequant_swiglu_quant",
            "_C_ascend::npu_swiglu_group_quant",
            "_C_ascend::grouped_matmul_swiglu_quant",
            "_C_ascend::grouped_matmul_swiglu_quant_v2",
            "_C_ascend::grouped_matmul_swiglu_quant_weight_nz",
            "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list",
            "_C_ascend::dispatch_ffn_combine",
            "_C_ascend::dispatch_gmm_combine_decode",
        )
    ),
)

#: Vendor operators that the model calls and for which torch_npu 2.10's documentation has no entry.
UNDOCUMENTED = (
    "npu::npu_dynamic_mx_quant",
    "npu::npu_interleave_rope",
    "npu::npu_kv_rmsnorm_rope_cache",
    "npu::_npu_format_cast",
    "_C_ascend::npu_add_rms_norm_bias",
    "_C_ascend::npu_causal_conv1d_custom",
    "_C_ascend::npu_moe_init_routing_custom",
)


def violations(operator: str, arguments: Arguments, *, situ: bool = True) -> list[str]:
    """What a call of ``operator`` (``namespace::name``) breaks, a line a rule. situ: whether the activation is SiTU."""
    result = []
    for constraint in CONSTRAINTS:
        if constraint.operator == operator and (situ or constraint.rule != NOT_SWIGLU):
            why = constraint.check(arguments)
            if why is not None:
                result.append(f"{operator}: {constraint.rule}: {why}")
    return result


def bound(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by schema name, defaults included."""
    result = {argument.name: argument.default_value for argument in schema.arguments}
    result |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    result.update(kwargs)
    return result
