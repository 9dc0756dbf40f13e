"""What the metadata builder makes of a step: classes, slots, offsets, padding, order, accepted counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from k3_core.vllm.serving import kda_metadata
from k3_core.vllm.serving.kda_metadata import PADDING, PREFILL, STEP, KdaMetadataBuilder, classify

BLOCK = 16


def builder(spec_tokens: int = 0, mode: str = "none", max_seqs: int = 8) -> KdaMetadataBuilder:
    spec = MambaSpec(
        shapes=((8, 3 + spec_tokens), (2, 4, 4)),
        dtypes=(torch.float32, torch.float32),
        block_size=BLOCK,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=mode,
        num_speculative_blocks=spec_tokens,
    )
    speculative = SimpleNamespace(num_speculative_tokens=spec_tokens, parallel_drafting=False) if spec_tokens else None
    config: Any = SimpleNamespace(
        num_speculative_tokens=spec_tokens,
        speculative_config=speculative,
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        scheduler_config=SimpleNamespace(max_num_seqs=max_seqs),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 16], static_forward_context={}),
        use_v2_model_runner=False,
    )
    return KdaMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def step(
    query: list[int], seq: list[int], table: list[list[int]], prefilling: list[bool] | None = None, tokens: int = 0
) -> CommonAttentionMetadata:
    """vLLM's description of a step; ``tokens`` counts padding as well."""
    bounds = torch.tensor(np.cumsum([0, *query]), dtype=torch.int32)
    flags = None if prefilling is None else torch.tensor(prefilling)
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds.clone(),
        seq_lens=torch.tensor(seq, dtype=torch.int32),
        num_reqs=len(query),
        num_actual_tokens=tokens or sum(query),
        max_query_len=max(query),
        max_seq_len=max(seq),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query), dtype=torch.int64),
        is_prefilling=flags,
        seq_lens_cpu_upper_bound=torch.tensor(seq, dtype=torch.int32),
    )


def test_rows_are_classified_by_what_they_are_not_by_their_length() -> None:
    query, seq = np.array([1, 1, 1, 5, 0]), np.array([9, 1, 7, 5, 0])
    prefilling = np.array([False, True, True, True, False])
    # a decoding row; a first chunk of one token; a later chunk of one token; a prompt; padding
    assert classify(query, seq, prefilling, None).tolist() == [STEP, PREFILL, STEP, PREFILL, PADDING]


def test_while_graphs_are_captured_rows_of_one_token_decode() -> None:
    assert classify(np.array([1, 1]), np.array([1, 1]), None, None).tolist() == [STEP, STEP]
    assert classify(np.array([1, 1]), np.array([1, 1]), np.array([False, False]), None).tolist() == [STEP, STEP]


def test_with_drafts_only_rows_that_say_so_are_verified() -> None:
    drafts = np.array([2, 0, -1, -1])
    kinds = classify(np.array([3, 1, 1, 0]), np.array([9, 9, 9, 0]), np.zeros(4, bool), drafts)
    assert kinds.tolist() == [STEP, STEP, PREFILL, PADDING]


def test_decoding_fills_a_buffer_that_keeps_its_address_and_nulls_its_padding() -> None:
    b = builder()
    first = b.build(0, step([1, 1, 1], [5, 9, 2], [[3], [4], [7]], [False] * 3))
    assert first.decode is not None
    assert first.decode.slots.tolist() == [3, 4, 7]
    padded = b.build(0, step([1, 1, 0, 0], [6, 10, 0, 0], [[4], [3], [9], [9]], [False] * 4, tokens=4))
    assert padded.decode is not None
    assert padded.decode.slots.tolist() == [4, 3, 0, 0]
    assert padded.decode.slots.data_ptr() == first.decode.slots.data_ptr()
    assert (padded.step_tokens, padded.prefill_tokens, padded.order) == (4, 0, None)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_the_short_way_of_plain_decoding_says_what_the_long_way_says(
    mode: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 17, 33, 16]
    table = [[3, 4, 5], [6, 7, 8], [9, 2, 1], [11, 12, 13], *[[15, 14, 10]] * padding]
    m = step([1] * 4 + [0] * padding, lengths + [0] * padding, table, [False] * (4 + padding), tokens=4 + padding)
    short = builder(mode=mode).build(0, m)
    monkeypatch.setattr(kda_metadata, "_any_prompt", lambda m: True)
    long = builder(mode=mode).build(0, m)
    assert short.decode is not None
    assert long.decode is not None
    assert short.decode.slots.tolist() == long.decode.slots.tolist()
    assert (short.step_tokens, short.prefill_tokens, short.order) == (long.step_tokens, long.prefill_tokens, long.order)


