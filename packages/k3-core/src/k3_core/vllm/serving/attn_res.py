"""The mix of attention residuals as a layer: two weight vectors and one operator call a mix.

Lazy form: the running ``prefix`` and the last sublayer's output ``delta`` travel separately; the next mix adds them,
writes the block bank where the schedule says so, mixes, and applies the norm that follows, in one pass over the rows.
Formula and schedule: ``k3_core.contracts.attn_res``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from k3_core.config import TextConfig
from k3_core.vllm.serving.dispatch import Choose
from k3_core.vllm.serving.modules import Loadable, parameter


class Mix(Loadable):
    """One mix: ``{name}_norm.weight`` [H] and ``{name}_proj.weight`` [1, H] of the checkpoint."""

    def __init__(self, text: TextConfig, slots: int, choose: Choose) -> None:
        super().__init__()
        self.norm_weight, self.proj_weight = parameter(text.hidden_size), parameter(text.hidden_size)
        self.eps = text.rms_norm_eps
        self._operator = choose("attn_res", torch.get_default_dtype(), {"H": text.hidden_size, "M": max(slots, 1)})

    def forward(
        self,
        prefix: Tensor,
        delta: Tensor | None,
        bank: Tensor,
        num_blocks: int,
        *,
        write_block: int | None = None,
        output_norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """The (normed) mix [T, H]; ``prefix`` becomes prefix + delta and ``bank[:, write_block]`` its copy.

        prefix, delta: [T, H]; bank: [T, slots, H], of which the first ``num_blocks`` are read. output_norm: weight and
        eps of the RMS norm that follows.
        """
        weight, eps = output_norm if output_norm is not None else (None, None)
        mixed: Tensor = self._operator(
            prefix,
            delta,
            bank,
            self.norm_weight,
            self.proj_weight,
            self.eps,
            num_blocks,
            write_block=write_block,
            output_norm_weight=weight,
            output_norm_eps=eps,
        )
        return mixed

    def named_parts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Destinations of the two vectors under the checkpoint's ``name``."""
        yield f"{name}_norm.weight", self.norm_weight.data
        yield f"{name}_proj.weight", self.proj_weight.data.unsqueeze(0)
