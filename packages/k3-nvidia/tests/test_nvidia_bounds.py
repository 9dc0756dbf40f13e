"""Kernels read and write inside their tensors only: every address of a launch under Triton's interpreter.

What a masked-out result was computed from does not show in results; where nothing is mapped it ends the process. The
short convolution once read the rows before a part of a chunk that had none.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("addresses are seen by the interpreter only; on a device: the sanitizer", allow_module_level=True)

from triton.runtime.errors import InterpreterError

from k3_core.testing.bounds import watched
from k3_nvidia.kernels import attn_res, glue, kda_conv, kda_prefill, situ
from k3_nvidia.kernels.kda_plan import plan_prefill


@pytest.mark.parametrize("lengths", [[1], [33], [65], [1, 1, 2], [64, 3]])
def test_short_conv(lengths: list[int]) -> None:
    tokens, width = sum(lengths), 48
    bounds = [0, *np.cumsum(lengths).tolist()]
    x, weight, out = torch.randn(tokens, width), torch.randn(width, 4), torch.empty(tokens, width)
    state = torch.zeros(1 + len(lengths), width, 3)
    where, ends = torch.arange(1, 1 + len(lengths), dtype=torch.int32), torch.tensor(bounds, dtype=torch.int32)
    fresh, plan = torch.ones(len(lengths), dtype=torch.bool), plan_prefill(bounds, 1, "cpu")
    with watched():
        kda_prefill.short_conv(x, weight, state, where, ends, fresh, out=out, plan=plan)


def test_parts_of_a_convolution_far_apart() -> None:
    """Parts of less than 2^31 elements, of which the third begins beyond them; untouched pages cost nothing."""
    width, tokens = 128, 9_000_000
    out = torch.empty(3, tokens, width, dtype=torch.bfloat16)
    assert (tokens - 1) * width < 1 << 31 < 2 * (tokens - 1) * width
    x, weight = torch.randn(64, 3 * width, dtype=torch.bfloat16), torch.randn(3 * width, 4)
    state, ends = torch.zeros(2, 3 * width, 3), torch.tensor([0, 64], dtype=torch.int32)
    slots, old = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
    plan = plan_prefill([0, 64], 1, "cpu")
    near = torch.empty(3, 64, width, dtype=torch.bfloat16)
    for place in (out, near):
        with watched():
            kda_conv.short_conv_kernel[(3, 1, 2)](
                x, weight, state, place, plan.chunks, ends, slots, old, x.stride(0), width, 4, *state.stride(), 1,
                3 * width, width, place.stride(0), BC=128, PARTS=2,
            )  # fmt: skip
    assert torch.equal(out[:, :64], near)


@pytest.mark.parametrize("config", [{"prefetch": True, "programs": 1}, {"programs": 2, "ring": 3}], ids=str)
def test_attn_res(config: dict[str, Any]) -> None:
    tokens, hidden = 5, 72
    prefix, delta, out = torch.randn(tokens, hidden), torch.randn(tokens, hidden), torch.empty(tokens, hidden)
    bank, norm, proj = torch.randn(tokens, 3, hidden), torch.randn(hidden), torch.randn(hidden)
    chosen = attn_res.Config(**{"chunk": 64, "warps": 4, "group": 2, "prefetch": False, **config})
    with watched():
        attn_res.attn_res(
            prefix, delta, bank, norm, proj, 1e-5, 2, write_block=2, output_norm_weight=norm, output_norm_eps=1e-5,
            out=out, config=chosen,
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 70])
def test_situ(rows: int) -> None:
    x, out = torch.randn(rows, 2 * 136), torch.empty(rows, 136)
    with watched():
        situ.situ_and_mul(x, 4.0, 25.0, out=out)


def test_it_would_be_seen() -> None:
    x, out, sizes = torch.randn(3, 40), torch.empty(9, 40), {"BR": 4, "BC": 64, "PDL": False}
    with watched(), pytest.raises(InterpreterError, match="read outside"):
        glue.sigmoid_fp32_kernel[(2,)](out, x, 8, 40, x.stride(0), **sizes)
    with watched():
        glue.sigmoid_fp32_kernel[(1,)](out, x, 3, 40, x.stride(0), **sizes)
