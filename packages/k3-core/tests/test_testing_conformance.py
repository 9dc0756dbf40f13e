"""The conformance suite against the contracts: everything passes, nothing is skipped, and it is not blind."""

import functools
import json

import pytest
import torch

from k3_core.contracts import kda
from k3_core.operators import TABLE, Implementation, Verdict
from k3_core.operators.contract import IMPLEMENTATIONS
from k3_core.testing import conformance, oracle
from k3_core.testing.case import Draw, Problem
from k3_core.testing.no_metadata import assert_zeros_without_metadata, check_no_metadata

ALL = [pytest.param(c, id=c.id) for name in conformance.operators() for c in conformance.cases(name)]


@pytest.mark.parametrize("case", ALL)
def test_contract_conforms(case):
    row = conformance.assert_conforms(case, IMPLEMENTATIONS[case.operator])
    assert row.verdict == "pass"


def test_case_names_are_unique_and_inputs_deterministic():
    ids = [p.values[0].id for p in ALL]
    assert len(set(ids)) == len(ids)
    for case in (p.values[0] for p in ALL[::17]):
        a, b = (case.inputs(torch.device("cpu")).tensors for _ in range(2))
        assert all(torch.equal(a[n].nan_to_num(), b[n].nan_to_num()) for n in a)


def test_every_operator_has_cases_that_stride_pad_and_skip():
    for name in TABLE:
        cases = conformance.cases(name)
        assert cases, name
        assert any(c.options.get("strided") for c in cases), name
    for name in ("short_conv", "kda_prefill", "kda_decode", "kda_verify"):
        assert any(c.options.get("null") for c in conformance.cases(name)), name
        assert {c.options.get("index", torch.int32) for c in conformance.cases(name)} == {torch.int32, torch.int64}


def test_real_cases_cover_the_released_sizes():
    """Definitions only; they run on accelerators."""
    heads = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96}
    for name in ("kda_prefill", "kda_decode", "kda_verify"):
        cases = conformance.cases(name, ("real",), [torch.bfloat16])
        assert {c.sizes["N"] for c in cases} == heads
        assert {c.sizes.get("D", c.sizes.get("K")) for c in cases} == {128}
    blocks = {c.options["num_blocks"] for c in conformance.cases("attn_res", ("real",)) if c.sizes["H"] == 7168}
    assert blocks >= set(range(9))
    widths = {(c.sizes["A"], c.sizes["L"], c.sizes["I"]) for c in conformance.cases("experts", ("real",))}
    assert widths == {(896, 3584, 192), (896, 3584, 384), (896, 3584, 3072)}
    assert {c.sizes["A"] for c in conformance.cases("route", ("real",))} == {896}


def test_huge_cases_pass_two_to_the_31():
    """Every row-strided argument and pool of every operator is far in one; logits are float32 in any model's dtype."""
    for op in TABLE.values():
        found = [c for c in conformance.cases(op.name, ("huge",)) if c.options["far"] != ("weights",)]
        wanted = {a.name for a in op.args if a.layout in ("rows", "pool", "conv_pool") or a.name == "bank"}
        assert {name for c in found for name in c.options["far"]} == wanted
        for case in found:
            inputs = case.inputs(torch.device("cpu"))
            for name in case.options["far"]:
                like = {"situ": "x", "experts": "x", "gated_norm": "o", "short_conv": "x"}.get(op.name, "z")
                rows = inputs.tensors[name if name != "out" else like].shape[0]
                assert 2**31 <= (rows - 1) * inputs.strides[name][0] < 2**31 + 2**16, case.id


