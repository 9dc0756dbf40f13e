"""vLLM's own KDA operators on our inputs, called as its Kimi K3 layer calls them; every entry is None without vLLM.

Conventions differ from the operator table: raw beta (before the sigmoid), a leading batch axis, packed initial and
final states around FlashKDA. What its layer does around a kernel is part of a row: gather of the initial states and
scatter of the final ones in every prefill row, three convolutions and the norm in the rows that say so. What its engine
prepares once a step (index tensors of the convolutions, buffers) is prepared outside the clock.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def _load(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        print(f"rival {module}.{name} is not here: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None


_loaded: dict[str, Any] = {}


def rivals() -> dict[str, Any]:
    """The rival's functions by role, loaded once; missing ones are None."""
    if not _loaded:
        conv = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
        recurrent = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
        _loaded["flash"] = _load("vllm._flashkda_C", "__name__") and torch.ops._flashkda_C
        _loaded["fused"] = _load("vllm._custom_ops", "fused_kda_decode")
        _loaded["conv_fn"] = _load(conv, "causal_conv1d_fn")
        _loaded["conv_update"] = _load(conv, "causal_conv1d_update")
        _loaded["recurrent"] = _load(recurrent, "fused_recurrent_kda")
        _loaded["packed"] = _load(recurrent, "fused_recurrent_kda_packed_decode")
        _loaded["conv_tables"] = _load("vllm.v1.attention.backends.utils", "compute_causal_conv1d_metadata")
        _loaded["gather"] = _load("vllm.model_executor.layers.mamba.ops.gather_initial_states", "gather_initial_states")
        _loaded["norm"] = _load("vllm.third_party.flash_linear_attention.ops.kda", "rms_norm_gated")
    return _loaded


def _raw(beta: torch.Tensor) -> torch.Tensor:
    return torch.logit(beta.clamp(1e-4, 1 - 1e-4)).bfloat16().unsqueeze(0)


def prefill(case: dict[str, Any], cu: torch.Tensor) -> Call | None:
    """Gather of the initial states, FlashKDA, scatter of the final ones: its layer without convolution and norm."""
    flash, gather = rivals()["flash"], rivals()["gather"]
    if flash is None or gather is None:
        return None
    q, k, v, z = (case[n].unsqueeze(0) for n in ("q", "k", "v", "z"))
    tokens, heads, dim = case["q"].shape
    slots, pool = case["slot_mapping"], case["recurrent_state"]
    sequences, long_slots = slots.numel(), slots.long()
    final = torch.empty(sequences, heads, dim, dim, dtype=pool.dtype, device=q.device)
    out = torch.empty_like(v)
    workspace = torch.empty(int(flash.get_workspace_size(tokens, heads, sequences)), dtype=torch.uint8, device=q.device)
    raw = _raw(case["beta"])
    bias = case["dt_bias"].view(heads, dim)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        initial = gather(pool, slots, case["has_initial_state"])
        flash.fwd(
            q, k, v, z, raw, dim**-0.5, out, workspace, case["a_log"], bias, case["lower_bound"], initial, final, cu,
            None, None,
        )  # fmt: skip
        pool[long_slots] = final
        return out[0], final

    return call


class ConvTables:
    """What the engine prepares once a step for the convolutions of a prefill."""

    def __init__(self, cu: torch.Tensor) -> None:
        made = rivals()["conv_tables"](cu.cpu(), device=cu.device)
        self.nums_dict, self.batch_ptr, self.token_chunk_offset_ptr = made


def _norm(weight: torch.Tensor) -> Any:
    """The function behind the layer's gated norm; the layer class itself wants an engine configuration."""
    function = rivals()["norm"]
    if function is None:
        return None
    return lambda o, gate: function(
        o, gate, weight, None, "sigmoid", residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False
    )


def prefill_layer(case: dict[str, Any], cu: torch.Tensor) -> Call | None:
    """Three convolutions, gather, FlashKDA, scatter, norm: from the projections to the gated norm."""
    r = rivals()
    norm = _norm(case["o_norm_weight"])
    if any(r[n] is None for n in ("flash", "conv_fn", "gather")) or norm is None:
        return None
    tables = None if r["conv_tables"] is None else ConvTables(cu)
    tokens, channels = case["qkv"].shape
    third = channels // 3
    dim = case["o_norm_weight"].numel()
    heads = third // dim
    slots, first = case["slot_mapping"], case["has_initial_state"]
    out = torch.empty(1, tokens, heads, dim, dtype=case["qkv"].dtype, device=case["qkv"].device)
    final = torch.empty(slots.numel(), heads, dim, dim, device=out.device)
    size = int(r["flash"].get_workspace_size(tokens, heads, slots.numel()))
    workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
    raw, z, gate = _raw(case["beta"]), case["z"].unsqueeze(0), case["gate"].unsqueeze(0)
    long_slots = slots.long()
    parts = [slice(n * third, (n + 1) * third) for n in range(3)]

    def call() -> torch.Tensor:
        q, k, v = (
            r["conv_fn"](
                case["qkv"][:, p].transpose(0, 1), case["conv_weight"][p], None, activation="silu",
                conv_states=case["conv_state"][:, p], has_initial_state=first, cache_indices=slots, query_start_loc=cu,
                metadata=tables,
            ).transpose(0, 1).reshape(1, tokens, heads, dim)
            for p in parts
        )  # fmt: skip
        initial = r["gather"](case["recurrent_state"], slots, first)
        r["flash"].fwd(
            q, k, v, z, raw, dim**-0.5, out, workspace, case["a_log"], case["dt_bias"], case["lower_bound"], initial,
            final, cu, None, None,
        )  # fmt: skip
        case["recurrent_state"][long_slots] = final
        return norm(out, gate)

    return call


