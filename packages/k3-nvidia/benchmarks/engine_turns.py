"""Engines that share one GPU: they start side by side and are timed one after the other, in rounds.

Alternating processes of which each starts anew spend most of a device's time on starts. Here every engine of a
comparison is started once, with a cache of fixed size so that all fit; when all stand (or have failed) they take turns,
and while one is timed the others wait for requests, which costs the device nothing. Files in a folder are the only
thing they share, so the processes need not be started by one parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Turn number ``index`` of ``of`` in ``folder``; a single engine (``of`` 1) never waits.

    limit: seconds after which an engine that did not come to the start is left behind.
    """

    def __init__(self, folder: Path, index: int, of: int, limit: float = 300.0) -> None:
        if not 0 <= index < of:
            raise ValueError(f"turn {index} of {of} does not exist")
        self.folder, self.index, self.of, self.limit = folder, index, of, limit
        folder.mkdir(parents=True, exist_ok=True)

    def _said(self, what: str, index: int) -> bool:
        return (self.folder / f"{what}.{index}").exists() or (self.folder / f"gone.{index}").exists()

    def _say(self, what: str) -> None:
        (self.folder / f"{what}.{self.index}").touch()

    def ready(self) -> list[int]:
        """Wait until every engine stands or has failed; the numbers of those that did neither in time."""
        self._say("ready")
        end = time.monotonic() + self.limit
        waiting = list(range(self.of))
        while waiting and time.monotonic() < end:
            waiting = [i for i in waiting if not self._said("ready", i)]
            time.sleep(0.05 if waiting else 0)
        return waiting

    def rounds(self, count: int) -> Iterator[int]:
        """The rounds of this engine, each when the engines before it have ended theirs."""
        missing = self.ready()
        others = [i for i in range(self.of) if i != self.index and i not in missing]
        for number in range(count):
            # One that is gone answers at once, so the order must not hang on the neighbour alone.
            due = [(number if i < self.index else number - 1, i) for i in others]
            while not all(before < 0 or self._said(f"round{before}", i) for before, i in due):
                time.sleep(0.05)
            yield number
            self._say(f"round{number}")

    def close(self) -> None:
        """Nobody waits for this engine any more."""
        self._say("gone")
