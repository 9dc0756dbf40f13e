"""A layer of experts over two streams: same results under every schedule, and no launch that lacks a wait.

CPU tensors stand for the GPU's. Every operation is noted with the stream that it would run on; vector clocks say what
each stream has been told to wait for. Two faults are looked for: an operation that reads what another stream wrote
without having waited for it, and memory that is given out again on the stream that made it while the other may still
use it (PyTorch reuses memory by the order of the host, not of the device).
"""

from __future__ import annotations

import importlib
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm", reason="needs a CPU build of vLLM")
pytest.importorskip("triton", reason="the launchers import it")

from nvidia_support import Group, groups, run_ranks

from k3_core.vllm.serving import beside, reductions
from k3_core.vllm.serving.modules import Rows
from k3_nvidia import moe
from k3_nvidia.tuning import moe_step
from k3_nvidia.tuning.moe_step import Schedule

HIDDEN, LATENT, WIDTH, EXPERTS, TOKENS = 12, 8, 4, 6, 3
ALL = [Schedule(*flags) for flags in product((False, True), repeat=4)]

Clock = dict[str, int]


class Streams(TorchDispatchMode):
    """Two streams' clocks, who wrote and used each storage when, and what is wrong with that."""

    def __init__(self) -> None:
        super().__init__()
        self.current = "main"
        self.clocks: dict[str, Clock] = {s: {"main": 0, "side": 0} for s in ("main", "side")}
        self.written: dict[int, tuple[str, int]] = {}
        self.made: dict[int, str] = {}
        self.used: dict[int, list[tuple[str, int]]] = {}
        self.freed: dict[str, list[tuple[str, int]]] = {"main": [], "side": []}
        self.faults: list[str] = []
        self.ran: list[str] = []

    def wait(self, waiting: str, seen: Clock) -> None:
        own = self.clocks[waiting]
        for stream, time in seen.items():
            own[stream] = max(own[stream], time)

    def _behind(self, point: tuple[str, int]) -> bool:
        """Whether the current stream comes after that point."""
        return self.clocks[self.current][point[0]] >= point[1]

    def _free(self, key: int) -> None:
        self.freed[self.made.pop(key)] += self.used.pop(key)
        self.written.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        here = self.current
        self.clocks[here][here] += 1
        now = here, self.clocks[here][here]
        before = {id(s): s for s in map(Tensor.untyped_storage, filter(torch.is_tensor, args))}
        name = func.name().split("::")[1]
        self.ran.append(f"{here} {name}")
        for key in before:
            if key in self.written and not self._behind(self.written[key]):
                self.faults.append(f"{name} on {here} reads what {self.written[key][0]} is still writing")
            if key in self.used:
                self.used[key].append(now)
        results = out if isinstance(out, tuple | list) else [out]
        for storage in map(Tensor.untyped_storage, filter(torch.is_tensor, results)):
            key = id(storage)
            if key in before or key in self.made:
                continue
            for point in self.freed[here]:
                if not self._behind(point):
                    self.faults.append(f"{name} on {here} is given memory that {point[0]} may still use")
            self.made[key], self.written[key], self.used[key] = here, now, [now]
            weakref.finalize(storage, self._free, key)
        return out


