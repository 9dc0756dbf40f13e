"""Pinned memory that experts pass on their way to a device: a slot is written only after its last copy has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")

from k3_core.vllm.serving import experts
from k3_core.vllm.serving.experts import RearrangedStore, Staging


class Event:
    """In the place of torch.cuda.Event: says when it was waited for."""

    waited: list[int] = []  # noqa: RUF012 - one list for all, as one device
    made = 0

    def __init__(self) -> None:
        self.number = Event.made
        Event.made += 1

    def record(self) -> None:
        """A device would record it here."""

    def synchronize(self) -> None:
        Event.waited.append(self.number)


@pytest.fixture
def ring() -> Staging:
    Event.waited, Event.made = [], 0
    return Staging(pinned=False, event=Event)


def expert(seed: int, width: int = 5) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {("w1", "weight_packed"): (width, 16), ("w1", "weight_scale"): (width, 1), ("w2", "weight_packed"): (3, 7)}
    return {k: torch.randint(0, 256, s, dtype=torch.uint8, generator=generator) for k, s in shapes.items()}


def test_bytes_survive_and_a_slot_is_free_before_it_is_written(ring: Staging) -> None:
    held = []
    for number in range(2 * ring.slots):
        assert Event.waited == list(range(number - ring.slots)), "waits for the copy of one round ago, and no other"
        held.append(ring.hold(expert(number)))
        ring.sent()
    for number, parts in enumerate(held[ring.slots :], ring.slots):  # the first round was written over
        for key, part in expert(number).items():
            assert torch.equal(parts[key], part)
            assert parts[key].is_contiguous()
    assert Event.waited == list(range(ring.slots))


@pytest.mark.parametrize(("slot", "slots"), [(0, 32), (1 << 20, 32), (17 << 20, 3), (1 << 30, 2)])
def test_a_ring_has_few_slots_of_large_experts(slot: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **named: honest(*sizes, **(named | {"device": "meta"})))
    assert Staging(slot, pinned=False, event=Event).slots == slots


def test_the_ring_is_host_memory_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert Staging(64, pinned=False, event=Event)._memory.device.type == "cpu"


def test_a_larger_expert_makes_a_new_ring_after_the_copies_from_the_old(ring: Staging) -> None:
    small = ring.hold(expert(1))
    ring.sent()
    large = ring.hold(expert(2, width=64))
    assert Event.waited == [0]
    for key, part in expert(1).items():
        assert torch.equal(small[key], part)
    for key, part in expert(2, width=64).items():
        assert torch.equal(large[key], part)


def test_a_store_on_a_device_goes_through_the_ring_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a name only; the kernels' packing is a stand-in."""
    Event.waited, Event.made = [], 0
    monkeypatch.setattr(experts, "Staging", lambda: Staging(pinned=False, event=Event))
    taken: list[Any] = []
    storage = type("Storage", (), {"w13": type("Codes", (), {"device": torch.device("cuda")})()})()
    store = RearrangedStore(storage, lambda dst, index, *matrices: taken.append((index, matrices)))
    parts = expert(1) | {("w3", k): v for (m, k), v in expert(2).items() if m == "w1"}
    parts[("w2", "weight_scale")] = torch.ones(3, 1, dtype=torch.uint8)
    store.put(7, parts)
    ((index, (gate, up, down)),) = taken
    assert index == 7
    for (codes, scale), name in ((gate, "w1"), (up, "w3"), (down, "w2")):
        assert torch.equal(codes, parts[name, "weight_packed"])
        assert torch.equal(scale, parts[name, "weight_scale"])
        assert codes.data_ptr() != parts[name, "weight_packed"].data_ptr()
    experts.release_staging()
    assert Event.waited == [0]
    assert experts._staging == []
