"""Which plan a cache gets, which layouts are illegal, and what a signature distinguishes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ascend_state_copy_support import SHAPE, cache_of

from k3_ascend import state_copy
from k3_ascend.state_copy import layout
from k3_ascend.state_copy.layout import Layout, PlanKind


@pytest.mark.parametrize(
    ("generation", "dtype", "inner", "kind", "because"),
    [
        ("950", torch.float32, None, PlanKind.FUSED, "dense payload"),
        ("950", torch.bfloat16, None, PlanKind.FUSED, "dense payload"),
        ("950", torch.float16, None, PlanKind.BYTES, "float16"),
        ("950", torch.float64, None, PlanKind.BYTES, "float64"),
        ("950", torch.float32, (128, 1, 8), PlanKind.BYTES, "not dense"),
        ("950", torch.float32, (256, 16, 1), PlanKind.BYTES, "not dense"),
        ("A2", torch.float32, None, PlanKind.BYTES, "this is A2"),
        ("A3", torch.bfloat16, None, PlanKind.BYTES, "this is A3"),
        ("310P", torch.float32, None, PlanKind.BYTES, "this is 310P"),
        ("soc999", torch.float32, None, PlanKind.BYTES, "this is soc999"),
        ("cpu", torch.float32, None, PlanKind.BYTES, "this is cpu"),
    ],
)
def test_device_and_layout_alone_choose_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    generation: str,
    dtype: torch.dtype,
    inner: tuple[int, ...] | None,
    kind: PlanKind,
    because: str,
) -> None:
    for name in ("K3_IMPL", "K3_STATE_COPY", "VLLM_ASCEND_STATE_COPY"):
        monkeypatch.setenv(name, "fused")
    choice = state_copy.choose(Layout.of(cache_of(dtype=dtype, inner=inner)), generation)
    assert choice.kind is kind
    assert because in choice.reason


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((4, 3, 8, 16), (999, 128, 16, 1), True),
        ((4, 1, 8, 16), (999, 7, 16, 1), True),  # an axis of one element has no stride to speak of
        ((4, 3, 1, 16), (999, 16, 5, 1), True),
        ((4, 3, 8, 1), (999, 8, 1, 77), True),
        ((4, 1, 1, 1), (999, 3, 4, 5), True),
        ((4, 3, 8, 16), (999, 129, 16, 1), False),
        ((4, 3, 8, 16), (999, 128, 1, 8), False),
        ((4, 3, 8, 16), (999, 128, 16, 2), False),
        ((4, 3, 16, 16), (999, 256, 1, 16), False),  # square and transposed: the shape alone would not tell
    ],
)
def test_a_payload_is_dense_from_the_last_axis_backwards(
    shape: tuple[int, ...], stride: tuple[int, ...], dense: bool
) -> None:
    assert layout.dense_payload(shape, stride) is dense


@pytest.mark.parametrize(
    ("shape", "stride", "problem"),
    [
        ((3, 8, 16), (128, 16, 1), "4-D"),
        ((0,), (1,), "4-D"),
        ((0, 3, 8, 16), (384, 128, 16, 1), "empty"),
        ((4, 3, 0, 16), (384, 128, 16, 1), "empty"),
        ((4, 3, 8, 16), (383, 128, 16, 1), "overlap"),
        ((4, 3, 8, 16), (0, 128, 16, 1), "overlap"),
        ((4, 3, 8, 16), (999, 0, 16, 1), "overlap"),
        ((4, 3, 8, 16), (999, 128, 8, 1), "overlap"),
    ],
)
def test_illegal_layouts_are_refused_with_a_reason(
    shape: tuple[int, ...], stride: tuple[int, ...], problem: str
) -> None:
    bad = Layout("npu:0", torch.float32, shape, stride, 0)
    with pytest.raises(ValueError, match=problem):
        state_copy.choose(bad, "950")
    with pytest.raises(ValueError, match=problem):
        state_copy.choose(bad, "A2")


def test_complex_elements_are_refused() -> None:
    bad = Layout("npu:0", torch.complex128, SHAPE, (999, 128, 16, 1), 0)
    with pytest.raises(ValueError, match="16 bytes"):
        state_copy.choose(bad, "A2")


def test_pages_may_touch_but_not_overlap() -> None:
    touching = Layout("npu:0", torch.float32, (4, 3, 8, 16), (384, 128, 16, 1), 0)
    assert state_copy.choose(touching, "950").kind is PlanKind.FUSED
    single = dataclasses.replace(touching, shape=(1, 3, 8, 16), stride=(100, 128, 16, 1))
    assert state_copy.choose(single, "950").kind is PlanKind.BYTES, (
        "stride(0) below the payload is not the fused plan's"
    )


def test_the_signature_tells_apart_what_compiled_code_depends_on() -> None:
    base = Layout.of(cache_of())
    assert base == Layout.of(cache_of(seed=9)), "values do not matter"
    others = (
        Layout.of(cache_of(dtype=torch.bfloat16)),
        Layout.of(cache_of(shape=(7, *SHAPE[1:]))),
        Layout.of(cache_of(gap=64)),
        Layout.of(cache_of(offset=1)),
        dataclasses.replace(base, device="npu:1"),
    )
    assert len({base, *others}) == 6
    assert Layout.of(cache_of(offset=1)).alignment == 4


@pytest.mark.parametrize(
    ("version", "name"),
    [(220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (260, "950"), (200, "soc200"), (261, "soc261")],
)
def test_generations_of_an_npu(monkeypatch: pytest.MonkeyPatch, version: int, name: str) -> None:
    import sys
    from types import SimpleNamespace

    fake = SimpleNamespace(npu=SimpleNamespace(get_soc_version=lambda: version))
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    assert layout.generation(SimpleNamespace(type="npu")) == name  # type: ignore[arg-type]


def test_other_devices_are_called_by_their_type() -> None:
    assert layout.generation(torch.device("cpu")) == "cpu"
    assert layout.generation(torch.device("cuda", 0)) == "cuda"
