"""The queue of benchmark jobs on one GPU machine: who may start when, what dies with a job, what a wait brings back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
BENCHMARKS = PACKAGE / "benchmarks"
JOBS = sorted((BENCHMARKS / "jobs").glob("*.json"))


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


# --------------------------------------------------------------------------------------------------- who may start when


def share(name: str, mem: float = 10, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": "true", "gpu": "share", "mem": mem, **more}


def timed(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": "true", "gpu": "time", **more}


def both(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": "true", "gpu": "both", **more}


class Sketch:
    """A plan whose jobs end when the test says so."""

    def __init__(self, *jobs: dict[str, Any], gpus: int = 2, cores: int = 16, mem: float = 140.0) -> None:
        from gpu_queue_plan import Job, Machine, Plan

        self.plan = Plan([Job(**job) for job in jobs], Machine(list("01")[:gpus], mem, list(range(cores)), True), 500.0)

    def at(self, now: float, *ended: str) -> dict[str, list[int]]:
        """End some, step; name -> GPUs of those that were started."""
        for job in self.plan.jobs:
            if job.name in ended:
                assert job.state == "running", job
                job.state, job.rc = "done", 0
        return {job.name: job.gpus for job in self.plan.step(now)}

    def dropped(self) -> dict[str, str]:
        return {job.name: job.why for job in self.plan.jobs if job.state == "dropped"}


def test_the_order_is_the_files_and_then_theirs() -> None:
    sketch = Sketch(timed("c", order=2), timed("b"), timed("a"), gpus=1)
    assert sketch.at(0) == {"b": [0]}
    assert sketch.at(1) == {}
    assert sketch.at(2, "b") == {"a": [0]}
    assert sketch.at(3, "a") == {"c": [0]}


def test_a_timed_job_is_alone_on_its_gpu() -> None:
    sketch = Sketch(timed("t"), share("s"), share("r"))
    assert sketch.at(0) == {"t": [0], "s": [1], "r": [1]}
    sketch = Sketch(share("s"), timed("t"), gpus=1)
    assert sketch.at(0) == {"s": [0]}, "nothing is timed while another loads"
    assert sketch.at(1, "s") == {"t": [0]}
    sketch = Sketch(timed("t"), share("s"), gpus=1)
    assert sketch.at(0) == {"t": [0]}
    assert sketch.at(1) == {}, "nothing loads while another is timed"
    assert sketch.at(2, "t") == {"s": [0]}


def test_no_two_jobs_have_a_core_in_common() -> None:
    sketch = Sketch(timed("t", cores=6), share("s", cores=7), share("r", cores=3), share("q", cores=4))
    assert set(sketch.at(0)) == {"t", "s", "r"}
    taken = [core for job in sketch.plan.running() for core in job.pinned]
    assert len(taken) == len(set(taken)) == 16
    assert set(sketch.at(1, "r")) == set(), "three cores are free, it wants four"
    assert set(sketch.at(2, "s")) == {"q"}


def test_both_have_the_machine_for_themselves() -> None:
    sketch = Sketch(share("s"), both("b"), share("r"))
    assert sketch.at(0) == {"s": [0]}, "r waits behind b"
    assert sketch.at(1, "s") == {"b": [0, 1]}
    assert sketch.at(2) == {}
    assert sketch.at(3, "b") == {"r": [0]}


def test_memory_is_shared_and_the_other_gpu_stays_empty_while_it_can() -> None:
    sketch = Sketch(share("a", 60), share("b", 60), share("c", 30), share("d", 20))
    assert sketch.at(0) == {"a": [0], "b": [0], "c": [1], "d": [0]}


def test_a_job_that_waits_for_room_is_not_overtaken_for_ever() -> None:
    sketch = Sketch(share("s", limit=100), timed("t"), share("long"), share("short", limit=50), gpus=1)
    assert sketch.at(0) == {"s": [0], "short": [0]}, "done before s is, at the latest"
    assert sketch.at(60, "short") == {}
    assert sketch.at(61, "s") == {"t": [0]}
    assert sketch.at(62, "t") == {"long": [0]}


def test_cores_are_kept_for_it_too() -> None:
    sketch = Sketch(share("s", limit=100, cores=2, pin=0), timed("t", cores=12, pin=0), share("r", cores=8, pin=1))
    assert sketch.at(0) == {"s": [0]}, "14 are free, ten of them and the two of s are t's"
    assert sketch.at(1, "s") == {"t": [0]}


def test_a_group_starts_together_alone_on_its_gpu() -> None:
    group = [share(f"g{i}", 40, group="g", pin=1) for i in range(3)]
    sketch = Sketch(share("s", pin=1), *group, share("r", pin=1), share("q", pin=0), timed("t", pin=1))
    assert sketch.at(0) == {"s": [1], "q": [0]}
    assert sketch.at(1, "s") == {"g0": [1], "g1": [1], "g2": [1]}
    taken = [core for job in sketch.plan.running() for core in job.pinned]
    assert len(taken) == len(set(taken)) == 8
    assert sketch.at(2, "g0", "g1") == {}, "until all of it have ended"
    assert sketch.at(3, "g2") == {"r": [1]}


def test_two_groups_have_a_gpu_each_or_follow_each_other() -> None:
    groups = [share(f"{g}{i}", 40, group=g, pin=pin) for pin, g in enumerate("gh") for i in range(2)]
    assert Sketch(*groups).at(0) == {"g0": [0], "g1": [0], "h0": [1], "h1": [1]}
    sketch = Sketch(*groups, gpus=1)
    assert sketch.at(0) == {"g0": [0], "g1": [0]}
    assert sketch.at(1, "g0", "g1") == {"h0": [0], "h1": [0]}


def test_a_group_that_lacks_one_does_not_start() -> None:
    sketch = Sketch(share("a", group="g"), share("b", group="g", after=["s"]), share("s"), gpus=1)
    assert sketch.at(0) == {"s": [0]}
    assert sketch.at(1, "s") == {"a": [0], "b": [0]}
    sketch = Sketch(share("a", group="g"), share("b", group="g", reserve=400))
    assert sketch.at(200) == {}
    assert set(sketch.dropped()) == {"a", "b"}


def test_after_and_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUE", str(tmp_path))
    sketch = Sketch(share("b", after=["a"]), share("c", needs="$QUEUE/weights"), timed("a", pin=0))
    assert sketch.at(0) == {"a": [0]}, "who waits for others keeps no GPU"
    assert sketch.at(1, "a") == {"b": [0]}
    (tmp_path / "weights").touch()
    assert sketch.at(2) == {"c": [0]}


def test_after_a_job_that_was_dropped() -> None:
    sketch = Sketch(both("a"), share("b", after=["a"]), gpus=1)
    assert sketch.dropped() == {"a": "needs two GPUs"}
    assert sketch.at(0) == {"b": [0]}


def test_what_comes_too_late_is_dropped() -> None:
    sketch = Sketch(timed("a"), share("b", reserve=300), share("c", needs="/nothing/here"), gpus=1)
    sketch.at(0)
    assert sketch.at(199) == {}
    assert sketch.dropped() == {}
    sketch.at(201)
    assert sketch.dropped() == {"b": "299 s were left, it wants 300 s"}
    sketch.at(498)
    assert sketch.dropped()["c"] == "2 s were left, it wants /nothing/here"


def test_what_this_machine_cannot_run_is_dropped_at_once() -> None:
    group = [share(f"g{i}", 80, group="g") for i in range(2)]
    sketch = Sketch(both("a"), share("b", 141), timed("c", cores=17), *group, share("d"), gpus=1)
    assert sketch.dropped() == {
        "a": "needs two GPUs",
        "b": "needs 141 GiB of 140",
        "c": "needs 17 cores of 16",
        "g0": "needs 160 GiB of 140",
        "g1": "needs 160 GiB of 140",
    }
    assert sketch.at(0) == {"d": [0]}


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([{"name": "a", "gpu": "time"}], "job a: lacks command"),
        ([timed("a", memory=3)], "job a: unknown keys memory; known: name, command"),
        ([timed("a"), timed("a")], "job a: this name is there twice"),
        ([timed("a/b")], "a name is letters"),
        ([timed("..")], "a name is letters"),
        ([{**timed("a"), "gpu": "all"}], "gpu is one of time, share, both, not all"),
        ([{**share("a"), "mem": 0}], "a job that shares a GPU says its mem"),
        ([timed("a", group="g")], 'jobs of a group have gpu "share"'),
        ([both("a", pin=0)], "pin is 0 or 1"),
        ([share("a", pin=0, group="g"), share("b", pin=1, group="g")], "group g: its jobs have different pins"),
        ([timed("a", after=["z"])], "job a: after names no job: z"),
        ([timed("a", after=["b"]), timed("b", after=["a"])], "jobs wait for each other: a, b"),
        ([share("a", group="g"), share("b", group="g", after=["a"])], "jobs wait for each other: g"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, jobs: list[dict[str, Any]], message: str) -> None:
    from gpu_queue_plan import load

    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    with pytest.raises(ValueError, match=re.escape(message)):
        load([path])


# ----------------------------------------------------------------------------------------------------- daemon and waits


class Queue:
    """The command line in a folder, on a machine that is not there."""

    def __init__(self, folder: Path, *jobs: dict[str, Any]) -> None:
        self.out, self.jobs = folder / "queue", folder / "jobs.json"
        self.jobs.write_text(json.dumps(jobs))

    def __call__(self, *words: Any) -> tuple[int, str]:
        command = [sys.executable, BENCHMARKS / "gpu_queue.py", *words, "--out", self.out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    def start(self, seconds: float = 60) -> None:
        status, said = self(self.jobs, "--seconds", seconds, "--start", "--dry", "2,16,140")
        assert status == 0, said

    def state(self) -> dict[str, Any]:
        return json.loads((self.out / "state.json").read_text())

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.state()["jobs"] if job["name"] == name)

    def packed(self) -> list[str]:
        with tarfile.open(self.out / "results.tgz") as tar:
            return sorted(tar.getnames())


def until(what: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Any]:
    """Makes a queue; its daemon ends with the test."""
    made: list[Queue] = []

    def make(*jobs: dict[str, Any]) -> Queue:
        made.append(Queue(tmp_path, *jobs))
        return made[-1]

    yield make
    for one in made:
        if (one.out / "state.json").exists() and not one.state()["ended"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.state()["pid"], signal.SIGTERM)
            until(lambda one=one: one.state()["ended"])


def sh(name: str, command: str, **more: Any) -> dict[str, Any]:
    return {**share(name), "command": command, **more}


def test_jobs_run_on_after_the_start_has_returned_and_waits_bring_what_is_new(queue: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    here = "echo $CUDA_VISIBLE_DEVICES $QUEUE_CORES $GREETING; echo oops >&2; echo 1 > $OUT/figures; test -d $QUEUE"
    q = queue(
        sh("a", here, env={"GREETING": "hello"}, cores=3), sh("b", f"until [ -e {go} ]; do sleep 0.05; done; false")
    )
    q.start()
    until(lambda: q.job("a")["state"] == "done")
    status, said = q("--wait", 0)
    assert status == 3
    assert re.search(r"^queue: running, \d\d s left$", said, re.MULTILINE)
    assert re.search(r"^a: done rc 0 \d+ s on GPU 0$", said, re.MULTILINE)
    assert "b: running on GPU 0" in said
    assert q.packed() == ["a", "a/figures", "a/log.txt", "daemon.log", "state.json"]
    assert (q.out / "a" / "log.txt").read_text() == "0 0,1,2 hello\noops\n"
    assert os.getsid(q.state()["pid"]) == os.getpgid(q.state()["pid"]) != os.getsid(0), "a session of its own"
    go.touch()
    status, said = q("--wait", 20)
    assert status == 1, "one failed"
    assert "queue: ended" in said
    assert re.search(r"^b: done rc 1 ", said, re.MULTILINE)
    assert q.packed() == ["b", "b/log.txt", "daemon.log", "state.json"], "a was brought before"
    status, said = q("--wait", 0)
    assert "packed: nothing new" in said
    assert not (q.out / "results.tgz").exists(), "an old one would be taken for news"
    q("--wait", 0, "--repack")
    assert {"a/figures", "b/log.txt"} <= set(q.packed())


def test_a_wait_that_was_killed_is_begun_anew(queue: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    q = queue(sh("a", f"until [ -e {go} ]; do sleep 0.05; done; echo 1 > $OUT/figures"))
    q.start()
    words = [sys.executable, str(BENCHMARKS / "gpu_queue.py"), "--out", str(q.out), "--wait", "50"]
    waiting = subprocess.Popen(words)
    time.sleep(0.5)
    assert waiting.poll() is None
    waiting.kill()
    waiting.wait()
    go.touch()
    assert q("--wait", 20)[0] == 0
    assert "a/figures" in q.packed()


def test_all_in_one_call(queue: Any) -> None:
    q = queue(sh("a", "true"), both("b"))
    status, said = q(q.jobs, "--seconds", 30, "--dry", "1,4,140")
    assert status == 1, "one was dropped"
    assert "b: dropped: needs two GPUs" in said
    assert "a: done rc 0" in said
    assert (
        q(q.jobs, "--seconds", 30, "--dry", "1,4,140")[1].strip().endswith("holds a queue already; name another folder")
    )


STUBBORN = "trap '' TERM; echo $BASHPID >> $OUT/pids; while :; do sleep 0.1; done"


def alive(pids: list[int]) -> list[int]:
    """Those that run; one that nobody has reaped is dead."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def test_a_job_that_is_killed_takes_its_children_along_and_leaves_what_it_wrote(queue: Any) -> None:
    # a child in its group, one without its environment, one in a session of its own; none minds SIGTERM
    own = f"bash -c {shlex.quote(STUBBORN)} & "
    children = f"({STUBBORN}) & env -i OUT=$OUT PATH=$PATH {own} setsid {own}"
    main = "echo half > $OUT/rows; until [ $(wc -l < $OUT/pids) = 3 ]; do sleep 0.05; done; touch $OUT/both; sleep 60"
    q = queue(sh("a", children + main, limit=4), sh("b", children + main.replace("sleep 60", "exit 7")))
    q.start()
    until(lambda: q.job("a")["state"] == "done" and q.job("b")["state"] == "done", 40)
    assert (q.job("a")["rc"], q.job("a")["why"]) == (124, "limit of 4 s")
    assert (q.job("b")["rc"], q.job("b")["why"]) == (7, "")
    for name in "ab":
        assert (q.out / name / "both").exists()
        assert (q.out / name / "rows").read_text() == "half\n"
        assert alive([int(pid) for pid in (q.out / name / "pids").read_text().split()]) == []


