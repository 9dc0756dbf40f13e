"""Which product a linear layer runs at which row count: the table's rules, the layers' hook, what falls through."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from k3_nvidia import few_rows
from k3_nvidia.kernels import skinny_cute, skinny_gemm
from k3_nvidia.tuning import skinny as tuning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH, TRITON = frozenset({"triton", "cute"}), frozenset({"triton"})
VECTOR = {"kind": "vector", "block_n": 8, "block_k": 64, "splits": 1, "warps": 1}
DOT = {"kind": "dot", "block_n": 16, "block_k": 64, "splits": 1, "warps": 4}
CUTE = {"tiles": 1, "unroll": 4, "warps": 8, "cluster": 1}
ROWS = [
    {"m": 1, "n": 24, "k": 64, "best": [{"kernel": "cute", "config": CUTE}, {"kernel": "triton", "config": VECTOR}]},
    {"m": 2, "n": 24, "k": 64, "best": []},
    {"m": 8, "n": 24, "k": 64, "best": [{"kernel": "triton", "config": DOT}]},
]


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {"a GPU": {"rows": ROWS}}})
    tuning._winners.cache_clear()
    yield
    tuning._winners.cache_clear()


@pytest.mark.usefixtures("small_table")
def test_rules_of_the_table() -> None:
    found = tuning.choices(24, 64, "a GPU", BOTH)
    assert [None if c is None else c.kernel for c in found] == [None, "cute", None] + ["triton"] * 6 + [None] * 24
    without = tuning.choices(24, 64, "a GPU", TRITON)
    assert without[1] is not None
    assert without[1].kernel == "triton"
    assert not any(tuning.choices(24, 128, "a GPU", BOTH)), "a size that was not measured"
    assert not any(tuning.choices(24, 64, "another GPU", BOTH)), "a device that was not measured"
    assert not tuning.measured("another GPU")


def test_every_entry_of_the_shipped_table_is_a_configuration() -> None:
    for device in tuning.table()["devices"].values():
        assert device["date"]
        for row in device["rows"]:
            assert 1 <= row["m"] <= skinny_gemm.MAX_ROWS
            assert 0 <= row.get("hold", 0) <= skinny_gemm.MAX_HOLD
            for entry in row["best"]:
                assert entry["us"] <= tuning.MARGIN * row["cublas_us"], row
                if entry["kernel"] == "cute":
                    assert row["m"] <= skinny_cute.MAX_ROWS
                    skinny_cute.Config(**entry["config"])
                else:
                    config = skinny_gemm.Config(**entry["config"])
                    assert config.kind != "vector" or row["m"] <= skinny_gemm.MAX_VECTOR_ROWS


def held(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Steps that the products of 1 and 8 rows of a table hold."""
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {"a GPU": {"rows": rows}}})
    tuning._winners.cache_clear()
    found = tuning.choices(1024, 4096, "a GPU", TRITON)
    tuning._winners.cache_clear()
    return [None if choice is None else few_rows._product_config(choice).hold for choice in (found[1], found[8])]


def test_what_a_product_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"n": 1024, "k": 4096}
    one = {"m": 1, **size, "best": [{"kernel": "triton", "config": VECTOR}]}
    eight = {"m": 8, **size, "best": [{"kernel": "triton", "config": DOT}]}
    assert held([one, eight], monkeypatch) == [0, 0], "nothing where nothing was measured"
    assert held([one | {"hold": 2}, eight | {"hold": 1}], monkeypatch) == [2, 1]
    monkeypatch.setenv("K3_HOLD", "dot:2")
    assert held([one | {"hold": 2}, eight | {"hold": 1}], monkeypatch) == [0, 2]
    monkeypatch.setenv("K3_HOLD", "")
    assert held([one | {"hold": 2}, eight | {"hold": 1}], monkeypatch) == [0, 0]
    monkeypatch.setenv("K3_HOLD", "vector:1,dot:1")
    cute = {"m": 8, **size, "best": [{"kernel": "cute", "config": CUTE}]}
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {"a GPU": {"rows": [cute | {"hold": 2}]}}})
    tuning._winners.cache_clear()
    choice = tuning.choices(1024, 4096, "a GPU", BOTH)[8]
    tuning._winners.cache_clear()
    assert choice is not None
    assert dict(choice.config) == CUTE, "its kernel holds nothing"


@pytest.mark.parametrize("text", ["2", "vector", "vector:3", "dot:-1", "dot:x", "cute:1"])
def test_what_cannot_be_held_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"K3_HOLD=.*it is read as"):
        tuning.override(text)