def test_a_huge_case_has_expert_weights_beyond_two_to_the_31():
    (case,) = [c for c in conformance.cases("experts", ("huge",), [torch.bfloat16]) if c.options["far"] == ("weights",)]
    assert (case.sizes["E"] // 2 - 1) * 2 * case.sizes["I"] * case.sizes["L"] // 2 > 2**31


def test_oracle_equals_the_contract():
    draw = Draw("oracle", torch.device("cpu"))
    lengths = [5, 0, 1, 40]
    q, k, v = (draw.normal(46, 2, d).double() for d in (8, 8, 12))
    g, beta = -draw.uniform(46, 2, 8).double(), draw.uniform(46, 2).double()
    state = draw.normal(4, 2, 12, 8).double()
    ours = oracle.run(q, k, v, g, beta, state, lengths)
    o, new = kda.recurrent(q, k, v, g, beta, state, [0, 5, 5, 6, 46])
    torch.testing.assert_close(ours.out, o, rtol=0, atol=1e-13)
    torch.testing.assert_close(ours.state, new, rtol=0, atol=1e-13)
    assert bool((ours.scale >= 0).all())


def _rounded(x):
    return x.bfloat16().float()


def _rounded_chunk(q, k, v, g, beta, S):
    """One chunk as tensor-core kernels compute it: [N, C, D] operands, fp32 sums, matrix operands in bfloat16."""
    r, G = _rounded, g.cumsum(-2)
    last, decay = G[:, -1:, :], G.exp()
    lower = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    between = (G.unsqueeze(2) - G.unsqueeze(1)).masked_fill(~lower[..., None], -torch.inf).exp()
    reads = torch.einsum("nid,njd,nijd->nij", q, k, between)
    system = beta.unsqueeze(-1) * torch.einsum("nid,njd,nijd->nij", k, k, between).tril(-1)
    eye = torch.eye(q.shape[1]).expand(system.shape).clone()
    inverse = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
    inverse = r(inverse * beta.unsqueeze(1))
    u, w, old = r(inverse @ v), r(inverse @ r(k * decay)), r(S)
    fresh = r(u - w @ old.mT)
    o = r(q * decay) @ old.mT + r(reads) @ fresh
    return o, S * last.exp() + fresh.mT @ r(k * (last - G).exp())


def _rounded_chunked(q, k, v, g, beta, state, bounds):
    """kda.chunked with those roundings, one sequence after the other."""
    normed = (_rounded(x) for x in kda.normalize_qk(q, k, torch.float32))
    operands = [x.float().transpose(0, 1) for x in (*normed, v, g, beta)]
    out, new = torch.zeros(v.shape).transpose(0, 1), state.float().clone()
    edges = [int(b) for b in bounds]
    for s, end in enumerate(edges[1:]):
        for begin in range(edges[s], end, 64):
            rows = slice(begin, min(begin + 64, end))
            out[:, rows], new[s] = _rounded_chunk(*(x[:, rows] for x in operands), new[s])
    return out.transpose(0, 1).to(v.dtype), new


def test_bfloat16_operands_are_no_false_alarm(monkeypatch):
    """The bounds leave room for the roundings that a chunk kernel on tensor cores makes, and not much more."""
    monkeypatch.setattr(kda, "chunked", _rounded_chunked)
    contract = IMPLEMENTATIONS["kda_prefill"]
    report = conformance.run("kda_prefill", contract, dtypes=[torch.bfloat16], only=lambda c: c.sizes["B"] < 8)
    report.raise_if_failed()
    assert max(r.worst for r in report.rows) > 0.4


def test_refused_cases_are_recorded_not_passed():
    contract = IMPLEMENTATIONS["situ"]
    picky = Implementation("situ", "picky", contract.function, lambda spec: (spec.sizes["I"] == 64, "I must be 64"))
    report = conformance.run("situ", picky)
    verdicts = {r.verdict for r in report.rows}
    assert verdicts == {"pass", "refused"}
    assert all(r.reason == "I must be 64" for r in report.rows if r.verdict == "refused")
    never = Implementation("situ", "never", contract.function, lambda spec: Verdict(False, "no such device"))
    report = conformance.run("situ", never)
    assert not report.ok, "a run in which nothing was tested is no success"
    with pytest.raises(AssertionError):
        report.raise_if_failed()
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        conformance.assert_conforms(conformance.cases("situ")[0], never)


def test_exceptions_fail_the_case_with_their_message():
    def situ(x, beta, linear_beta, *, out=None):
        raise RuntimeError("illegal instruction")

    report = conformance.run("situ", situ)
    assert {r.verdict for r in report.rows} == {"fail"}
    assert "raised RuntimeError: illegal instruction" in report.summary()


def test_other_operator_or_signature_is_refused():
    with pytest.raises(TypeError, match="implements situ, not route"):
        conformance.run("route", IMPLEMENTATIONS["situ"])
    with pytest.raises(TypeError, match="parameters are"):
        conformance.run("situ", lambda x, *, out=None: x)


def test_ignored_out_is_caught():
    contract = IMPLEMENTATIONS["situ"].function

    @functools.wraps(contract)
    def situ(x, beta, linear_beta, *, out=None):
        return contract(x, beta, linear_beta)

    report = conformance.run("situ", situ)
    assert all("something else was returned" in r.reason for r in report.failures)
    assert report.failures


@pytest.mark.parametrize("claims", [True, False])
def test_claimed_batch_invariance_is_checked_by_bits(claims):
    contract = IMPLEMENTATIONS["gated_norm"].function

    @functools.wraps(contract)
    def function(o, gate, weight, eps, *, out=None):
        # Within the tolerance, but not the same bits when there is company.
        return contract(o, gate, weight, eps, out=out).mul_(1 + 1e-6 * (o.shape[0] > 1))

    report = conformance.run(
        "gated_norm",
        Implementation("gated_norm", "tiled", function, batch_invariant=claims),
        dtypes=[torch.float32],
        only=lambda c: "T33" in c.name or "T5" in c.name,
    )
    assert bool(report.failures) == claims
    assert all("claims invariance" in r.reason for r in report.failures)


def test_report_is_plain_json(tmp_path):
    def situ(x, beta, linear_beta, *, out=None):
        return torch.full((x.shape[0], x.shape[1] // 2), float("nan")) if out is None else out

    report = conformance.run("situ", situ)
    report.rows += conformance.run("situ", IMPLEMENTATIONS["situ"]).rows
    report.write(tmp_path / "report.json")
    page = json.loads((tmp_path / "report.json").read_text())
    assert page["environment"]["torch"] == torch.__version__
    assert {r["verdict"] for r in page["rows"]} == {"pass", "fail"}
    row = page["rows"][-1]
    assert set(row) >= {"operator", "case", "device", "verdict", "worst", "error", "tolerance", "reason"}
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_arguments_reach_the_launcher_as_the_table_says():
    """Layouts of the table: what a launcher sees is what it was promised."""
    case = next(c for c in conformance.cases("kda_decode") if c.options["strided"] and c.options["layout"] == "SD")
    problem = Problem.build(case, case.inputs(torch.device("cpu")), torch.device("cpu"), IMPLEMENTATIONS["kda_decode"])
    views = problem.arena.views
    assert views["conv_state"].stride(1) == 1
    assert views["recurrent_state"].stride(0) > views["recurrent_state"][0].numel()
    assert views["slot_mapping"].stride(0) == 3
    for name in ("qkv", "z", "gate", "out"):
        assert not views[name].is_contiguous()
        assert views[name][0].is_contiguous()
        assert views[name].data_ptr() % 16 == 0
        assert views[name].stride(0) * views[name].element_size() % 16 == 0


class _Layer:
    """A layer in miniature: looks itself up in the step's metadata."""

    def __init__(self, fault=None):
        self.fault = fault

    def __call__(self, metadata):
        out = torch.empty(4, 8)
        if self.fault == "lookup" and metadata is not None:
            return out.copy_(metadata["this.layer"])
        if self.fault == "garbage":
            return out
        if self.fault == "none_only" and metadata is None:
            return out.zero_()
        return out if self.fault == "none_only" else out.zero_()


def test_layers_without_metadata_give_zeros():
    assert_zeros_without_metadata(_Layer())


@pytest.mark.parametrize(
    ("fault", "word"), [("garbage", "NaN among them"), ("lookup", "KeyError"), ("none_only", "an empty dict")]
)
def test_layers_without_metadata_that_do_not_are_caught(fault, word):
    assert any(word in p for p in check_no_metadata(_Layer(fault)))
    with pytest.raises(AssertionError, match=word):
        assert_zeros_without_metadata(_Layer(fault))


def test_cases_ask_with_the_names_that_a_model_asks_with():
    """What an implementation decides by stands in the query: else a case is refused or raised for want of a word."""
    route = [c.spec(torch.device("cpu")).options for c in conformance.cases("route")]
    assert {(o["num_expert_group"], o["topk_group"]) for o in route} == {(o["groups"], o["kept"]) for o in route}
    assert any(o["topk_group"] < o["num_expert_group"] for o in route)
    experts = [c.spec(torch.device("cpu")).options for c in conformance.cases("experts")]
    assert {o["quantised"] for o in experts} == {True, False}
    assert {o["hidden_act"] for o in experts} == {"situ", "silu"}
