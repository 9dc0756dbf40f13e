"""What the layers hand to the kernels passes the kernels' own checks of shapes, dtypes and strides.

The model runs in bf16 with the Triton launchers it would use on a GPU, but nothing is launched: every kernel is
replaced by a note of its name. A call that a launcher refuses fails here, not on the first GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

import torch
from nvidia_support import Group, bind_caches, build, fill, groups, one_prompt, our_model, settle

from k3_core.checkpoint import CheckpointReader
from k3_core.operators import CallSpec
from k3_nvidia import dispatch, warmup
from k3_nvidia.kda import KimiDeltaAttention


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with our_model():
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that would have been launched."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import KernelInterface

    names: list[str] = []

    def note(self: Any, grid: Any) -> Any:
        name = getattr(self, "__name__", None) or self.fn.__name__
        return lambda *args, **named: names.append(name)

    monkeypatch.setattr(KernelInterface, "__getitem__", note)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", note, raising=False)

    def on_hopper(name: str, dtype: Any, sizes: Any, options: Any = None, want: str | None = None) -> Any:
        spec = CallSpec(name, "cuda", dtype, "sm_90", dict(sizes), dict(options or {}))
        return dispatch.registry().choose(spec, want).implementation

    monkeypatch.setattr(dispatch, "choose", on_hopper)
    return names


def make(folder: Path, **options: Any) -> Any:
    with groups(Group(), Group()):
        config = settle(folder, dtype="bfloat16", **options)
        model = build(config, CheckpointReader(folder).config)
        fill(model)
    return model


def forward(model: Any, tokens: int) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    bind_caches(model)
    hidden = torch.zeros(tokens, model.config.text.hidden_size, dtype=torch.bfloat16)
    with (
        groups(Group(), Group()),
        torch.no_grad(),
        set_forward_context(one_prompt(model, tokens), model.vllm_config, slot_mapping={}),
    ):
        return model.model(hidden, None)


@pytest.mark.parametrize("tokens", [1, 17, 130])
def test_a_prompt_reaches_every_kernel(tokens: int, nvidia_tiny: Path, launched: list[str]) -> None:
    model = make(nvidia_tiny)
    launched.clear()
    assert forward(model, tokens).shape == (tokens, model.config.text.hidden_size)
    names = " ".join(launched)
    for part in ("attn_res", "conv", "kda_chunk", "kda_output", "norm", "route", "w13", "w2", "combine", "situ"):
        assert part in names, f"no kernel named like {part} in {sorted(set(launched))}"
    # attention mix and MLP mix of 5 layers, and the output mix
    assert sum("attn_res" in name for name in launched) == 11


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_kind_of_step_passes_the_kernels_checks(drafts: int, nvidia_tiny: Path, launched: list[str]) -> None:
    options: dict[str, Any] = {}
    if drafts:
        speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
        options = {"speculative_config": speculation, "enable_prefix_caching": False}
    model = make(nvidia_tiny, **options)
    layer = next(m for m in model.modules() if isinstance(m, KimiDeltaAttention))
    limits = warmup.Limits(max_num_batched_tokens=1100, max_num_seqs=8, num_spec=drafts)
    launched.clear()
    warmup.WARM_UP.run_kda(layer, limits, torch.bfloat16, torch.device("cpu"))
    wanted = {"kda_decode_kernel", "kda_chunk_kernel", "gated_norm_kernel"} | (
        {"kda_verify_kernel"} if drafts else set()
    )
    assert wanted <= set(launched)
    # as vLLM's pages lay them out: rows of a page much longer than the state, the window first
    conv, recurrent = layer.get_state_shape()
    page = 3 * (conv[0] * conv[1] * 2 + recurrent[0] * recurrent[1] * recurrent[2] * 4)
    pages = torch.zeros(6, page // 16 * 16, dtype=torch.int8)
    layer.bind_kv_cache(pages.view(6, 1, 1, -1))
    qkv, z, beta, gate = layer.project(torch.zeros(8, 256, dtype=torch.bfloat16))
    for metadata in warmup.WARM_UP.steps(layer, limits, torch.device("cpu")):
        if metadata.step_tokens + metadata.prefill_tokens <= 8:
            layer._run(metadata, qkv, z, beta, gate, torch.empty_like(z))


def test_kimi_linear_without_packed_experts_uses_the_library(nvidia_linear: Path, launched: list[str]) -> None:
    model = make(nvidia_linear)
    experts = {layer.feed_forward.operator.name for layer in model.model.layers if layer.is_moe}
    assert experts == {dispatch.LIBRARY}
    layer = next(m for m in model.modules() if isinstance(m, KimiDeltaAttention))
    limits = warmup.Limits(max_num_batched_tokens=130, max_num_seqs=8, num_spec=0)
    launched.clear()
    warmup.WARM_UP.run_kda(layer, limits, torch.bfloat16, torch.device("cpu"))
    assert any("chunk" in name for name in launched)
