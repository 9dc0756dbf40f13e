"""kda_prefill through vLLM's FlashKDA operator: who is chosen, what the operator is given, what comes back.

Where the operator is not here (no CUDA wheel of vLLM) a stand-in made from the contract takes its place: it checks
every argument as the operator does and computes in fp64.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_core.contracts import kda as contract
from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec, Implementation
from k3_core.testing import conformance
from k3_core.testing.poison import poisoned_empty
from k3_core.testing.triton_interpreter import round_to_nearest
from k3_nvidia.kernels import kda_checks, kda_flash, kda_plan, kda_prefill
from k3_nvidia.tuning import kda as tuning

if kda_checks.interpreted():
    round_to_nearest()

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DIM, BOUND = 128, -5.0
NAMES = kda_flash.ARGUMENTS


class Standin:
    """The operator's contract in fp64; `calls` keeps what it was given. `wrong` breaks one convention on purpose."""

    def __init__(self, wrong: str = "") -> None:
        self.calls: list[dict] = []
        self.wrong = wrong

    def get_workspace_size(self, tokens, heads, sequences):
        return 64 * heads * (-(-tokens // 16) + sequences)

    def fwd(self, *args, **named):
        given = dict(zip(NAMES, args, strict=False)) | named
        assert list(given) == list(NAMES)
        self.calls.append(given)
        q, k, v, g, beta, out, cu = (given[n] for n in ("q", "k", "v", "g", "beta", "out", "cu_seqlens"))
        _, tokens, heads, dim = q.shape
        for x in (q, k, v, g, out, given["workspace"], given["initial_state"], given["final_state"], cu):
            assert x.is_contiguous()
        for x in (q, k, v, g, out):
            assert x.shape == (1, tokens, heads, dim)
            assert x.dtype == torch.bfloat16
        assert beta.shape == (1, tokens, heads)
        assert beta.dtype == torch.bfloat16
        assert beta[0].t().is_contiguous(), "the operator would copy beta"
        assert given["workspace"].numel() >= self.get_workspace_size(tokens, heads, cu.numel() - 1)
        assert given["dt_bias"].shape == (heads, dim)
        assert given["scale"] == dim**-0.5
        # The last chunk of a sequence reads on to its sixteenth row: v of what follows, beta as one flat vector.
        flat = beta[0].t().reshape(-1)
        for a, b in pairwise(cu.tolist()):
            reach = range(b, a + -(-(b - a) // 16) * 16)
            assert v[0, reach.start : reach.stop].isfinite().all(), "the operator would spread it"
            for head in range(heads):
                assert flat[head * tokens + reach.start : head * tokens + reach.stop].isfinite().all()
        start = given["initial_state"].double()
        assert start.shape == given["final_state"].shape == (cu.numel() - 1, heads, dim, dim)
        log_decay = contract.gate(g[0].double(), given["A_log"].double(), given["dt_bias"].double(), BOUND)
        o, final = contract.recurrent(
            q[0].double(), k[0].double(), v[0].double(), log_decay, torch.sigmoid(beta[0].double()), start, cu.cpu()
        )
        last = int(cu[-1])
        out[0, :last] = o[:last].to(out.dtype)
        given["final_state"].copy_(final.transpose(2, 3) if self.wrong == "transposed state" else final)


@pytest.fixture
def operator(monkeypatch):
    """The stand-in, in the operator's place."""
    made = Standin()
    monkeypatch.setattr(kda_flash, "operator", lambda: (made, "stand-in"))
    return made


def through_flash(*args, out=None, plan=None):
    """kda_prefill with FlashKDA wherever every sequence has a token."""
    cu = args[10].tolist()
    engine = kda_plan.FLASH if min(b - a for a, b in pairwise(cu)) > 0 else kda_plan.CHUNKS
    plan = kda_plan.plan_prefill(cu, args[0].shape[1], args[0].device, dim=args[0].shape[2], engine=engine)
    return kda_prefill.kda_prefill(*args, out=out, plan=plan)


def inputs(heads: int, lengths: list[int], padding: int = 0, slots: list[int] | None = None):
    """Arguments of kda_prefill as the layer makes them: q, k, v and z dense."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    tokens = sum(lengths) + padding
    q, k, v, z = (normal(tokens, heads, DIM).bfloat16() for _ in range(4))
    # Logits as the layer has them: beta came from bfloat16.
    beta = torch.sigmoid((3 * normal(tokens, heads)).bfloat16().float())
    pool = normal(2 * len(lengths) + 3, heads, DIM, DIM)
    where = torch.tensor(slots or [2 * n + 2 for n in reversed(range(len(lengths)))], dtype=torch.int32, device=DEVICE)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    first = torch.arange(len(lengths), device=DEVICE) % 2 == 0
    return [q, k, v, z, beta, normal(heads) * 0.3, normal(heads, DIM) - 3, BOUND, pool, where, cu, first]


def expected(args):
    """(outputs of the valid rows, final states) of the contract in fp64."""
    q, k, v, z, beta, a_log, bias, bound, pool, where, cu, first = args
    use = first & (where > 0)
    start = torch.where(use.view(-1, 1, 1, 1), pool[where.long().clamp(min=0)], torch.zeros((), device=DEVICE)).double()
    g = contract.gate(z.double(), a_log.double(), bias.double(), bound)
    return contract.recurrent(q.double(), k.double(), v.double(), g, beta.double(), start, cu.cpu())


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(args, out, before, wrong_state: bool = False):
    want, final = expected([*args[:8], before, *args[9:]])
    where, cu = args[9], args[10].tolist()
    touched = torch.zeros(len(before), dtype=torch.bool)
    for n, (a, b) in enumerate(pairwise(cu)):
        slot = int(where[n])
        if slot > 0:
            touched[slot] = True
            assert error(out[a:b], want[a:b]) < 3e-3  # one bf16 rounding of the output
            assert (error(args[8][slot], final[n]) < 1e-5) is not wrong_state
        else:
            assert (out[a:b] == 0).all()
    assert (out[cu[-1] :] == 0).all()
    assert torch.equal(args[8].cpu()[~touched], before.cpu()[~touched])


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_states_come_from_their_slots_and_go_back(operator, state):
    """Shuffled slots, sequences with and without a state, padding rows, beta beyond fp32's sigmoid."""
    args = inputs(3, [17, 1, 40], padding=5)
    args[4][0], args[4][1] = 0.0, 1.0
    args[8] = args[8].to(state)
    before = args[8].clone()
    out = torch.full_like(args[0], float("nan"))
    through_flash(*args, out=out)
    call = operator.calls[0]
    assert torch.equal(call["initial_state"][0], before[int(args[9][0])])
    assert not call["initial_state"][1].any()
    if state == torch.float32:
        check(args, out, before)
    assert torch.equal(call["final_state"][2], args[8][int(args[9][2])])


def test_beta_is_the_logit_that_it_came_from(operator):
    args = inputs(2, [64])
    logits = (3 * torch.randn(64, 2)).bfloat16().to(DEVICE)
    args[4] = torch.sigmoid(logits.float())
    through_flash(*args)
    assert torch.equal(operator.calls[0]["beta"][0], logits)


def test_rows_of_an_output_that_is_not_dense(operator):
    """They are copied from a dense one, the zeros behind the last sequence too."""
    args = inputs(2, [17, 20], padding=6)
    before = args[8].clone()
    out = torch.full((43, 4, DIM), float("nan"), dtype=torch.bfloat16, device=DEVICE)[:, :2]
    with poisoned_empty():
        through_flash(*args, out=out)
    check(args, out, before)


def test_null_sequences_write_zeros_and_touch_no_state(operator):
    args = inputs(2, [9, 20, 3], slots=[0, 4, -1])
    args[8][0] = float("nan")
    args[0][:9] = float("nan")
    before = args[8].clone()
    out = torch.full_like(args[0], float("nan"))
    through_flash(*args, out=out)
    assert (out[:9] == 0).all()
    assert (out[29:] == 0).all()
    assert out[9:29].isfinite().all()
    assert torch.equal(args[8][5:], before[5:])


@pytest.mark.parametrize("what", ["v", "beta", "one channel", "infinite"])
def test_what_is_not_finite_stays_in_its_sequence(operator, what):
    """Sequences shorter than what the operator reads of them, padding rows of NaN; v has its bits back afterwards."""
    lengths = [33, 2, 1, 20, 16, 5]
    args = inputs(2, lengths, padding=7)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    v, beta = args[2], args[4]
    v[bounds[-1] :] = float("nan")
    beta[bounds[-1] :] = float("nan")
    sick = {2, 3}
    for n in sick:
        if what == "v":
            v[bounds[n] : bounds[n + 1]] = float("nan")
        elif what == "beta":
            beta[bounds[n]] = float("nan")
        else:
            v[bounds[n], :, 5] = float("nan" if what == "one channel" else "inf")
    clean = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    for x in (clean[2], clean[4]):
        x[~x.isfinite()] = 0.0
    want, final = expected(clean)
    before, out = v.clone(), torch.empty_like(args[0])
    through_flash(*args, out=out)
    assert torch.equal(v.view(torch.int16), before.view(torch.int16))
    for n, (a, b) in enumerate(pairwise(bounds)):
        slot = int(args[9][n])
        if n not in sick:
            assert error(out[a:b], want[a:b]) < 3e-3
            assert error(args[8][slot], final[n]) < 1e-5
        else:
            one = what in ("one channel", "infinite")
            assert out[a:b, :, 5].isnan().all()
            assert args[8][slot, :, 5].isnan().all()
            assert out[a:b, :, 6].isnan().all() != one
    assert (out[bounds[-1] :] == 0).all()


def test_a_wrong_state_order_is_caught(monkeypatch):
    made = Standin("transposed state")
    monkeypatch.setattr(kda_flash, "operator", lambda: (made, "stand-in"))
    args = inputs(2, [30])
    before, out = args[8].clone(), torch.empty_like(args[0])
    through_flash(*args, out=out)
    check(args, out, before, wrong_state=True)


@pytest.mark.skipif(not CUDA, reason="only the cases of real size have the operator's head dimension")
@pytest.mark.gpu
def test_conforms(monkeypatch):
    """The shared cases; a call that the operator cannot take (softplus gates, empty sequences) goes to our kernels.

    Without the operator its stand-in is under test, that is, what is around it.
    """
    if kda_flash.operator()[0] is None:
        monkeypatch.setattr(kda_flash, "operator", lambda: (Standin(), "stand-in"))
    went: list[int] = []

    @wraps(kda_prefill.kda_prefill)
    def function(*args, **named):
        if kda_flash.refusal(args[0].shape[2], args[0].dtype, args[8].dtype, args[7]):
            return kda_prefill.kda_prefill(*args, **named)
        went.append(len(args[0]))
        return through_flash(*args, **named)

    implementation = Implementation("kda_prefill", "flash", function, kda_prefill.supports_prefill)
    report = conformance.run("kda_prefill", implementation, DEVICE, scales=("real",))
    # The operator rounds its state to bfloat16 after every chunk of 16, which the table's bound of an element does not
    # count: ten times in the longest case, of random sign, so sqrt(10) more; the norm keeps within its own bound.
    bad = [row for row in report.failures if row.worst > 1 + 10**0.5 or row.error > row.tolerance]
    assert not bad, "\n".join(f"{row.case}: {row.reason}" for row in bad)
    assert any(row.verdict == "pass" for row in report.rows)
    assert went


@pytest.mark.skipif(not CUDA or kda_flash.operator()[0] is None, reason="the operator is in vLLM's CUDA wheels")
@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [700, 1, 64, 300]])
def test_the_operator_itself(lengths):
    args = inputs(6, lengths, padding=3)
    before, out = args[8].clone(), torch.full_like(args[0], float("nan"))
    want, final = expected(args)
    through_flash(*args, out=out)
    assert error(out[: sum(lengths)], want[: sum(lengths)]) < 1.2e-2  # its state is bfloat16 on the chip
    assert error(args[8][args[9].long()], final) < 1.2e-2
    assert (out[sum(lengths) :] == 0).all()
    assert torch.equal(args[8][1::2], before[1::2])


def test_three_dense_tensors_from_the_convolution():
    """parts=3 holds the bits of the one-tensor form, padding rows included."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(45, 96, generator=generator).bfloat16().to(DEVICE)
    weight = torch.randn(96, 4, generator=generator).to(DEVICE)
    cu = torch.tensor([0, 17, 40], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    first = torch.tensor([True, False], device=DEVICE)
    results = []
    for parts in (1, 3):
        conv = torch.randn(3, 96, 3, generator=torch.Generator().manual_seed(4)).bfloat16().to(DEVICE)
        y = kda_prefill.short_conv(x, weight, conv, slots, cu, first, parts=parts)
        results.append((y, conv))
    (whole, conv), (dense, conv_dense) = results
    assert dense.shape == (3, 45, 32)
    assert dense[1].is_contiguous()
    assert torch.equal(torch.cat(list(dense), dim=1), whole)
    assert torch.equal(conv, conv_dense)
    with pytest.raises(ValueError, match="equal parts"):
        kda_prefill.short_conv(x, weight, conv, slots, cu, first, parts=5)


def test_choice_follows_the_measurements():
    """Each measured row gets the faster implementation; another device gets this wheel's kernels."""
    device = tuning.prefill_table()["device"]
    for heads, tokens, longest, chunks, flash in tuning.prefill_table()["rows"]:
        assert tuning.prefill_engine(heads, tokens, longest, device) == ("flash" if flash < chunks else "chunks")
        assert tuning.prefill_engine(heads, tokens, longest, "another") == "chunks"
    assert tuning.prefill_engine(6, 8000, 7900, device) == "chunks"
    assert tuning.prefill_engine(90, 8000, 600, device) == "flash"


def test_choice_between_measured_shapes_is_never_far_from_the_better():
    """Each measured shape, left out of the table, is still given an implementation within a tenth of the faster one."""
    rows = tuning.prefill_table()["rows"]
    wrong = 0
    for row in rows:
        others = [r for r in rows if r is not row]
        taken, other = (row[4], row[3]) if tuning.log_ratio(row[:3], others) < 0 else (row[3], row[4])
        assert taken <= 1.1 * other, row
        wrong += taken > other
    assert wrong <= len(rows) // 8


def test_plan_of_an_unmeasured_device_and_of_bad_engines():
    assert kda_plan.plan_prefill([0, 512] * 1 + [1024], 96, "cpu").engine == kda_plan.CHUNKS
    assert kda_plan.plan_prefill([0, 5], 96, "cpu", engine=kda_plan.FLASH).forced
    with pytest.raises(ValueError, match="have a token"):
        kda_plan.plan_prefill([0, 5, 5], 96, "cpu", engine=kda_plan.FLASH)
    with pytest.raises(ValueError, match="engine must be"):
        kda_plan.plan_prefill([0, 5], 96, "cpu", engine="fast")


def test_a_measured_choice_gives_way_and_a_forced_one_says_why(operator, monkeypatch):
    """Strided q, an unbounded gate or a missing operator: ours runs unless the caller insisted."""
    args = inputs(2, [20])
    monkeypatch.setattr(kda_plan.tuning, "prefill_engine", lambda *shape: kda_plan.FLASH)
    plan = kda_plan.plan_prefill([0, 20], 2, DEVICE)
    q, k, v, z = args[:4]
    assert kda_prefill.runs_flash(plan, q, k, v, z, torch.float32, BOUND)
    wide = torch.cat([q, k], dim=1)[:, :2]
    assert not kda_prefill.runs_flash(plan, wide, k, v, z, torch.float32, BOUND)
    assert not kda_prefill.runs_flash(plan, q, k, v, z, torch.float32, None)
    assert not kda_prefill.runs_flash(plan, q, k, v, z, torch.float32, -9.0)
    monkeypatch.setattr(kda_flash, "operator", lambda: (None, "not here"))
    assert not kda_prefill.runs_flash(plan, q, k, v, z, torch.float32, BOUND)
    forced = kda_plan.plan_prefill([0, 20], 2, DEVICE, engine=kda_plan.FLASH)
    with pytest.raises(UnsupportedError, match="not here"):
        kda_prefill.kda_prefill(*args, plan=forced)


REFUSED = [
    (dict(sizes={"N": 6, "D": 64, "K": 64, "V": 64}), "head dimension"),
    (dict(dtype=torch.float32), "bfloat16"),
    (dict(options={"lower_bound": None}), "bounded"),
    (dict(options={"lower_bound": -8.0}), "bounded"),
    (dict(options={"lower_bound": -5.0, "state_dtype": torch.float16}), "state"),
    (dict(arch="sm_80"), "compute capability"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_capability_query_says_why(operator, change, says):
    spec = CallSpec("kda_prefill", "cuda", torch.bfloat16, "sm_90", {"N": 6, "D": 128}, {"lower_bound": -5.0})
    assert kda_flash.supports(spec)[0]
    assert "where it was measured to be faster" in kda_prefill.supports_prefill(spec)[1]
    ok, reason = kda_flash.supports(replace(spec, **change))
    assert not ok
    assert says in reason


@pytest.mark.parametrize(
    ("names", "defaults", "ok"),
    [(NAMES, 14, True), ((*NAMES, "extra"), 14, True), ((*NAMES, "extra"), 15, False), (NAMES[:-1], 13, False)],
)
def test_another_signature_is_not_called(monkeypatch, names, defaults, ok):
    arguments = [SimpleNamespace(name=n, has_default_value=lambda i=i: i >= defaults) for i, n in enumerate(names)]
    fwd = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))
    fake = SimpleNamespace(_flashkda_C=SimpleNamespace(fwd=fwd, get_workspace_size=None))
    monkeypatch.setattr(kda_flash.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(kda_flash.torch, "ops", fake)
    kda_flash.operator.cache_clear()
    try:
        found, why = kda_flash.operator()
        assert (found is not None) is ok
        assert ok or "signature" in why
    finally:
        kda_flash.operator.cache_clear()
