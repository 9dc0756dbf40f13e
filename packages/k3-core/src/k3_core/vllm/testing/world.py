"""Programs of several ranks, started one by one without a launcher, watched and stopped.

A program works through a list of cases (:func:`serve`), each a collective matter: when one rank fails or hangs, the
others wait for it forever. So the ranks are watched from outside (:func:`run`): a case that any rank fails, or that not
all finish in time, ends all ranks, and those that were not reached yet run in new ones. A case that fails in ranks
which already served others is tried once more in new ones, and its result says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Where a rank finds its cases and writes its results.
CASES, RESULTS = "K3_WORLD_CASES", "K3_WORLD_RESULTS"
TAIL = 1500


@dataclass(frozen=True)
class Result:
    """What became of a case. ranks: the payload of each rank, or None with the reason in ``why``."""

    case: dict[str, Any]
    ranks: list[Any] | None
    why: str = ""
    seconds: float = 0.0
    #: Why the first try failed, where this is the second.
    before: str = ""


def serve(work: Callable[[dict[str, Any]], Any]) -> None:
    """In a rank: ``work(case)`` of every case in turn; its JSON-able result is written. The first exception ends it."""
    target = Path(os.environ[RESULTS])
    for case in json.loads(Path(os.environ[CASES]).read_text()):
        os.environ["MASTER_PORT"] = str(case["port"])
        try:
            line = {"case": case["name"], "payload": work(case)}
        except BaseException:
            line = {"case": case["name"], "error": traceback.format_exc()[-TAIL:]}
        with target.open("a") as results:
            results.write(json.dumps(line) + "\n")
        if "error" in line:
            # Not sys.exit: what is left of a broken group may wait for the others while it is torn down.
            os._exit(1)


def serve_engines(work: Callable[[dict[str, Any]], Any]) -> None:
    """:func:`serve` with engines in this process and one vendor's model, the first case's."""
    from k3_core.vllm.testing.vendor import Vendor

    cases = json.loads(Path(os.environ[CASES]).read_text())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with Vendor(*cases[0]["vendor"]).acting():
        serve(work)


def run(
    command: Sequence[str],
    cases: Sequence[dict[str, Any]],
    processes: int,
    *,
    case_seconds: float,
    deadline: float,
    environment: Mapping[str, str] | None = None,
    per_rank: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> Iterator[Result]:
    """Results of ``cases`` (dicts with a unique ``name``), in order, from ``processes`` ranks that run ``command``.

    Each rank has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and, anew for each case, MASTER_PORT. case_seconds: how long
    a case may take, the first of new ranks with their start. deadline: ``time.monotonic()`` at which all is stopped.
    """
    left = [dict(case) for case in cases]
    failed_once: dict[str, str] = {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            ranks = _Ranks(command, left, processes, Path(folder), environment or {}, per_rank)
            try:
                for position, case in enumerate(list(left)):
                    began = time.monotonic()
                    payloads, why = ranks.wait(case["name"], min(began + case_seconds, deadline))
                    took = time.monotonic() - began
                    again = payloads is None and position > 0 and time.monotonic() < deadline
                    if again and case["name"] not in failed_once:
                        failed_once[case["name"]] = why
                        break
                    left.pop(0)
                    yield Result(case, payloads, why, took, failed_once.get(case["name"], ""))
                    if payloads is None:
                        break
            finally:
                ranks.stop()


class _Ranks:
    """The processes of one try."""

    def __init__(
        self,
        command: Sequence[str],
        cases: Sequence[dict[str, Any]],
        processes: int,
        folder: Path,
        environment: Mapping[str, str],
        per_rank: Callable[[int], Mapping[str, str]],
    ) -> None:
        ports = free_ports(len(cases))
        written = folder / "cases.json"
        written.write_text(json.dumps([case | {"port": port} for case, port in zip(cases, ports, strict=True)]))
        self.results = [folder / f"results{rank}.jsonl" for rank in range(processes)]
        self.logs = [folder / f"log{rank}" for rank in range(processes)]
        self.processes = []
        for rank in range(processes):
            here = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                CASES: str(written),
                RESULTS: str(self.results[rank]),
            }
            with self.logs[rank].open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        list(command),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **environment, **per_rank(rank), **here},
                        start_new_session=True,
                    )
                )

    def wait(self, name: str, until: float) -> tuple[list[Any] | None, str]:
        """Payloads of all ranks, or None and why not."""
        while True:
            lines = [self._line(rank, name) for rank in range(len(self.processes))]
            errors = [(rank, line["error"]) for rank, line in enumerate(lines) if line and "error" in line]
            if errors:
                rank, error = errors[0]
                return None, f"rank {rank}: {error}\nits last output:\n{self._tail(rank)}"
            payloads = [line["payload"] for line in lines if line]
            if len(payloads) == len(lines):
                return payloads, ""
            for rank, process in enumerate(self.processes):
                # Its last line may have come between the reading above and its end.
                if process.poll() is not None and self._line(rank, name) is None:
                    return None, f"rank {rank} ended with {process.returncode}; its last output:\n{self._tail(rank)}"
            if time.monotonic() > until:
                waiting = [rank for rank, line in enumerate(lines) if line is None]
                tails = "\n".join(f"rank {rank}: {self._tail(rank)}" for rank in waiting)
                return None, f"no result in time from ranks {waiting}; their last output:\n{tails}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End all ranks and what they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _line(self, rank: int, name: str) -> dict[str, Any] | None:
        try:
            text = self.results[rank].read_text()
        except FileNotFoundError:
            return None
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                value: dict[str, Any] = json.loads(line)
                if value["case"] == name:
                    return value
        return None

    def _tail(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")[-TAIL:]


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
