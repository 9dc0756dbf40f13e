"""Decoding with a cache: a sequence cut anywhere gives what the whole sequence gives."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from k3_core.checkpoint import write_tiny
from k3_core.errors import CheckpointError, UnsupportedError
from k3_core.reference import Cache, KdaState, MlaState, ReferenceK3, load_model

T = 90


@pytest.fixture(scope="module", params=["k3", "linear"])
def model(request, tmp_path_factory) -> ReferenceK3:
    """float64 and weights that remember for hundreds of tokens: a state lost at a cut shows in every later logit."""
    folder = write_tiny(tmp_path_factory.mktemp(request.param), request.param, seed=5, long_memory=True)
    return load_model(folder, torch.float64)


@functools.cache
def prompt() -> list[int]:
    return torch.randint(0, 500, (T,), generator=torch.Generator().manual_seed(11)).tolist()


def in_pieces(model: ReferenceK3, lengths: list[int], between=lambda cache: None) -> Tensor:
    """Logits of the prompt run in pieces of these lengths, then the rest; `between` may tamper with the cache."""
    cache, logits, start = model.new_cache(), [], 0
    for length in [*lengths, T]:
        piece = prompt()[start : start + length]
        if piece:
            logits.append(model.step(piece, cache))
            between(cache)
        start += length
    assert cache.num_tokens == T
    return torch.cat(logits)


@given(lengths=st.lists(st.integers(1, 40), max_size=5))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_anywhere(model, lengths):
    whole = model.logits(prompt())
    assert torch.allclose(in_pieces(model, lengths), whole, rtol=0, atol=1e-8)


def test_one_token_at_a_time(model):
    assert torch.allclose(in_pieces(model, [1] * T), model.logits(prompt()), rtol=0, atol=1e-8)


@pytest.mark.parametrize("lost", ["recurrent", "conv", "rows"])
def test_a_state_lost_between_pieces_is_caught(model, lost):
    """The control of the two tests above: without any one of the three states the pieces differ."""

    def lose(cache: Cache) -> None:
        for i, state in enumerate(cache.layers):
            if isinstance(state, KdaState) and lost == "recurrent":
                cache.layers[i] = KdaState(state.conv, torch.zeros_like(state.recurrent))
            elif isinstance(state, KdaState) and lost == "conv":
                cache.layers[i] = KdaState(torch.zeros_like(state.conv), state.recurrent)
            elif isinstance(state, MlaState) and lost == "rows":
                cache.layers[i] = MlaState(state.rows[:0])

    difference = (in_pieces(model, [40], lose) - model.logits(prompt())).abs().amax(-1)
    assert difference[:40].max() < 1e-8
    assert difference[40:].max() > 1e-3
    if lost == "recurrent":
        assert difference[-1] > 1e-4, "long memory: the loss is still felt fifty tokens later"


def test_a_transposed_state_is_caught(model):
    def transpose(cache: Cache) -> None:
        for i, state in enumerate(cache.layers):
            if isinstance(state, KdaState):
                cache.layers[i] = KdaState(state.conv, state.recurrent.transpose(-1, -2))

    assert (in_pieces(model, [40], transpose) - model.logits(prompt()))[40:].abs().max() > 1e-3


def test_branches_of_a_cache_are_independent(model):
    cache = model.new_cache()
    model.step(prompt()[:30], cache)
    branch = cache.copy()
    once = model.step(prompt()[30:50], branch)
    model.step(prompt()[50:80], cache)
    again = model.new_cache()
    model.step(prompt()[:30], again)
    assert torch.equal(model.step(prompt()[30:50], again), once)
    assert (branch.num_tokens, cache.num_tokens) == (50, 60)


def test_generate_equals_the_whole_forward_every_time(model):
    tokens = model.generate(prompt()[:20], 12)
    sequence = prompt()[:20]
    for token in tokens:
        assert int(model.logits(sequence)[-1].argmax()) == token
        sequence.append(token)
    assert model.generate(prompt()[:20], 12, stop_ids=[tokens[3]]) == tokens[: tokens.index(tokens[3]) + 1]
    assert model.generate(prompt()[:20], 0) == []


def test_a_failed_step_leaves_the_cache_alone(model):
    cache = model.new_cache()
    model.step(prompt()[:10], cache)
    before = list(cache.layers)
    with pytest.raises(ValueError, match="vocabulary"):
        model.step([10**6], cache)
    assert cache.num_tokens == 10
    assert all(a is b for a, b in zip(before, cache.layers, strict=True))


def test_a_cache_of_another_model_is_refused(model, tmp_path):
    other = Cache(model.new_cache().layers[:-1])
    with pytest.raises(ValueError, match="layers"):
        model.step([1], other)
    mixed = Cache(list(reversed(model.new_cache().layers)))
    with pytest.raises(TypeError, match="another model"):
        model.step([1], mixed)


@pytest.mark.parametrize("ids", [[], [[1, 2]], [-1], [10**6], [1.5]])
def test_wrong_ids_are_refused(model, ids):
    with pytest.raises(ValueError, match="input_ids"):
        model.logits(ids)


def test_ids_may_be_tensors(model):
    assert torch.equal(model.logits(torch.tensor(prompt()[:5])), model.logits(prompt()[:5]))


def test_linear_refuses_images_and_packed_experts(tmp_path):
    folder = write_tiny(tmp_path, "linear")
    with pytest.raises(UnsupportedError, match="not quantised"):
        load_model(folder, packed_experts=True)
    with pytest.raises(UnsupportedError, match="text only"):
        load_model(folder).logits([1, 2], [Image.new("RGB", (28, 28))])
    with pytest.raises(UnsupportedError, match="float16"):
        load_model(folder, torch.float16)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    folder = write_tiny(tmp_path, "linear")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(folder)


def test_no_tensor_is_made_on_the_default_device(model):
    """On another device than the CPU this would mix devices: here the default device holds no data at all."""
    embeddings = model.embed(prompt()[:40])
    whole, cache = model.forward(embeddings).logits, model.new_cache()
    with torch.device("meta"):
        pieces = [model.forward(piece, cache).logits for piece in embeddings.split([30, 1, 9])]
    assert torch.allclose(torch.cat(pieces), whole, rtol=0, atol=1e-8)
