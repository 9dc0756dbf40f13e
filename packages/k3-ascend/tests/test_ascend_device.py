"""The whole model in real vllm 0.23 and vllm-ascend 0.23 on the fake device: classes, operators, documented rules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ascend_modelslim as writer
import ascend_support as support
import pytest
import torch

if not support.has_vllm_ascend():
    pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')", allow_module_level=True)

from torch._subclasses.fake_tensor import FakeTensorMode

from k3_ascend import channels, constraints, experts, limits, npu_ops
from k3_ascend.generation import Generation
from k3_core.checkpoint import write_tiny
from k3_core.errors import UnsupportedError

#: Operators of this project and of vLLM's plumbing; vendor operators are in the table of channels.
PLUMBING = ("vllm::", "k3_ascend::")
VENDOR = ("npu::", "_C_ascend::")


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    support.fake_device()
    support.plugins()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 5-layer Kimi K3 whose experts are wide enough for every form."""
    folder = tmp_path_factory.mktemp("ascend-k3")
    return write_tiny(folder, support.wide_config(), seed=3)


def rules_broken(census: support.Census) -> list[str]:
    """Documented constraints that the calls of a run break."""
    broken = []
    for function, args, kwargs in census.calls:
        name = function._schema.name
        broken += constraints.violations(name, constraints.bound(function._schema, args, kwargs))
    return broken


# ------------------------------------------------------------------------ registration


def test_the_platform_is_vllm_ascends_and_we_act() -> None:
    from vllm.platforms import current_platform

    from k3_core.vllm import registration

    assert type(current_platform).__name__ == "NPUPlatform"
    active = registration.active()
    assert active is not None
    assert active.vendor == "ascend"


def test_the_configuration_is_settled(tiny: Path) -> None:
    config = support.settle(tiny)
    assert config.model_config.use_mla
    assert config.parallel_config.worker_cls == "vllm_ascend.worker.worker.NPUWorker"
    assert config.cache_config.block_size % limits.KERNEL_BLOCK == 0
    assert config.compilation_config.mode.name == "NONE"  # nothing is traced
    assert config.model_config.enforce_eager  # no Triton driver here: the contracts cannot be captured
    assert config.model_config.tokenizer_mode == "kimi_k3"


