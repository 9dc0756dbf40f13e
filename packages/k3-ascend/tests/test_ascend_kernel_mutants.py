"""Faults planted in the kernels' sources: each must fail a case, lowered and executed as in the numerics tests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ascend_kernel_support import executor, kernel_module, planted, tools

from k3_core.testing import conformance

pytest.importorskip("triton", reason="the kernels need Triton")
tools("execute")


CONV, TAPS = "short_conv", "w0 * h0 + w1 * h1 + w2 * h2 + w3 * x"
FRESH = "tl.where(tl.load(init_ptr + seq).to(tl.int32) != 0, channels, 0)"
LOGIT = "/ tl.sqrt(tl.sum(y * y, axis=0) / H + eps)"
SLOT = "write_block * block_stride"


class Fault(NamedTuple):
    """One replacement in a module's source, and the operator and words of the case that must notice."""

    module: str
    old: str
    new: str
    operator: str
    case: str


FAULTS = {
    "delta not rounded": Fault(
        "attn_res", "x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)",
        "x = x.to(tl.float32) + delta.to(tl.float32)", "attn_res", "n3.delta.strided.x64",
    ),
    "logits not normalised": Fault("attn_res", LOGIT, "", "attn_res", "n3.delta"),
    "softmax not rescaled": Fault("attn_res", "mixed * kept + y", "mixed + y", "attn_res", "n3.delta"),
    "last block left out": Fault("attn_res", "range(num_blocks)", "range(num_blocks - 1)", "attn_res", "n3.delta"),
    "bank written elsewhere": Fault(
        "attn_res", SLOT, "(write_block - 1) * block_stride", "attn_res", "n3.delta.strided.write3"
    ),
    "up half not saturated": Fault("situ", "linear_beta * tanh(up / linear_beta)", "up", "situ", "T17.I64.strided:"),
    "mean of squares is a sum": Fault("gated_norm", "axis=1) / D", "axis=1)", "gated_norm", "T5.N2"),
    "silu instead of sigmoid": Fault("gated_norm", "* sigmoid(gate)", "* gate * sigmoid(gate)", "gated_norm", "T5.N2"),
    "taps reversed": Fault(
        CONV, TAPS, "w3 * h0 + w2 * h1 + w1 * h2 + w0 * x", "short_conv", "1_2_3"
    ),
    "former owner's window": Fault(
        CONV, FRESH, "channels", "short_conv", "1_2_3"
    ),
    "short sequences forget": Fault(
        "short_conv", "new = tl.where(length == 1, h1, tl.where(length == 2, h2, new))", "pass", "short_conv", "1_2_3"
    ),
    "accepted tokens ignored by the window": Fault(
        "short_conv", "(tl.load(accepted_ptr + seq) - 1)", "(tl.load(accepted_ptr + seq) * 0)", "kda_verify", "4_4_4_4"
    ),
    "accepted tokens ignored by the state": Fault(
        "kda_step", "(tl.load(accepted_ptr + seq) - 1)", "(tl.load(accepted_ptr + seq) * 0)", "kda_verify", "4_4_4_4"
    ),
    "all states in one slot": Fault(
        "kda_step", "slot_at + j * slot_column_stride", "slot_at", "kda_verify", "4_4_4_4"
    ),
    "read before write": Fault(
        "kda_step", "S = S + u[:, None] * k[None, :]\n                o = tl.sum(S * q[None, :], axis=1)",
        "o = tl.sum(S * q[None, :], axis=1)\n                S = S + u[:, None] * k[None, :]", "kda_decode", "T33",
    ),
    "decay left out": Fault("kda_step", "S = S * decay[None, :]", "S = S * 1.0", "kda_decode", "T33"),
    "null block touched": Fault("kda_step", "if slot > 0:", "if slot > -1:", "kda_decode", "T33"),
    "gates not summed": Fault("kda_gate", "g = total", "pass", "kda_prefill", "65_0_1_64.long"),
    "state not decayed": Fault("kda_chunk", "S = S * gamma[:, None] +", "S = S +", "kda_prefill", "150.mixed"),
    "initial state of a former owner": Fault(
        "kda_chunk", "live & (tl.load(init_ptr + seq).to(tl.int32) != 0)", "live", "kda_prefill", "65_0_1_64.mixed"
    ),
    "own token not attended": Fault("kda_chunk", "i >= j, 1.0", "i > j, 1.0", "kda_prefill", "65_0_1_64.long"),
    "tiles meet one row early": Fault(
        "kda_chunk", "tl.minimum(right, rows) - 1)", "tl.minimum(right, rows) - 9)", "kda_prefill", "150.mixed"
    ),
    "inverse without its last row": Fault(
        "kda_chunk", "for r in range(rows):", "for r in range(rows - 1):", "kda_prefill", "65_0_1_64.long"
    ),
    "sequences without a slot are written": Fault(
        "kda_chunk", "tl.where(live, tl.load(chunk_ptr + chunk * 4 + 1), 0)", "tl.load(chunk_ptr + chunk * 4 + 1)",
        "kda_prefill", "65_0_1_64.long",
    ),
}  # fmt: skip


def _fails(fault: Fault) -> str:
    """The verdict's reason for the first case of that name; empty if it passes."""
    cases = [c for c in conformance.cases(fault.operator, ("small",), (torch.bfloat16,)) if f":{fault.case}" in c.id]
    cases = [c for c in cases if c.options.get("layout", "SD") == "SD"]
    assert cases, f"no case is called {fault.case}"
    implementation = kernel_module("catalogue").IMPLEMENTATIONS[fault.operator]
    with kernel_module("launch").executing_with(executor()):
        row = conformance.run_case(cases[0], implementation)
    assert row.verdict != "refused", row.reason
    return row.reason if row.verdict == "fail" else ""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with planted(fault.module, fault.old, fault.new, tmp_path):
        reason = _fails(fault)
    assert reason, "the case passes"
    assert "raised" not in reason, f"not caught by a wrong value: {reason}"


def test_an_unchanged_copy_passes(tmp_path: Path) -> None:
    """The way faults are planted does not itself break a kernel."""
    fault = FAULTS["decay left out"]
    with planted(fault.module, fault.old, fault.old, tmp_path):
        assert not _fails(fault)


def test_mxfp4_faults_are_caught(tmp_path: Path) -> None:
    """Nibbles swapped, a scale off by one, subnormals flushed."""
    from k3_core.contracts import mxfp4

    packed = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    scale = torch.tensor([0, 1, 130], dtype=torch.uint8)[:, None].expand(3, 16).contiguous()
    want = mxfp4.unpack(packed, scale, torch.bfloat16).view(torch.int16)
    for old, new in (
        ("low | (high << 16)", "high | (low << 16)"),
        ("(magnitude >> 1) - 1", "(magnitude >> 1)"),
        ("64 + (half >> 1), 32)", "0, 0)"),
    ):
        with planted("mxfp4", old, new, tmp_path), kernel_module("launch").executing_with(executor()):
            got = kernel_module("mxfp4").unpack_mxfp4(packed, scale)
        assert not torch.equal(got.view(torch.int16), want), (old, new)
