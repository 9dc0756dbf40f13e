"""A trace is cut into steps of the engine; the median step of the whole batch is told, or why there is none."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAUSE = 20.0
SAMPLING = "_gumbel_sample_kernel"
COPY = "Memcpy HtoD (Pinned -> Device)"
Span = tuple[str, int, float, float]


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Device:
    """Writes a trace: launches one after the other on stream 7, the step's own layers last 100 us in all."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.spans: list[Span] = []

    def launch(self, name: str, us: float, stream: int = 7, early: float = 0.0) -> None:
        start = self.now - early
        self.spans.append((name, stream, start, start + us))
        if stream == 7:
            self.now = start + us

    def step(self, layer: float = 25.0, wait: float = 0.0, prompt: bool = False, copies: int = 1) -> None:
        """Inputs (5 us each, 1), four layers (an experts' kernel and a product), a head in two launches, sampling."""
        self.now += wait
        for _ in range(copies):
            self.launch(COPY, 5)
        self.launch("_combine_sampled_and_draft_tokens_kernel", 1)  # has a name of sampling, but no head before it
        for _ in range(4):
            self.launch("w13_kernel", layer - 5)
            self.launch("nvjet_sm90_tst_192x208" if prompt else "nvjet_sm90_tst_64x8", 5)
        self.launch("nvjet_sm90_tst_128x8_head", 30)
        self.launch("void cublasLt::splitKreduce_kernel<32>", 2)
        self.now += 3
        self.launch(SAMPLING, 8)

    def run(self, steps: int, **options: Any) -> Device:
        for _ in range(steps):
            self.step(**options)
        return self


#: A step that nothing disturbs: a copy and the last tokens, layers, the head with its sum, a gap, sampling.
STEP = 6 + 100 + 32 + 3 + 8


def decode(device: Device, tokens: int) -> dict[str, Any]:
    import engine_steps

    return engine_steps.decode(device.spans, tokens, PAUSE)


def test_a_batch_that_came_at_once() -> None:
    device = Device()
    device.step(layer=200, prompt=True)
    found = decode(device.run(19), 20)
    assert found["device_ms"] == pytest.approx(STEP / 1e3)
    assert found["device_iqr_ms"] == [found["device_ms"]] * 2
    assert found["launches"] == 2 + 8 + 2 + 1
    assert found["steps"] == [19, 1], "the step of the prompts is dropped"
    assert found["kernels"][0] == "w13_kernel"
    assert found["timeline"]["gaps"] == pytest.approx(3)
    whole = sum(row[4] for row in found["timeline"]["rows"]) + found["timeline"]["gaps"]
    assert whole == pytest.approx(1e3 * found["device_ms"])


def late(tokens: int, after: int, quick: float = 15.0) -> Device:
    """A request comes ``after`` steps late: before it and after the others are done, steps of a smaller batch, which
    launch the same graph and are quicker; its prompt is a chunk in the midst."""
    device = Device()
    device.step(layer=200, prompt=True)
    device.run(after - 1, layer=quick)
    device.step(layer=150, prompt=True)
    device.run(tokens - after - 1)
    return device.run(after, layer=quick)


def test_a_late_request() -> None:
    found = decode(late(40, 3), 40)
    assert found["device_ms"] == pytest.approx(STEP / 1e3)
    assert found["steps"] == [36, 7], "of 43: the prompts', and before and after them those that lack a request"
    assert found["device_iqr_ms"] == [found["device_ms"]] * 2, "no step of another batch is among them"


def test_a_late_request_whose_steps_look_like_the_others_is_told_by_the_counts() -> None:
    # nothing but the number of steps says which have the whole batch: 15 of 39 would, less than half
    found = decode(late(40, 24), 40)
    assert "device_ms" not in found
    assert found["device_refused"].startswith("15 of 39 expected steps are of one kind: 64 steps in the trace")


def test_a_chunk_of_another_prompt_in_the_midst() -> None:
    device = Device().run(10)
    device.step(layer=400, prompt=True)
    device.run(9, layer=26.0)
    found = decode(device, 20)
    assert found["steps"] == [18, 2]
    assert "nvjet_tst_192x208" not in json.dumps(found["timeline"])
    assert found["device_ms"] < 0.16


