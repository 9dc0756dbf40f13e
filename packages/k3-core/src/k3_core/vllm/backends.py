"""What vLLM's engine needs to know about the two kinds of layers, and what a layer learns about a step.

A step is a ragged batch: request r brings the tokens ``query_start[r] .. query_start[r+1]``, the last of which is
token number ``seq_lens[r]`` of its sequence. The recurrent state of a request lies in one cache block per layer
(``state_slots[r]``), its latent rows in the blocks of its row of the block table.

Block 0 is vLLM's null block: rows of padding point there, and it is never read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf

from k3_core.vllm import compat

NULL_BLOCK = 0


@dataclass(frozen=True)
class Step:
    """One engine step as the layers of one cache group see it.

    Attributes:
        query_start: R + 1 offsets into the step's tokens.
        seq_lens: R sequence lengths, this step's tokens included.
        state_slots: R cache blocks holding the recurrent states; 0 for padding rows.
        block_table: [R, blocks] int32.
        slot_mapping: [T] int64 position in the latent cache for each token, -1 for padding; unused by recurrent layers.
    """

    query_start: list[int]
    seq_lens: list[int]
    state_slots: list[int]
    block_table: Tensor
    slot_mapping: Tensor

    @cached_property
    def requests(self) -> list[Request]:
        """The requests of this step that have tokens and a block, padding rows left out."""
        spans = zip(pairwise(self.query_start), self.seq_lens, self.state_slots, strict=True)
        return [
            Request(row, start, end, seq_len, slot)
            for row, ((start, end), seq_len, slot) in enumerate(spans)
            if end > start and slot != NULL_BLOCK
        ]

    @cached_property
    def decode(self) -> Rows:
        """Requests that add one token to a past."""
        return Rows.of([r for r in self.requests if r.is_decode], self.block_table.device)

    @cached_property
    def prefill(self) -> Rows:
        """All other requests: whole prompts, chunks of prompts, and single tokens without a past."""
        return Rows.of([r for r in self.requests if not r.is_decode], self.block_table.device)


@dataclass(frozen=True)
class Request:
    """One request of a step: its tokens are ``start:end``; ``slot`` holds its recurrent state."""

    row: int
    start: int
    end: int
    seq_len: int
    slot: int

    @property
    def num_computed(self) -> int:
        """Tokens of the sequence that earlier steps (or a cached prefix) already account for."""
        return self.seq_len - (self.end - self.start)

    @property
    def is_decode(self) -> bool:
        """One token that continues a sequence."""
        return self.end - self.start == 1 and self.num_computed > 0


@dataclass(frozen=True)
class Rows:
    """Some requests of a step, packed: what a contract with ``cu_seqlens`` takes.

    Attributes:
        requests: the requests.
        tokens: int64 positions of their tokens in the step.
        bounds: len(requests) + 1 offsets into ``tokens``.
        slots: int64 cache block of each request's recurrent state.
        fresh: bool, whether a request has no past and starts from a zero state.
    """

    requests: list[Request]
    tokens: Tensor
    bounds: list[int]
    slots: Tensor
    fresh: Tensor

    @staticmethod
    def of(requests: list[Request], device: torch.device) -> Rows:
        """Pack ``requests``."""
        positions = [position for r in requests for position in range(r.start, r.end)]
        return Rows(
            requests=requests,
            tokens=torch.tensor(positions, dtype=torch.int64, device=device),
            bounds=[0, *accumulate(r.end - r.start for r in requests)],
            slots=torch.tensor([r.slot for r in requests], dtype=torch.int64, device=device),
            fresh=torch.tensor([r.num_computed == 0 for r in requests], dtype=torch.bool, device=device),
        )

    def __bool__(self) -> bool:
        return bool(self.requests)


class StepBuilder(AttentionMetadataBuilder):
    """Builds a :class:`Step` from vLLM's common metadata."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self._aligned = vllm_config.cache_config.mamba_cache_mode == "align"

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step that ``common_attn_metadata`` describes."""
        common = common_attn_metadata
        num_reqs = common.num_reqs
        seq_lens = common.seq_lens[:num_reqs].tolist()
        # With prefix caching (mode "align") a request keeps one state per block of tokens and works on the newest;
        # without it there is a single block.
        columns = [(n - 1) // self.kv_cache_spec.block_size if self._aligned and n > 0 else 0 for n in seq_lens]
        table = common.block_table_tensor[:num_reqs]
        return Step(
            query_start=common.query_start_loc_cpu[: num_reqs + 1].tolist(),
            seq_lens=seq_lens,
            state_slots=[int(table[row, column]) for row, column in enumerate(columns)],
            block_table=table,
            slot_mapping=common.slot_mapping,
        )


class RecurrentBackend(compat.backend_base()):  # type: ignore[misc]
    """KDA layers: a fixed-size state per request."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return "K3_REFERENCE_KDA"

    @staticmethod
    def get_impl_cls() -> type:
        """There is no implementation class: the layer computes itself."""
        raise NotImplementedError("the layer computes itself")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Class of the metadata builder."""
        return StepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """This backend holds a recurrent state, not keys and values."""
        return True


class LatentBackend(compat.backend_base()):  # type: ignore[misc]
    """MLA layers: one latent row per token."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return "K3_REFERENCE_MLA"

    @staticmethod
    def get_impl_cls() -> type:
        """There is no implementation class: the layer computes itself."""
        raise NotImplementedError("the layer computes itself")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Class of the metadata builder."""
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any block size: rows are gathered by index."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """One latent row a token, no values beside it (asked from 0.32 on, for the size of a block)."""
        return replace(spec, head_size_v=0)
