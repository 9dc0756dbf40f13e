"""The layers on ragged batches with a poisoned cache: shuffled slots, stale states, padding, no metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the layers derive from vLLM's")

import torch
from torch import Tensor

from k3_core.checkpoint import tensor_table, tiny_config
from k3_core.config import TextConfig
from k3_core.contracts import kda, mla, moe, situ, vision
from k3_core.vllm import compat
from k3_core.vllm.backends import Step
from k3_core.vllm.layers import cache
from k3_core.vllm.layers.kda import KimiDeltaAttention
from k3_core.vllm.layers.mla import KimiLatentAttention
from k3_core.vllm.layers.moe import MoE
from k3_core.vllm.layers.vision import Projector

#: Tokens of three sequences, step by step: a whole prompt, chunks, decodes, an idle sequence, a one-token prompt.
STEPS: list[dict[int, int]] = [{0: 5, 1: 7}, {0: 1, 1: 6}, {1: 1, 2: 1, 0: 1}, {2: 1, 1: 4}, {0: 1, 2: 3, 1: 1}]
LENGTHS = {seq: sum(step.get(seq, 0) for step in STEPS) for seq in range(3)}
NUM_BLOCKS, BLOCK = 11, 4
ATOL = 2e-5  # fp32: chunked, recurrent and absorbed forms against one whole pass


@pytest.fixture(params=["k3", "linear"])
def text(request: pytest.FixtureRequest) -> TextConfig:
    return tiny_config(request.param).text


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def settings(dtype: torch.dtype = torch.float32, state: str = "auto") -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(
            mamba_ssm_cache_dtype=state, block_size=BLOCK, mamba_block_size=64, mamba_cache_mode="none"
        ),
    )


def fill(layer: torch.nn.Module) -> None:
    for name, weight in layer.named_parameters():
        weight.data = torch.randn(weight.shape) * (0.3 if weight.dim() > 1 else 1.0) / max(1.0, weight.shape[-1] ** 0.5)
        if name.endswith("norm.weight"):
            weight.data = 1 + 0.2 * torch.randn(weight.shape)
        if name == "dt_bias":
            weight.data = torch.randn(weight.shape) - 3


def fill_plain(layer: torch.nn.Module) -> None:
    """As :func:`fill`, for a module of which some parameters are bytes."""
    for weight in layer.parameters():
        if weight.is_floating_point():
            weight.data = torch.randn(weight.shape) / weight.shape[-1] ** 0.5


def strided_cache(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A cache of NaN whose pages stand further apart than they are long, as padded pages do."""
    numel = 1
    for size in shape[1:]:
        numel *= size
    raw = torch.full((shape[0], numel + 5), float("nan"), dtype=dtype)
    return raw[:, :numel].view(shape[0], *shape[1:])


