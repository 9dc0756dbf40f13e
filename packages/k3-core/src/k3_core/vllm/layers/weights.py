"""Parameters of the reference model. Module paths equal the released tensor names, so loading needs no table of names.

A matrix is not an ``nn.Linear``: its initialisation would cost more than loading, and vLLM repacks linear layers on
CPUs, after which their weight can no longer be read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient; ``dtype`` None is the model dtype (torch's current default)."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype or torch.get_default_dtype()), requires_grad=False)


class Weight(nn.Module):
    """One tensor called ``weight``; calling it applies it as a bias-free projection [..., in] -> [..., out]."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = parameter(*shape, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] times the transposed weight [out, in]."""
        return functional.linear(x, self.weight)