def decode_fused(case: dict[str, Any]) -> Call | None:
    """vLLM's CUDA kernel from convolution to gated norm (12, 24, 48 and 96 local heads only)."""
    fused = rivals()["fused"]
    heads, dim = case["z"].shape[1:]
    if fused is None or heads not in (12, 24, 48, 96):
        return None
    # Its convolution weights are [3, taps, channels of one part].
    weight = case["conv_weight"].view(3, heads * dim, 4).transpose(1, 2).contiguous()
    raw = _raw(case["beta"])
    out = torch.empty_like(case["z"]).unsqueeze(0)

    def call() -> torch.Tensor:
        return fused(
            x=case["qkv"], weight=weight, bias=None, conv_state=case["conv_state"], raw_g=case["z"].unsqueeze(0),
            raw_beta=raw, A_log=case["a_log"], dt_bias=case["dt_bias"].view(-1), state_indices=case["slot_mapping"],
            state=case["recurrent_state"], out=out, lower_bound=case["lower_bound"],
            output_gate=case["gate"], norm_weight=case["o_norm_weight"], norm_eps=case["o_norm_eps"],
        )[0]  # fmt: skip

    return call


def decode_parts(case: dict[str, Any]) -> Call | None:
    """Convolution update, packed recurrence, norm: what vLLM runs where its fused kernel refuses (TP16: 6 heads)."""
    r = rivals()
    norm = _norm(case["o_norm_weight"])
    if r["conv_update"] is None or r["packed"] is None or norm is None:
        return None
    raw, z, gate = _raw(case["beta"]), case["z"].unsqueeze(0), case["gate"].unsqueeze(0)
    out = torch.empty_like(z)
    mixed = torch.empty_like(case["qkv"])

    def call() -> torch.Tensor:
        r["conv_update"](
            case["qkv"], case["conv_state"], case["conv_weight"], None, activation="silu",
            conv_state_indices=case["slot_mapping"], validate_data=False, out=mixed,
        )  # fmt: skip
        r["packed"](
            mixed_qkv=mixed, raw_g=z, raw_beta=raw, A_log=case["a_log"], dt_bias=case["dt_bias"].view(-1),
            lower_bound=case["lower_bound"], initial_state=case["recurrent_state"],
            state_indices=case["slot_mapping"], out=out,
        )  # fmt: skip
        return norm(out, gate)[0]

    return call


def verify_parts(case: dict[str, Any]) -> Call | None:
    """Speculative convolution update, recurrence over slots per token, norm."""
    r = rivals()
    norm = _norm(case["o_norm_weight"])
    if r["conv_update"] is None or r["recurrent"] is None or norm is None:
        return None
    raw, z, gate = _raw(case["beta"]), case["z"].unsqueeze(0), case["gate"].unsqueeze(0)
    tokens, heads, dim = case["z"].shape
    out = torch.empty_like(z)
    mixed = torch.empty_like(case["qkv"])
    slots = case["slot_mapping"]

    def call() -> torch.Tensor:
        r["conv_update"](
            case["qkv"], case["conv_state"], case["conv_weight"], None, activation="silu",
            conv_state_indices=slots[:, 0], num_accepted_tokens=case["num_accepted"],
            query_start_loc=case["cu_seqlens"], max_query_len=slots.shape[1], validate_data=False, out=mixed,
        )  # fmt: skip
        q, k, v = (x.view(1, tokens, heads, dim) for x in mixed.split(heads * dim, dim=-1))
        r["recurrent"](
            q=q, k=k, v=v, raw_g=z, raw_beta=raw, A_log=case["a_log"], dt_bias=case["dt_bias"].view(-1),
            lower_bound=case["lower_bound"], initial_state=case["recurrent_state"], cu_seqlens=case["cu_seqlens"],
            ssm_state_indices=slots, num_accepted_tokens=case["num_accepted"], out=out,
        )  # fmt: skip
        return norm(out, gate)[0]

    return call


def ratio(ours: float, theirs: float | None) -> float:
    """ours / theirs, NaN where there is no rival."""
    return ours / theirs if theirs else math.nan
