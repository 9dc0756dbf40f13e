"""aiter's adapter: parameter names against the release on the package index, absence, and calls of the right form."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from k3_amd import aiter

#: Read from the wheel's source without importing it; see the file.
SIGNATURES = json.loads(Path(__file__).with_name("aiter_signatures.json").read_text())


def in_order(wanted: tuple[str, ...], has: list[str]) -> bool:
    """Whether ``wanted`` are among ``has``, in the same order."""
    rest = iter(has)
    return all(name in rest for name in wanted)


@pytest.mark.parametrize("symbol", aiter.SYMBOLS, ids=lambda s: f"{s.function}-{s.purpose[:20]}")
def test_parameters_are_those_of_the_release_on_the_index_or_marked_unverified(symbol: aiter.Symbol) -> None:
    assert SIGNATURES["release"] == aiter.INDEX_VERSION
    has = SIGNATURES["functions"].get(symbol.name)
    fits = has is not None and bool(symbol.parameters) and set(symbol.parameters) <= set(has)
    if symbol.name.endswith("mla_reduce_v1"):
        fits = False  # vLLM passes one more position than that release has
    assert (symbol.verified == "signature") == fits, f"{symbol.name}: {has}"


def test_a_parameter_that_the_release_lacks_would_be_noticed() -> None:
    """vLLM 0.33 passes a page size to the schedule; the old release has no such parameter."""
    schedule = next(s for s in aiter.SYMBOLS if s.function == "get_mla_metadata_v1")
    assert "page_size" in schedule.parameters
    assert "page_size" not in SIGNATURES["functions"][schedule.name]
    assert schedule.verified == "unverified"


def test_positions_of_the_one_direct_call_are_in_the_releases_order() -> None:
    assert in_order(aiter.VISION.parameters, SIGNATURES["functions"][aiter.VISION.name])


def test_absent_aiter_is_a_normal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    aiter.version.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert aiter.version() is None
    assert aiter.resolve(aiter.VISION) == (None, "aiter is not installed")
    assert len(aiter.report()) == 1 + len(aiter.SYMBOLS)
    aiter.version.cache_clear()


def test_an_aiter_that_lacks_a_symbol_or_breaks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter, "version", lambda: "9.9")
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    function, why = aiter.resolve(aiter.VISION)
    assert function is None
    assert "9.9" in why
    assert "flash_attn_varlen_func" in why


def test_the_installed_aiters_parameters_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `k3 doctor` prints: found and fitting, older, opaque, absent; and the fallback of each."""
    from k3_amd import plugin

    def fitting(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
                softmax_scale: Any, causal: Any, return_lse: Any, out: Any) -> None: ...  # fmt: skip

    def older(page_size: Any, fast_mode: Any) -> None: ...

    package, mla = ModuleType("aiter"), ModuleType("aiter.mla")
    package.flash_attn_varlen_func = fitting  # type: ignore[attr-defined]
    package.get_mla_metadata_v1 = older  # type: ignore[attr-defined]
    mla.mla_decode_fwd = lambda *args: None  # type: ignore[attr-defined]
    monkeypatch.setattr(aiter, "version", lambda: "9.9")
    monkeypatch.setitem(sys.modules, "aiter", package)
    monkeypatch.setitem(sys.modules, "aiter.mla", mla)
    head, *lines = plugin.diagnose()
    assert head == "aiter 9.9"
    said = {s.name + s.caller: line for s, line in zip(aiter.SYMBOLS, lines, strict=True)}
    for symbol in aiter.SYMBOLS:
        assert symbol.fallback in said[symbol.name + symbol.caller]
    assert lines[0].endswith("[found, takes what is passed]")
    assert "[found, lacks kv_granularity, max_seqlen_qo" in next(x for x in lines if "get_mla_metadata_v1" in x)
    assert "[found, does not say" in next(x for x in lines if "mla_decode_fwd" in x)
    assert "[absent: aiter 9.9 has no usable aiter:mla_reduce_v1" in next(x for x in lines if "mla_reduce_v1" in x)


def test_an_aiter_whose_attention_takes_other_arguments_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
    from k3_amd import platform, vision
    from k3_core.vllm.serving.vision import attend_by_item

    monkeypatch.setattr(platform, "on_rocm", lambda: True)
    monkeypatch.setattr(aiter, "enabled", lambda switch: True)
    monkeypatch.setattr(aiter, "resolve", lambda symbol: (lambda q, k, v, bounds: None, "aiter 9.9"))
    chosen, why = vision.choose_attention()
    assert chosen is attend_by_item
    assert "lacks cu_seqlens_q" in why


def test_every_entry_says_what_runs_without_it() -> None:
    assert all(symbol.fallback and symbol.purpose and symbol.caller for symbol in aiter.SYMBOLS)


def test_images_of_one_call_stay_apart() -> None:
    """The call of the tower's attention, computed by a stand-in of the release's parameters from the bounds it gets."""
    pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
    from k3_amd import vision
    from k3_core.vllm.serving.vision import attend_by_item

    asked: list[dict[str, Any]] = []

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        asked.append(named)
        assert set(named) | {"q", "k", "v"} <= set(SIGNATURES["functions"][aiter.VISION.name])
        assert not named["causal"]
        ends = named["cu_seqlens_q"].tolist()
        parts = []
        for start, end in pairwise(ends):
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * named["softmax_scale"]
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end]))
        return torch.cat(parts)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 8, generator=generator) for _ in range(3))
    lengths = [4, 1, 4]
    together = vision.varlen(flash)(q, k, v, lengths)
    torch.testing.assert_close(together, attend_by_item(q, k, v, lengths), atol=1e-5, rtol=1e-5)
    assert len(asked) == 1
    assert asked[0]["max_seqlen_k"] == 4
