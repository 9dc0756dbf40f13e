"""ModelSlim W4A8 checkpoints: what is refused before weights, values after loading, products, logits, two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_modelslim as writer
import ascend_support as support
import pytest
import torch

if not support.has_vllm_ascend():
    pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')", allow_module_level=True)

import ascend_reference_ops as reference_ops

from k3_ascend import constraints, experts, modelslim
from k3_ascend.generation import Generation
from k3_core.checkpoint import CheckpointReader, Topology, shard_plan
from k3_core.errors import CheckpointError
from k3_core.reference import load_model

BF16 = torch.bfloat16
PROMPT = list(range(7, 19))
#: Bound on the rms of the logits' error relative to theirs. An int8 row has a step of amax / 127, about 3.5 sigma over
#: 127: an error of 0.8 % of its rms, which a product hands on. Two products a block in 4 expert layers, were the stream
#: of residuals made of nothing else: sqrt(8) * 0.8 % = 2.3 %; half as much again for the roundings of bfloat16.
LOGITS = 0.035
FORMS = {
    "channel": {"packed": True, "group": 0, "shared": True},
    "group": {"packed": True, "group": 256, "shared": True},
    "unpacked": {"packed": False, "group": 256, "shared": False},
    "int8": {"packed": True, "group": 0, "shared": False, "int8": True},
    "both": {"packed": True, "group": 256, "shared": True, "int8": True},
}


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    support.fake_device()
    support.plugins()
    reference_ops.install()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, writer.Written]:
    return {name: writer.write(tmp_path_factory.mktemp(name), **form) for name, form in FORMS.items()}  # type: ignore[arg-type]


def found(checkpoint: writer.Written) -> modelslim.Layout:
    return modelslim.layout(checkpoint.description, checkpoint.config)


def stored_values(store: Any, index: int, matrix: str) -> torch.Tensor:
    """[N, K] of one matrix in a store, unpacked here without the code under test."""
    half = store.width
    weight, scale = (store.w2, store.w2_scale) if matrix == "w2" else (store.w13, store.w13_scale)
    nibbles = torch.stack([(weight[index] >> (4 * i)) & 15 for i in range(8)], dim=-1).flatten(-2)
    codes = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    scales = scale[index].to(torch.int32).view(torch.float32)
    values = (codes * scales.repeat_interleave(codes.shape[0] // scales.shape[0], dim=0)).t()
    return values if matrix == "w2" else values[:half] if matrix == "w1" else values[half:]


# -------------------------------------------------------------------------------------------------- before weights load


def wrong_type(w: writer.Written) -> None:
    w.description[next(n for n in w.description if n.endswith("experts.3.w2.weight"))] = "W8A8_DYNAMIC"


def one_shared_float(w: writer.Written) -> None:
    w.description[next(n for n in w.description if n.endswith("shared_experts.up_proj.weight"))] = "FLOAT"


def attention_int8(w: writer.Written) -> None:
    w.description[next(n for n in w.description if n.endswith("self_attn.o_proj.weight"))] = "W8A8_DYNAMIC"


def attention_static(w: writer.Written) -> None:
    w.description[next(n for n in w.description if n.endswith("self_attn.o_proj.weight"))] = "W8A8"


def router_int8(w: writer.Written) -> None:
    w.description[next(n for n in w.description if n.endswith("block_sparse_moe.gate.weight"))] = "W8A8_DYNAMIC"


def undescribed(w: writer.Written) -> None:
    del w.description[next(n for n in w.description if n.endswith("experts.0.w1.weight"))]


def missing_scale(w: writer.Written) -> None:
    del w.tensors[next(n for n in w.tensors if n.endswith("experts.5.w3.weight_scale"))]


def missing_bias(w: writer.Written) -> None:
    del w.tensors[next(n for n in w.tensors if n.endswith("shared_experts.down_proj.scale_bias"))]


def unpacked_weight(w: writer.Written) -> None:
    name = next(n for n in w.tensors if n.endswith("experts.1.w1.weight"))
    w.tensors[name] = torch.cat([w.tensors[name]] * 2)


def a_rotation(w: writer.Written) -> None:
    w.description["metadata"] = {"quarot": {"map": []}}


REFUSED: list[tuple[Callable[[writer.Written], Any], str]] = [
    (wrong_type, r"experts\.3\.w2\.weight is W8A8_DYNAMIC\. Every routed expert"),
    (one_shared_float, r"shared_experts\.up_proj\.weight is FLOAT\..*shared ones of all layers or of none"),
    (attention_int8, r"tensor missing.*self_attn\.o_proj\.weight_(offset|scale)"),
    (attention_static, r"o_proj\.weight is W8A8\..*FLOAT for every other tensor"),
    (router_int8, r"gate\.weight is W8A8_DYNAMIC\..*FLOAT for every other tensor"),
    (undescribed, r"experts\.0\.w1\.weight is not described"),
    (missing_scale, r"tensor missing.*experts\.5\.w3\.weight_scale"),
    (missing_bias, r"tensor missing.*shared_experts\.down_proj\.scale_bias"),
    (unpacked_weight, r"wrong shape.*experts\.1\.w1\.weight, expected \[256, 512\], found \[512, 512\]"),
    (a_rotation, r"metadata\.quarot is not supported"),
    (lambda w: w.description.update(version="2.0.0"), r"version '2\.0\.0' is not known"),
    (lambda w: w.description.update(group_size=128), r"group_size 128 .*only 0 or 256"),
    (lambda w: w.description.update(kv_cache_type="C8"), r"kv_cache_type is not supported"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_what_is_not_as_described_is_refused_before_weights(
    change: Callable[[writer.Written], Any], said: str, written: Any, tmp_path: Path
) -> None:
    original = written["channel"]
    damaged = writer.Written(
        tmp_path / "k3", original.plain, original.config, dict(original.description), dict(original.tensors)
    )
    change(damaged)
    with pytest.raises(Exception, match=f"(?s){said}"):
        support.settle(damaged.save())


def test_the_vendors_own_flag_is_accepted(written: Any) -> None:
    folder = written["channel"].folder
    for options in ({}, {"quantization": "ascend"}):
        assert support.settle(folder, **options).model_config.quantization == "ascend"  # found by vllm-ascend itself


def test_other_forms_and_devices_are_refused(written: Any) -> None:
    with pytest.raises(Exception, match="experts are int4"):
        support.settle(written["channel"].folder, additional_config={"k3_experts": "int8"})
    w = written["group"]
    said = list(modelslim.reasons(found(w), w.config, Topology(tp_size=4), None, Generation.A950))
    assert any("for A2 and A3" in reason for reason in said)
    assert any("multiples of 256" in reason for reason in said)
    w = written["channel"]
    assert any("slices" in r for r in modelslim.reasons(found(w), w.config, Topology(tp_size=3), None, Generation.A2))


def test_a_description_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / modelslim.DESCRIPTION).write_text("[1]")
    with pytest.raises(CheckpointError, match="expected an object"):
        modelslim.description(str(tmp_path))


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", [Topology(), Topology(tp_size=2, tp_rank=1), Topology(2, 1, 2, 1)], ids=str)
def test_every_ranks_part_has_the_values_of_the_float_matrix(form: str, topology: Topology, written: Any) -> None:
    """Bit for bit: codes and scales are taken as they are, for whole experts and for cut ones."""
    w = written[form]
    layout = found(w)
    plain = CheckpointReader(w.plain, w.config)
    reader = CheckpointReader(w.folder, w.config, manifest=modelslim.verify(w.folder, w.config, layout))
    parts = dict(reader.tensors(modelslim.plan(w.config, layout, topology), copy=True))
    checked = 0
    for name, shard in shard_plan(w.config, topology).items():
        if not layout.is_int4(name) or shard.is_empty:
            continue
        stem = name.removesuffix("weight")
        codes, scale = modelslim.decode({k: parts[stem + k] for k in layout.kinds()}, layout)
        expected = shard.take(plain.read(name)).float()
        assert torch.equal(codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1), expected), name
        checked += 1
    assert checked > 20
    for name in layout.int8:
        stem = name.removesuffix("weight")
        values = modelslim.dequantised({k: parts[stem + k] for k in modelslim.INT8_KINDS}, BF16)
        assert torch.equal(values, shard_plan(w.config, topology)[name].take(plain.read(name))), name
    assert bool(layout.int8) is ("int8" in FORMS[form])


def model_of(folder: Path) -> Any:
    config = support.settle(folder)
    config.model_config.dtype = BF16
    return config


@pytest.mark.parametrize("form", FORMS)
def test_the_loaded_model_computes_what_the_values_say(form: str, written: Any) -> None:
    """Values of all stores bit for bit; logits near the reference on the dequantised weights (``LOGITS``)."""
    w = written[form]
    error, model = relative_error(w.folder, w.plain)
    print(f"\n{form}: relative rms of the logits {error:.3f}")
    assert error < LOGITS
    plain = CheckpointReader(w.plain, w.config)
    for index in (0, 2, 3):  # int8, int8, float where anything is int8; a dense layer, a KDA and an MLA layer
        projection = model.language_model.model.layers[index].self_attn.o_proj.weight
        assert torch.equal(projection, plain.read(f"language_model.model.layers.{index}.self_attn.o_proj.weight"))
    layers = [(i, layer) for i, layer in enumerate(model.language_model.model.layers) if layer.is_moe]
    assert layers
    for index, layer in layers:
        stem = f"language_model.model.layers.{index}.block_sparse_moe."
        block = layer.feed_forward
        for matrix, name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            for expert in (0, 7):
                expected = plain.read(f"{stem}experts.{expert}.{matrix}.weight").float()
                assert torch.equal(stored_values(block.experts.store, expert, matrix), expected)
            if FORMS[form]["shared"]:
                expected = plain.read(f"{stem}shared_experts.{name}_proj.weight").float()
                assert torch.equal(stored_values(block.shared_experts.experts.store, 0, matrix), expected)
    assert (type(layers[0][1].feed_forward.shared_experts).__name__ == "Int4SharedExperts") == FORMS[form]["shared"]


def relative_error(folder: Path, plain: Path) -> tuple[float, Any]:
    """(rms of the logits' error against the fp32 reference on the plain values, relative to theirs; the model)."""
    expected = load_model(plain, dtype=torch.float32).logits(torch.tensor(PROMPT))
    config = model_of(folder)
    with support.worker(config):
        model = support.build(config)
        support.load(model, config)
        with support.Census() as census:
            logits = support.Steps(model, config).prefill([PROMPT])[0]
    counts = census.counts()
    moe = [layer.feed_forward for layer in model.language_model.model.layers if layer.is_moe]
    blocks = sum(2 if type(m.shared_experts).__name__ == "Int4SharedExperts" else 1 for m in moe)
    assert counts["npu::npu_grouped_matmul"] == 2 * blocks
    assert not [name for name in counts if "swiglu" in name]
    broken = [
        violation
        for function, args, kwargs in census.calls
        for violation in constraints.violations(
            function._schema.name, constraints.bound(function._schema, args, kwargs)
        )
    ]
    assert broken == []
    return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()), model


