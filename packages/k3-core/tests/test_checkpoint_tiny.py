"""Tiny checkpoints: the released layout, working tokenizer, sane logits, and states that last when asked to."""

import dataclasses
import hashlib
import json
import re

import pytest
import tiktoken
import tiktoken.load
import torch
from safetensors import safe_open

from k3_core.checkpoint import CheckpointReader, tensor_table, tiny_config, unpack_mxfp4, verify_headers, write_tiny
from k3_core.checkpoint.table import TensorSpec
from k3_core.checkpoint.tiny_vocab import K3_SPECIALS, LINEAR_SPECIALS, mergeable_ranks
from k3_core.checkpoint.tiny_weights import _codes
from k3_core.config import load_config
from k3_core.errors import ConfigError
from k3_core.reference import load_model


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("k3"), "k3", seed=1)


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_files_of_k3(k3):
    names = {path.name for path in k3.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
        *(f"model-{i:05d}-of-000008.safetensors" for i in range(1, 9)),
    }
    config = json.loads((k3 / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert "quantization_config" not in config
    assert load_config(k3) == tiny_config("k3")
    with safe_open(k3 / "model-00001-of-000008.safetensors", "pt") as shard:
        assert shard.metadata() == {"format": "pt"}


def test_placement(k3):
    manifest = verify_headers(k3)
    for name, tensor in manifest.items():
        layer = re.match(r"language_model\.model\.layers\.(\d+)\.", name)
        expected = int(layer[1]) + 1 if layer else 6 + ("mm_projector" in name) + 2 * ("vision_tower" in name)
        assert tensor.shard == f"model-{expected:05d}-of-000008.safetensors", name


def test_k3_details(k3):
    manifest = verify_headers(k3)
    a_log = manifest["language_model.model.layers.0.self_attn.A_log"]
    assert (a_log.shape, a_log.dtype_name) == ((6,), "F32")
    codes, scales, zero_groups = set(), set(), 0
    for name, tensor in CheckpointReader(k3):
        if name.endswith("weight_packed"):
            codes |= set(tensor.flatten().tolist())
        elif name.endswith("weight_scale"):
            scales |= set(tensor.flatten().tolist())
            zero_groups += int((tensor == 0).sum())
        elif tensor.is_floating_point():
            assert torch.isfinite(tensor).all(), name
    assert codes == set(range(256))
    assert zero_groups > 0
    assert max(scales) < 130


@pytest.mark.parametrize(("preset", "layers", "tensors"), [("k3", 5, 338), ("k3-13", 13, 934), ("linear", 7, 279)])
def test_presets(preset, layers, tensors):
    config = tiny_config(preset)
    assert config.text.num_hidden_layers == layers
    assert config.text.layer_kind(layers - 1) == "mla"
    assert len(tensor_table(config)) == tensors
    assert config.is_kimi_linear == (preset == "linear")
    with pytest.raises(ConfigError, match="preset 'k4' is unknown"):
        tiny_config("k4")


def test_own_configurations(tmp_path):
    config = tiny_config("k3", num_hidden_layers=2, num_experts=4, attn_res_block_size=2, num_ranks=300)
    assert config.text.linear_attn.full_attn_layers == (2,)
    assert config.text.vocab_size == 556
    assert config.media_placeholder_token_id == 321
    folder = write_tiny(tmp_path, config, a_log_padding=0)
    assert load_config(folder) == config
    assert verify_headers(folder)["language_model.model.layers.0.self_attn.A_log"].shape == (4,)
    text_only = write_tiny(tmp_path / "text", config.to_dict()["text_config"])
    assert not (text_only / "preprocessor_config.json").exists()
    assert load_model(text_only).logits([1, 2, 3]).shape == (3, 556)
    with pytest.raises(ConfigError, match="num_ranks = 44: the 256 single bytes"):
        write_tiny(tmp_path, tiny_config("linear", vocab_size=300, eos_token_id=2, bos_token_id=1, pad_token_id=0))


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    config = tiny_config("k3", num_hidden_layers=1, num_experts=2)
    first = digest(write_tiny(tmp_path / "a", config, seed=3))
    assert digest(write_tiny(tmp_path / "b", config, seed=3)) == first
    other = digest(write_tiny(tmp_path / "c", config, seed=4))
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.startswith("model-")}


def encoding(folder):
    """As the released tokenizer reads its files, with a simple split pattern in place of the released one."""
    ranks = tiktoken.load.load_tiktoken_bpe(str(folder / "tiktoken.model"))
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    named = {int(i): token["content"] for i, token in added.items()}
    specials = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)}
    return tiktoken.Encoding("tiny", pat_str=r" ?\w+|[^\w\s]+|\s+", mergeable_ranks=ranks, special_tokens=specials)


