"""What decoding keeps between calls: two small states for a KDA layer, one row a token for an MLA layer."""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from k3_core.config import TextConfig


@dataclass(frozen=True)
class KdaState:
    """conv [3 P, W - 1]: the last raw q, k, v projections, oldest first; recurrent [N, V, K] in fp32 (fp64)."""

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True)
class MlaState:
    """rows [tokens, R + rope]: normed latent and shared key part of every token so far."""

    rows: Tensor


LayerState = KdaState | MlaState


@dataclass
class Cache:
    """The states of one sequence. `ReferenceK3.forward` replaces `layers` and counts `num_tokens`."""

    layers: list[LayerState]
    num_tokens: int = field(default=0)

    @classmethod
    def empty(cls, text: TextConfig, dtype: torch.dtype, device: torch.device) -> Self:
        """The states of a sequence that has not begun: zeros and no rows."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        heads, dim = text.linear_attn.num_heads, text.linear_attn.head_dim
        history = text.linear_attn.short_conv_kernel_size - 1
        states: list[LayerState] = []
        for i in range(text.num_hidden_layers):
            if text.layer_kind(i) == "kda":
                conv = torch.zeros(3 * heads * dim, history, dtype=dtype, device=device)
                states.append(KdaState(conv, torch.zeros(heads, dim, dim, dtype=wide, device=device)))
            else:
                width = text.kv_lora_rank + text.qk_rope_head_dim
                states.append(MlaState(torch.zeros(0, width, dtype=dtype, device=device)))
        return cls(states)

    def copy(self) -> "Cache":
        """An independent branch: states are never changed in place, so sharing them is safe."""
        return Cache(list(self.layers), self.num_tokens)
