"""Many benchmark jobs on one machine of one or two GPUs within a fixed time. Standard library only.

    python gpu_queue.py jobs.json [more.json] --seconds 540 --out DIR --start     a daemon begins, this returns
    python gpu_queue.py --out DIR --wait 120      until all have ended or 120 s are over: a line a job, and results.tgz
    python gpu_queue.py --out DIR --status        the lines alone

Without ``--start``, ``--wait`` and ``--status`` it starts and waits to the end. DIR must outlast the calls. Every
``--wait`` packs what ended since the last one (``--repack``: all that ended) into DIR/results.tgz. Exit status of a
wait: 0 all ended well, 1 all ended and one failed or was dropped, 3 not all have ended.

A file is a list of jobs, each an object:
  name, command   letters, digits, ``._-``; a shell command, run where the queue was started
  gpu             "time": alone on its GPU; "share": beside others, by memory; "both": alone on two GPUs
  mem             GiB on the GPU, for "share"
  cores           of the CPU, 2 by default. No two jobs have a core in common, so none runs on those of a timed one
  order           smaller ones first (0)
  after           names of jobs that must have ended, however they did
  needs           a path that must exist; $QUEUE in it is DIR
  limit           seconds; then its processes are killed, rc 124
  reserve         dropped where fewer seconds are left before it starts
  pin             0 or 1: this GPU (of a machine with one: that one)
  group           jobs of one group ("share") start together on one GPU and nothing else runs there until all ended; of
                  a group that lacks a job none runs
  env             additions to the environment
A job has CUDA_VISIBLE_DEVICES, $OUT (DIR/name, which is packed), $QUEUE (DIR) and log.txt in $OUT. Where it ends or is
killed, every process that it left dies; what it wrote stays. A job that must wait for room keeps a GPU for itself:
later ones start there only if their limit ends before those that it waits for. Jobs that can never run on this machine
are dropped. ``python`` is the interpreter of the queue. ``--dry GPUS,CORES,MEM`` tries a file where no GPU is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_queue_plan import GRACE, Job, Machine, Plan, load

#: Seconds between two looks at the jobs.
POLL = 0.05


def machine(dry: str) -> Machine:
    """This machine, or the one that ``--dry`` describes. Raises SystemExit where no GPU is."""
    if dry:
        gpus, cores, mem = dry.split(",")
        return Machine([str(i) for i in range(int(gpus))], float(mem), list(range(int(cores))), True)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as e:
        raise SystemExit(f"gpu_queue.py: nvidia-smi names no GPU ({e}); --dry GPUS,CORES,MEM tries a file") from None
    return Machine([str(i) for i in range(len(found))], min(map(int, found)) / 1024, sorted(os.sched_getaffinity(0)))


# -------------------------------------------------------------------------------------------------------------- running


def marked(mark: str) -> list[int]:
    """Processes whose environment has the mark of a job, in whatever session they are."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"QUEUE_JOB={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def gone(pid: int) -> bool:
    """Whether a process has let go of all it held (files, devices): it is no more, or waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Process:
    """One running job: a session of its own, with a mark that its children inherit."""

    def __init__(self, job: Job, out: Path, where: Machine) -> None:
        self.job, self.mark, self.killed = job, f"{out}:{job.name}", 0.0
        self.struck: tuple[float, list[int]] | None = None
        folder = out / job.name
        folder.mkdir(exist_ok=True)
        own = {
            "OUT": str(folder), "QUEUE": str(out), "QUEUE_JOB": self.mark, "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(where.gpus[i] for i in job.gpus),
            "QUEUE_CORES": ",".join(map(str, job.pinned)),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }  # fmt: skip
        before = os.sched_getaffinity(0)
        if not where.dry:
            os.sched_setaffinity(0, job.pinned)  # a child has its parent's
        try:
            with (folder / "log.txt").open("ab") as log:
                self.child = subprocess.Popen(
                    ["bash", "-c", job.command], env={**os.environ, **job.env, **own}, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
        finally:
            os.sched_setaffinity(0, before)

    def kill(self, number: int) -> None:
        """A signal to the job's group and to those of its processes that left it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def over(self) -> bool:
        """Whether its first process has ended; it stays unreaped, so that its number is nobody else's."""
        return os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def follow(self, now: float, end: float) -> bool:
        """Kill it where its time is up; True once it has ended and nothing is left of it."""
        job, over = self.job, self.over()
        if not over and not self.killed:
            limit = end if job.limit is None else min(end, job.began + job.limit)
            if now >= limit:
                job.why = f"limit of {job.limit:g} s" if limit < end and job.limit else "the queue's time was up"
                self.killed = now
                self.kill(signal.SIGTERM)
        # What was told to end may still write: the last of its processes has the same time as the first.
        if (self.killed and now <= self.killed + GRACE and marked(self.mark)) or (not over and not self.killed):
            return False
        if self.struck is None:
            self.struck = now, [self.child.pid, *marked(self.mark)]
            self.kill(signal.SIGKILL)
        # A process that had much of a GPU is gone a while after its death; who comes next wants an empty one.
        if not all(map(gone, self.struck[1])) and now < self.struck[0] + 10:
            return False
        code = self.child.poll()
        code = -signal.SIGKILL if code is None else code  # that it hangs in the kernel must not hold up the others
        job.rc = 124 if self.killed else code if code >= 0 else 128 - code
        job.state, job.seconds = "done", round(now - job.began, 1)
        return True


def write(path: Path, data: Any) -> None:
    """Replace a JSON file as a whole: a reader sees the old or the new one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.replace(path)


@contextlib.contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock; gives False where another process has it and ``wait`` is False."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def serve(plan: Plan, out: Path) -> None:
    """The daemon: start, follow and end jobs until all have ended or the time is over."""
    began, clock = time.monotonic(), time.time()
    processes: list[Process] = []

    def say(ended: bool = False) -> None:
        jobs = [asdict(job) for job in plan.jobs]
        write(out / "state.json", {"pid": os.getpid(), "ends": clock + plan.seconds, "ended": ended, "jobs": jobs})

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is killed below
    os.environ["QUEUE"] = str(out)
    try:
        say()
        while not all(job.ended for job in plan.jobs):
            now = time.monotonic() - began
            last = [p for p in processes if p.follow(now, plan.seconds - GRACE)]
            processes = [p for p in processes if p not in last]
            before = [job.state for job in plan.jobs]
            processes += [Process(job, out, plan.machine) for job in plan.step(now)]
            if last or before != [job.state for job in plan.jobs]:
                say()
            time.sleep(POLL)
    finally:
        for process in processes:
            process.kill(signal.SIGKILL)
        for job in plan.jobs:
            if job.state == "running":
                job.state, job.rc, job.why = "done", 137, "the queue was ended"
        say(ended=True)


def start(jobs: list[Job], out: Path, seconds: float, where: Machine) -> None:
    """Fork the daemon away from this process and its session, and return once it serves. Raises SystemExit."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "state.json").exists():
        raise SystemExit(f"gpu_queue.py: {out} holds a queue already; name another folder")
    plan = Plan(jobs, where, seconds)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        log = os.open(out / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(to, number)
        status = 1
        try:
            with locked(out / "daemon.lock", wait=False) as mine:
                if mine:
                    serve(plan, out)
                    status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.waitpid(child, 0)
    end = time.monotonic() + 10
    while not (out / "state.json").exists():
        if time.monotonic() > end:
            raise SystemExit(f"gpu_queue.py: the daemon did not begin, see {out / 'daemon.log'}")
        time.sleep(POLL)


# -------------------------------------------------------------------------------------------------------------- reading


def state(out: Path) -> dict[str, Any]:
    """state.json, ``gone`` where the daemon ended without saying so. Raises SystemExit where no queue is."""
    path = out / "state.json"
    if not path.exists():
        raise SystemExit(f"gpu_queue.py: {out} holds no queue; --start begins one")
    with locked(out / "daemon.lock", wait=False) as free:
        found: dict[str, Any] = json.loads(path.read_text())
    found["gone"] = free and not found["ended"]
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """A line for the queue and one for each job."""
    left = max(0.0, found["ends"] - time.time())
    head = "ended" if found["ended"] else f"running, {left:.0f} s left"
    result = [f"queue: {'the daemon is gone' if found['gone'] else head}"]
    for job in found["jobs"]:
        where = f" on GPU {','.join(map(str, job['gpus']))}" if job["gpus"] else ""
        why = f" ({job['why']})" if job["why"] else ""
        done = f"done rc {job['rc']} {job['seconds']:.0f} s{where}{why}"
        said = {"done": done, "dropped": f"dropped: {job['why']}", "running": f"running{where}"}
        result.append(f"{job['name']}: {said.get(job['state'], 'queued')}")
    return result


def pack(out: Path, again: bool = False) -> list[str]:
    """Pack the folders of jobs that ended and were not packed before (``again``: of all that ended); their names."""
    with locked(out / "pack.lock", wait=True):
        packed, target = out / "packed.json", out / "results.tgz"
        before = json.loads(packed.read_text()) if packed.exists() and not again else []
        jobs = state(out)["jobs"]
        names = [job["name"] for job in jobs if job["state"] == "done" and job["name"] not in before]
        target.unlink(missing_ok=True)  # one from before is not mistaken for news
        if names:
            fresh = out / "results.tgz.part"
            with tarfile.open(fresh, "w:gz") as tar:
                for name in (*names, "state.json", "daemon.log"):
                    tar.add(out / name, name)
            fresh.replace(target)
            write(packed, before + names)
    return names


def wait(out: Path, seconds: float, again: bool = False) -> int:
    """Wait for the jobs, at most so long; say where they are and pack what ended. The exit status."""
    end = time.monotonic() + seconds
    while not ((found := state(out))["ended"] or found["gone"]) and time.monotonic() < end:
        time.sleep(min(0.2, max(0.01, end - time.monotonic())))
    names = pack(out, again)
    size = f", {(out / 'results.tgz').stat().st_size / 2**20:.1f} MiB" if names else ""
    found = state(out)
    print("\n".join([*lines(found), f"packed: {' '.join(names) or 'nothing new'}{size}"]), flush=True)
    if not found["ended"] and not found["gone"]:
        return 3
    return 0 if not found["gone"] and all(job["rc"] == 0 for job in found["jobs"]) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="*", help="files of jobs, for a start")
    parser.add_argument("--out", type=Path, required=True, help="the queue's folder")
    parser.add_argument("--seconds", type=float, help="all that the queue may take, for a start")
    parser.add_argument("--start", action="store_true", help="begin and return")
    parser.add_argument("--wait", type=float, metavar="N", help="wait at most N seconds, report, pack")
    parser.add_argument("--status", action="store_true", help="only report")
    parser.add_argument("--repack", action="store_true", help="pack again what was packed before")
    parser.add_argument("--dry", default="", metavar="GPUS,CORES,MEM", help="as if the machine were this")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.start or (options.wait is None and not options.status):
        if not options.jobs or not options.seconds:
            parser.error("a start needs files of jobs and --seconds")
        try:
            jobs = load(options.jobs)
        except (OSError, ValueError, TypeError) as e:
            parser.error(str(e))
        start(jobs, out, options.seconds, machine(options.dry))
        if options.wait is None and options.start:
            print("\n".join(lines(state(out))), flush=True)
            return 0
    if options.status:
        print("\n".join(lines(state(out))), flush=True)
        return 0
    return wait(out, options.seconds + 10 if options.wait is None else options.wait, options.repack)


if __name__ == "__main__":
    sys.exit(main())