class Side:
    """The side stream of the real class, in clocks."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    @contextmanager
    def work(self) -> Iterator[None]:
        s = self.streams
        s.wait("side", s.clocks["main"])
        s.current = "side"
        yield
        s.current = "main"

    def mark(self) -> Clock:
        return dict(self.streams.clocks["side"])

    def after(self, mark: Clock) -> None:
        self.streams.wait("main", mark)

    def join(self) -> None:
        self.streams.wait("main", self.streams.clocks["side"])


class Layer(moe.MoE):
    """The schedules of the real layer over small matrices and experts of one product each."""

    def __init__(self, how: Schedule) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

        self.text = SimpleNamespace(routed_expert_hidden_size=LATENT, expert_hidden_size=LATENT)
        self.one_input = self._fused = True
        self._joined, self._gathers, self.form = False, False, "none"
        self._schedules = ((1 << 20, how),)
        self.rows = Rows()
        self.rows.add("routed_expert_down_proj", LATENT)
        self.rows.add("shared_experts.gate_proj", WIDTH)
        self.rows.add("shared_experts.up_proj", WIDTH)
        weight = matrix(self.rows.padded, HIDDEN)

        class In(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x @ weight.t()

        self.in_proj = In()
        self.in_proj.weight = weight
        down, self.router, self.expert = matrix(HIDDEN, WIDTH), matrix(EXPERTS, HIDDEN), matrix(LATENT, LATENT)
        self.shared_experts = nn.Module()
        self.shared_experts.act = lambda rows: torch.sigmoid(rows[:, :WIDTH]) * rows[:, WIDTH:]
        self.shared_experts.down_proj = lambda x: x @ down.t()
        self.shared_experts.finish = lambda rows: self.shared_experts.down_proj(self.shared_experts.act(rows))
        self.up = matrix(HIDDEN, LATENT)

    def _choose(self, x: Tensor, first: bool = False) -> Tensor:
        return (x @ self.router.t()).softmax(-1)

    def _products(self, latent: Tensor, chosen: Tensor, first: bool = False) -> Tensor:
        return (latent @ self.expert.t()) * chosen.sum(-1, keepdim=True) * chosen[:, :1]

    def forward(self, x: Tensor) -> Tensor:
        """As the form for one rank."""
        routed, shared = self.partial(x)
        return routed @ self.up.t() + shared


def run(how: Schedule, side: type[Side], monkeypatch: pytest.MonkeyPatch, layers: int = 3) -> tuple[Tensor, Streams]:
    """The output of some layers in a row and what the streams saw."""
    chain = [Layer(how) for _ in range(layers)]
    streams = Streams()
    monkeypatch.setattr(beside, "side", lambda device: side(streams))
    x = torch.linspace(-1, 1, TOKENS * HIDDEN, dtype=torch.float64).view(TOKENS, HIDDEN)
    with streams:
        for layer in chain:
            x = torch.tanh(layer(x))
    return x, streams


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
def test_every_schedule_waits_for_what_it_reads(how: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = run(Schedule(), Side, monkeypatch)
    got, streams = run(how, Side, monkeypatch)
    assert not streams.faults
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert any(name.startswith("side") for name in streams.ran) == how.two_streams


@pytest.mark.parametrize("choice", [False, True])
def test_early_shared_experts_run_before_the_routed_ones(choice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("_shared", "_products"):
        real = getattr(Layer, name)

        def noted(self: Layer, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            order.append(name)
            return real(self, *args, **options)

        monkeypatch.setattr(Layer, name, noted)
    _, streams = run(Schedule(choice=choice, early=True), Side, monkeypatch, layers=1)
    assert order == ["_shared", "_products"]
    assert all(name.startswith("main") for name in streams.ran) != choice
    order.clear()
    run(Schedule(choice=True), Side, monkeypatch, layers=1)
    assert order == ["_products", "_shared"], "without it they run behind"


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
def test_the_norm_waits_for_a_whole_predecessor_behind_a_join_only(
    how: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it would lose what early shared experts are for."""
    streams = Streams()
    monkeypatch.setattr(beside, "side", lambda device: Side(streams))
    joins: list[bool] = []
    monkeypatch.setattr(Side, "join", lambda self, real=Side.join: joins.append(True) or real(self))
    layer = Layer(how)
    with streams:
        layer.partial(torch.zeros(TOKENS, HIDDEN, dtype=torch.float64))
    assert layer._joined == bool(joins)


class NoAfter(Side):
    """Mutant: the products do not wait for the choice."""

    def after(self, mark: Clock) -> None:
        pass


class NoJoin(Side):
    """Mutant: the sum does not wait for the shared experts."""

    def join(self) -> None:
        pass


class NoFork(Side):
    """Mutant: the side stream starts at once."""

    @contextmanager
    def work(self) -> Iterator[None]:
        self.streams.current = "side"
        yield
        self.streams.current = "main"


