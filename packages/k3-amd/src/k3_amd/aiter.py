"""AMD's aiter behind one adapter: what this wheel calls of it, what vLLM's attention calls for it, and what else runs.

aiter is optional. vLLM decides by ``VLLM_ROCM_USE_AITER`` and its finer switches whether its own layers use it; this
wheel follows these switches and calls one function of aiter itself. Everything else in the table is called by vLLM's
MLA on this model's behalf and listed so that a report names it. vLLM's norms, matrix products and plain experts may
call more of aiter, under switches of their own.

``verified`` says what stands behind the parameter names. aiter's releases are in AMD's images; the newest on the
package index is 0.1.7.post2.dev18, from long before vLLM 0.33. Where that one has the symbol with the parameters used
here, a test compares them; where it has not, the entry is unverified until a user's `k3 doctor` compares it with the
aiter that is installed (:func:`missing_parameters`). This project never made a call on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: The release whose source the parameter names were compared with.
INDEX_VERSION = "0.1.7.post2.dev18"
Verified = Literal["signature", "unverified"]


@dataclass(frozen=True)
class Symbol:
    """One function of aiter.

    Attributes:
        name: ``module:function``.
        caller: ``k3-amd`` or the module of vLLM that calls it.
        purpose: for what.
        parameters: names that the caller passes by keyword or that its positions rely on, in order.
        fallback: what runs where aiter or the symbol is absent.
        verified: whether the parameters were compared with a release's source.
    """

    name: str
    caller: str
    purpose: str
    parameters: tuple[str, ...]
    fallback: str
    verified: Verified

    @property
    def module(self) -> str:
        """Module part of the name."""
        return self.name.partition(":")[0]

    @property
    def function(self) -> str:
        """Function part of the name."""
        return self.name.partition(":")[2]


_MLA = "vllm.v1.attention.backends.mla.rocm_aiter_mla"

VISION = Symbol(
    "aiter:flash_attn_varlen_func",
    "k3-amd",
    "attention of the vision tower, all images in one call",
    ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
    "PyTorch's fused attention, one image at a time",
    "signature",
)

SYMBOLS = (
    VISION,
    Symbol(
        "aiter:flash_attn_varlen_func",
        "vllm.v1.attention.backends.mla.prefill.aiter_flash_attn",
        "MLA prefill",
        (*VISION.parameters, "return_lse", "out"),
        "vLLM's flash attention for prefill; where neither is installed vLLM refuses to start",
        "signature",
    ),
    Symbol(
        "aiter.mla:mla_decode_fwd",
        _MLA,
        "MLA decode of 16 heads or a multiple; fewer or uneven heads are padded",
        ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q",
         "sm_scale", "logit_cap", "q_scale", "kv_scale", "work_meta_data", "work_indptr", "work_info_set",
         "reduce_indptr", "reduce_final_map", "reduce_partial_map", "causal"),
        "vLLM's Triton MLA backend, which takes any number of heads",
        "unverified",
    ),
    Symbol(
        "aiter:get_mla_metadata_info_v1",
        _MLA,
        "sizes of the decode kernel's schedule",
        ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse", "fast_mode"),
        "with aiter's decode, its older schedule; without, none is needed",
        "signature",
    ),
    Symbol(
        "aiter:get_mla_metadata_v1",
        _MLA,
        "the decode kernel's schedule",
        ("page_size", "kv_granularity", "max_seqlen_qo", "uni_seqlen_qo", "fast_mode", "dtype_q", "dtype_kv"),
        "as above",
        "unverified",
    ),
    Symbol(
        "aiter.ops.triton.gluon.mla_gluon:mla_gluon",
        _MLA,
        "MLA decode of fewer than 16 heads on gfx950",
        (),
        "aiter's padded decode",
        "unverified",
    ),
    Symbol(
        "aiter:mla_prefill_ps_asm_fwd",
        _MLA,
        "MLA prefill from an FP8 cache on gfx950",
        (),
        "flash attention on unpacked rows",
        "unverified",
    ),
    Symbol(
        "aiter:mla_reduce_v1",
        _MLA,
        "sum over the parts of an FP8 prefill",
        ("partial_output", "partial_lse", "reduce_indptr", "reduce_final_map", "reduce_partial_map"),
        "flash attention on unpacked rows",
        "unverified",
    ),
)  # fmt: skip


@functools.cache
def version() -> str | None:
    """aiter's release; "of unknown version" where it can be found but does not say; None where it is absent."""
    if importlib.util.find_spec("aiter") is None:
        return None
    for name in ("amd-aiter", "aiter"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def resolve(symbol: Symbol) -> tuple[Callable[..., Any] | None, str]:
    """(the function, what was found) or (None, why not). Imports aiter, which may ask for the device."""
    found = version()
    if found is None:
        return None, "aiter is not installed"
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(symbol.module), symbol.function)
    except Exception as error:  # an aiter that does not fit its ROCm fails in many ways; each means: not this one
        return None, f"aiter {found} has no usable {symbol.name} ({type(error).__name__}: {error})"
    return function, f"aiter {found}"


def missing_parameters(symbol: Symbol, function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Parameters that the caller passes and ``function`` does not have; None where it does not say what it takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return ()
    return tuple(name for name in symbol.parameters if name not in parameters)


def enabled(switch: str) -> bool:
    """Whether vLLM would use aiter here for ``switch`` ("mla", "mha", "fused_moe"): its own environment and checks."""
    from vllm._aiter_ops import rocm_aiter_ops

    ask = getattr(rocm_aiter_ops, f"is_{switch}_enabled", None)
    return bool(ask()) if ask is not None else False


def report() -> list[str]:
    """One line a symbol: what it is for, who calls it, what runs otherwise. Imports nothing of aiter."""
    return [_head(), *(f"{_described(s)} [{s.verified}]" for s in SYMBOLS)]


def installed() -> list[str]:
    """As :func:`report`, with what the installed aiter has of each symbol. Imports aiter where it is installed."""
    if version() is None:
        return report()
    return [_head(), *(f"{_described(s)} [{_state(s)}]" for s in SYMBOLS)]


def _head() -> str:
    found = version()
    return "aiter is not installed: a normal state" if found is None else f"aiter {found}"


def _described(symbol: Symbol) -> str:
    return f"{symbol.name}, for {symbol.purpose} ({symbol.caller}); else {symbol.fallback}"


def _state(symbol: Symbol) -> str:
    function, why = resolve(symbol)
    if function is None:
        return f"absent: {why}"
    missing = missing_parameters(symbol, function)
    if missing is None or not symbol.parameters:
        return "found, does not say what it takes" if missing is None else "found, parameters not compared"
    return f"found, lacks {', '.join(missing)}" if missing else "found, takes what is passed"