@pytest.mark.parametrize("group", [0, 256])
def test_products_equal_the_formula_on_the_same_rows(group: int) -> None:
    """Both products with SiTU replaced by a half: exact but for bfloat16 results and the int8 rows between (fp64)."""
    layout = modelslim.Layout(packed=True, group=group, shared=True)
    generator = torch.Generator().manual_seed(1)
    store = modelslim.Store(2, 256, 512, layout)
    values: list[dict[str, torch.Tensor]] = []
    for expert in range(2):
        parts, of_expert = {}, {}
        for matrix, shape in (("w1", (256, 512)), ("w3", (256, 512)), ("w2", (512, 256))):
            weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            kinds, of_expert[matrix] = writer.quantise(weight, f"{matrix}.weight", True, group)
            parts |= {(matrix, kind): part for kind, part in kinds.items()}
        store.put(expert, parts)
        values.append(of_expert)
        both = torch.cat([of_expert["w1"], of_expert["w3"]])
        torch.testing.assert_close(store.w13_bias[expert], 8 * both.sum(1), rtol=1e-5, atol=1e-4)
    counts = torch.tensor([3, 2])
    x = torch.randn(5, 512, generator=generator).to(BF16)
    found_rows = store.mlp(experts.Rows(x, None, counts, 1), lambda h: h[:, : h.shape[1] // 2] * 0.5)
    for row in range(5):
        of_expert = values[0 if row < 3 else 1]
        codes, scale = reference_ops.npu_dynamic_quant(x[row : row + 1])
        inner = (codes.double() * scale.double()) @ of_expert["w1"].double().t() * 0.5
        expected = (inner @ of_expert["w2"].double().t())[0]
        # Rounding of the inner row: bfloat16 twice (2^-9 each) and half an int8 step of its largest value, each entry
        # independently: their sum over 256 inputs has this rms; five of them.
        size = float(inner.abs().max()) / 127 / 12**0.5 + 2 * 2**-9 * float(inner.square().mean().sqrt())
        noise = size * of_expert["w2"].double().square().sum(1).sqrt()
        assert ((found_rows[row].double() - expected).abs() <= 5 * noise + 2**-8 * expected.abs()).all()


# -------------------------------------------------------------------------------------------------------------- mutants


def test_swapped_nibbles_are_caught_by_the_stored_bias(written: Any, tmp_path: Path) -> None:
    for form in ("channel", "group"):
        w = written[form]
        name = next(n for n in w.tensors if n.endswith("experts.2.w3.weight"))
        changed = writer.Written(tmp_path / form, w.plain, w.config, w.description, dict(w.tensors))
        changed.tensors[name] = writer.swap_nibbles(w.tensors[name])
        config = model_of(changed.save())
        with support.worker(config):
            model = support.build(config)
            with pytest.raises(CheckpointError, match=r"experts\.2.*w3: scale_bias of \d+ of 512 rows does not belong"):
                support.load(model, config)


def test_swapped_nibbles_would_show_in_the_values(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant in our reader, with the comparison of the bias switched off: the logits tell."""
    original = modelslim._codes
    monkeypatch.setattr(modelslim, "_codes", lambda stored, found: original(writer.swap_nibbles(stored), found))
    monkeypatch.setattr(modelslim, "_compare_bias", lambda *_: None)
    w = written["channel"]
    error, _ = relative_error(w.folder, w.plain)
    print(f"\nswapped nibbles: relative rms of the logits {error:.3f}")
    assert error > 4 * LOGITS


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("weight_offset", 1.0, "weight_offset is not zero"),
        ("weight_scale", float("nan"), "negative or not a number"),
        ("weight_scale", -1.0, "negative or not a number"),
        ("scale_bias", 1e3, "does not belong to the codes"),
        ("scale_bias", float("nan"), "does not belong to the codes"),
    ],
)
def test_values_that_cannot_be_are_refused(kind: str, value: float, said: str) -> None:
    layout = modelslim.Layout(packed=True, group=0, shared=False)
    parts, _ = writer.quantise(torch.randn(64, 64), "w2.weight", True, 0)
    parts[kind] = parts[kind].clone()
    parts[kind][3, 0] = value
    with pytest.raises(CheckpointError, match=said):
        modelslim.decode(parts, layout)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("weight_offset", 1.0, "weight_offset is not zero"),
        ("weight_scale", float("nan"), "negative or not a number"),
        ("weight_scale", -1.0, "negative or not a number"),
    ],
)
def test_int8_values_that_cannot_be_are_refused(kind: str, value: float, said: str) -> None:
    parts, values = writer.quantise_int8(torch.randn(64, 48))
    assert torch.equal(modelslim.dequantised(parts, BF16), values.to(BF16))
    parts[kind][3, 0] = value
    with pytest.raises(CheckpointError, match=said):
        modelslim.dequantised(parts, BF16)


def test_codes_that_are_not_int4_are_refused() -> None:
    layout = modelslim.Layout(packed=False, group=256, shared=False)
    parts, _ = writer.quantise(torch.randn(8, 256), "w1.weight", False, 256)
    parts["weight"][0, 0] = 8
    with pytest.raises(CheckpointError, match="outside -8"):
        modelslim.decode(parts, layout)


def test_the_description_that_the_writer_makes_is_json(written: Any) -> None:
    raw = json.loads((written["group"].folder / modelslim.DESCRIPTION).read_text())
    assert modelslim.layout(raw, written["group"].config) == modelslim.Layout(packed=True, group=256, shared=True)