@pytest.mark.parametrize(
    ("mutant", "how", "fault"),
    [
        (NoAfter, Schedule(choice=True), "main reads what side"),
        (NoJoin, Schedule(shared=True), "main reads what side"),
        (NoFork, Schedule(shared=True), "side reads what main"),
        (NoFork, Schedule(split=True, choice=True, shared=True), "side reads what main"),
    ],
)
def test_a_forgotten_wait_is_seen(
    mutant: type[Side], how: Schedule, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, streams = run(how, mutant, monkeypatch)
    assert any(fault in line for line in streams.faults), streams.faults


def test_memory_dropped_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the choice is dropped before the next work of the side stream waits for its readers."""
    real = Layer._scheduled

    def scheduled(self: Layer, x: Tensor, how: Schedule) -> tuple[Tensor, Tensor]:
        side = beside.side(x.device)
        with side.work():
            chosen = self._choose(x)
        side.after(side.mark())
        routed = self._products(torch.zeros(TOKENS, LATENT, dtype=x.dtype), chosen)
        del chosen
        side.streams.current = "side"  # work without its wait
        shared = torch.zeros(TOKENS, HIDDEN, dtype=x.dtype)
        side.streams.current = "main"
        side.join()
        return routed, shared

    monkeypatch.setattr(Layer, "_scheduled", scheduled)
    _, streams = run(Schedule(choice=True), Side, monkeypatch)
    assert any("memory that main may still use" in line for line in streams.faults), streams.faults
    monkeypatch.setattr(Layer, "_scheduled", real)


@pytest.mark.parametrize("how", [Schedule(), Schedule(split=True, shared=True)], ids=lambda how: how.name)
def test_a_long_batch_computes_its_latent_by_ranks(how: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the schedule of the layer is; what is gathered is the latent that one rank would compute."""
    x = torch.linspace(-1, 1, TOKENS * HIDDEN, dtype=torch.float64).view(TOKENS, HIDDEN)
    want = Layer(Schedule()).partial(x)
    monkeypatch.setattr(reductions, "GATHER_TOKENS", TOKENS)
    gathered: list[tuple[int, ...]] = []
    group = Group(2)
    real = group.all_gather

    def all_gather(part: Tensor, dim: int = -1) -> Tensor:
        gathered.append(tuple(part.shape))
        return real(part, dim)

    monkeypatch.setattr(group, "all_gather", all_gather)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        layer = Layer(how)
        layer.form, layer.rank, layer.ranks, layer._gathers = "adaptive", rank, 2, True
        return layer.partial(x)

    with groups(group, Group()):
        for found in run_ranks(group, work):
            for part, whole in zip(found, want, strict=True):
                torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)
    assert gathered == [(TOKENS, LATENT // 2)] * 2


# ------------------------------------------------------------------------------------------------------------ table


def test_the_shipped_table_is_read() -> None:
    for device, entry in moe_step.table()["devices"].items():
        assert entry["measured"], device
        for width in entry["widths"]:
            found = moe_step.schedules(device, width["max_width"])
            assert [up_to for up_to, _ in found] == sorted(up_to for up_to, _ in found)
            assert {up_to for up_to, _ in found} <= set(moe_step.edges(device))


def test_an_unmeasured_device_has_one_stream() -> None:
    assert moe_step.choose(moe_step.schedules("a device of tomorrow", 192), 1) == Schedule()
    assert moe_step.edges("a device of tomorrow") == []


def test_the_override_says_where_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_MOE_STEP", "16:choice+shared,128:split")
    found = moe_step.schedules("any", 192)
    assert moe_step.choose(found, 16) == Schedule(choice=True, shared=True)
    assert moe_step.choose(found, 17) == moe_step.choose(found, 128) == Schedule(split=True)
    assert moe_step.choose(found, 129) == Schedule()
    assert moe_step.edges("any") == [16, 128]
    monkeypatch.setenv("K3_MOE_STEP", "")
    assert moe_step.schedules("any", 192) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [("16:chioce", "chioce"), ("128:split,16:choice", "must grow"), ("0:split", "must grow"), ("split", "read as")],
)
def test_a_wrong_override_is_named(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_MOE_STEP", text)
    with pytest.raises(ValueError, match=f"K3_MOE_STEP.*{words}"):
        moe_step.schedules("any", 192)


@pytest.mark.parametrize("how", ALL, ids=lambda how: how.name)
def test_names_of_schedules_are_read_back(how: Schedule) -> None:
    assert moe_step.parse(how.name) == how


def test_the_sweep_keeps_one_stream_unless_another_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    sweep = importlib.import_module("sweep_moe_step")

    def row(tokens: int, choice: float, split: float) -> dict[str, Any]:
        return {"tokens": tokens, "us": {"one stream": 100.0, "choice": choice, "split+shared": split}}

    rows = [
        row(1, 90, 95),
        row(8, 91, 95),
        row(16, 99.6, 99.9),
        row(128, 99, 80),
        row(512, 79.9, 80),
        row(2048, 70, 70),
    ]
    want = [
        {"up_to": 8, "schedule": "choice"},
        {"up_to": 16, "schedule": "one stream"},
        {"up_to": 512, "schedule": "split+shared"},  # kept where another is no faster to speak of
    ]
    assert sweep.entries(rows) == want
    assert moe_step.override(sweep.override_of(want)) == tuple(
        (e["up_to"], moe_step.parse(e["schedule"])) for e in want
    )
    table = sweep.table_of(rows, 192, "a device", "versions")
    monkeypatch.setattr(moe_step, "table", lambda: table)
    found = moe_step.schedules("a device", 192)
    assert moe_step.choose(found, 5) == Schedule(choice=True)
    assert moe_step.choose(found, 16) == Schedule()
    assert moe_step.choose(found, 17) == Schedule(split=True, shared=True)
    assert moe_step.choose(found, 513) == Schedule(), "the host's launches bound an eager step"
    assert moe_step.schedules("a device", 384) == ()
    assert moe_step.edges("a device") == [8, 16, 512]
    long = [*rows, row(8192, 99, 98)]
    assert sweep.entries(long)[-2:] == [
        {"up_to": 2048, "schedule": "one stream"}, {"up_to": 8192, "schedule": "split+shared"},
    ]  # fmt: skip


def test_the_sweep_writes_what_the_fastest_schedule_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    sweep = importlib.import_module("sweep_moe_step")
    rows = [
        {"tokens": 1, "held": {"early": {"us": 90, "held": {"24x64": 2}}, "shared": {"us": 91, "held": {"96x64": 2}}}},
        {"tokens": 8, "held": {"early": {"us": 95, "held": {"24x64": 1}}, "shared": {"us": 93, "held": {}}}},
    ]
    sizes = [{"m": m, "n": n, "k": 64, "best": [], "hold": 1} for m in (1, 2, 8, 16) for n in (24, 96, 48)]
    table = sweep.with_held({"devices": {"a device": {"rows": sizes}, "another": {"rows": []}}}, "a device", rows)
    got = {(e["m"], e["n"]): e.get("hold") for e in table["devices"]["a device"]["rows"]}
    assert got == {
        (1, 24): 2, (1, 96): None, (2, 24): None, (2, 96): None, (8, 24): None, (8, 96): None,
        (16, 24): 1, (16, 96): 1, (1, 48): 1, (2, 48): 1, (8, 48): 1, (16, 48): 1,
    }  # fmt: skip
    assert all("hold" in row for row in sizes), "the table that was given stays as it is"

    path = tmp_path / "skinny.json"
    path.write_text(json.dumps({"devices": {"a device": {"rows": sizes}}}))
    monkeypatch.setattr(sweep.skinny, "__file__", str(tmp_path / "skinny.py"))
    another = {"tokens": 1, "held": {"early": {"us": 50, "held": {"48x64": 2}}}}
    page = {
        "environment": {"device": "a device"},
        "rows": {"tp16 T1": {"tokens": 1, "us": {}}, "tp16 T1 held": rows[0], "tp8 T1 held": another},
    }
    (tmp_path / "moe_step.json").write_text(json.dumps(page))
    sweep.adopt([tmp_path / "moe_step.json"])
    adopted = {(e["m"], e["n"]): e.get("hold") for e in json.loads(path.read_text())["devices"]["a device"]["rows"]}
    assert {n: adopted[1, n] for n in (24, 48)} == {24: 2, 48: 2}, "each shape has its own sizes"