def test_who_is_told_to_end_may_write_until_it_does(queue: Any) -> None:
    python = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('last'), sys.exit(0)))\n"
        "time.sleep(60)"
    )
    q = queue(sh("a", f"python -c {shlex.quote(python)}; echo never", limit=1.5))
    q.start()
    until(lambda: q.job("a")["state"] == "done")
    assert q.job("a")["rc"] == 124
    assert (q.out / "a" / "log.txt").read_text().strip() == "last"


def test_the_end_of_the_time(queue: Any) -> None:
    q = queue(sh("a", "echo 1 > $OUT/rows; sleep 60"), sh("b", "true", after=["a"]), timed("c", pin=0, reserve=3))
    q.start(seconds=5)
    status, said = q("--wait", 20)
    assert status == 1
    assert re.search(r"^a: done rc 124 2 s on GPU 0 \(the queue's time was up\)$", said, re.MULTILINE), said
    assert "c: dropped: 3 s were left, it wants 3 s" in said
    assert q.packed()[:3] == ["a", "a/log.txt", "a/rows"]


def test_a_daemon_that_was_killed_is_missed_and_one_that_is_ended_ends_its_jobs(queue: Any) -> None:
    q = queue(sh("a", "echo $BASHPID > $OUT/pids; exec sleep 60"))
    q.start()
    until(lambda: (q.out / "a" / "pids").exists() and (q.out / "a" / "pids").read_text())
    os.kill(q.state()["pid"], signal.SIGTERM)
    until(lambda: q.state()["ended"])
    assert (q.job("a")["rc"], q.job("a")["why"]) == (137, "the queue was ended")
    assert alive([int((q.out / "a" / "pids").read_text())]) == []
    q.out = q.out.with_name("another")
    q.start()
    until(lambda: (q.out / "a" / "pids").exists() and (q.out / "a" / "pids").read_text())
    os.kill(q.state()["pid"], signal.SIGKILL)
    os.kill(int((q.out / "a" / "pids").read_text()), signal.SIGKILL)
    until(lambda: "queue: the daemon is gone" in q("--status")[1])
    assert q("--wait", 30)[0] == 1
    (q.out / "state.json").unlink()  # nobody is left to end