def steps(tables: dict[int, list[int]], padding: int) -> Any:
    """(step, sequences in order) for STEPS: requests shuffled, `padding` padded tokens and one padded request."""
    done = dict.fromkeys(LENGTHS, 0)
    for number, counts in enumerate(STEPS):
        order = sorted(counts, key=lambda seq: (seq * 7 + number) % 5)
        starts, lens, mapping = [0], [], []
        for seq in order:
            positions = range(done[seq], done[seq] + counts[seq])
            mapping += [tables[seq][p // BLOCK] * BLOCK + p % BLOCK for p in positions]
            done[seq] += counts[seq]
            starts.append(starts[-1] + counts[seq])
            lens.append(done[seq])
        width = max(map(len, tables.values()))
        rows = [tables[seq] + [0] * (width - len(tables[seq])) for seq in order] + [[0] * width]
        step = Step(
            query_start=[*starts, starts[-1]],
            seq_lens=[*lens, 0],
            state_slots=[tables[seq][0] for seq in order] + [0],
            block_table=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor(mapping + [-1] * padding),
        )
        yield step, order


def run(layer: Any, xs: dict[int, Tensor], monkeypatch: pytest.MonkeyPatch, padding: int = 3) -> dict[int, Tensor]:
    """Outputs of every sequence, served in STEPS; checks padding rows on the way."""
    tables = {0: [9, 2, 5], 1: [4, 10, 1, 6, 8], 2: [3, 7]}
    outputs: dict[int, list[Tensor]] = {seq: [] for seq in xs}
    done = dict.fromkeys(xs, 0)
    for step, order in steps(tables, padding):
        counts = [end - start for start, end in zip(step.query_start, step.query_start[1:], strict=False)]
        pieces = []
        for seq, count in zip(order, counts, strict=False):
            pieces.append(xs[seq][done[seq] : done[seq] + count])
            done[seq] += count
        x = torch.cat([*pieces, torch.full((padding, xs[0].shape[1]), 7.0)])
        monkeypatch.setattr(compat, "forward_metadata", lambda prefix, step=step: step)
        out = layer(x)
        assert torch.equal(out[len(x) - padding :], torch.zeros(padding, x.shape[1])), "a padded row was not zeroed"
        for seq, piece in zip(order, out[: len(x) - padding].split(counts[: len(order)]), strict=True):
            outputs[seq].append(piece)
    return {seq: torch.cat(pieces) for seq, pieces in outputs.items()}


def inputs(text: TextConfig) -> dict[int, Tensor]:
    return {seq: torch.randn(length, text.hidden_size) for seq, length in LENGTHS.items()}


def kda_layer(text: TextConfig, state: str = "auto") -> tuple[KimiDeltaAttention, tuple[Tensor, Tensor]]:
    config = settings(state=state)
    layer = KimiDeltaAttention(text, config, "model.layers.0.self_attn")
    fill(layer)
    assert config.compilation_config.static_forward_context == {"model.layers.0.self_attn": layer}
    conv, recurrent = (
        strided_cache((NUM_BLOCKS, *shape), dtype)
        for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
    )
    layer.kv_cache = (conv, recurrent)
    return layer, (conv, recurrent)


def whole_kda(text: TextConfig, layer: Any, x: Tensor) -> Tensor:
    """One pass of the contract over the whole sequence, by the recurrence."""
    full = text.linear_attn.use_full_rank_gate
    weights = kda.KdaWeights(
        q=layer.q_proj.weight, k=layer.k_proj.weight, v=layer.v_proj.weight,
        q_conv=layer.q_conv1d.weight, k_conv=layer.k_conv1d.weight, v_conv=layer.v_conv1d.weight,
        f_a=layer.f_a_proj.weight, f_b=layer.f_b_proj.weight, b=layer.b_proj.weight,
        a_log=layer.A_log, dt_bias=layer.dt_bias, o_norm=layer.o_norm.weight, o=layer.o_proj.weight,
        g=layer.g_proj.weight if full else layer.g_b_proj.weight, g_a=None if full else layer.g_a_proj.weight,
    )  # fmt: skip
    linear = text.linear_attn
    out, _ = kda.layer(
        x, weights, num_heads=linear.num_heads, lower_bound=linear.gate_lower_bound, eps=text.rms_norm_eps, chunk=None
    )
    return out


def test_kda_equals_the_whole_sequence(text: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (conv, recurrent) = kda_layer(text)
    xs = inputs(text)
    outputs = run(layer, xs, monkeypatch)
    for seq, x in xs.items():
        torch.testing.assert_close(outputs[seq], whole_kda(text, layer, x), atol=ATOL, rtol=0)
    used = {9, 4, 3}
    for state in (conv, recurrent):
        for block in range(NUM_BLOCKS):
            assert state[block].isnan().all() == (block not in used), block


def test_a_narrow_kda_state_is_close(text: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """--mamba-ssm-cache-dtype bfloat16: each step rounds the state to 8 bits, 2^-8 of its size, a few times over."""
    layer, (_, recurrent) = kda_layer(text, state="bfloat16")
    assert recurrent.dtype == torch.bfloat16
    xs = inputs(text)
    outputs = run(layer, xs, monkeypatch)
    for seq, x in xs.items():
        whole = whole_kda(text, layer, x)
        assert (outputs[seq] - whole).abs().max() < 0.05 * whole.abs().max()


KEEP = KimiDeltaAttention._keep


def _stale_states(self: Any, rows: Any) -> tuple[Tensor, Tensor]:
    conv, recurrent = (state[rows.slots] for state in compat.state_views(self.kv_cache))
    return conv, recurrent.float()


def _window_not_kept(self: Any, rows: Any, conv: Tensor, recurrent: Tensor) -> None:
    KEEP(self, rows, torch.zeros_like(conv), recurrent)


def _transposed_state(self: Any, rows: Any, conv: Tensor, recurrent: Tensor) -> None:
    KEEP(self, rows, conv, recurrent.transpose(-1, -2))


def _one_slot_for_all(self: Any, rows: Any, conv: Tensor, recurrent: Tensor) -> None:
    KEEP(self, replace(rows, slots=rows.slots[:1].expand_as(rows.slots)), conv, recurrent)


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("_states", _stale_states),
        ("_keep", _window_not_kept),
        ("_keep", _transposed_state),
        ("_keep", _one_slot_for_all),
    ],
)
def test_planted_mistakes_are_noticed(method: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tiny_config("k3").text
    layer, _ = kda_layer(text)
    monkeypatch.setattr(KimiDeltaAttention, method, mutant)
    xs = inputs(text)
    outputs = run(layer, xs, monkeypatch)
    assert any(
        not torch.allclose(outputs[seq], whole_kda(text, layer, x), atol=100 * ATOL, rtol=0) for seq, x in xs.items()
    )


def mla_layer(text: TextConfig) -> tuple[KimiLatentAttention, Tensor]:
    layer = KimiLatentAttention(text, settings(), "model.layers.3.self_attn")
    fill(layer)
    pages = strided_cache((NUM_BLOCKS, BLOCK, cache.latent_width(text)))
    layer.kv_cache = pages.unsqueeze(1)  # as vLLM 0.32 binds it
    return layer, pages


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_mla_equals_the_whole_sequence(text: TextConfig, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller scale gives latents of mean square 1e-5, where the norms' eps (1e-6, not the config's) shows."""
    layer, pages = mla_layer(text)
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        if hasattr(layer, name):
            getattr(layer, name).weight.data.mul_(scale)
    xs = inputs(text)
    outputs = run(layer, xs, monkeypatch)
    low = text.q_lora_rank is not None
    weights = mla.MlaWeights(
        q_a=layer.q_a_proj.weight if low else None,
        q_a_norm=layer.q_a_layernorm.weight if low else None,
        q_b=layer.q_b_proj.weight if low else layer.q_proj.weight,
        kv_a=layer.kv_a_proj_with_mqa.weight,
        kv_a_norm=layer.kv_a_layernorm.weight,
        kv_b=layer.kv_b_proj.weight,
        g=layer.g_proj.weight if text.mla_use_output_gate else None,
        o=layer.o_proj.weight,
    )
    for seq, x in xs.items():
        whole, _ = mla.layer(x, weights, num_heads=text.num_attention_heads, nope_dim=text.qk_nope_head_dim)
        torch.testing.assert_close(outputs[seq], whole, atol=ATOL, rtol=0)
    assert pages[0].isnan().all(), "the null block was written"


@pytest.mark.parametrize("metadata", [None, {}, {"another.layer": object()}, [], [{}]])
@pytest.mark.parametrize("make", [kda_layer, mla_layer])
def test_a_step_without_metadata_gives_zeros(make: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tiny_config("k3").text
    layer, _ = make(text)
    context = SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
    assert torch.equal(layer(torch.randn(6, text.hidden_size)), torch.zeros(6, text.hidden_size))


def test_pages_of_both_kinds_have_one_size() -> None:
    text = tiny_config("k3").text
    config = settings()
    state, latent = kda_layer(text)[0].get_kv_cache_spec(config), mla_layer(text)[0].get_kv_cache_spec(config)
    assert state.page_size_bytes == latent.page_size_bytes
    config.cache_config.block_size = 4096
    state, latent = kda_layer(text)[0].get_kv_cache_spec(config), mla_layer(text)[0].get_kv_cache_spec(config)
    assert state.page_size_bytes == latent.page_size_bytes == 4096 * cache.latent_width(text) * 4


def packed_moe(text: TextConfig) -> MoE:
    """A layer whose experts hold random MXFP4 bytes with scales around one."""
    block = MoE(text, packed=True)
    fill_plain(block)
    generator = torch.Generator().manual_seed(3)
    for name, weight in block.experts.named_parameters():
        low, high = (120, 125) if name.endswith("scale") else (0, 256)
        weight.data = torch.randint(low, high, weight.shape, generator=generator, dtype=torch.uint8)
    return block


def test_packed_experts_unpacked_by_use_equal_unpacked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that `loading` makes by size changes no bit."""
    from k3_core.vllm import loading

    block, x = packed_moe(tiny_config("k3").text), torch.randn(9, 256)
    by_use = block(x)
    monkeypatch.setattr(loading, "UNPACK_LIMIT", 0)
    loading._settle_experts(block, torch.float32)
    assert block.experts.packed
    monkeypatch.undo()
    loading._settle_experts(block, torch.float32)
    assert not block.experts.packed
    assert torch.equal(block(x), by_use)
    assert by_use.abs().max() > 0.1


def test_tensors_stored_in_f32_stay_so_in_a_bf16_model() -> None:
    """vLLM builds models under the model's dtype; a rounded bias or window weight would pass every fp32 test."""
    torch.set_default_dtype(torch.bfloat16)
    text = tiny_config("k3").text
    layers = {"self_attn.": KimiDeltaAttention(text, settings(), "a"), "block_sparse_moe.": MoE(text, packed=True)}
    table = tensor_table(tiny_config("k3"))
    for prefix, layer in layers.items():
        for name, weight in layer.named_parameters():
            if ".experts" not in f".{name}":
                spec = table[f"language_model.model.layers.1.{prefix}{name}"]
                assert weight.dtype == spec.dtype, name


ROUTING: dict[str, dict[str, Any]] = {
    "groups": {"num_expert_group": 4, "topk_group": 1},
    "renormalise": {"moe_renormalize": False},
    "scaling": {"routed_scaling_factor": 2.5},
    "eps": {"rms_norm_eps": 0.5},
    "count": {"num_experts_per_token": 3},
}


@pytest.mark.parametrize("what", ROUTING)
def test_every_routing_key_of_the_configuration_is_followed(what: str) -> None:
    """The released values (one group, factor 1.0) would hide a key that is not passed on, and the norm a factor."""
    plain = tiny_config("k3").text.model_copy(update={"latent_moe_use_norm": what == "eps"})
    text = plain.model_copy(update=ROUTING[what])
    block = packed_moe(text)
    block.gate.e_score_correction_bias.data = torch.randn(text.num_experts)
    x = torch.randn(9, text.hidden_size)

    def expected(config: TextConfig) -> Tensor:
        return moe.layer(
            x,
            block._weights(),
            top_k=config.num_experts_per_token,
            activation=situ.gated_activation("situ", config.activation_situ_beta, config.activation_situ_linear_beta),
            eps=config.rms_norm_eps,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
            num_groups=config.num_expert_group,
            topk_groups=config.topk_group,
        )[0]

    assert torch.equal(block(x), expected(text))
    assert not torch.allclose(expected(plain), expected(text), rtol=1e-3)


def test_a_row_on_the_null_block_is_no_request() -> None:
    """Padding may bring tokens; the null block is never its state."""
    table = torch.tensor([[3], [0], [2]], dtype=torch.int32)
    step = Step([0, 2, 3, 3], [5, 1, 4], [3, 0, 2], table, torch.tensor([0, 1, -1]))
    assert [(request.row, request.start, request.end) for request in step.requests] == [(0, 0, 2)]
    assert not step.decode
    assert step.prefill.tokens.tolist() == [0, 1]


def test_the_projector_norms_with_the_eps_of_the_configuration() -> None:
    config = tiny_config("k3").vision
    assert config is not None
    projector = Projector(config.model_copy(update={"projector_ln_eps": 0.5}))
    fill(projector)
    merged = torch.randn(6, 4, config.mm_hidden_size)
    parts: Any = projector.proj
    weights = vision.ProjectorWeights(parts["0"].weight, parts["2"].weight, projector.post_norm.weight, eps=0.5)
    expected = vision.projector(merged, weights)
    assert torch.equal(projector(merged), expected)
    assert not torch.allclose(vision.projector(merged, replace(weights, eps=1e-5)), expected, atol=0.01)


@pytest.mark.parametrize("quantised", [True, False])
def test_experts_without_a_checkpoint_are_zeros(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--load-format dummy` fills parameters only; what the allocator hands out may mean NaN."""
    from k3_core.vllm.serving.experts import ReleasedStore

    honest = torch.empty

    def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
        return honest(*shape, dtype=dtype).fill_(255 if dtype == torch.uint8 else float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)
    tensors = ReleasedStore(2, 64, 64, quantised).tensors()
    assert set(tensors) == {"w13", "w2"} | ({"w13_scale", "w2_scale"} if quantised else set())
    assert not any(tensor.any() for tensor in tensors.values())
