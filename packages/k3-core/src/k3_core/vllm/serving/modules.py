"""Small pieces that every layer uses: matrices of one rank, norms, the gated MLP, and what loading needs to know.

Matrices are vLLM's linear layers, so that its choice of matrix product, its collectives and its handling of weights on
a CPU apply. A matrix that holds rows of several checkpoint tensors, some cut and some whole, is a
:func:`local_linear` of this rank's own size; :meth:`Loadable.parts` says which rows belong to which tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from k3_core.config import TextConfig
from k3_core.vllm.serving.dispatch import Choose

#: Rows of fused projections are padded to this, so that every row of the result starts on 32 bytes.
ROW_MULTIPLE = 16


def tp() -> tuple[int, int]:
    """(size, rank) of tensor parallelism."""
    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()


def votes(answers: list[bool], device: torch.device) -> list[int]:
    """How many tensor parallel ranks say yes to each question. A collective: every rank must ask, outside any graph."""
    if tp()[0] == 1:
        return [int(yes) for yes in answers]
    mine = torch.tensor(answers, dtype=torch.float32, device=device)
    return [round(count) for count in tensor_model_parallel_all_reduce(mine).tolist()]


class Loadable(nn.Module):
    """A module that says where the checkpoint's tensors go."""

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """(released name below this module, destination of this rank's part). Shapes equal those of the parts."""
        raise NotImplementedError


def variant_key(layer: nn.Module) -> Hashable:
    """What of a layer decides which variants of kernels it launches.

    The types of its parts; dtype, shape, strides and 16-byte alignment of its tensors; and what no tensor tells: a part
    that compiles constants of its own (say, of its weights' values) gives them by a method ``variant_key()``.
    """
    tensors = chain(layer.named_parameters(), layer.named_buffers())
    modules = list(layer.named_modules())
    return (
        tuple((name, type(module)) for name, module in modules),
        tuple((name, t.dtype, tuple(t.shape), t.stride(), t.data_ptr() % 16 == 0) for name, t in tensors),
        tuple((name, module.variant_key()) for name, module in modules if hasattr(module, "variant_key")),
    )


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient; ``dtype`` None is the model dtype (torch's current default)."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype or torch.get_default_dtype()), requires_grad=False)


def local_linear(inputs: int, outputs: int, prefix: str) -> ReplicatedLinear:
    """A bias-free matrix [outputs, inputs] of exactly this size on this rank; calling it returns the product only."""
    return ReplicatedLinear(inputs, outputs, bias=False, quant_config=None, prefix=prefix, return_bias=False)


def row_parallel(inputs: int, outputs: int, prefix: str, *, reduce: bool = True) -> RowParallelLinear:
    """A bias-free matrix cut along its inputs; the ranks' results are summed unless ``reduce`` is false."""
    return RowParallelLinear(
        inputs, outputs, bias=False, quant_config=None, prefix=prefix, reduce_results=reduce, return_bias=False
    )


def norm(size: int, eps: float) -> RMSNorm:
    """vLLM's RMS norm, which rounds as the released code: once before and once after the weight."""
    return RMSNorm(size, eps=eps)


class Rows:
    """Hands out consecutive rows of a fused matrix."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, int]] = {}
        self.total = 0

    def add(self, name: str, count: int) -> None:
        """Reserve ``count`` rows for ``name``."""
        self.sizes[name] = (self.total, count)
        self.total += count

    @property
    def padded(self) -> int:
        """All rows, rounded up to ``ROW_MULTIPLE``."""
        return -(-self.total // ROW_MULTIPLE) * ROW_MULTIPLE

    def columns(self, product: Tensor, first: str, last: str | None = None) -> Tensor:
        """The columns of a product [T, padded] that belong to ``first`` .. ``last``, as a view."""
        start = self.sizes[first][0]
        end = sum(self.sizes[last or first])
        return product[:, start:end]

    def parts(self, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(``name.weight``, its rows of ``weight``)."""
        for name, (start, count) in self.sizes.items():
            yield f"{name}.weight", weight[start : start + count]


class Activation(nn.Module):
    """The configuration's gated activation on [gate | up] rows."""

    def __init__(self, text: TextConfig, width: int, choose: Choose) -> None:
        super().__init__()
        self.beta, self.linear_beta = text.activation_situ_beta, text.activation_situ_linear_beta
        self.situ = text.hidden_act == "situ"
        if self.situ:
            self._operator = choose("situ", torch.get_default_dtype(), {"I": width})
        else:
            self._silu = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]."""
        if self.situ:
            result: Tensor = self._operator(x, 1.0 if self.beta is None else self.beta, self.linear_beta)
            return result
        activated: Tensor = self._silu(x.contiguous())  # vLLM's kernel takes no columns of a wider tensor
        return activated


class GatedMLP(Loadable):
    """act(x Wg^T, x Wu^T) Wd^T cut along its width: the dense layer and, unreduced, the shared experts.

    own_inputs: False where another matrix has the gate and up rows; then only ``finish`` computes.
    """

    def __init__(
        self,
        text: TextConfig,
        width: int,
        prefix: str,
        choose: Choose,
        *,
        reduce: bool = True,
        own_inputs: bool = True,
    ) -> None:
        super().__init__()
        size, _ = tp()
        self.width, self.own_inputs = width // size, own_inputs
        if own_inputs:
            self.gate_up_proj = local_linear(text.hidden_size, 2 * self.width, f"{prefix}.gate_up_proj")
        self.down_proj = row_parallel(width, text.hidden_size, f"{prefix}.down_proj", reduce=reduce)
        self.act = Activation(text, self.width, choose)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]; this rank's share where the results are not reduced."""
        return self.finish(self.gate_up_proj(x))

    def finish(self, gate_up: Tensor) -> Tensor:
        """Activation and down projection of [T, 2 I] gate and up rows -> [T, H]."""
        result: Tensor = self.down_proj(self.act(gate_up))
        return result

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Gate rows, then up rows."""
        if self.own_inputs:
            yield "gate_proj.weight", self.gate_up_proj.weight[: self.width]
            yield "up_proj.weight", self.gate_up_proj.weight[self.width :]
        yield "down_proj.weight", self.down_proj.weight


def below(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """The parts of a child module, or its ``weight``, under ``name``."""
    if isinstance(module, Loadable):
        for part, destination in module.parts():
            yield f"{name}.{part}", destination
    else:
        yield f"{name}.weight", module.weight
