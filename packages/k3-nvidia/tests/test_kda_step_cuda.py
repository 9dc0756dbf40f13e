"""The cluster form of KDA decode and verification: the source run on a CPU fiber by fiber, and the cases on a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from test_kda_kernels import implementation

from k3_core.operators import contract as operators
from k3_core.testing import conformance
from k3_nvidia.kernels import cuda_host, kda_step, kda_step_cuda
from k3_nvidia.tuning import kda as tuning

CUDA = torch.cuda.is_available()
HERE = Path(__file__).parent
#: Blocks of a cluster, warps of a block, the state by bulk copies.
FORMS = [(4, 4, 0), (4, 8, 0), (2, 8, 0), (1, 8, 1), (1, 16, 0), (2, 4, 1)]


def emulated(
    split: int, warps: int, bulk: int, folder: Path, edit: tuple[str, str] = ("", ""), **definitions: int
) -> ctypes.CDLL:
    """The source as a library; edit: a text of it and what replaces that."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / f"decode{len(list(folder.iterdir()))}.so"  # a name is loaded once
    source = cuda_host.source("kda_step")
    assert not edit[0] or source.count(edit[0]) == 1, edit
    path = library.with_suffix(".cu")
    path.write_text(source.replace(*edit) if edit[0] else source)
    flags = {"SPLIT": split, "WARPS": warps, "BULK": bulk, **definitions}
    subprocess.run(
        [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-w", *(f"-D{k}={v}" for k, v in flags.items()),
         f'-DSOURCE="{path}"', f"-I{HERE}", str(HERE / "kda_step_emulation.cpp"), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def inputs(heads: int, slots: list[int], by_channel: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, dim = len(slots), 128
    wide = normal(rows, 3 * heads * dim + 64).bfloat16()
    conv = normal(8, 3, 3 * heads * dim).bfloat16().transpose(1, 2)
    return dict(
        qkv=wide[:, : 3 * heads * dim], z=normal(rows, heads, dim).bfloat16(), beta=torch.sigmoid(normal(rows, heads)),
        gate=normal(rows, heads, dim).bfloat16(), conv_weight=normal(3 * heads * dim, 4), a_log=normal(heads) * 0.3,
        dt_bias=normal(heads, dim) - 2, o_norm_weight=normal(dim),
        conv_state=conv if by_channel else conv.contiguous(), recurrent_state=normal(8, heads, dim, dim),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip


def run(library: ctypes.CDLL, case: dict[str, torch.Tensor], bound: float | None, seed: int) -> torch.Tensor:
    out = torch.full_like(case["z"], float("nan"))
    names = ("qkv", "z", "beta", "gate", "conv_weight", "a_log", "dt_bias", "o_norm_weight", "conv_state")
    tensors = [case[n] for n in (*names, "recurrent_state", "slot_mapping")] + [out]
    slots, heads = case["slot_mapping"], case["z"].shape[1]
    counts = [case[n].data_ptr() if n in case else None for n in ("num_accepted", "cu_seqlens")]
    arguments = kda_step_cuda.Arguments(
        *(x.data_ptr() for x in tensors), *counts,
        *(case[n].stride(0) for n in ("qkv", "z", "beta", "gate")), out.stride(0),
        *case["conv_state"].stride(), case["recurrent_state"].stride(0), slots.stride(0), slots.stride(-1),
        bound or 0.0, 1e-5, heads, len(slots), len(out),
    )  # fmt: skip
    library.kda_step_emulated(ctypes.byref(arguments), heads, len(slots), seed)
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_source_computes_the_contract(form, tmp_path):
    """Every block and warp, threads in any order; shuffled slots, a null and a padding row, both conv layouts."""
    for bound, layout in ((-5.0, True), (None, False)):
        if bound is None and form != FORMS[0]:
            continue
        library = emulated(*form, tmp_path, BOUNDED=int(bound is not None))
        case = inputs(2, [3, 0, 5, -1, 1], layout)
        expected = {k: v.clone() for k, v in case.items()}
        want = operators.kda_decode(**expected, lower_bound=bound, o_norm_eps=1e-5)
        got = run(library, case, bound, seed=form[0] * 100 + form[1])
        assert torch.equal(case["conv_state"], expected["conv_state"])
        # A convolution may round to the other bfloat16 neighbour once in a while; all else is as near as fp32.
        assert error(case["recurrent_state"], expected["recurrent_state"]) < 1e-4
        assert torch.equal(case["recurrent_state"][[0, 2, 4, 6, 7]], expected["recurrent_state"][[0, 2, 4, 6, 7]])
        assert (got[[1, 3]] == 0).all()
        assert error(got, want) < 4e-3


#: (what, text of kda_step.cu, what replaces it).
BULK_MUTANTS = [
    ("the state read before it came", "if (BULK) barrier_wait(bars + 8 * g, 0);", ""),
    ("one barrier waited for by every piece", "barrier_wait(bars + 8 * g, 0)", "barrier_wait(bars, 0)"),
    ("every piece in the place of the first", "address(shared) + STATE + g * PIECE", "address(shared) + STATE"),
]


@pytest.mark.parametrize(("what", "old", "new"), BULK_MUTANTS, ids=[m[0] for m in BULK_MUTANTS])
def test_mutants_of_the_bulk_copies_are_caught(what, old, new, tmp_path):
    """Copies arrive when they like, or (odd seeds) when nobody can go on without them."""
    library = emulated(2, 4, 1, tmp_path, (old, new))
    for seed in range(3):
        case = inputs(2, [3, 0, 5, -1, 1])
        expected = {k: v.clone() for k, v in case.items()}
        operators.kda_decode(**expected, lower_bound=-5.0, o_norm_eps=1e-5)
        run(library, case, -5.0, seed)
        if not error(case["recurrent_state"], expected["recurrent_state"]) < 1e-4:
            return
    raise AssertionError(what)


VERIFY_FORMS = [(4, 4, 0), (4, 8, 0), (2, 8, 0), (1, 16, 0)]


@pytest.mark.parametrize("form", VERIFY_FORMS, ids=str)
def test_source_verifies_as_the_contract(form, tmp_path):
    """Rows of 1 to 4 tokens, a null row, a row without tokens, two padding rows; every accepted count; null targets."""
    library = emulated(*form, tmp_path, VERIFY=1, TOKENS=4)
    case = inputs(2, [0] * 12)
    slots = torch.tensor([[3, 9, 5, 0], [0, 0, 0, 0], [2, 4, 6, 8], [7, 1, 10, 11], [12, 13, 14, 15]])
    case["slot_mapping"] = slots.int()
    case["recurrent_state"] = torch.randn(16, 2, 128, 128, generator=torch.Generator().manual_seed(1))
    conv = torch.randn(16, 6, 768, generator=torch.Generator().manual_seed(2)).bfloat16().transpose(1, 2)
    case["conv_state"] = conv if form[0] > 1 else conv.contiguous()
    case["num_accepted"] = torch.tensor([2, 1, 4, 1, 1], dtype=torch.int32)
    case["cu_seqlens"] = torch.tensor([0, 3, 5, 9, 10, 10], dtype=torch.int32)
    expected = {k: v.clone() for k, v in case.items()}
    want = operators.kda_verify(**expected, lower_bound=-5.0, o_norm_eps=1e-5)
    got = run(library, case, -5.0, seed=form[1])
    assert torch.equal(case["conv_state"], expected["conv_state"])
    assert error(case["recurrent_state"], expected["recurrent_state"]) < 1e-4
    untouched = [0, 8, 1, 10, 11, 12, 13, 14, 15]
    kept = [n for n in untouched if torch.equal(expected["recurrent_state"][n], case["recurrent_state"][n])]
    assert set(kept) >= {0, 1, 10, 11, 12, 13, 14, 15}
    assert (got[[3, 4, 10, 11]] == 0).all()
    assert error(got, want) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="runs on the device")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_conforms(form, overlap, monkeypatch):
    """The operator's cases; those of other sizes or dtypes take the form that serves them."""
    split, warps, bulk = form
    config = {"FORM": "cluster", "SPLIT": split, "num_warps": warps, "BULK": bool(bulk), "PDL": overlap}
    blocks = {"decode": {"BV": 16, "STAGES": 2}, "verify": {"BV": 16}}
    monkeypatch.setattr(tuning, "step_launch", lambda kernel, programs, dim: blocks[kernel] | config)
    calls = []
    step = kda_step_cuda.step
    monkeypatch.setattr(kda_step.kda_step_cuda, "step", lambda *a: (calls.append(len(a)), step(*a)))
    for name in ("kda_decode", "kda_verify") if not bulk else ("kda_decode",):
        conformance.run(name, implementation(name), "cuda", scales=("real",)).raise_if_failed()
    assert len(set(calls)) == 2 - bulk
