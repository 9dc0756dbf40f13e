"""Accepted counts reach the verification of every speculating row, whether it drafted or not (vllm-ascend 0.23)."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_state_copy_support import Layer, cache_of

from k3_ascend import speculation


def drafts_of(drafts: list[int], lengths: list[int], prefilling: list[bool] | None) -> list[int]:
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    flags = None if prefilling is None else torch.tensor(prefilling)
    return speculation.with_undrafted(torch.tensor(drafts, dtype=torch.int32), bounds, flags).tolist()


def test_decoding_rows_without_drafts_count_as_verifications_of_none() -> None:
    # drafted; drafted nothing; a prompt chunk; a prompt chunk of one token; padding
    kinds = drafts_of([2, -1, -1, -1, -1], [3, 1, 5, 1, 0], [False, False, True, True, False])
    assert kinds == [2, 0, -1, -1, -1]


def test_while_graphs_are_captured_nothing_changes() -> None:
    assert drafts_of([-1, 3], [1, 4], None) == [-1, 3]


def test_the_dtype_is_kept_and_the_runner_s_buffer_untouched() -> None:
    buffer = torch.tensor([-1, -1], dtype=torch.int32)
    made = speculation.with_undrafted(buffer, torch.tensor([0, 1, 2]), torch.tensor([False, False]))
    assert made.dtype == torch.int32
    assert buffer.tolist() == [-1, -1]


# --- the first runner ------------------------------------------------------------------------------------------------


def runner(monkeypatch: pytest.MonkeyPatch, *, speculative: bool, kda: bool) -> Any:
    """A stand-in for vllm-ascend's first runner, wrapped; it returns what the builder would be given."""

    class NPUModelRunner:
        def __init__(self) -> None:
            self.speculative_config = object() if speculative else None
            context = {"kda": Layer("kda", cache_of())} if kda else {"mla": object()}
            self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
            self.num_decode_draft_tokens = SimpleNamespace(np=np.array([3, 1, -1]))

        def _build_attention_metadata(
            self, num_tokens: int, use_spec_decode: bool = False, for_cudagraph_capture: bool = False
        ) -> tuple[int, list[int] | None, bool]:
            given = self.num_decode_draft_tokens.np.tolist() if use_spec_decode else None
            return num_tokens, given, for_cudagraph_capture

    module = ModuleType(speculation.RUNNER[0])
    setattr(module, speculation.RUNNER[1], NPUModelRunner)
    monkeypatch.setitem(sys.modules, speculation.RUNNER[0], module)
    assert speculation.install()
    wrapped = NPUModelRunner._build_attention_metadata
    assert speculation.install()
    assert NPUModelRunner._build_attention_metadata is wrapped, "wrapped once"
    return NPUModelRunner()


def test_a_step_in_which_nobody_drafted_passes_counts_and_no_stale_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(monkeypatch, speculative=True, kda=True)
    assert made._build_attention_metadata(num_tokens=3, use_spec_decode=False) == (3, [-1, -1, -1], False)


def test_a_step_with_drafts_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(monkeypatch, speculative=True, kda=True)
    assert made._build_attention_metadata(4, use_spec_decode=True, for_cudagraph_capture=True) == (4, [3, 1, -1], True)


@pytest.mark.parametrize(("speculative", "kda"), [(False, True), (True, False)])
def test_other_engines_are_left_alone(monkeypatch: pytest.MonkeyPatch, speculative: bool, kda: bool) -> None:
    made = runner(monkeypatch, speculative=speculative, kda=kda)
    assert made._build_attention_metadata(3) == (3, None, False)
    assert made.num_decode_draft_tokens.np.tolist() == [3, 1, -1]


def test_a_runner_that_is_not_loaded_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, speculation.RUNNER[0], raising=False)
    assert not speculation.install()


