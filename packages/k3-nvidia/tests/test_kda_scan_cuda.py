"""kda_scan_bulk.cu, the scan over segments alone, run on the CPU fiber by fiber against fp64.

The format of the transitions is written down here once more, from the head of the source. Whole prefills, with what the
local pass writes, are in test_kda_chunk_cuda. The emulation cannot show a missing fence between stores and products.
"""

from __future__ import annotations

import ctypes
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as test_kda_kernels, whichever is imported first
pytest.importorskip("triton")

from cuda_emulated import Edit, emulated

from k3_nvidia.kernels import cuda_host, kda_passes_cuda, kda_prefill
from k3_nvidia.kernels.kda_plan import plan_prefill
from k3_nvidia.tuning import kda as tuning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the device runs the kernels themselves")
DIM, HEADS = 128, 2
#: Rows of a block, stages; the first is the one that is chosen.
Form = tuple[int, int]
FORMS: list[Form] = [(16, 3), (16, 2), (32, 2)]
CHOSEN = FORMS[0]
#: First segment and segments of sequences: more steps than stages, one step, none.
SCANS = [(0, 8), (8, 3), (11, 2)]
SEGMENTS = 13


def tiles(p: Tensor) -> Tensor:
    """[..., K, N] -> [..., 16384]: halves of k, rows of N with permuted 16-byte pieces (kda_scan_bulk.cu)."""
    lead, x = p.shape[:-2], p.reshape(-1, 2, 4, 2, 4, 2, DIM)  # half, sixteen, r, t, e, n
    places = x.permute(0, 1, 6, 2, 4, 5, 3).reshape(-1, 2, DIM, 8, 8)
    pieces = torch.arange(8)[None, :] ^ (torch.arange(DIM) % 8)[:, None]
    index = pieces[None, None, :, :, None].expand(places.shape)
    return places.gather(3, index).reshape(*lead, -1)


def case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """start, hi, lo, scans, and the starts in fp64; what no scan may read is NaN."""
    gen = torch.Generator().manual_seed(3)
    p = torch.linalg.qr(torch.randn(SEGMENTS, HEADS, DIM, DIM, generator=gen))[0]  # keeps the whole state
    start = torch.randn(SEGMENTS, HEADS, DIM, DIM, generator=gen)
    want = start.double()
    for first, segments in SCANS:
        for i in range(first + 2, first + segments):
            want[i] += want[i - 1] @ p[i - 1].double()
        p[first] = p[first + segments - 1] = float("nan")  # of a first segment, of one without successor
    hi = p.bfloat16()
    return start, tiles(hi), tiles((p - hi.float()).bfloat16()), torch.tensor(SCANS, dtype=torch.int32), want


def scanned(form: Form) -> tuple[Tensor, Tensor]:
    """The kernel's starts and the contract's."""
    start, hi, lo, scans, want = case()
    none = torch.empty(0)
    tensors = kda_passes_cuda.Tensors(*([none] * 9), start, hi.contiguous(), lo.contiguous(), *([none] * 4))
    kda_passes_cuda.scan(tensors, scans, HEADS, *form)
    return start, want


