"""The operator table, the signature check and the choice of an implementation."""

import functools
import inspect

import pytest
import torch

from k3_core.errors import UnsupportedError
from k3_core.operators import CallSpec, Implementation, Registry, Verdict
from k3_core.operators.contract import IMPLEMENTATIONS
from k3_core.operators.spec import DTYPES, LAYOUTS
from k3_core.testing.operators import TABLE, check_signature, markdown, operator

NAMES = (
    "attn_res", "short_conv", "kda_prefill", "gated_norm", "kda_decode", "kda_verify", "route", "experts", "situ",
    "state_gather", "state_scatter",
)  # fmt: skip
SPEC = CallSpec("situ", "cpu", torch.bfloat16, sizes={"I": 64})


def test_table_holds_the_operators_of_the_design():
    assert tuple(TABLE) == NAMES
    assert set(IMPLEMENTATIONS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_row_is_consistent(name):
    op = TABLE[name]
    assert callable(op.contract_function())
    assert op.summary
    assert op.rules
    names = [a.name for a in op.args]
    assert len(set(names)) == len(names)
    for a in op.args:
        assert a.layout in LAYOUTS
        assert (a.layout == "scalar") == (not a.shape)
        assert a.dtype in DTYPES or a.layout == "scalar"
    for result in op.results:
        assert result in names or result in op.returns
    mutated = {a.name for a in op.args if a.role == "inout"}
    assert mutated <= set(op.results), "a mutated argument is never compared"
    for table in op.bounds.values():
        assert set(op.results) <= set(table)
        assert all(b.reason for b in table.values()), "a tolerance without a reason"


@pytest.mark.parametrize("name", NAMES)
def test_contract_has_the_signature(name):
    assert check_signature(name, IMPLEMENTATIONS[name].function) == (True, f"{name}: signature is the table's")


def situ_renamed(y, beta, linear_beta, *, out=None): ...
def situ_swapped(x, linear_beta, beta, *, out=None): ...
def situ_without_out(x, beta, linear_beta): ...
def situ_positional_out(x, beta, linear_beta, out=None): ...
def situ_other_default(x, beta, linear_beta, *, out=0): ...
def situ_defaulted(x, beta, linear_beta=None, *, out=None): ...
def situ_starred(*args, **kwargs): ...
def situ_extra_required(x, beta, linear_beta, *, out=None, block): ...
def situ_extra_optional(x, beta, linear_beta, *, out=None, block=128): ...


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (situ_renamed, "must be ['x', 'beta', 'linear_beta']"),
        (situ_swapped, "parameters are"),
        (situ_without_out, "'out' is missing"),
        (situ_positional_out, "parameters are"),
        (situ_other_default, "default of 'out' is 0, must be None"),
        (situ_defaulted, "default of 'linear_beta' is None, must be absent"),
        (situ_starred, "hides the parameters"),
        (situ_extra_required, "'block' is not in the table"),
    ],
)
def test_wrong_signature_is_refused_with_its_reason(function, word):
    ok, reason = check_signature("situ", function)
    assert not ok
    assert word in reason
    with pytest.raises(TypeError, match="situ"):
        Implementation("situ", "wrong", function)


def test_tuning_parameters_are_legal():
    assert check_signature("situ", situ_extra_optional).ok
    assert check_signature("situ", functools.partial(situ_extra_required, block=3)).ok


def test_unknown_operator_names_the_known_ones():
    with pytest.raises(KeyError, match="attn_res"):
        operator("attn")


def test_bound_of_an_untested_dtype_is_an_error():
    with pytest.raises(UnsupportedError, match="float16"):
        TABLE["situ"].bound("out", torch.float16)


def test_markdown_shows_every_argument_and_rule():
    page = markdown()
    for op in TABLE.values():
        assert f"### {op.name}" in page
        assert all(rule in page for rule in op.rules)
        assert all(f"| {a.name}" in page for a in op.args)


def _only(reason):
    return lambda spec: Verdict(False, reason)


def _even(spec):
    ok = spec.sizes["I"] % 128 == 0
    return Verdict(ok, "I is a multiple of 128" if ok else f"I = {spec.sizes['I']} is not a multiple of 128")


def _registry():
    registry, function = Registry(), IMPLEMENTATIONS["situ"].function
    registry.register(Implementation("situ", "contract", function))
    registry.register(Implementation("situ", "vector", function, _even, priority=10))
    registry.register(Implementation("situ", "sm100", function, _only("needs sm_100"), priority=20))
    return registry


def test_choice_takes_the_best_that_supports_and_says_why():
    choice = _registry().choose(SPEC)
    assert choice.implementation.name == "contract"
    assert [(n, v.ok) for n, v in choice.reasons] == [("sm100", False), ("vector", False), ("contract", True)]
    assert choice.explain().startswith("situ -> contract [sm100: no (needs sm_100); vector: no (I = 64 is not")
    wide = CallSpec("situ", "cpu", torch.bfloat16, sizes={"I": 256})
    assert _registry().choose(wide).implementation.name == "vector"


def test_a_wanted_implementation_never_falls_back():
    with pytest.raises(UnsupportedError, match=r"asked for 'vector'.*not a multiple of 128"):
        _registry().choose(SPEC, want="vector")
    with pytest.raises(UnsupportedError, match=r"asked for 'cutlass'.*known: sm100, vector, contract"):
        _registry().choose(SPEC, want="cutlass")
    with pytest.raises(UnsupportedError, match="none registered"):
        Registry().choose(SPEC)


def test_a_query_that_raises_is_a_defect_and_shows():
    registry = Registry()
    registry.register(Implementation("situ", "bad", IMPLEMENTATIONS["situ"].function, lambda spec: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        registry.choose(SPEC)


def test_registration_is_idempotent_and_names_are_unique():
    registry, one = Registry(), IMPLEMENTATIONS["situ"]
    assert registry.register(one) is registry.register(one)
    assert registry.implementations("situ") == (one,)
    with pytest.raises(ValueError, match="already has"):
        registry.register(Implementation("situ", "contract", one.function, priority=1))


def test_launchers_default_what_the_table_defaults():
    for op in TABLE.values():
        for p in op.signature().parameters.values():
            if p.default is not inspect.Parameter.empty:
                assert p.default is None, "a numeric default would shape the arithmetic silently"
