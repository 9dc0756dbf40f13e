"""A logits processor that makes a random tiny model say what a test wants, through vLLM's own serving.

``vllm serve --logits-processors scripted_logits:Scripted`` and, per request, ``vllm_xargs={"script": [ids...]}``: step
i gives ``script[i]``; behind the script the model is free (a grammar and the request's logit_bias still hold).
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Scripted(AdapterLogitsProcessor):
    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Anything goes."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        script = [int(token) for token in (params.extra_args or {}).get("script", [])]
        if not script:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(script):
                logits.fill_(float("-inf"))
                logits[script[len(output_ids)]] = 0.0
            return logits

        return force