def test_tokenizer(k3):
    tokens = encoding(k3)
    assert tokens.n_vocab == load_config(k3).text.vocab_size == 768
    for text in ("The ferry leaves the harbour", "naïve 灯塔 🙂\r\n\t", "".join(map(chr, range(1, 700)))):
        assert tokens.decode(tokens.encode(text, disallowed_special=())) == text
    assert len(tokens.encode("The assistant answers the message")) < 16  # merges are used
    ids = {name: tokens.encode_single_token(name) for name in ("<|end_of_msg|>", "<|open|>", "<|media_pad|>", "[PAD]")}
    assert ids == {"<|end_of_msg|>": 514, "<|open|>": 515, "<|media_pad|>": 533, "[PAD]": 767}
    config = load_config(k3)
    assert (config.eos_token_id, config.media_placeholder_token_id, config.pad_token_id) == (514, 533, 767)


def test_every_rank_is_a_merge_of_earlier_ones():
    ranks = mergeable_ranks(512)
    known = set(ranks[:256])
    assert known == {bytes([b]) for b in range(256)}
    for token in ranks[256:]:
        assert token not in known
        assert any(token[:i] in known and token[i:] in known for i in range(1, len(token)))
        known.add(token)
    with pytest.raises(ConfigError, match="the built-in sample gives only"):
        mergeable_ranks(100_000)


def test_special_slots(tmp_path):
    assert (K3_SPECIALS[2], LINEAR_SPECIALS[2]) == ("<|end_of_msg|>", "<|im_end|>")
    folder = write_tiny(tmp_path, tiny_config("linear", num_hidden_layers=1))
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert added["514"]["content"] == "<|im_end|>"
    assert added["529"]["content"] == "<|im_middle|>"


IDS = torch.randint(0, 512, (320,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("preset", ["k3", "linear"])
def test_logits_are_not_degenerate(tmp_path, preset):
    logits = load_model(write_tiny(tmp_path, preset, seed=1)).logits(IDS[:64])
    assert torch.isfinite(logits).all()
    assert 1.5 < float(logits.std()) < 4
    best = logits.topk(2, -1).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.2
    assert logits.argmax(-1).unique().numel() > 25


def forgetting(model, distance=200, cut=80):
    """rms change of the logits `distance` tokens after all recurrent KDA states are dropped."""
    ids = IDS[: cut + distance + 20]
    whole, broken = model.new_cache(), model.new_cache()
    for cache in (whole, broken):
        model.forward(model.embed(ids[:cut]), cache)
    broken.layers = [
        dataclasses.replace(s, recurrent=torch.zeros_like(s.recurrent)) if hasattr(s, "recurrent") else s
        for s in broken.layers
    ]
    after = [model.forward(model.embed(ids[cut:]), cache).logits[distance:] for cache in (whole, broken)]
    return float((after[0] - after[1]).square().mean().sqrt())


@pytest.mark.parametrize("preset", ["k3", "linear"])
def test_long_memory_keeps_the_state(tmp_path, preset):
    """A state lost 200 tokens ago still moves the logits (std 2.5) clearly; with ordinary weights it hardly does."""
    ordinary = forgetting(load_model(write_tiny(tmp_path / "a", preset, seed=1)))
    long = forgetting(load_model(write_tiny(tmp_path / "b", preset, seed=1, long_memory=True)))
    assert long > 0.15
    assert long > 2.5 * ordinary


@pytest.mark.parametrize("std", [2.0**-9, 0.0051, 0.11])
def test_codes_drawn_on_an_accelerator_have_the_wanted_size(std):
    """Where values are drawn on a device their codes are drawn as such: right size, a few scales of zero."""
    generator = torch.Generator().manual_seed(5)
    packed, scale = _codes(TensorSpec((256, 512), torch.uint8), std, generator)
    assert packed.shape == (256, 256)
    assert scale.shape == (256, 16)
    assert 0.002 < (scale == 0).float().mean() < 0.03
    assert scale.unique().numel() == 3
    # Two powers of two at or above std rounded down to one: rms between 0.75 and 1.6 of it.
    assert 0.75 < unpack_mxfp4(packed, scale, torch.float32).std() / std < 1.65