def excess(form: Form) -> float:
    """The largest error norm of a start over its tolerance.

    P of norm one keeps the errors of earlier steps; a step adds the parts of P and S below two terms (2^-17 of each at
    most) and lo lo (2^-18).
    """
    got, want = scanned(form)
    worst = 0.0
    for first, segments in SCANS:
        assert torch.equal(got[first : first + 2].double(), want[first : first + 2])  # not the scan's to write
        for i in range(2, segments):
            error = (got[first + i].double() - want[first + i]).norm() / want[first + i].norm()
            worst = max(worst, float("inf") if error.isnan() else error.item() / ((i - 1) * 2.0**-16))
    return worst


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_starts_are_the_recurrence(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = emulated(monkeypatch)
    assert excess(form) <= 1
    assert ran == ["kda_scan_bulk_cuda"]


def test_any_order_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in range(3):
        emulated(monkeypatch, seed=seed)
        found.append(scanned(CHOSEN)[0])
    assert all(torch.equal(a, b) for a, b in pairwise(found))


#: (what, text of kda_scan_bulk.cu, what replaces it).
MUTANTS = [
    ("transitions read before they came",
     "barrier_wait(address(shared + BARS + 8 * (n % STAGES)), (n / STAGES) & 1);", ""),
    ("the other phase of a barrier", "(n / STAGES) & 1", "1"),
    ("a stage asked for while it is read", "n > 0 && n - 1 + STAGES < steps) ask(args, base + (n + STAGES) * step, "
     "shared, n - 1 + STAGES)", "n + STAGES < steps) ask(args, base + (n + STAGES + 1) * step, shared, n + STAGES)"),
    ("one buffer of states", "n % 2 * BUFFER", "0"),
    ("states read before all have stored them", "stores_done();\n        sync_all();\n", "stores_done();\n"),
    ("products not waited for", "products_end<0>();\n", "products_end<1>();\n"),
    ("the first segment's transition", "base + (n + 1) * step, shared, n)", "base + n * step, shared, n)"),
    ("P in one term", "product<ROWS>(rest, operand_at(stage, TERM + at), state)", ""),
    ("S in one term", "*(u32 *)(to + ROWS * 128) = lo", "*(u32 *)(to + ROWS * 128) = 0"),
    ("the local state of a segment before", "load(mine + (n + 3) * step, next)", "load(mine + (n + 2) * step, next)"),
    ("pieces of a row in plain order", "^ (row % 8)", "^ 0"),
    ("the order of the channels", "+ g % 4 * 4", "+ (3 - g % 4) * 4"),
]  # fmt: skip


def edit_of(old: str, new: str) -> Edit:
    def edit(name: str, source: str) -> str:
        assert name == "kda_scan_bulk"
        assert source.count(old) == 1, old
        return source.replace(old, new)

    return edit


@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_caught(what: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        emulated(monkeypatch, edit_of(old, new), seed)
        try:
            if not excess(CHOSEN) <= 1:
                return
        except RuntimeError as error:  # or a block that hangs
            assert "hangs" in str(error)  # noqa: PT017
            return
    raise AssertionError(what)


@pytest.mark.parametrize("form", [(8, 3), (0, 3), (16, 0)], ids=str)
def test_a_form_that_there_is_not_is_refused(form: Form) -> None:
    with pytest.raises(ValueError, match="rows must be 16 or 32 and stages at least 1"):
        kda_passes_cuda.scan_kernel(*form)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_shared_memory_is_what_the_source_counts(form: Form) -> None:
    """Stages, states, barriers and alignment fit what a block may have."""
    source = cuda_host.source("kda_scan_bulk")
    assert "SCAN_SHARED = BARS + 8 * STAGES + 1024" in source
    assert "fence.proxy.async" in source.split("stores_done")[1].split("\n")[0]  # products read what threads stored
    assert kda_passes_cuda.scan_bytes(*form) <= 227 * 1024


@pytest.mark.parametrize(
    ("cut", "launches"),
    [(0, [("kda_pass_cuda", False)]), (2, [("kda_pass_cuda", True)] * 2),
     (1, [("kda_pass_cuda", True), ("kda_scan_bulk_cuda", True), ("kda_pass_cuda", True)])],
)  # fmt: skip
def test_only_a_pass_behind_the_local_one_or_the_local_one_itself_overlaps(
    cut: int, launches: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output pass asks for chunks before it waits: right behind the chunk kernel they are not there yet."""
    ran = []
    options = {"local": {"groups": 2, "stages": 4}, "output": {"groups": 1, "stages": 3}}
    monkeypatch.setattr(tuning, "passes", lambda: options | {"scan": {"rows": 16, "stages": 3}, "overlap": True})
    monkeypatch.setattr(
        cuda_host.CudaKernel,
        "__call__",
        lambda self, _grid, _args, _device, overlap=False: ran.append((self.entry, overlap)),
    )
    plan = plan_prefill([0, 192 if cut == 1 else 256], 1, "cpu", segment_chunks=cut)
    x, out = torch.zeros(4, 64 * DIM, dtype=torch.bfloat16), torch.zeros(256, 1, DIM, dtype=torch.bfloat16)
    state, slots = torch.zeros(2, 1, DIM, DIM), torch.ones(1, dtype=torch.int32)
    kda_prefill._explicit_passes((x, x, x, x, x, x.float()), state, slots, slots.bool(), plan, 1, out)
    assert ran == launches


def test_an_overlapped_launch_is_what_the_driver_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUlaunchConfig and CUlaunchAttribute byte by byte (cuda.h)."""
    seen: list[bytes] = []

    def launch(config: object, kernel: object, pointers: object, extra: object) -> int:
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)  # type: ignore[attr-defined]
        seen.extend((raw, ctypes.string_at(int.from_bytes(raw[40:48], "little"), 72)))
        return 0

    monkeypatch.setattr(cuda_host, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0x1234567890))
    monkeypatch.setattr(cuda_host.CudaKernel, "function", lambda *_: ctypes.c_void_p(1))
    kernel = kda_passes_cuda.scan_kernel(*CHOSEN)
    kernel((8, 6, 1), kda_passes_cuda.ScanArguments(), torch.device("cuda", 0), True)
    config, attribute = seen
    sizes = [8, 6, 1, 256, 1, 1, kernel.shared]
    assert [int.from_bytes(config[4 * i : 4 * i + 4], "little") for i in range(7)] == sizes
    assert int.from_bytes(config[32:40], "little") == 0x1234567890
    assert int.from_bytes(config[48:52], "little") == 1
    assert [int.from_bytes(attribute[i : i + 4], "little") for i in (0, 8)] == [6, 1]
