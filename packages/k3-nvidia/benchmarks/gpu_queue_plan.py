"""Which jobs of ``gpu_queue.py`` may start: what a file says of them, the machine, and the choice. Starts nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("time", "share", "both")
#: Seconds between SIGTERM and SIGKILL; jobs that run at the end of the time are told so many before it.
GRACE = 3.0


@dataclass
class Job:
    """What a file says of a job, and how far it has come. Times are seconds since the queue began."""

    name: str
    command: str
    gpu: str
    mem: float = 0.0
    cores: int = 2
    order: float = 0.0
    after: list[str] = field(default_factory=list)
    needs: str = ""
    limit: float | None = None
    reserve: float = 0.0
    pin: int | None = None
    group: str = ""
    env: dict[str, str] = field(default_factory=dict)
    state: str = "queued"
    gpus: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    began: float = 0.0
    seconds: float = 0.0
    rc: int | None = None
    why: str = ""

    @property
    def alone(self) -> bool:
        """Nothing else (but its group) may be on its GPU."""
        return self.gpu != "share" or bool(self.group)

    @property
    def ended(self) -> bool:
        return self.state in ("done", "dropped")


FILED = ("name", "command", "gpu", "mem", "cores", "order", "after", "needs", "limit", "reserve", "pin", "group", "env")


def load(paths: Sequence[Path]) -> list[Job]:
    """The jobs of some files. Raises ValueError: which file, which job, what is wrong."""
    jobs: list[Job] = []
    for path in paths:
        for number, entry in enumerate(json.loads(path.read_text())):
            where = f"{path}: job {entry.get('name', number)}"
            if unknown := sorted(set(entry) - set(FILED)):
                raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; known: {', '.join(FILED)}")
            if missing := [key for key in ("name", "command", "gpu") if not entry.get(key)]:
                raise ValueError(f"{where}: lacks {', '.join(missing)}")
            job = Job(**entry)
            for wrong, what in (
                (not re.fullmatch(r"[\w.-]+", job.name) or job.name.startswith("."), "a name is letters, digits, ._-"),
                (job.name in {other.name for other in jobs}, "this name is there twice"),
                (job.gpu not in KINDS, f"gpu is one of {', '.join(KINDS)}, not {job.gpu}"),
                (job.gpu == "share" and job.mem <= 0, "a job that shares a GPU says its mem, GiB"),
                (job.pin not in (None, 0, 1) or (job.gpu == "both" and job.pin is not None), "pin is 0 or 1, of a GPU"),
                (bool(job.group) and job.gpu != "share", 'jobs of a group have gpu "share"'),
                (job.cores < 1, "cores begin at 1"),
            ):
                if wrong:
                    raise ValueError(f"{where}: {what}")
            jobs.append(job)
    _check_after(jobs)
    for job in jobs:
        if job.group and any(o.group == job.group and o.pin != job.pin for o in jobs):
            raise ValueError(f"group {job.group}: its jobs have different pins")
    return jobs


def _check_after(jobs: Sequence[Job]) -> None:
    """Raises ValueError where ``after`` names nobody, or jobs (a group starts as one) wait for each other."""
    units = {job.name: job.group or job.name for job in jobs}
    waits: dict[str, set[str]] = {unit: set() for unit in units.values()}
    for job in jobs:
        if absent := [name for name in job.after if name not in units]:
            raise ValueError(f"job {job.name}: after names no job: {', '.join(absent)}")
        waits[units[job.name]] |= {units[name] for name in job.after}
    while free := [unit for unit, before in waits.items() if not before & set(waits)]:
        for unit in free:
            del waits[unit]
    if waits:
        raise ValueError(f"jobs wait for each other: {', '.join(sorted(waits))}")


@dataclass
class Machine:
    """GPUs by number (their ids for CUDA_VISIBLE_DEVICES), their memory in GiB, cores by number."""

    gpus: list[str]
    mem: float
    cores: list[int]
    dry: bool = False


class Plan:
    """Which jobs may start: decides, starts nothing. A unit is a job, or the jobs of a group."""

    def __init__(self, jobs: Sequence[Job], where: Machine, seconds: float) -> None:
        self.jobs, self.machine, self.seconds = list(jobs), where, seconds
        units: dict[str, list[Job]] = {}
        for job in self.jobs:
            units.setdefault(f"group {job.group}" if job.group else f"job {job.name}", []).append(job)
        self.units = sorted(units.values(), key=lambda unit: min(job.order for job in unit))
        for unit in self.units:
            if why := self._impossible(unit):
                self._drop(unit, why)

    def _impossible(self, unit: list[Job]) -> str:
        mem, cores = sum(job.mem for job in unit), sum(job.cores for job in unit)
        if unit[0].gpu == "both" and len(self.machine.gpus) < 2:
            return "needs two GPUs"
        if mem > self.machine.mem:
            return f"needs {mem:g} GiB of {self.machine.mem:g}"
        return f"needs {cores} cores of {len(self.machine.cores)}" if cores > len(self.machine.cores) else ""

    @staticmethod
    def _drop(unit: list[Job], why: str) -> None:
        for job in unit:
            job.state, job.why = "dropped", why

    def _end(self, job: Job) -> float:
        return min(self.seconds, self.seconds if job.limit is None else job.began + job.limit)

    def running(self, gpus: Sequence[int] | None = None) -> list[Job]:
        """Jobs that run (on one of ``gpus``)."""
        found = [job for job in self.jobs if job.state == "running"]
        return found if gpus is None else [job for job in found if set(job.gpus) & set(gpus)]

    def _places(self, unit: list[Job]) -> list[list[int]]:
        count = len(self.machine.gpus)
        if unit[0].gpu == "both":
            return [list(range(count))]
        if unit[0].pin is not None:
            return [[unit[0].pin % count]]
        # The fullest first: another stays empty for a job that wants one alone.
        return sorted(([i] for i in range(count)), key=lambda gpus: -sum(job.mem for job in self.running(gpus)))

    def _room(self, unit: list[Job], gpus: list[int]) -> bool:
        others = self.running(gpus)
        if any(job.alone for job in (*unit, *others)) and others:
            return False
        return sum(job.mem for job in (*unit, *others)) <= self.machine.mem

    def free_cores(self) -> list[int]:
        """Cores that no running job has."""
        taken = {core for job in self.running() for core in job.pinned}
        return [core for core in self.machine.cores if core not in taken]

    def ready(self, unit: list[Job]) -> bool:
        """All that it waits for, but room, is there."""
        ended = {job.name for job in self.jobs if job.ended}
        paths = [os.path.expandvars(job.needs) for job in unit if job.needs]
        return all(set(job.after) <= ended for job in unit) and all(map(os.path.exists, paths))

    def _waited(self, unit: list[Job]) -> str:
        """What it wanted, in words."""
        ended = {job.name for job in self.jobs if job.ended}
        wants = [f"{job.reserve:g} s" for job in unit if job.reserve]
        wants += [name for job in unit for name in job.after if name not in ended]
        wants += [job.needs for job in unit if job.needs and not os.path.exists(os.path.expandvars(job.needs))]
        return f", it wants {', '.join(wants)}" if wants else ""

    def step(self, now: float) -> list[Job]:
        """Drop what comes too late, give places to all that can start at ``now`` and return it, as running."""
        started: list[Job] = []
        #: (GPUs, cores, when it can start at the latest) of each unit that was ready before and had no room.
        claims: list[tuple[list[int], int, float]] = []
        for unit in self.units:
            if unit[0].state != "queued":
                continue
            left = self.seconds - now
            if max(job.reserve for job in unit) > left or left <= GRACE:
                self._drop(unit, f"{max(left, 0):.0f} s were left{self._waited(unit)}")
            elif self.ready(unit):
                if place := self._place(unit, now, claims):
                    self._give(unit, place, now)
                    started += unit
                else:
                    claims.append(self._claim(unit, now))
        return started

    def _place(self, unit: list[Job], now: float, claims: list[tuple[list[int], int, float]]) -> list[int] | None:
        until = max(self.seconds if job.limit is None else now + job.limit for job in unit)
        later = [claim for claim in claims if until >= claim[2]]  # that it would be in the way of
        cores = sum(job.cores for job in unit) + sum(claim[1] for claim in later)
        if cores > len(self.free_cores()):
            return None
        kept = {gpu for claim in later for gpu in claim[0]}
        return next((p for p in self._places(unit) if not set(p) & kept and self._room(unit, p)), None)

    def _claim(self, unit: list[Job], now: float) -> tuple[list[int], int, float]:
        """The GPUs that are free for it first, the cores that it lacks of theirs, and when their last job has ended."""

        def until(gpus: list[int]) -> float:
            return max((self._end(job) for job in self.running(gpus)), default=now)

        gpus = min(self._places(unit), key=until)
        there = self.running(gpus)
        cores = sum(job.cores for job in unit) - sum(len(job.pinned) for job in there)
        return gpus, max(0, cores), until(gpus) if there else max(map(self._end, self.running()), default=now)

    def _give(self, unit: list[Job], gpus: list[int], now: float) -> None:
        cores = self.free_cores()
        for job in unit:
            job.pinned, cores = cores[: job.cores], cores[job.cores :]
            job.state, job.gpus, job.began = "running", gpus, now
