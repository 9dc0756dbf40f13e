"""Accepted counts for every speculating row, which the runners of vllm 0.23 and vllm-ascend 0.23 leave out.

The state of a row lies in the slot of its last accepted token (K3-SPEC 4.9), and only the verification path starts
there. vLLM calls a row "verified" if it has drafts; but n-gram and suffix proposals often draft nothing, and then

* the first runner passes no counts at all for a step in which nobody drafted;
* both runners mark a row without drafts as no verification (-1) beside rows that have some.

Such a row would continue from the slot of its first token instead. Later vLLM releases count it as a verification of
zero drafts; :func:`with_undrafted` does that here, and :func:`install` makes the first runner pass counts always.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3_ascend.state_copy.hooks import layers_of

#: The runner that passes counts only in steps with drafts.
RUNNER = ("vllm_ascend.worker.model_runner_v1", "NPUModelRunner")
_METHOD = "_build_attention_metadata"
_MARK = "_k3_speculation"


def with_undrafted(drafts: Tensor, query_start_loc_cpu: Tensor, is_prefilling: Tensor | None) -> Tensor:
    """Draft counts int32 [rows] on the host, where decoding rows of one token without drafts have 0 instead of -1.

    drafts: -1 for rows that are not verified. query_start_loc_cpu: [rows + 1]. is_prefilling: bool [rows]; None (while
    graphs are captured) changes nothing. Prompt chunks of one token stay -1: they start from the first slot.
    """
    if is_prefilling is None:
        return drafts
    rows = drafts.shape[0]
    lengths = query_start_loc_cpu[1 : rows + 1] - query_start_loc_cpu[:rows]
    undrafted = (drafts < 0) & (lengths == 1) & ~is_prefilling[:rows].cpu()
    return torch.where(undrafted, 0, drafts)


def install() -> bool:
    """Wrap the first runner's metadata call, once, if it is loaded; whether it is wrapped.

    Raises RuntimeError if the runner has no such call: another release of vllm-ascend.
    """
    runner = getattr(sys.modules.get(RUNNER[0]), RUNNER[1], None)
    if runner is None:
        return False
    method = vars(runner).get(_METHOD)
    if method is None:
        raise RuntimeError(f"{'.'.join(RUNNER)} has no {_METHOD} of its own; k3-ascend does not know it")
    if not hasattr(method, _MARK):
        setattr(runner, _METHOD, _always_counted(method))
    return True


def _always_counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def build(self: Any, *args: Any, use_spec_decode: bool = False, **kwargs: Any) -> Any:
        if not use_spec_decode and self.speculative_config is not None and layers_of(self):
            # Nobody drafted: the counts of an earlier step are still in the buffer.
            self.num_decode_draft_tokens.np.fill(-1)
            use_spec_decode = True
        return method(self, *args, use_spec_decode=use_spec_decode, **kwargs)

    setattr(build, _MARK, True)
    return build