def test_the_real_runner_passes_use_spec_decode_by_keyword() -> None:
    """Read, not imported: what the wrapper relies on in vllm-ascend 0.23."""
    spec = importlib.util.find_spec("vllm_ascend")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm_ascend is not installed")
    path = Path(spec.submodule_search_locations[0]) / "worker" / "model_runner_v1.py"
    tree = ast.parse(path.read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == speculation.RUNNER[1])
    (method,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "_build_attention_metadata")
    assert "use_spec_decode" in [a.arg for a in method.args.args]
    calls = [
        n for n in ast.walk(cls)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "_build_attention_metadata"
    ]  # fmt: skip
    assert calls
    assert all(len(call.args) == 0 for call in calls), "positional arguments would hide the flag from the wrapper"


# --- the builder -----------------------------------------------------------------------------------------------------


def builder(num_spec: int) -> Any:
    pytest.importorskip("vllm", reason="the builder is a subclass of vLLM's")
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    from k3_ascend.kda import AscendKdaMetadataBuilder

    spec = MambaSpec(
        shapes=((8, 3 + num_spec), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        block_size=16,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="none",
        num_speculative_blocks=num_spec,
    )
    config: Any = SimpleNamespace(
        num_speculative_tokens=num_spec,
        speculative_config=SimpleNamespace(num_speculative_tokens=num_spec, parallel_drafting=False),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 16], static_forward_context={}),
        use_v2_model_runner=False,
    )
    return AscendKdaMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def step(query: list[int], seq: list[int], prefilling: list[bool]) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    bounds = torch.tensor(np.cumsum([0, *query]), dtype=torch.int32)
    lengths = torch.tensor(seq, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=bounds, query_start_loc_cpu=bounds.clone(), seq_lens=lengths, num_reqs=len(query),
        num_actual_tokens=sum(query), max_query_len=max(query), max_seq_len=max(seq),
        block_table_tensor=torch.tensor([[10 * r + 1, 10 * r + 2, 10 * r + 3] for r in range(len(query))]).int(),
        slot_mapping=torch.zeros(sum(query), dtype=torch.int64), is_prefilling=torch.tensor(prefilling),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )  # fmt: skip


def test_nobody_drafted_and_every_row_starts_from_its_accepted_slot() -> None:
    accepted = torch.tensor([3, 1, 2], dtype=torch.int32)
    made = builder(2).build(0, step([1, 1, 1], [9, 9, 9], [False] * 3), accepted, torch.full((3,), -1).int())
    assert made.decode is None
    assert made.prefill is None
    assert made.verify.accepted.tolist() == [3, 1, 2]
    assert made.verify.slots.tolist() == [[1, 2, 3], [11, 12, 13], [21, 22, 23]]
    assert made.verify.cu_seqlens.tolist() == [0, 1, 2, 3]


def test_a_row_without_drafts_beside_one_with_drafts_and_prompts() -> None:
    # a drafting row, a row that drafted nothing, a prompt, a last prompt chunk of one token
    m = step([3, 1, 5, 1], [12, 9, 5, 7], [False, False, True, True])
    accepted = torch.tensor([1, 3, 1, 1], dtype=torch.int32)
    made = builder(2).build(0, m, accepted, torch.tensor([2, -1, -1, -1], dtype=torch.int32))
    assert made.step_tokens == 4
    assert made.verify.accepted.tolist() == [1, 3]
    assert made.verify.cu_seqlens.tolist() == [0, 3, 4]
    assert made.verify.slots.tolist() == [[1, 2, 3], [11, 12, 13]]
    assert made.prefill.slots.tolist() == [21, 31]
    assert made.prefill.has_initial_state.tolist() == [False, True]
    assert made.order is None
    assert (made.num_prefills, made.num_decodes, made.num_spec_decodes) == (2, 4, 0)