@pytest.mark.parametrize("disturbed", [2, 6])
def test_slow_steps_of_the_right_kind_do_not_move_the_median(disturbed: int) -> None:
    device = Device()
    for n in range(25):
        device.step(layer=60 if n % 4 == 3 and n // 4 < disturbed else 25 + n % 3)
    found = decode(device, 25)
    times = sorted(5 + 4 * (60 if n % 4 == 3 and n // 4 < disturbed else 25 + n % 3) + 43 + 1 for n in range(1, 25))
    assert found["device_ms"] == pytest.approx(times[11] / 1e3)
    assert abs(statistics.fmean(times) - times[11]) > 8, "a mean would be another step"
    assert found["steps"] == [24, 1]
    assert (found["device_iqr_ms"][1] > 0.16) == (disturbed == 6), "a quarter of slow steps shows in the quartiles"


def mutant_mean(spans: list[Span], tokens: int) -> float:
    """What must not be: the mean over all the steps of the trace."""
    import engine_steps

    steps, _ = engine_steps.cut(spans, PAUSE)
    return statistics.fmean(step.us for step in steps) / 1e3


def mutant_difference(long: list[Span], short: list[Span], steps: int) -> float:
    """What was: the longer run less the shorter, which got the late request at another step."""
    import engine_timeline

    def us(spans: list[Span]) -> float:
        swept = engine_timeline.sweep(spans, PAUSE)
        return sum(row[4] for row in swept["rows"]) + swept["gaps"]

    return (us(long) - us(short)) / steps / 1e3


def test_the_mean_over_all_steps_and_the_difference_of_runs_are_wrong_here() -> None:
    device = late(40, 3)
    right = decode(device, 40)["device_ms"]
    assert right == pytest.approx(STEP / 1e3)
    assert mutant_mean(device.spans, 40) > 1.05 * right
    assert abs(mutant_difference(device.spans, Device().run(16).spans, 24) - right) > 0.05 * right


def test_copies_and_waits_that_hang_on_the_host_make_no_kind() -> None:
    device = Device()
    for n in range(20):
        device.step(copies=1 + n % 3, wait=100.0 * (n % 2))
    found = decode(device, 20)
    assert found["steps"] == [19, 1]
    assert found["device_ms"] == pytest.approx((STEP + 5) / 1e3), "the median step has two copies"
    assert found["launches"] == 14


def overlapping(steps: int) -> Device:
    """Asynchronous scheduling, programmatic launch, shared experts on a second stream."""
    device = Device()
    for n in range(steps):
        device.launch("w13_kernel", 50, early=4.0 if n else 0.0)  # its blocks are there while sampling still runs
        device.launch("nvjet_sm90_tst_64x8", 30, stream=8, early=40.0)  # beside the experts
        device.launch("w2_kernel", 40, early=2.0)
        device.launch(COPY, 6, stream=9, early=1.0)  # the next step's inputs, before this one's head
        device.launch("nvjet_sm90_tst_128x8_head", 30)
        device.launch(SAMPLING, 8, early=1.0)
        device.launch("Memcpy DtoH (Device -> Pinned)", 5, stream=9, early=0.0)  # its tokens, behind it
    return device


def test_steps_that_overlap_add_up_to_the_trace() -> None:
    import engine_steps
    import engine_timeline

    device = overlapping(30)
    steps, rest = engine_steps.cut(device.spans, PAUSE)
    assert len(steps) == 30
    assert [x.span[0] for x in rest] == [SAMPLING, "Memcpy DtoH (Device -> Pinned)"]
    swept = engine_timeline.sweep(device.spans, PAUSE)
    whole = sum(row[4] for row in swept["rows"]) + swept["gaps"]
    assert sum(step.us for step in steps) + sum(x.exposed + x.gap for x in rest) == pytest.approx(whole)
    assert len([x for step in steps for x in step.launches]) + len(rest) == len(device.spans)
    period = 50 - 4 + 40 - 2 + 30 + 8 - 1
    found = decode(device, 30)
    assert found["device_ms"] == pytest.approx(period / 1e3)
    assert found["launches"] == 7
    names = [row[0] for row in found["timeline"]["rows"]]
    assert names[0] == SAMPLING, "a step begins behind the head of the one before"
    assert names[-1].endswith("(head)")


def test_an_early_copy_is_the_steps_it_started_in() -> None:
    import engine_steps

    steps, _ = engine_steps.cut(overlapping(3).spans, PAUSE)
    assert [sum("HtoD" in x.span[0] for x in step.launches) for step in steps] == [1, 1, 1]


def test_waits_for_the_host_count_nowhere() -> None:
    assert decode(Device().run(20, wait=2000.0), 20)["device_ms"] == pytest.approx(STEP / 1e3)


def test_a_trace_whose_steps_all_differ_is_refused() -> None:
    device = Device()
    for n in range(20):
        for _ in range(n):
            device.launch("_attn_res_kernel", 3)
        device.step()
    found = decode(device, 20)
    assert set(found) == {"device_refused", "steps"}
    assert found["device_refused"].startswith("1 of 19 expected steps are of one kind: 20 steps in the trace, 19 of")
    assert "+1 _attn_res_kernel" in found["device_refused"]
    assert found["steps"] == [1, 19]


@pytest.mark.parametrize("same", [10, 9])
def test_half_of_the_expected_steps_is_enough(same: int) -> None:
    device = Device().run(1 + same)
    for n in range(20 - same):
        for _ in range(n + 1):
            device.launch("_attn_res_kernel", 3)
        device.step()
    assert ("device_ms" in decode(device, 21)) == (same == 10)


@pytest.mark.parametrize("spans", [[], [(COPY, 7, 0.0, 1.0)], [("w13_kernel", 7, float(i), i + 1.0) for i in range(9)]])
def test_a_trace_without_steps_is_refused(spans: list[Span]) -> None:
    import engine_steps

    found = engine_steps.decode(spans, 20, PAUSE)
    assert found["device_refused"].startswith("0 of 19 expected steps are of one kind: 0 steps in the trace")
    assert engine_steps.median_request([engine_steps.request(spans, PAUSE)] * 3)["device_refused"]


def requests(*devices: Device) -> dict[str, Any]:
    import engine_steps

    return engine_steps.median_request([engine_steps.request(device.spans, PAUSE) for device in devices])


def prefill(layer: float, chunks: int = 1) -> Device:
    device = Device().run(chunks, layer=layer, prompt=True, wait=50)
    device.launch("Memcpy DtoH (Device -> Pinned)", 5)
    return device


def test_the_median_of_three_requests() -> None:
    found = requests(prefill(300.0), prefill(2000.0), prefill(310.0))
    assert found["device_ms"] == pytest.approx((STEP + 4 * 285 + 5) / 1e3)
    assert found["device_all_ms"][1] > 5 * found["device_ms"]
    assert found["steps"] == 1
    assert found["requests"] == [3, 0]
    assert "kind" not in found
    timeline = found["timeline"]
    assert sum(r[4] for r in timeline["rows"]) + timeline["gaps"] == pytest.approx(1e3 * found["device_ms"])
    assert any("DtoH" in name or "Memcpy" in name for name, *_ in timeline["rows"]), "all of it, behind the head too"


def test_a_request_of_several_chunks() -> None:
    found = requests(*[prefill(300.0, chunks=4)] * 3)
    assert found["steps"] == 4
    assert found["device_ms"] == pytest.approx((4 * (STEP + 4 * 275) + 5) / 1e3)


def test_requests_that_were_cut_into_other_chunks() -> None:
    found = requests(prefill(300.0), prefill(160.0, chunks=2), prefill(310.0))
    assert found["requests"] == [2, 1]
    assert found["steps"] == 1
    found = requests(*(prefill(300.0, chunks=n) for n in (1, 2, 3)))
    assert set(found) == {"device_refused", "requests"}
    assert "[1, 2, 3] steps" in found["device_refused"]


def arrivals(*steps: tuple[float, int]) -> list[tuple[float, dict[str, int]]]:
    """(seconds since the last, how many of the batch's requests got a token) of each output."""
    now, found = 5.0, []
    for seconds, count in steps:
        now += seconds
        found.append((now, {f"r{i}": 1 for i in range(count)}))
    return found


def test_what_a_user_waits_between_tokens() -> None:
    import engine_steps

    run = arrivals((1, 3), (0.5, 1), *[(0.002, 4)] * 20, (0.002, 3))
    assert engine_steps.intervals(run, 4) == pytest.approx([0.002] * 19)
    slow = arrivals((1, 4), *[(0.002, 4)] * 15, (0.3, 4), *[(0.002, 4)] * 4)
    found = engine_steps.step_ms([run, slow], 4, 21)
    assert found["ms"] == 2.0, "one long wait is no step"
    assert found["ms_iqr"] == [2.0, 2.0]
    assert found["ms_mean"] > 9


def test_outputs_that_hold_nothing_or_two_tokens() -> None:
    import engine_steps

    run = arrivals((1, 2), (0.002, 2), (0.001, 0), (0.001, 2))
    assert engine_steps.intervals(run, 2) == pytest.approx([0.002, 0.002]), "nothing in between is no output"
    run[-1][1]["r0"] = 2
    assert engine_steps.intervals(run, 2) == pytest.approx([0.002])


def test_no_wall_clock_without_a_whole_batch() -> None:
    import engine_steps

    found = engine_steps.step_ms([arrivals(*[(0.002, 3)] * 30, *[(0.002, 4)] * 10)], 4, 21)
    assert found == {"ms_refused": "9 of 20 expected intervals are between outputs of the whole batch"}


def test_a_kept_trace_says_the_same(tmp_path: Path) -> None:
    import engine_steps

    for tokens, device in ((40, late(40, 3)), (None, prefill(300.0))):
        path = tmp_path / "trace.json.gz"
        engine_steps.write(path, device.spans, tokens, PAUSE)
        found = engine_steps.read(path)
        direct = decode(device, tokens) if tokens else engine_steps.request(device.spans, PAUSE)
        assert {k: v for k, v in found.items() if k != "timeline"} == {
            k: v for k, v in direct.items() if k != "timeline"
        }


class Core:
    """As vLLM's client of its engine: outputs of requests, one step at a time."""

    def __init__(self) -> None:
        self.left = 3

    def get_output(self) -> Any:
        self.left -= 1
        one = type("Output", (), {"request_id": "a", "new_token_ids": [4]})
        return type("Outputs", (), {"outputs": [one] if self.left else []})


def test_the_lines_of_a_folder_are_told_anew_from_its_traces(tmp_path: Path) -> None:
    """With a shorter pause the waits between a step's launches are the host's; what no trace says stays."""
    import engine_steps

    who = {"part": "rank", "shape": "tp16", "impl": "ours", "experts": "k3-nvidia"}
    stem = "trace_rank_tp16_ours_k3-nvidia"
    engine_steps.write(tmp_path / f"{stem}_decode_8.json.gz", Device().run(9).spans, 8, PAUSE)
    for number, layer in enumerate((25.0, 27.0, 26.0)):
        spans = Device().run(1, layer=layer).spans
        engine_steps.write(tmp_path / f"{stem}_prefill_8192_{number}.json.gz", spans, None, PAUSE)
    lines = [
        {**who, "start_s": 100.0},
        {**who, "decode_batch": 8, "ms": 2.0, "device_ms": 9.0, "launches": 1},
        {**who, "prefill": 8192, "ms": 40.0, "device_ms": 9.0, "launches": 1},
        {"part": "timeline", "shape": "tp16", "impl": "ours", "experts": "k3-nvidia", "cases": {}},
    ]
    (tmp_path / "engine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start, decode, prompt, timeline = engine_steps.again(tmp_path)
    assert start == lines[0]
    assert (decode["ms"], decode["device_ms"], decode["launches"]) == (2.0, STEP / 1e3, 13)
    assert (prompt["ms"], prompt["device_ms"]) == (40.0, (STEP + 4) / 1e3)
    assert {case: step["us"] for case, step in timeline["cases"].items()} == {
        "decode 8": STEP,
        "prefill 8192": STEP + 4,
    }
    assert engine_steps.again(tmp_path, 2.0)[1]["device_ms"] == (STEP - 3) / 1e3
    other = {**lines[3], "impl": "upstream", "experts": "auto"}
    refused = {**who, "decode_batch": 8, "ms": 2.0, "device_refused": "no trace"}
    (tmp_path / "engine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [refused, other]))
    told, another = engine_steps.again(tmp_path)
    assert told == decode, "a reason goes where there is a figure"
    assert another["cases"] == {}, "the steps of one engine are not another's"
    (tmp_path / f"{stem}_decode_8.json.gz").unlink()
    with pytest.raises(FileNotFoundError, match="decode_8"):
        engine_steps.again(tmp_path)


def test_outputs_are_noted_and_the_engine_left_as_it_was() -> None:
    import bench_engine

    llm: Any = type("LLM", (), {"llm_engine": type("Engine", (), {"engine_core": Core()})})
    noted = bench_engine.Arrivals(llm)
    with noted:
        while llm.llm_engine.engine_core.get_output().outputs:
            pass
    with noted:
        pass
    assert [[tokens for _, tokens in run] for run in noted.runs] == [[{"a": 1}, {"a": 1}, {}], []]
    times = [time for time, _ in noted.runs[0]]
    assert times == sorted(times)
    assert "get_output" not in vars(llm.llm_engine.engine_core)


class Engine:
    """As vLLM's LLM: every request gets a token a step; the trace is what a device would have run for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_by: int) -> None:
        import engine_worker

        self.llm_engine = self.engine_core = self
        self.device, self.late_by = Device(), late_by
        self.queue: list[list[str]] = []
        monkeypatch.setattr(engine_worker, "start_profile", lambda _: setattr(self, "device", Device()))
        monkeypatch.setattr(engine_worker, "_profile", self)

    def get_output(self) -> Any:
        time.sleep(0.0005)
        outputs = [type("Output", (), {"request_id": one, "new_token_ids": [4]}) for one in self.queue.pop(0)]
        return type("Outputs", (), {"outputs": outputs})

    def generate(self, requests: list[Any], sampling: Any, use_tqdm: bool) -> None:
        names, count = [str(i) for i in range(len(requests))], sampling.max_tokens
        last = self.late_by if len(names) > 1 else 0  # that many steps later than the others comes the last request
        for step in range(count + last):
            prompt = step in (0, last)
            self.device.step(layer=200 if prompt else 25, prompt=prompt)
            self.queue.append(names[:-1] * (step < count) + names[-1:] * (step >= last))
        while self.queue:
            self.llm_engine.engine_core.get_output()

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [call(self, *args)] if call.__module__ != "engine_worker" or "profile" in call.__name__ else [[]]

    def __exit__(self, *_: object) -> None:
        pass

    def events(self) -> list[Any]:
        spans = [("cudaGraphLaunch", 0, 0.0, 1.0), *self.device.spans]
        kind = {"cudaGraphLaunch": "DeviceType.CPU"}
        return [
            SimpleNamespace(
                name=name, device_type=kind.get(name, "DeviceType.CUDA"), device_resource_id=stream,
                time_range=SimpleNamespace(start=start, end=end),
            )
            for name, stream, start, end in spans
        ]  # fmt: skip


@pytest.mark.parametrize("late_by", [0, 7, 50])
def test_the_rows_of_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late_by: int) -> None:
    pytest.importorskip("vllm")
    import bench_engine
    import engine_steps
    import torch
    from engine_turns import Turns

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(bench_engine, "say", lambda **row: said.append(row))
    monkeypatch.setattr(bench_engine, "BATCHES", (1, 3))
    who = {"part": "rank", "shape": "tp8", "impl": "ours", "experts": "k3-nvidia"}
    options = SimpleNamespace(shape="tp8", turns=Turns(tmp_path / "turns", 0, 1), rounds=2, traces=tmp_path)
    if late_by == 50:
        with pytest.raises(RuntimeError, match=r"no figure of decode 3: .* expected intervals.*; decode 3: 13 of 63"):
            bench_engine.measure(Engine(monkeypatch, late_by), who, options)
    else:
        bench_engine.measure(Engine(monkeypatch, late_by), who, options)
    rows = {(row["round"], row.get("decode_batch"), row.get("prefill")): row for row in said if "round" in row}
    assert len(rows) == 2 * 5
    assert json.loads(json.dumps(said)) == said
    whole = rows[0, 3, None]
    assert ("device_ms" in whole, "ms" in whole) == ((late_by < 50,) * 2)
    assert "device_ms" not in rows[1, 3, None], "one round is traced"
    if late_by < 50:
        assert whole["device_ms"] == rows[0, 1, None]["device_ms"] == pytest.approx(STEP / 1e3)
        assert whole["steps"][0] == 63 - late_by
        assert 0.4 < whole["ms"] < 50
        kept = engine_steps.read(tmp_path / "trace_rank_tp8_ours_k3-nvidia_decode_3.json.gz")
        assert kept["device_ms"] == whole["device_ms"]
    assert rows[0, None, 8192]["device_all_ms"] == [pytest.approx((STEP + 700) / 1e3)] * 3
    (line,) = (row for row in said if row["part"] == "timeline")
    assert ("decode 3" in line["cases"]) == (late_by < 50)
    assert line["cases"]["decode 1"]["us"] == pytest.approx(STEP)


def test_a_refused_figure_is_told_on_the_page_and_the_others_stay() -> None:
    import engine_rows

    who = {"part": "rank", "shape": "tp8", "round": 0, "decode_batch": 8}
    ours = {"impl": "ours", "experts": "k3-nvidia"}
    lines = [
        {**who, **ours, "ms_refused": "2 of 9 expected", "device_ms": 1.5, "launches": 170},
        {**who, "impl": "upstream", "experts": "auto", "ms": 3.0, "device_refused": "4 of 39 expected"},
        {**who, "impl": "upstream", "experts": "marlin", "ms": 2.0, "device_ms": 3.0, "launches": 200.5},
    ]
    row = engine_rows.rows(lines)["tp8 decode 8"]
    assert row["ratio, device"] == 0.5
    assert "ratio" not in row
    assert engine_rows.refusals(lines) == [
        "No wall clock of ours in tp8 decode 8: 2 of 9 expected.",
        "No device time of humming in tp8 decode 8: 4 of 39 expected.",
    ]
