"""What the KDA layers need to know about an engine step, built once a step and cache group.

A request of a step is one of three things:

* *step* row, one token that continues a sequence. Without speculation it goes to ``kda_decode``; with speculation it
  brings 1 to 1 + num_spec tokens and goes to ``kda_verify``, which alone applies the accepted count of the step before;
* *prefill* row: a prompt or a chunk of one, a first chunk of one token included (its slot holds another request's
  leftovers, so it must start from zeros);
* padding: no tokens.

The classes are decided on the host from lengths that vLLM keeps there; what depends on the device (slots, accepted
counts, whether a state exists) stays on the device, and nothing here waits for it. Batches without prefill rows use
buffers that live as long as the builder, because a CUDA graph replays with the addresses it was captured with.

State slots: mode "none" has one column of blocks a request (and one more per draft token); in mode "align" the state
of a row is in the block of its last token, columns ``(seq_len - 1) // block_size ..`` (K3-SPEC 4.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

NULL_BLOCK = 0
PADDING, STEP, PREFILL = 0, 1, 2


@dataclass(frozen=True)
class Decode:
    """One token a row. slots int32 [rows]: 0 for padding rows."""

    slots: Tensor


@dataclass(frozen=True)
class Verify:
    """1 to 1 + num_spec tokens a row. slots int32 [B, 1 + num_spec], accepted int32 [B], cu_seqlens int32 [B + 1]."""

    slots: Tensor
    accepted: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Prefill:
    """Whole sequences or chunks. slots int32 [B], cu_seqlens int32 [B + 1] from 0, has_initial_state bool [B].

    plan: what the prefill kernels precompute on the host for all layers, or None.
    """

    slots: Tensor
    cu_seqlens: Tensor
    has_initial_state: Tensor
    plan: Any = None


@dataclass(frozen=True)
class KdaMetadata:
    """A step as KDA layers see it: ``step_tokens`` tokens of step rows, then ``prefill_tokens`` of prefill rows.

    order: int64 [step_tokens + prefill_tokens], the token that stands at each place, where the batch has another order;
    None where it has this one. Tokens beyond both counts are padding.
    """

    step_tokens: int
    prefill_tokens: int
    decode: Decode | None = None
    verify: Verify | None = None
    prefill: Prefill | None = None
    order: Tensor | None = None


def classify(
    query_lens: np.ndarray, seq_lens: np.ndarray, prefilling: np.ndarray | None, drafts: np.ndarray | None
) -> np.ndarray:
    """PADDING, STEP or PREFILL for each request.

    query_lens, seq_lens: tokens of this step and of the sequence after it. prefilling: whether the prompt is not yet
    computed before this step; None while graphs are captured. drafts: draft tokens of a verification row, -1 for other
    rows; None without speculation.
    """
    kinds = np.full(len(query_lens), PREFILL, dtype=np.int8)
    kinds[query_lens == 0] = PADDING
    if drafts is not None and (drafts >= 0).any():
        kinds[(query_lens > 0) & (drafts >= 0)] = STEP
        return kinds
    fresh = seq_lens <= query_lens
    # A capture has sequences as long as their queries, but they stand for decoding rows.
    fresh = fresh & prefilling if prefilling is not None else np.zeros_like(fresh)
    kinds[(query_lens == 1) & ~fresh] = STEP
    return kinds


class KdaBackend(AttentionBackend):
    """vLLM's name for KDA layers: a fixed-size state a request."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return "K3_KDA"

    @staticmethod
    def get_impl_cls() -> type:
        """There is no implementation class: the layer computes itself."""
        raise NotImplementedError("KDA layers compute themselves")

    @staticmethod
    def get_builder_cls() -> type[KdaMetadataBuilder]:
        """Class of the metadata builder."""
        return KdaMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Not asked for recurrent states, whose shapes the layer gives; some releases declare it abstract."""
        return (num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def is_ssm(cls) -> bool:
        """This backend holds a recurrent state, not keys and values."""
        return True


class KdaMetadataBuilder(GDNAttentionMetadataBuilder):
    """Builds :class:`KdaMetadata`.

    The base class is the one to which vLLM's runners hand draft and accepted counts; nothing else of it is used.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.num_spec = int(vllm_config.num_speculative_tokens)
        self.use_spec_decode = self.num_spec > 0
        self._init_reorder_batch_threshold(1, self.use_spec_decode)
        self.cache_mode = vllm_config.cache_config.mamba_cache_mode
        self._planner = _planner(vllm_config, layer_names)

        rows = vllm_config.scheduler_config.max_num_seqs
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
        tokens = max([rows * (1 + self.num_spec), *sizes])
        # One more row than tokens: the offsets' end. Zero is the null block, so unused rows touch nothing.
        self._slots = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._verify_slots = torch.zeros(tokens, 1 + self.num_spec, dtype=torch.int32, device=device)
        self._accepted = torch.ones(tokens, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.zeros(tokens + 1, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> KdaMetadata:
        """The step that ``common_attn_metadata`` describes.

        num_accepted_tokens int32 [rows] on the device: accepted in the step before, at least 1.
        num_decode_draft_tokens_cpu int32 [rows]: drafts of a verification row, -1 for others.
        """
        m = common_attn_metadata
        rows = m.num_reqs
        drafts = num_decode_draft_tokens_cpu
        if drafts is None and m.max_query_len == 1 and not _any_prompt(m):
            # The usual step, on every one of which this host time is spent: rows of one token, then padding.
            return self._steps_only(m, int(m.query_start_loc_cpu.numpy()[rows]), self._slots_of(m), None)
        bounds = m.query_start_loc_cpu[: rows + 1].numpy()
        kinds = classify(
            np.diff(bounds),
            _host_seq_lens(m),
            None if m.is_prefilling is None else m.is_prefilling[:rows].numpy(),
            None if drafts is None or not self.use_spec_decode else drafts[:rows].numpy(),
        )
        verify = drafts is not None and self.use_spec_decode and bool((drafts[:rows] >= 0).any())
        accepted = num_accepted_tokens if verify else None
        slots = self._slots_of(m)
        if not (kinds == PREFILL).any():
            return self._steps_only(m, int((kinds == STEP).sum()), slots, accepted)
        return self._mixed(m, kinds, bounds, slots, accepted)

    def _slots_of(self, m: CommonAttentionMetadata) -> Tensor:
        """Slots [rows, 1 + num_spec] of the states of every request."""
        rows = m.num_reqs
        slots: Tensor = mamba_get_block_table_tensor(
            m.block_table_tensor[:rows], m.seq_lens[:rows], self.kv_cache_spec, self.cache_mode
        )
        return slots

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> KdaMetadata:
        """Metadata of the uniform batch that a graph is captured with: decoding, or verification of full drafts."""
        m = common_attn_metadata
        if not self.use_spec_decode:
            return self.build(0, m)
        return self.build(0, m, torch.diff(m.query_start_loc), torch.diff(m.query_start_loc_cpu) - 1)

    def _steps_only(
        self, m: CommonAttentionMetadata, count: int, slots: Tensor, accepted: Tensor | None
    ) -> KdaMetadata:
        """A batch of step rows, perhaps padded, in buffers that keep their address."""
        tokens = m.num_actual_tokens
        if accepted is None:
            # vllm-ascend pads the rows of a graph but tells the unpadded tokens: the replayed rows beyond would find
            # the slots of an earlier, larger batch here.
            tokens = max(tokens, m.num_reqs)
            own = self._slots[:tokens]
            own[:count].copy_(slots[:count, 0])
            if count < tokens:
                own[count:].fill_(NULL_BLOCK)
            return KdaMetadata(tokens, 0, decode=Decode(own))
        rows = m.num_reqs
        own, counts, ends = self._verify_slots[:rows], self._accepted[:rows], self._cu_seqlens[: rows + 1]
        own[:count].copy_(slots[:count, : 1 + self.num_spec])
        own[count:].fill_(NULL_BLOCK)
        counts[:count].copy_(accepted[:count])
        counts[count:].fill_(1)
        ends[: count + 1].copy_(m.query_start_loc[: count + 1])
        ends[count + 1 :].copy_(m.query_start_loc[count : count + 1].expand(rows - count))
        return KdaMetadata(tokens, 0, verify=Verify(own, counts, ends))

    def _mixed(
        self, m: CommonAttentionMetadata, kinds: np.ndarray, bounds: np.ndarray, slots: Tensor, accepted: Tensor | None
    ) -> KdaMetadata:
        """A batch with prefill rows. Step rows come first; where the batch is not in that order, it is permuted."""
        step_rows, prefill_rows = np.flatnonzero(kinds == STEP), np.flatnonzero(kinds == PREFILL)
        used = np.concatenate([step_rows, prefill_rows])
        lengths = np.diff(bounds)
        order = None
        if not np.array_equal(used, np.arange(len(used))):
            order = _to_device(_token_order(bounds, used), torch.int64, self.device)
            index = _to_device(used, torch.int64, self.device)
            slots, seq_lens = slots[index], m.seq_lens[index]
            accepted = None if accepted is None else accepted[index]
        else:
            seq_lens = m.seq_lens[: len(used)]
            slots = slots[: len(used)]
        steps = len(step_rows)
        step_bounds = np.concatenate([[0], np.cumsum(lengths[step_rows])])
        prefill_bounds = np.concatenate([[0], np.cumsum(lengths[prefill_rows])])
        packed = _to_device(np.concatenate([step_bounds, prefill_bounds]), torch.int32, self.device)
        step_ends, prefill_ends = packed[: steps + 1], packed[steps + 1 :]
        decode = verify = None
        if steps and accepted is not None:
            verify = Verify(slots[:steps, : 1 + self.num_spec], accepted[:steps].contiguous(), step_ends)
        elif steps:
            decode = Decode(slots[:steps, 0])
        prefill = Prefill(
            slots=slots[steps:, 0],
            cu_seqlens=prefill_ends,
            has_initial_state=seq_lens[steps:] > prefill_ends.diff(),
            plan=self._planner(prefill_bounds, self.device),
        )
        return KdaMetadata(int(step_bounds[-1]), int(prefill_bounds[-1]), decode, verify, prefill, order)


def _any_prompt(m: CommonAttentionMetadata) -> bool:
    """Whether any request's prompt was not yet computed before this step; None (a capture) means no."""
    return m.is_prefilling is not None and bool(m.is_prefilling.numpy()[: m.num_reqs].any())


def _host_seq_lens(m: CommonAttentionMetadata) -> np.ndarray:
    """Sequence lengths as far as the host knows them: exact for prompts, an upper bound for verification rows."""
    upper = m.seq_lens_cpu_upper_bound
    if upper is None:  # only tests and captures leave it out
        upper = m.seq_lens.cpu()
    lens: np.ndarray = upper[: m.num_reqs].numpy()
    return lens


def _token_order(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Token numbers of ``rows``, row after row."""
    return np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in rows])


def _to_device(values: np.ndarray | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy on ``device`` that the host does not wait for."""
    host = torch.as_tensor(np.asarray(values), dtype=dtype)
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def _planner(vllm_config: Any, layer_names: list[str]) -> Any:
    """(bounds, device) -> the host-side plan of the layers' prefill kernels; gives None where they need none."""
    layers = vllm_config.compilation_config.static_forward_context
    layer = next((layers[name] for name in layer_names if name in layers), None)
    plan = getattr(layer, "plan_prefill", None)
    return plan if plan is not None else lambda bounds, device: None