def test_rows_that_pad_a_graph_are_null_although_the_runner_tells_unpadded_tokens() -> None:
    """A graph of four rows replays for two: rows three and four must not find an earlier batch's slots."""
    from dataclasses import replace

    made = builder(2)
    full = made.build(0, step([1, 1, 1, 1], [9, 9, 9, 9], [False] * 4))
    assert full.decode.slots.tolist() == [1, 11, 21, 31]
    padded = step([1, 1, 0, 0], [9, 9, 0, 0], [False] * 4)
    padded.block_table_tensor[2:] = 0  # as the runner does
    assert (padded.num_actual_tokens, padded.num_reqs) == (2, 4)
    again = made.build(0, padded)
    assert again.decode.slots.data_ptr() == full.decode.slots.data_ptr(), "the address the graph was captured with"
    assert full.decode.slots.tolist() == [1, 11, 0, 0]
    counted = made.build(0, replace(padded), torch.tensor([3, 2, 1, 1]).int(), torch.full((4,), -1).int())
    assert counted.verify.slots.tolist() == [[1, 2, 3], [11, 12, 13], [0, 0, 0], [0, 0, 0]]
    assert counted.verify.accepted.tolist() == [3, 2, 1, 1]
    assert counted.verify.cu_seqlens.tolist() == [0, 1, 2, 2, 2]


def test_rows_that_pad_a_graph_of_drafts_are_no_prompts() -> None:
    """The runner gives padding rows the length of a real row; a graph of four rows replays for two."""
    made = builder(2)
    tables = [[1, 2, 3], [11, 12, 13], [0, 0, 0], [0, 0, 0]]
    padded = step([3, 3, 3, 3], [12, 9, 0, 0], [False] * 4)
    padded.num_actual_tokens = 6
    padded.block_table_tensor = torch.tensor(tables, dtype=torch.int32)
    accepted, drafts = torch.tensor([3, 1, 1, 1]).int(), torch.tensor([2, 2, -1, -1]).int()
    found = made.build(0, padded, accepted, drafts)
    assert found.prefill is None
    assert found.order is None
    assert found.verify.slots.tolist() == tables
    assert found.verify.accepted.tolist() == [3, 1, 1, 1]
    assert found.verify.cu_seqlens.tolist() == [0, 3, 6, 6, 6]
    assert padded.query_start_loc_cpu.tolist() == [0, 3, 6, 9, 12], "the runner's own offsets stay"

    full = step([3, 3, 3, 3], [12, 9, 8, 7], [False] * 4)
    captured = made.build_for_cudagraph_capture(full)
    assert captured.verify.slots.data_ptr() == found.verify.slots.data_ptr()
    assert captured.verify.cu_seqlens.data_ptr() == found.verify.cu_seqlens.data_ptr()
    assert captured.verify.cu_seqlens.tolist() == [0, 3, 6, 9, 12]


def test_rows_of_one_token_that_pad_a_graph_are_null() -> None:
    made = builder(2)
    full = made.build(0, step([1, 1, 1, 1], [9, 9, 9, 9], [False] * 4))
    padded = step([1, 1, 1, 1], [9, 9, 0, 0], [False] * 4)
    padded.num_actual_tokens = 2
    padded.block_table_tensor[2:] = 0
    made.build(0, padded)
    assert full.decode.slots.tolist() == [1, 11, 0, 0]


# --- the real runners ------------------------------------------------------------------------------------------------


def test_both_real_runners_are_wrapped_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend's own classes, imported on the fake device: what install() finds and changes."""
    import ascend_support as support

    if not support.has_vllm_ascend():
        pytest.skip("needs torch_npu and vllm-ascend (environment 'ascend')")
    support.fake_device()
    support.plugins()
    from k3_ascend import state_copy
    from k3_ascend.state_copy import hooks

    methods = [(*where, "initialize_kv_cache") for where in hooks.RUNNERS]
    methods.append((*speculation.RUNNER, "_build_attention_metadata"))
    classes = [(getattr(importlib.import_module(m), c), name) for m, c, name in methods]
    for cls, name in classes:
        monkeypatch.setattr(cls, name, vars(cls)[name])  # puts the original back afterwards
    assert state_copy.install() == tuple(".".join(where) for where in hooks.RUNNERS)
    assert speculation.install()
    for cls, name in classes:
        assert vars(cls)[name].__wrapped__.__qualname__ == f"{cls.__name__}.{name}"