def test_cores_are_a_jobs_own(tmp_path: Path) -> None:
    from gpu_queue import Process
    from gpu_queue_plan import Job, Machine

    mine = os.sched_getaffinity(0)
    core = max(mine)
    command = "python -c 'import os; print(os.sched_getaffinity(0))'"
    job = Job("a", command, "time", cores=1, state="running", gpus=[1], pinned=[core])
    process = Process(job, tmp_path, Machine(["0", "1"], 140.0, [core]))
    until(lambda: process.follow(1.0, 50.0))
    assert (tmp_path / "a" / "log.txt").read_text() == f"{{{core}}}\n"
    assert job.rc == 0
    assert os.sched_getaffinity(0) == mine


# ------------------------------------------------------------------------------------------------------- the files here


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_files_here_fit_their_machine(path: Path) -> None:
    from gpu_queue_plan import Machine, Plan, load

    plan = Plan(load([path]), Machine(["0", "1"], 139.8, list(range(32))), 540.0)
    assert [job.why for job in plan.jobs if job.state == "dropped"] == []
    first = {job.name for job in plan.step(0.0)}
    assert first == ({"ranks"} if path.stem == "checks" else {job.name for job in plan.jobs})
    single = Plan(load([path]), Machine(["0"], 139.8, list(range(16))), 540.0)
    of_two = ["ranks", "ranks_wide"] if path.stem == "checks" else []
    assert [job.name for job in single.jobs if job.state == "dropped"] == of_two


