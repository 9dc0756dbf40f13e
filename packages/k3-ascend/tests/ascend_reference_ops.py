"""Reference implementations on the CPU, registered behind the real schemas of torch_npu and vllm-ascend.

With them the unmodified model runs on CPU tensors: every call goes through the vendor's own schema (argument names,
types, defaults), and only the arithmetic is ours. What an implementation does follows the vendor's documentation where
there is one; an argument that it does not read must have its default, so that a call which relies on more fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3_core.contracts import kda, moe

#: name -> implementation; the namespace is in :func:`install`.
NPU: dict[str, Callable[..., Any]] = {}
C_ASCEND: dict[str, Callable[..., Any]] = {}
_libraries: list[torch.library.Library] = []


def npu(function: Callable[..., Any]) -> Callable[..., Any]:
    NPU[function.__name__] = function
    return function


def c_ascend(function: Callable[..., Any]) -> Callable[..., Any]:
    C_ASCEND[function.__name__] = function
    return function


def install() -> None:
    """Register all of them for CPU tensors; once a process."""
    if _libraries:
        return
    import torch_npu  # noqa: F401
    import vllm_ascend.vllm_ascend_C  # noqa: F401
    from vllm.distributed import parallel_state
    from vllm_ascend.ops import linear, register_custom_ops

    sources = {
        "all_reduce": parallel_state.all_reduce,
        "all_gather": parallel_state.all_gather,
        "unquantized_gemm": linear.unquantized_gemm,
        "maybe_pad_and_reduce": register_custom_ops._maybe_pad_and_reduce_impl,
        "maybe_chunk_residual": register_custom_ops._maybe_chunk_residual_impl,
        "maybe_all_gather_and_maybe_unpad": register_custom_ops._maybe_all_gather_and_maybe_unpad_impl,
    }
    for namespace, table in (("npu", NPU), ("_C_ascend", C_ASCEND), ("vllm", sources)):
        library = torch.library.Library(namespace, "IMPL")
        for name, function in table.items():
            library.impl(name, function, "CPU")
        _libraries.append(library)


def _only(**defaults: tuple[Any, Any]) -> None:
    """Arguments this implementation does not read have their defaults."""
    for name, (given, default) in defaults.items():
        assert given is default or given == default, f"{name} = {given!r} is not implemented here"


# ----------------------------------------------------------------------------------------------------------------- norm


@npu
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


@c_ascend
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return (y if beta is None else y + beta), rstd, total


# -------------------------------------------------------------------------------------------------------------- experts


@npu
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    _only(renorm=(renorm, 0), norm_type=(norm_type, 1), out_flag=(out_flag, False), eps=(eps, 1e-20))
    assert group_count == 1 or group_select_mode == 1
    weights, ids = moe.route(x, bias, k, scaling=routed_scaling_factor, num_groups=group_count, topk_groups=k_group)
    return weights.to(x.dtype), ids.to(torch.int32), x.float().sigmoid()


@c_ascend
def npu_moe_init_routing_custom(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Any = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _only(scale=(scale, None), offset=(offset, None), drop=(drop_pad_mode, 0), kind=(expert_tokens_num_type, 1))
    first, last = active_expert_range
    flat = expert_idx.flatten().long()
    local = (flat >= first) & (flat < last)
    order = torch.argsort(torch.where(local, flat, expert_num), stable=True)
    active = int(local.sum())
    rows = x[order[:active] // expert_idx.shape[1]]
    expanded = torch.full((flat.numel(), x.shape[1]), float("nan"), dtype=x.dtype)  # rows behind are undefined
    expanded[:active] = rows
    counts = torch.bincount(flat[local] - first, minlength=last - first)
    # Gather indices: where token t's j-th choice stands; choices that are not here are negative.
    row_idx = torch.full((flat.numel(),), -1, dtype=torch.int32)
    row_idx[order[:active]] = torch.arange(active, dtype=torch.int32)
    if quant_mode == -1:
        return expanded, row_idx, counts, torch.empty(0)
    assert quant_mode == 1
    codes, scales = npu_dynamic_quant(torch.nan_to_num(expanded))
    return codes, row_idx, counts, scales


@npu
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    _only(padded=(padded_mode, False), restore=(restore_shape, None))
    assert probs is not None
    rows = permuted_tokens[sorted_indices.long()].unflatten(0, probs.shape)
    rows = torch.where(probs.unsqueeze(-1) == 0, 0.0, rows.float())
    return (rows * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


@npu
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _only(smooth=(smooth_scales, None), group=(group_index, None), dst=(dst_type, None), mode=(quant_mode, "pertoken"))
    scale = input.float().abs().amax(-1) / 127
    codes = (input.float() / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)).round()
    return codes.clamp(-128, 127).to(torch.int8), scale


@npu
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Any = None,
    activation_quant_scale: Any = None,
    activation_quant_offset: Any = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    tuning_config: Any = None,
    output_dtype: Any = None,
    x_dtype: Any = None,
    weight_dtype: Any = None,
    scale_dtype: Any = None,
    per_token_scale_dtype: Any = None,
) -> list[Tensor]:
    _only(
        act=(act_type, 0), group=(group_type, 0), antiquant=(antiquant_scale, None), weight_dtype=(weight_dtype, None)
    )
    assert split_item in (2, 3)
    assert group_list is not None
    (rows,), (matrices,) = x, weight
    counts = group_list if group_list_type == 1 else torch.diff(group_list, prepend=group_list.new_zeros(1))
    parts = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        part = rows[start : start + count]
        start += count
        if scale is None:
            parts.append((part.float() @ matrices[expert].float()).to(part.dtype))
            continue
        assert per_token_scale is not None
        product = part.float() @ _dequantised(matrices[expert], scale[0][expert])
        parts.append((product * per_token_scale[0][start - count : start, None]).to(torch.bfloat16))
    tail = rows.shape[0] - start  # rows of no expert are undefined
    width = parts[0].shape[-1]
    parts.append(torch.full((tail, width), float("nan"), dtype=parts[0].dtype))
    return [torch.cat(parts)]


def _dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """int8 [K, N] with a scale a column, or packed int4 [K, N / 8] with fp32 bits in int64 scales [G, N]."""
    if weight.dtype == torch.int8:
        return weight.float() * scale.float()
    low_high = weight.contiguous().view(torch.int8)
    low = (low_high << 4).to(torch.int8) >> 4
    codes = torch.stack([low, low_high >> 4], dim=-1).flatten(-2).float()
    scales = (scale & 0xFFFFFFFF).to(torch.int64).to(torch.int32).view(torch.float32)
    return codes * scales.repeat_interleave(weight.shape[0] // scale.shape[0], dim=0)


@npu
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


# ------------------------------------------------------------------------------------------------------------------ kda


@c_ascend
def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """S <- S * exp(gk) over the keys, S <- S + beta (v - S k) k^T, o = scale S q; state [slots, N, V, K] in place."""
    _only(g=(g, None), accepted=(num_accepted_tokens, None))
    assert beta is not None
    assert actual_seq_lengths is not None
    assert ssm_state_indices is not None
    assert gk is not None
    assert scale is not None
    out = torch.full_like(value, float("nan"))
    for row, (length, slot) in enumerate(zip(actual_seq_lengths.tolist(), ssm_state_indices.tolist(), strict=True)):
        if length == 0:
            continue
        assert length == 1
        s = state[slot].float() * gk[row].float().exp().unsqueeze(-2)
        k, q = key[row].float(), query[row].float()
        error = value[row].float() - torch.einsum("nvk,nk->nv", s, k)
        s = s + torch.einsum("nv,nk->nvk", beta[row].float().unsqueeze(-1) * error, k)
        state[slot] = s.to(state.dtype)
        out[row] = (scale * torch.einsum("nvk,nk->nv", s, q)).to(out.dtype)
    return out


@c_ascend
def npu_causal_conv1d_custom(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """Prefill form: x [T, C], weight [W, C], conv_state [slots, columns, C]; not ``output`` but a copy comes back."""
    _only(bias=(bias_opt, None), accepted=(num_accepted_tokens_opt, None), mode=(run_mode, 0), act=(activation_mode, 1))
    assert query_start_loc_opt is not None
    assert cache_indices_opt is not None
    assert initial_state_mode_opt is not None
    result = output.clone()
    history = weight.shape[0] - 1
    bounds = query_start_loc_opt.tolist()
    for row, slot in enumerate(cache_indices_opt.tolist()):
        if slot == pad_slot_id:
            continue
        part = slice(bounds[row], bounds[row + 1])
        old = conv_state[slot, :history].t().unsqueeze(0)
        old = old if bool(initial_state_mode_opt[row]) else torch.zeros_like(old)
        y, new = kda.short_conv(x[part], weight.t(), old, [0, part.stop - part.start])
        result[part] = y.to(result.dtype)
        conv_state[slot, :history] = new[0].t().to(conv_state.dtype)
    return result


# ------------------------------------------------------------------------------------------------------------------ mla


def _interleaved(x: Tensor) -> Tensor:
    """Even columns, then odd ones: how the vendor's rotation reorders a key."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = _interleaved(x).float()
    first, second = x.chunk(2, dim=-1)
    return x * cos.float() + torch.cat([-second, first], dim=-1) * sin.float()