def test_no_more_steps_are_held_than_a_cut_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(skinny_gemm, "_dot", lambda grid, *args, HOLD, **options: seen.append(HOLD))
    x, weight = torch.zeros(8, 512).bfloat16(), torch.zeros(64, 512).bfloat16()
    for splits in (2, 4):
        skinny_gemm.skinny_gemm(x, weight, skinny_gemm.Config("dot", 64, 128, splits, 4, pdl=True, hold=2))
    assert seen == [2, 1]


def hooked(calls: list[int]) -> tuple[few_rows.FewRows, Any]:
    layer = SimpleNamespace(weight=torch.randn(24, 64).bfloat16().to(DEVICE))

    def usual(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(x.shape[0])
        return torch.nn.functional.linear(x, layer.weight, bias)

    return few_rows.FewRows(usual, (24, 64), tuning.choices(24, 64, "a GPU", TRITON)), layer


@pytest.mark.usefixtures("small_table")
def test_the_hook_takes_what_the_table_names_and_nothing_else() -> None:
    calls: list[int] = []
    apply, layer = hooked(calls)
    for rows in (1, 5):
        x = torch.randn(rows, 80).bfloat16().to(DEVICE)[:, :64]  # padded rows, as slices of a fused projection are
        torch.testing.assert_close(apply(layer, x), (x.double() @ layer.weight.double().t()).bfloat16())
    assert not calls
    x = torch.randn(40, 65).bfloat16().to(DEVICE)
    for usual in (x[:2, :64], x[:9].reshape(-1)[: 9 * 64].view(9, 64), x[:33, :64], x[:0, :64], x[:1, 1:]):
        apply(layer, usual)
    apply(layer, x[:1].clone()[:, :64], torch.zeros(24).bfloat16().to(DEVICE))
    apply(layer, torch.zeros(1, 2, 64).bfloat16().to(DEVICE))
    assert calls == [2, 9, 33, 0, 1, 1, 1]


@pytest.mark.usefixtures("small_table")
def test_warm_up_meets_every_row_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    apply, layer = hooked(calls)
    ran: list[int] = []
    apply.products = [None if p is None else (lambda x, w: ran.append(x.shape[0])) for p in apply.products]
    layer.quant_method = SimpleNamespace(apply=apply)
    few_rows.warm_up(SimpleNamespace(modules=lambda: [layer, layer, torch.nn.Linear(1, 1)]))  # type: ignore[arg-type]
    assert ran == [1, 3, 4, 5, 6, 7, 8]


@pytest.mark.usefixtures("small_table")
@pytest.mark.parametrize(
    ("asked", "device", "backend", "invariant", "count"),
    [
        (None, "a GPU", "auto", "0", 1),
        ("1", "a GPU", "auto", "0", 1),
        ("0", "a GPU", "auto", "0", 0),
        ("1", "another GPU", "auto", "0", 0),
        ("1", "a GPU", "torch", "0", 0),
        ("1", "a GPU", "auto", "1", 0),
    ],
)
def test_install(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, device: str, backend: str, invariant: str, count: int
) -> None:
    if asked is None:
        monkeypatch.delenv("K3_FEW_ROWS", raising=False)
    else:
        monkeypatch.setenv("K3_FEW_ROWS", asked)
    method = SimpleNamespace(apply=lambda layer, x, bias=None: x)
    usual = method.apply
    layer = SimpleNamespace(weight=torch.zeros(24, 64).half(), quant_method=method)
    other = SimpleNamespace(weight=torch.zeros(24, 32).half(), quant_method=SimpleNamespace(apply=usual))
    monkeypatch.setattr(few_rows, "_linears", lambda model: [layer, other])
    model = torch.nn.Module()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    config = SimpleNamespace(kernel_config=SimpleNamespace(linear_backend=backend))
    assert few_rows.install(model, config, device) == count
    assert isinstance(method.apply, few_rows.FewRows) == bool(count)
    assert other.quant_method.apply is usual


def test_an_empty_table_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_FEW_ROWS", "1")
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {}})
    tuning._winners.cache_clear()
    monkeypatch.setattr(few_rows, "_linears", lambda model: pytest.fail("looked at the layers"))
    assert few_rows.install(None, None, "a GPU") == 0  # type: ignore[arg-type]
    tuning._winners.cache_clear()


def finishes(model: torch.nn.Module) -> list[Any]:
    return [module._finish for module in model.modules() if hasattr(module, "_finish")]


