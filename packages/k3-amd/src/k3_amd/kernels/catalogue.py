"""Every kernel in every tuned configuration at K3's sizes: what is built ahead of time and held to budgets.

Types are those of a serving process: bfloat16 activations, float32 states (bfloat16 where named), int32 indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from k3_amd import tuning
from k3_amd.kernels.build import WAVE, Variant
from k3_amd.kernels.device import (
    attn_res,
    experts,
    kda_chunk,
    kda_conv,
    kda_segment,
    kda_step,
    router,
    situ,
    state_copy,
    worklist,
)

HIDDEN, LATENT, EXPERTS, TOP_K, DIM, MAX_BLOCKS = 7168, 3584, 896, 16, 128, 8
#: Pointers of memory that a large server has more than 2 GiB of: caches and the bank of attention residuals.
POOLS = ("state_ptr", "conv_ptr", "cache_ptr", "bank_ptr")
#: Widths of one rank's experts: cut over 16 or 8 ranks, or whole under expert parallelism.
WIDTHS = (192, 384, 3072)


def _options(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A table entry as (constants, compiler options)."""
    constants = {k: v for k, v in entry.items() if k.isupper()}
    options = {k: v for k, v in entry.items() if not k.isupper() and k not in ("threads", "programs")}
    options["num_warps"] = max(entry["threads"] // WAVE, 1)
    return constants, options


def variants(arch: str) -> dict[str, Variant]:
    """All variants for an architecture by name, each in its forms."""
    found = {}
    for part in (_attn_res, _steps, _prefill, _small, _worklist, _experts):
        for variant in part(arch):
            for form in forms(variant):
                if form.name in found:
                    raise ValueError(f"two variants are called {form.name!r}")
                found[form.name] = form
    return found


def forms(variant: Variant) -> Iterator[Variant]:
    """The same for storages of more than 2 GiB, for smaller ones, and for small ones with large pools."""
    yield variant
    pointers = [n for n in variant.kernel.arg_names if n.endswith("_ptr") and n not in variant.constants]
    yield replace(variant, name=f"{variant.name}, small", narrow=tuple(pointers))
    small = tuple(n for n in pointers if n not in POOLS)
    if len(small) < len(pointers):
        yield replace(variant, name=f"{variant.name}, large pool", narrow=small)


def _attn_res(arch: str) -> Iterator[Variant]:
    constants, options = _options(tuning.launch("attn_res", arch))
    chunk = constants["CHUNK"]
    kinds = dict.fromkeys(
        ("out_ptr", "prefix_ptr", "delta_ptr", "bank_ptr", "norm_ptr", "proj_ptr", "out_norm_ptr"), "*bf16"
    ) | {"eps": "fp32", "out_eps": "fp32"}
    for blocks in range(MAX_BLOCKS + 1):
        yield Variant(
            f"attn_res {blocks}", attn_res.attn_res_kernel,
            {"NUM_BLOCKS": blocks, "HAS_DELTA": True, "HAS_WRITE": blocks % 2 == 0, "HAS_NORM": True, "H": HIDDEN,
             "CHUNK": chunk, "KC": -(-HIDDEN // chunk), "TOGETHER": min(constants["TOGETHER"], blocks + 1)},
            options, kinds, wide=blocks + 2,
        )  # fmt: skip


_STEP_TYPES = {
    **dict.fromkeys(("qkv_ptr", "z_ptr", "gate_ptr", "conv_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("beta_ptr", "weight_ptr", "a_log_ptr", "dt_bias_ptr", "norm_ptr", "state_ptr"), "*fp32"),
    "lower_bound": "fp32", "eps": "fp32",
}  # fmt: skip


def _steps(arch: str) -> Iterator[Variant]:
    for name, kernel in (("decode", kda_step.kda_decode_kernel), ("verify", kda_step.kda_verify_kernel)):
        constants, options = _options(tuning.launch(name, arch))
        fixed = {**constants, "D": DIM, "BOUNDED": True, "channel_stride": 1}
        yield Variant(f"{name} fp32", kernel, fixed, options, _STEP_TYPES, wide=8)
        yield Variant(f"{name} bf16 state", kernel, fixed, options, {**_STEP_TYPES, "state_ptr": "*bf16"}, wide=4)
        columns = {k: v for k, v in fixed.items() if k != "channel_stride"} | {"column_stride": 1, "BOUNDED": False}
        yield Variant(f"{name} fp32 DS softplus", kernel, columns, options, _STEP_TYPES, wide=8)


def _prefill(arch: str) -> Iterator[Variant]:
    bf16 = ("q_ptr", "k_ptr", "v_ptr", "z_ptr", "w_ptr", "ut_ptr", "qg_ptr", "kg_ptr", "a_ptr", "hi_ptr", "lo_ptr",
            "out_ptr")  # fmt: skip
    fp32 = ("beta_ptr", "a_log_ptr", "dt_bias_ptr", "gamma_ptr", "start_ptr", "state_ptr")
    kinds = dict.fromkeys(bf16, "*bf16") | dict.fromkeys(fp32, "*fp32") | {"init_ptr": "*i1", "lower_bound": "fp32"}
    for name, bounded in (("chunk", True), ("chunk_softplus", False)):
        constants, options = _options(tuning.launch(name, arch))
        fixed = {**constants, "BOUNDED": bounded, "SPLIT": bounded, "D": DIM, "UPCAST": False}
        yield Variant(name, kda_chunk.kda_chunk_kernel, fixed, options, kinds, matrix="bf16", wide=4)
    for name, kernel in (
        ("local", kda_segment.kda_local_kernel),
        ("scan", kda_segment.kda_scan_kernel),
        ("output", kda_segment.kda_output_kernel),
    ):
        constants, options = _options(tuning.launch(name, arch))
        fixed = {**constants, "D": DIM, "UPCAST": False}
        yield Variant(name, kernel, fixed, options, kinds, matrix="bf16", wide=4)


def _small(arch: str) -> Iterator[Variant]:
    constants, options = _options(tuning.launch("conv", arch))
    kinds = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "state_ptr": "*bf16", "out_ptr": "*bf16", "init_ptr": "*i1"}
    for name, one in (("conv SD", "channel_stride"), ("conv DS", "column_stride")):
        wide = constants["GROUP"] + 3
        yield Variant(name, kda_conv.short_conv_kernel, {**constants, one: 1}, options, kinds, ("channels",), wide=wide)
    constants, options = _options(tuning.launch("norm", arch))
    kinds = {"o_ptr": "*bf16", "gate_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16", "eps": "fp32"}
    yield Variant("norm", kda_conv.gated_norm_kernel, {**constants, "D": DIM}, options, kinds, wide=2)
    constants, options = _options(tuning.launch("situ", arch))
    kinds = {"x_ptr": "*bf16", "out_ptr": "*bf16", "beta": "fp32", "linear_beta": "fp32"}
    yield Variant("situ", situ.situ_kernel, {**constants, "ACT": 1}, options, kinds, ("width",), wide=2)
    constants, options = _options(tuning.launch("route", arch))
    fixed = {**constants, "EB": 1024, "TK": TOP_K, "HAS_BIAS": True, "RENORM": True}
    kinds = {"logits_ptr": "*fp32", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "factor": "fp32"}
    yield Variant("route", router.route_kernel, fixed, options, kinds, ("top_k", "num_experts"), wide=8)
    constants, options = _options(tuning.launch("copy", arch))
    for dtype in ("fp32", "bf16"):
        kinds = {"cache_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "packed_ptr": f"*{dtype}", "init_ptr": "*i1"}
        gather = {**constants, "HAS_INIT": True}
        yield Variant(f"gather {dtype}", state_copy.state_gather_kernel, gather, options, kinds, ("payload",), wide=4)
        yield Variant(
            f"scatter {dtype}", state_copy.state_scatter_kernel, constants, options, kinds, ("payload",), wide=4
        )


def _worklist(arch: str) -> Iterator[Variant]:
    constants, options = _options(tuning.launch("worklist", arch))
    chunk, rows = {"CHUNK": constants["CHUNK"]}, {"ROWS": constants["ROWS"]}
    base = {"EB": 1024, "EC": constants["EC"]}
    yield Variant("count", worklist.count_kernel, base | chunk | {"HAS_MAP": False}, options)
    yield Variant("count map", worklist.count_kernel, {**base, **chunk, "EB": 64, "HAS_MAP": True}, options)
    yield Variant("total", worklist.total_kernel, base | rows, options)
    for block in sorted({p["BM"] for p in tuning.expert_plans(arch)}):
        fixed = base | chunk | rows | {"HAS_MAP": False, "BM": block}
        yield Variant(f"place {block}", worklist.place_kernel, fixed, options)
    constants, options = _options(tuning.launch("combine", arch))
    kinds = {"d_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"}
    fixed = {**constants, "TK": TOP_K, "HAS_MAP": False}
    yield Variant("combine", experts.combine_kernel, fixed, options, kinds, ("latent", "top_k"), wide=TOP_K)


def _product(plan: dict[str, Any], which: str, K: int, form: int, wide_scales: bool) -> tuple[Any, dict[str, Any]]:
    constants, options = _options(tuning.product(plan, which, K))
    return constants | {"K": K, "FORM": form, "WIDE": wide_scales, "UPCAST": False}, options


def _experts(arch: str) -> Iterator[Variant]:
    """unpacked on gfx942; scaled on gfx950, and mxfp8 for who asks; wide scale bytes in the smallest plan."""
    forms = ((0, "unpacked", "bf16"),) if arch == "gfx942" else ((1, "scaled", "bf16"), (2, "mxfp8", "scale"))
    for form, label, matrix in forms:
        left = "*fp8e4nv" if form == 2 else "*bf16"
        kinds = {"x_ptr": left, "y_ptr": "*bf16", "xs_ptr": "*u8", "ys_ptr": "*u8", "w_ptr": "*u8", "s_ptr": "*u8",
                 "d_ptr": "*bf16", "beta": "fp32", "linear_beta": "fp32"}  # fmt: skip
        if form != 2:
            kinds |= {"xs_ptr": "*bf16", "ys_ptr": "*bf16"}
        even = ("up_w", "up_s", "latent", "top_k")
        for i, plan in enumerate(tuning.expert_plans(arch)):
            constants, options = _product(plan, "13", LATENT, form, False)
            yield Variant(f"w13 {label} {i}", experts.w13_kernel, {**constants, "ACT": 1}, options, kinds, even,
                          matrix, 2)  # fmt: skip
            down = {**kinds, "y_ptr": left}
            for width in WIDTHS:
                inner = -(-width // 128) * 128 if form == 2 else width
                constants, options = _product(plan, "2", inner, form, False)
                yield Variant(f"w2 {label} {width} {i}", experts.w2_kernel, constants, options, down, even, matrix, 1)
            if form == 0 and i == 0:
                constants, options = _product(plan, "13", LATENT, form, True)
                yield Variant("w13 unpacked wide scales", experts.w13_kernel, {**constants, "ACT": 1}, options, kinds,
                              even, matrix, 2)  # fmt: skip
    if arch == "gfx950":
        constants, options = _options(tuning.launch("quantize", arch))
        kinds = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "s_ptr": "*u8"}
        yield Variant("quantize", experts.quantize_kernel, constants, options, kinds, ("width",), wide=1)