@npu
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(x, cos, sin).to(x.dtype)


@npu
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Any = None,
    c_kv_scale: Any = None,
    k_rope_offset: Any = None,
    c_kv_offset: Any = None,
    v: Any = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm of the latent part, rotation of the shared part, both written to pages [blocks, tokens, 1, width]."""
    _only(scale=(c_kv_scale, None), mode=(cache_mode, "PA"))
    rank = gamma.shape[0]
    latent = npu_rms_norm(kv[..., :rank], gamma, epsilon)[0]
    shared = _rotated(kv[..., rank:], cos, sin).to(kv.dtype)
    for rows, cache in ((latent, ckv_cache), (shared, k_cache)):
        flat = rows.reshape(-1, rows.shape[-1])
        live = index >= 0
        block, place = index[live] // cache.shape[1], index[live] % cache.shape[1]
        cache[block, place, 0] = flat[live].to(cache.dtype)
    return k_cache, ckv_cache, shared, latent


@npu
def npu_fused_infer_attention_score(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Prefill: packed rows [T, N, D], causal inside each sequence, lengths as running sums."""
    assert given["input_layout"] == "TND"
    assert given["sparse_mode"] == 3
    if given.get("query_rope") is not None:
        query = torch.cat([query, given["query_rope"]], dim=-1)
        key = torch.cat([key, given["key_rope"]], dim=-1)
    out = torch.full((*query.shape[:2], value.shape[-1]), float("nan"), dtype=query.dtype)
    lse = torch.zeros(query.shape[0], query.shape[1], 1)
    bounds = [0, *given["actual_seq_lengths"]]
    for start, end in pairwise(bounds):
        q, k, v = (t[start:end].float().transpose(0, 1) for t in (query, key, value))
        scores = q @ k.transpose(1, 2) * given["scale"]
        hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
        out[start:end] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        lse[start:end] = scores.logsumexp(-1).transpose(0, 1).unsqueeze(-1)
    return out, lse