def test_a_first_chunk_of_one_token_alone_is_no_decoding_step() -> None:
    m = builder().build(0, step([1, 1], [1, 9], [[3], [4]], [True, False]))
    assert (m.step_tokens, m.prefill_tokens) == (1, 1)


def test_decode_rows_of_a_mixed_batch_go_to_the_recurrence() -> None:
    m = builder().build(0, step([1, 1, 5, 3], [8, 4, 5, 10], [[2], [3], [4], [5]], [False, False, True, True]))
    assert m.order is None
    assert (m.step_tokens, m.prefill_tokens) == (2, 8)
    assert m.decode is not None
    assert m.prefill is not None
    assert m.decode.slots.tolist() == [2, 3]
    assert m.prefill.slots.tolist() == [4, 5]
    assert m.prefill.cu_seqlens.tolist() == [0, 5, 8]
    assert m.prefill.has_initial_state.tolist() == [False, True]


def test_a_batch_in_another_order_is_permuted() -> None:
    # a first chunk of one token stands before a decoding row
    m = builder().build(0, step([1, 1, 3, 0], [1, 6, 9, 0], [[2], [3], [4], [0]], [True, False, True, False], tokens=6))
    assert m.order is not None
    assert m.order.tolist() == [1, 0, 2, 3, 4]
    assert m.decode is not None
    assert m.prefill is not None
    assert m.decode.slots.tolist() == [3]
    assert m.prefill.slots.tolist() == [2, 4]
    assert m.prefill.cu_seqlens.tolist() == [0, 1, 4]
    assert m.prefill.has_initial_state.tolist() == [False, True]


@pytest.mark.parametrize(("length", "column"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (0, 0)])
def test_align_takes_the_block_of_the_last_token(length: int, column: int) -> None:
    table = [[11, 12, 13, 14]]
    m = builder(mode="align").build(0, step([1], [length], table, [False]))
    assert m.decode is not None
    assert m.decode.slots.tolist() == [table[0][column]]


def test_align_of_chunks_and_verification() -> None:
    b = builder(spec_tokens=2, mode="align")
    table = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    drafts, accepted = torch.tensor([2, -1], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    m = b.build(0, step([3, 20], [20, 40], table, [False, True]), accepted, drafts)
    assert m.verify is not None
    assert m.prefill is not None
    assert m.verify.slots.tolist() == [[2, 3, 4]]  # (20 - 1) // 16 = 1 and two more
    assert m.verify.accepted.tolist() == [3]
    assert m.prefill.slots.tolist() == [8]  # (40 - 1) // 16 = 2


def test_verification_is_padded_to_the_rows_of_the_graph() -> None:
    b = builder(spec_tokens=3)
    table = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9], [9, 9, 9, 9]]
    drafts = torch.tensor([3, 0, -1, -1], dtype=torch.int32)
    accepted = torch.tensor([2, 4, 7, 7], dtype=torch.int32)
    m = b.build(0, step([4, 1, 0, 0], [9, 9, 0, 0], table, [False] * 4, tokens=8), accepted, drafts)
    assert m.verify is not None
    assert m.decode is None
    assert m.verify.slots.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [0] * 4, [0] * 4]
    assert m.verify.accepted.tolist() == [2, 4, 1, 1]
    assert m.verify.cu_seqlens.tolist() == [0, 4, 5, 5, 5]
    assert m.step_tokens == 8
    again = b.build(0, step([1, 1], [9, 9], table[:2], [False] * 2), accepted[:2], torch.tensor([0, 0]))
    assert again.verify is not None, "rows without drafts still apply the accepted offset"
    assert again.verify.slots.data_ptr() == m.verify.slots.data_ptr()


def test_without_draft_counts_a_speculating_engine_decodes() -> None:
    m = builder(spec_tokens=2).build(0, step([1], [5], [[4, 5, 6]], [False]))
    assert m.decode is not None
    assert m.decode.slots.tolist() == [4]


def test_capture_of_verification_stands_for_full_drafts() -> None:
    b = builder(spec_tokens=2)
    m = b.build_for_cudagraph_capture(step([3, 3], [3, 3], [[0, 0, 0]] * 2))
    assert m.verify is not None
    assert m.verify.accepted.tolist() == [3, 3]
    assert m.verify.cu_seqlens.tolist() == [0, 3, 6]


def test_capture_of_decoding() -> None:
    m = builder().build_for_cudagraph_capture(step([1, 1], [1, 1], [[0], [0]], [False, False]))
    assert m.decode is not None
    assert m.decode.slots.tolist() == [0, 0]


def test_it_has_what_vllm_asks_of_a_builder() -> None:
    b = builder(spec_tokens=2)
    assert b.reorder_batch_threshold == 3
    assert b.kv_cache_spec.num_speculative_blocks == 2
    assert b.layer_names == ["layer"]
    assert not b.supports_update_block_table