def test_graphs_are_captured_for_decoding_where_kernels_are(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3_ascend import dispatch

    monkeypatch.setattr(dispatch, "triton_ready", lambda: (True, ""))
    config = support.settle(tiny)
    assert config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert not config.model_config.enforce_eager


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"additional_config": {"enable_fused_mc2": 1}}, "enable_fused_mc2"),
        ({"additional_config": {"k3_experts": "mxfp"}}, "for 950"),
        ({"additional_config": {"k3_moe_reduction": "merged"}}, "k3_moe_reduction is not a setting"),
        ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "xlite"),
        ({"additional_config": {"multistream_overlap_gate": True}}, "multistream"),
        ({"additional_config": {"enable_fused_mc2": "yes"}}, "enable_fused_mc2"),
        ({"additional_config": {"xlite_graph_config": "on"}}, "xlite"),
        ({"additional_config": {"k3_experts": ["int8"]}}, "not one of bf16, int8"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"block_size": 64}, "128"),
        ({"dtype": "float16"}, "float16"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_work_is_refused_before_weights(tiny: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        support.settle(tiny, **options)
    assert "k3-ascend cannot serve this" in str(caught.value)


def test_releases_that_do_not_fit_are_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3_ascend import versions

    monkeypatch.setattr(versions, "found", lambda: {"vllm-ascend": "0.27.0", "torch-npu": "2.10.0.post4"})
    with pytest.raises(Exception, match=r"vllm-ascend 0\.27\.0 \(supported: >=0\.23,<0\.24\)"):
        support.settle(tiny)


# ------------------------------------------------------------------------ the model, one forward


@pytest.fixture(scope="module", params=["bf16", "int8", "w4a8", "modelslim"])
def ran(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, support.Census, torch.Tensor]]:
    """(form, model, calls, logits) of a forward pass of 8 tokens on fake tensors of the NPU, weights loaded before."""
    if request.param == "modelslim":  # a scale a channel, shared experts too
        config = support.settle(writer.write(tmp_path_factory.mktemp("modelslim")).folder)
    else:
        config = support.settle(tiny, additional_config={"k3_experts": request.param})
    with support.worker(config):
        model = support.build(config)
        support.load(model, config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            support.to_fake(model)
            ids = torch.empty(8, dtype=torch.int64, device="npu:0")
            with support.forward_context(config, 8, profile=True), support.Census() as census:
                hidden = model(None, ids, inputs_embeds=model.embed_input_ids(ids))
                logits = model.compute_logits(hidden)
        yield request.param, model, census, logits


def test_the_forward_pass_has_the_right_shape(ran: Any) -> None:
    _, model, _, logits = ran
    assert logits.shape == (8, model.config.text.vocab_size)
    assert logits.device == torch.device("npu", 0)


def test_the_classes_are_ascends(ran: Any) -> None:
    _, model, _, _ = ran
    names = {type(m).__module__ + "." + type(m).__name__ for m in model.modules()}
    for expected in (
        "k3_ascend.model.KimiK3ForConditionalGeneration",
        "k3_ascend.model.KimiLinearForCausalLM",
        "k3_ascend.kda.KimiDeltaAttention",
        "k3_ascend.mla.LatentAttention",
        "k3_ascend.moe.MoE",
        "vllm_ascend.ops.linear.AscendReplicatedLinear",
        "vllm_ascend.ops.linear.AscendRowParallelLinear",
        "vllm_ascend.ops.layernorm.AscendRMSNorm",
        "vllm_ascend.ops.vocab_parallel_embedding.AscendVocabParallelEmbedding",
    ):
        assert expected in names
    assert not [n for n in names if "kimi_k3" in n.lower() and n.startswith("vllm.")]
    attention = next(m for m in model.modules() if type(m).__name__ == "MLAAttention")
    assert type(attention.impl).__name__ == "AscendMLAImpl"
    assert attention.get_attn_backend().__name__ == "AscendMLABackend"


def test_only_operators_of_the_table_are_called(ran: Any) -> None:
    _, _, census, _ = ran
    called = {name for name in census.counts() if not name.startswith(PLUMBING)}
    allowed = channels.vendor_calls() - set(channels.TABLE["silu"].calls)
    assert called <= allowed, called - allowed


def test_experts_run_two_products_and_situ_between(ran: Any) -> None:
    form, model, census, _ = ran
    counts = census.counts()
    layers = sum(layer.is_moe for layer in model.language_model.model.layers)
    shared = form == "modelslim"  # two products more, and quantised rows before each, which dispatch has not made
    assert counts["npu::npu_grouped_matmul"] == 2 * layers * (1 + shared)
    assert counts["npu::npu_moe_gating_top_k"] == layers
    assert counts["npu::npu_dynamic_quant"] == (0 if form == "bf16" else layers * (1 + 2 * shared))
    assert not [name for name in counts if "swiglu" in name]


def test_every_call_keeps_the_documented_constraints(ran: Any) -> None:
    _, _, census, _ = ran
    assert rules_broken(census) == []


def test_a_swiglu_would_be_found() -> None:
    """The two checks above can fail: the census sees the operator, and the table forbids it."""
    with FakeTensorMode(allow_non_fake_inputs=True), support.Census() as census:
        torch.ops.npu.npu_swiglu(torch.empty(4, 8, dtype=torch.bfloat16, device="npu:0"))
    assert rules_broken(census)
    assert set(census.counts()) == set(channels.TABLE["silu"].calls)


# ------------------------------------------------------------------------ before and after loading


@pytest.mark.parametrize("form", ["bf16", "w4a8", "mxfp"])
def test_a_model_without_weights_is_finished_once(form: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--load-format dummy`` loads nothing: the first forward pass brings the experts, zeros, to their layout."""
    from k3_ascend import dispatch

    if form == "mxfp":
        monkeypatch.setattr(dispatch, "generation", lambda: Generation.A950)
        monkeypatch.setattr(experts.Mxfp, "_format", lambda self, weight: weight)  # only an NPU casts formats
    config = support.settle(tiny, additional_config={"k3_experts": form}, load_format="dummy")
    with support.worker(config):
        model = support.build(config)
        blocks = [layer.feed_forward for layer in model.language_model.model.layers if layer.is_moe]
        assert blocks
        assert not any(block.finished for block in blocks)
        before = blocks[0].experts.store.w13.shape
        model.language_model.warm_up()
        assert all(block.finished for block in blocks)
        after = [block.experts.store.tensors() for block in blocks]
        if form == "mxfp":
            assert after[0]["w13"].shape == (before[0], before[2], before[1])
        assert not any(tensor.any() for tensors in after for tensor in tensors.values())
        assert dict(blocks[0].experts.named_buffers()).keys() >= after[0].keys()
        model.language_model.warm_up()
        for block, tensors in zip(blocks, after, strict=True):
            assert all(block.experts.store.tensors()[name] is tensor for name, tensor in tensors.items())
        with pytest.raises(UnsupportedError, match="a second time"):
            model.load_weights(iter(()))


def test_weights_are_prepared_once_for_triton_kernels(tiny: Path) -> None:
    """Mixes get norm * projection, KDA layers the taps by tap; renewed in place; other channels get nothing more."""
    import dataclasses

    from k3_ascend import prepared
    from k3_core.vllm.serving.attn_res import Mix
    from k3_core.vllm.serving.kda_layer import KdaLayer

    calls: list[tuple[str, dict[str, Any]]] = []

    def named(implementation: Any, channel: str) -> Any:
        def function(*args: Any, folded: Any = None, taps: Any = None, **more: Any) -> None:
            calls.append((implementation.operator, {"folded": folded, "taps": taps}))

        function.__wrapped__ = implementation.function  # type: ignore[attr-defined]
        return dataclasses.replace(implementation, name=channel, function=function)

    config = support.settle(tiny)
    with support.worker(config):
        model = support.build(config)
    mixes = [m for m in model.modules() if isinstance(m, Mix)]
    layers = [m for m in model.modules() if isinstance(m, KdaLayer)]
    for mix in mixes:
        torch.nn.init.normal_(mix.norm_weight)
        torch.nn.init.normal_(mix.proj_weight)
        mix._operator = named(mix._operator, channels.TRITON)
    for layer in layers:
        torch.nn.init.normal_(layer.conv_weight)
        for name in ("_short_conv", "_decode", "_verify"):
            setattr(layer, name, named(getattr(layer, name), channels.TRITON if name != "_verify" else "other"))
    prepared.prepare(model)
    mixes[0].norm_weight.data.mul_(2)
    prepared.prepare(model)
    for mix in mixes:
        calls.clear()
        mix._operator()
        assert torch.equal(calls[0][1]["folded"], mix.norm_weight.float() * mix.proj_weight.float())
    for layer in layers:
        calls.clear()
        layer._short_conv()
        layer._decode()
        layer._verify()
        assert [c[1]["taps"] is None for c in calls] == [False, False, True]
        assert torch.equal(calls[1][1]["taps"], layer.conv_weight.t())
        assert calls[0][1]["taps"].data_ptr() == layer.taps.data_ptr()
    assert mixes
    assert layers


# ------------------------------------------------------------------------ schemas and documentation


def documentation(operator: str) -> str:
    """torch_npu's own text about an operator."""
    import torch_npu

    text = (Path(torch_npu.__file__).parent / "_op_plugin_docs.py").read_text()
    start = text.find(f'"{operator.split("::")[1]}"')
    return "" if start < 0 else text[start : text.find("_add_torch_npu_docstr", start)]


@pytest.mark.parametrize("constraint", [c for c in constraints.CONSTRAINTS if c.quote], ids=lambda c: c.rule[:40])
def test_the_documentation_says_so(constraint: constraints.Constraint) -> None:
    assert constraint.quote in documentation(constraint.operator)


@pytest.mark.parametrize("name", [n for n in constraints.UNDOCUMENTED if n.startswith("npu::")])
def test_what_is_called_undocumented_is(name: str) -> None:
    assert documentation(name) == ""


def test_every_vendor_call_has_a_schema() -> None:
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    assert channels.vendor_calls() <= known
    assert {c.operator for c in constraints.CONSTRAINTS} <= known


def test_the_calls_of_our_source_are_those_of_the_table() -> None:
    import k3_ascend

    folder = Path(k3_ascend.__file__).parent
    text = "".join(p.read_text() for p in folder.glob("*.py"))
    direct = {f"{space}::{name}" for space, name in re.findall(r"torch\.ops\.(npu|_C_ascend)\.(\w+)\(", text)}
    direct |= {f"npu::{name}" for name in re.findall(r"torch_npu\.(npu_\w+)\(", text)}
    assert direct
    assert direct <= channels.vendor_calls()


def test_the_chunked_operator_of_later_releases_is_only_reported() -> None:
    assert "absent" in npu_ops.chunked_kda_operator()


@pytest.mark.parametrize("function", [npu_ops.route, npu_ops.gated_norm, npu_ops.kda_decode, npu_ops.short_conv])
def test_adapters_use_what_operators_return(function: Any) -> None:
    """No adapter reads an argument that an operator may have written: only what came back."""
    source = inspect.getsource(function)
    assert re.search(r"=\s*torch\.ops\.", source)
    assert "_out" not in re.sub(r"flag_out|out_flag", "", re.findall(r"torch\.ops\.[\w.]+", source)[0])


def test_our_operators_return_what_their_alias_declares() -> None:
    import k3_ascend.state_copy  # noqa: F401

    ours = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("k3_ascend::")]
    assert ours
    for schema in ours:
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for result in schema.returns:
            if result.alias_info is not None:
                assert written, schema


def test_only_latent_layers_meet_the_update_of_graphs() -> None:
    """vllm-ascend pairs layers and captured operators by position: recurrent layers must not be among them."""
    from types import SimpleNamespace

    from vllm_ascend.attention.mla_v1 import AscendMLAImpl, AscendMLAMetadata

    from k3_ascend import mla

    seen: list[list[str]] = []
    original = AscendMLAImpl.update_graph_params
    try:
        AscendMLAImpl.update_graph_params = staticmethod(
            lambda stream, context: seen.append(list(context.attn_metadata))
        )
        mla.only_latent_layers()
        once = AscendMLAImpl.update_graph_params
        mla.only_latent_layers()
        assert AscendMLAImpl.update_graph_params is once
        latent = AscendMLAMetadata.__new__(AscendMLAMetadata)
        whole = {"a.kda": object(), "b.attn": latent, "c.kda": object()}
        context = SimpleNamespace(attn_metadata=whole)
        AscendMLAImpl.update_graph_params(None, context)
        assert seen == [["b.attn"]]
        assert context.attn_metadata is whole
    finally:
        AscendMLAImpl.update_graph_params = original


@pytest.mark.parametrize(("heads", "padded"), [(1, 8), (6, 8), (12, 16), (24, 32), (48, 64), (96, 128), (128, 128)])
def test_few_heads_are_padded_to_a_documented_count(heads: int, padded: int) -> None:
    from k3_ascend import mla

    assert mla.padded_heads(heads) == padded


# ------------------------------------------------------------------------ 950, fake tensors


def test_mxfp_products_take_fp4_weights_and_fp8_rows() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("npu:0"), support.Census() as census:
        store = experts.Mxfp(4, 128, 192)
        store.w13, store.w2 = store.w13.transpose(1, 2), store.w2.transpose(1, 2)
        store.w13_scale, store.w2_scale = (
            s.unflatten(-1, (-1, 2)).transpose(1, 2) for s in (store.w13_scale, store.w2_scale)
        )
        rows = experts.Rows(torch.empty(10, 192, dtype=torch.bfloat16), None, torch.empty(4, dtype=torch.int64), 1)
        out = store.mlp(rows, lambda x: x[:, :128] * x[:, 128:])
    assert out.shape == (10, 192)
    assert out.dtype == torch.bfloat16
    products = [kwargs for f, _, kwargs in census.calls if f._schema.name == "npu::npu_grouped_matmul"]
    assert len(products) == 2
    assert all(kwargs["weight_dtype"] == 296 for kwargs in products)  # float4_e2m1fn_x2
    assert rules_broken(census) == []


def test_a_build_for_another_generation_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ascend import utils

    from k3_ascend import generation

    for name, expected in (("A2", Generation.A2), ("A3", Generation.A3), ("A5", Generation.A950)):
        monkeypatch.setattr(utils, "_ascend_device_type", utils.AscendDeviceType[name])
        assert generation.of_build() is expected
    monkeypatch.setattr(utils, "_ascend_device_type", utils.AscendDeviceType["_310P"])
    with pytest.raises(Exception, match="310P"):
        generation.of_build()