#: Runs scripts up to the point where they have read their arguments; says what each made of its own.
READER = """
import argparse, json, runpy, sys
class Read(BaseException): pass
def parse(self, *rest, original=argparse.ArgumentParser.parse_args):
    raise Read(vars(original(self, *rest)))
argparse.ArgumentParser.parse_args = parse
for line in sys.stdin:
    path, *words = json.loads(line)
    sys.argv = [path, *words]
    sys.path[0] = path.rpartition("/")[0]
    try:
        runpy.run_path(path, run_name="__main__")
    except Read as e:
        print(json.dumps(e.args[0], default=str), flush=True)
    except SystemExit as e:
        print(json.dumps({"exit": str(e)}), flush=True)
"""


def commands() -> list[list[str]]:
    """The words of every command of the files here."""
    return [shlex.split(job["command"]) for path in JOBS for job in json.loads(path.read_text())]


def read(lines: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", READER], input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True, text=True, check=False, cwd=PACKAGE.parents[1],
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(lines), done.stderr[-3000:]
    return found


def test_every_command_of_the_files_here_is_understood() -> None:
    scripts = [words[1:] for words in commands() if words[1].endswith(".py")]
    assert len(scripts) == 14
    wrong = [[scripts[0][0], "--seconds", "1", "--no-such-flag"]]
    found = read([[str(PACKAGE.parents[1] / script), *words] for script, *words in [*scripts, *wrong]])
    assert found.pop() == {"exit": "2"}, "a flag that a script does not have is found"
    for words, options in zip(scripts, found, strict=True):
        assert "exit" not in options, (words, options)
        given = dict(zip(words[1::2], words[2::2], strict=True))
        for flag, value in given.items():
            got = options[flag.removeprefix("--").replace("-", "_")]
            assert str(got) == value or float(got) == float(value), (words, flag, got)
    turns = [options["turns"] for options in found if "turns" in options]
    assert turns == [f"$QUEUE/turns_{shape}:{i}:3" for shape in ("tp16", "tp8") for i in range(3)]


def test_test_files_that_are_named_are_there_and_have_what_is_asked_for() -> None:
    for words in commands():
        if words[1:3] == ["-m", "pytest"]:
            files = [PACKAGE.parents[1] / word for word in words if word.endswith(".py")]
            assert len(files) == 2
            assert all(file.exists() for file in files)
            marked = "gpu" in words
            assert all(("pytest.mark.gpu" in file.read_text()) >= marked for file in files), "it would select nothing"
