"""Scripted proposals for vLLM's second model runner, whose n-gram proposer works on the device.

:func:`k3_core.vllm.testing.draft_engine.propose_from` replaces the first runner's proposer, which is asked with lists;
here the same answers are computed from the tensors of the running requests, without a wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def propose_on_device(script: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Let the n-gram proposer of vLLM's second runner propose from ``script``; nothing where vLLM has none.

    Returns what undoes it.
    """
    try:
        from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
    except ImportError:
        return lambda: None
    longest = max(len(text) for text in script)
    texts = torch.tensor([[*text, *[-1] * (longest - len(text))] for text in script])
    lengths = torch.tensor([len(text) for text in script])
    cls: Any = NgramGPUSpeculator
    honest = cls.propose
    signature = inspect.signature(honest)

    def propose(self: Any, *args: Any, **named: Any) -> Tensor:
        given = signature.bind(self, *args, **named).arguments
        batch, states = given["input_batch"], self.req_states
        if not given.get("dummy_run"):
            rows = batch.idx_mapping[: batch.num_reqs].long()
            known = states.total_len.gpu[rows].long()
            device = known.device
            drafts = following_rows(
                texts.to(device, non_blocking=True),
                lengths.to(device, non_blocking=True),
                states.all_token_ids.gpu[rows],
                known,
                self.num_speculative_steps,
            )
            self.drafts[: batch.num_reqs] = drafts
        drafted: Tensor = self.drafts[: batch.num_reqs]
        return drafted

    cls.propose = propose
    return lambda: setattr(cls, "propose", honest)


def following_rows(texts: Tensor, lengths: Tensor, rows: Tensor, known: Tensor, count: int) -> Tensor:
    """``count`` tokens behind the first ``known`` [B] of ``rows`` [B, L], of the text that begins so: [B, count].

    texts [n, longest], padded behind ``lengths`` [n]. One token of a proposal is wrong, or none (see
    ``draft_engine.wrong_place``); where no text is known, or it is over, zeros.
    """
    width = min(texts.shape[1], rows.shape[1])
    behind = torch.arange(width, device=rows.device) >= known[:, None]
    same = (rows[:, None, :width] == texts[None, :, :width]) | behind[:, None]
    fits = same.all(-1) & (known[:, None] < lengths)
    which = fits.int().argmax(1)
    places = known[:, None] + torch.arange(count, device=rows.device)
    valid = fits.any(1)[:, None] & (places < lengths[which][:, None])
    found = texts[which].gather(1, places.clamp(max=texts.shape[1] - 1))
    wrong = (known * 2654435761 >> 12) % (count + 1)
    flipped = torch.arange(count, device=rows.device) == wrong[:, None]
    return torch.where(valid, found ^ flipped, torch.zeros_like(found))