@pytest.mark.usefixtures("small_table")
def test_a_sum_joins_the_product_that_the_table_names() -> None:
    calls: list[int] = []
    apply, layer = hooked(calls)
    wide = torch.randn(6, 40).bfloat16().to(DEVICE)
    for rows, x in ((1, torch.randn(1, 64)), (6, torch.randn(6, 64))):
        x, residual = x.bfloat16().to(DEVICE), wide[:rows, :24]
        want = x.double() @ layer.weight.double().t() + residual.double()
        got = apply.add(layer, x, residual)
        assert got is not None
        # Before hardware's one rounding there is none; the interpreter truncates, which is up to one step of bfloat16.
        assert ((got.double() - want).abs() <= 2.0**-7 * want.abs() + 1e-3).all()
    x = torch.randn(2, 64).bfloat16().to(DEVICE)
    assert apply.add(layer, x, wide[:2, :24]) is None, "the library's rows are not the table's"
    assert apply.add(layer, x[:1], wide[:1, :24].float()) is None
    assert apply.add(layer, x[:1], torch.zeros(1, 48, device=DEVICE).bfloat16()[:, ::2]) is None
    assert not calls


def test_the_experts_last_product_adds_the_shared_result(nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
    from nvidia_support import Group, build, groups, our_model, settle

    from k3_core.checkpoint import CheckpointReader

    with our_model(), groups(Group(), Group()):
        model = build(settle(nvidia_tiny), CheckpointReader(nvidia_tiny).config).to(torch.bfloat16)
    finish = finishes(model)[0]
    finish.up.weight.data.normal_()
    n, k = finish.up.weight.shape
    rows = [{"m": 4, "n": n, "k": k, "best": [{"kernel": "triton", "config": DOT}]}]
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {"a GPU": {"rows": rows}}})
    tuning._winners.cache_clear()
    few_rows.install(model, model.vllm_config, "a GPU")
    tuning._winners.cache_clear()
    assert all(finish.add for finish in finishes(model))
    layer = finish.up.quant_method.apply
    layer.usual = lambda layer, x, bias=None: x @ layer.weight.t()
    layer.products = [None] + [lambda x, w, residual=None: x @ w.t() + residual + 1] * 4 + [None] * 12
    routed, shared = torch.randn(2, k).bfloat16(), torch.randn(2, n).bfloat16()
    normed = finish.norm(routed)
    torch.testing.assert_close(finish.plus(routed, shared.clone()), normed @ finish.up.weight.t() + shared + 1)
    many = torch.randn(9, k).bfloat16()
    want = finish.up(finish.norm(many)) + 0.5
    torch.testing.assert_close(finish.plus(many, torch.full((9, n), 0.5).bfloat16()), want)


@pytest.mark.parametrize("form", ["none", "merged", "separate", "adaptive", "sharded"])
def test_a_rank_that_adds_its_columns_in_place_needs_no_sum(form: str) -> None:
    """And its warm-up compiles none."""
    finish = few_rows.Finish(None, SimpleNamespace(quant_method=SimpleNamespace(apply=None)))
    finish.up.quant_method.apply = few_rows.FewRows(lambda *args: None, (24, 64), [None] * 33)
    module = torch.nn.Module()
    module._finish, module.form = finish, form  # type: ignore[assignment]
    few_rows._install_sums(module)
    assert (finish.add is None) == (form == "sharded")


def test_the_layers_of_a_model_take_the_hook(nvidia_tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every projection and the head of a real model are offered to the table, and the hooked one multiplies."""
    pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
    from nvidia_support import Group, build, groups, our_model, settle

    from k3_core.checkpoint import CheckpointReader

    with our_model(), groups(Group(), Group()):
        model = build(settle(nvidia_tiny), CheckpointReader(nvidia_tiny).config).to(torch.bfloat16)
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(module)].split(".")[-1] for module in few_rows._linears(model)}
    assert found == {
        "in_proj", "f_b_proj", "q_b_proj", "kv_b_proj", "o_proj", "routed_expert_up_proj", "gate_up_proj", "down_proj",
        "lm_head",
    }  # fmt: skip
    monkeypatch.setenv("K3_FEW_ROWS", "1")
    layer = next(module for module in few_rows._linears(model) if names[id(module)].endswith("in_proj"))
    layer.weight.data.normal_()  # nothing was loaded
    n, k = layer.weight.shape
    rows = [{"m": 4, "n": n, "k": k, "best": [{"kernel": "triton", "config": DOT}]}]
    monkeypatch.setattr(tuning, "table", lambda: {"devices": {"a GPU": {"rows": rows}}})
    tuning._winners.cache_clear()
    alike = [module for module in few_rows._linears(model) if tuple(module.weight.shape) == (n, k)]
    assert few_rows.install(model, model.vllm_config, "a GPU") == len(alike)
    layer.quant_method.apply.products = [None, lambda x, w: x @ w.t() + 1] + [None] * 15
    assert not any(finish.add for finish in finishes(model)), "no size of the up projection is in this table"
    x = torch.randn(1, k).bfloat16()
    torch.testing.assert_close(layer(x), x @ layer.weight.t() + 1)
    tuning._winners.cache_clear()