@npu
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """Decode over pages: query [B, N, 1, R], pages [blocks, 1, tokens, R]; result [N, B, 1, R]."""
    assert given["input_layout"] == "BNSD_NBSD"
    assert query.shape[1] == given["num_query_heads"]
    assert given["num_query_heads"] in (1, 2, 4, 8, 16, 32, 64, 128)
    out = torch.zeros(query.shape[1], query.shape[0], 1, value.shape[-1], dtype=query.dtype)
    for row, length in enumerate(given["actual_seq_kvlen"]):
        blocks = given["block_table"][row, : -(-length // given["block_size"])].long()
        latent = key[blocks, 0].flatten(0, 1)[:length].float()
        shared = given["key_rope"][blocks, 0].flatten(0, 1)[:length].float()
        q, q_rope = query[row, :, 0].float(), given["query_rope"][row, :, 0].float()
        scores = (q @ latent.t() + q_rope @ shared.t()) * given["softmax_scale"]
        out[:, row, 0] = (scores.softmax(-1) @ latent).to(out.dtype)
    return out, torch.zeros(1)


@npu
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Any = None,
    scale: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int = 1,
) -> Tensor:
    _only(bias=(bias, None), scale=(scale, None), x1=(perm_x1, None), x2=(perm_x2, None))
    product = (input.float() @ weight.float()).to(input.dtype)
    return product if perm_y is None else product.permute(*perm_y)


@npu
def npu_format_cast(input: Tensor, acl_format: int, **_: Any) -> Tensor:
    return input.clone()
