"""SiTU-GLU, the activation of every K3 feed-forward (dense, shared and routed experts), and SwiGLU of Kimi-Linear.

    situ(g, u) = beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)

with beta 4 and linear_beta 25 in the release, so |situ| <= 100 and situ(0, 0) = 0 (padded lanes vanish). Without
linear_beta the up half stays linear: beta * tanh(g / beta) * sigmoid(g) * u. beta itself is 1 where the config leaves
it unset. All of it in fp32, one rounding at the end. Do not form tanh in BF16: about 9 % of the gate values lie beyond
beta, where a BF16 tanh is flat.

    silu_and_mul(g, u) = g * sigmoid(g) * u          (Kimi-Linear, hidden_act "silu")

Values: situ(1,1) = 0.7158178, situ(-1,2) = -0.5258289, situ(4,25) = 56.959320, situ(10,-30) = -82.245822,
situ(100,100) = 99.932930.

Tolerance: 1 BF16 ulp of the result for BF16 outputs; 2e-6 relative + 1e-6 absolute in fp32 (three transcendental
functions of about 2 ulp each, products up to 100).

Source: released modelling code and config (`activation_situ_beta`, `activation_situ_linear_beta`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from k3_core.contracts._common import compute_dtype
from k3_core.errors import ConfigError

GatedActivation = Callable[[Tensor, Tensor], Tensor]


def situ_and_mul(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU-GLU of gate and up, equal shapes [..., I] -> [..., I] in gate's dtype.

    beta None means 1.0 (the released fall-back); linear_beta None leaves `up` linear.
    """
    dtype = compute_dtype(gate, up)
    g, u = gate.to(dtype), up.to(dtype)
    b = 1.0 if beta is None else beta
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (b * torch.tanh(g / b) * torch.sigmoid(g) * u).to(gate.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of gate and up, equal shapes [..., I] -> [..., I] in gate's dtype; fp32 inside, one rounding."""
    dtype = compute_dtype(gate, up)
    g = gate.to(dtype)
    return (g * torch.sigmoid(g) * up.to(dtype)).to(gate.dtype)


def gated_activation(hidden_act: str, beta: float | None = None, linear_beta: float | None = None) -> GatedActivation:
    """The (gate, up) -> product function that the config's `hidden_act` names.

    Raises ConfigError for any activation but "situ" and "silu".
    """
    if hidden_act == "situ":
        return lambda gate, up: situ_and_mul(gate, up, beta, linear_beta)
    if hidden_act == "silu":
        return silu_and_mul
    raise ConfigError(f'hidden_act must be "situ" or "silu", got {hidden_act!r}')
