"""A second stream for work of a layer that does not depend on what the first is doing.

    with side.work(): ...        launches go to the side stream; they come after everything launched here so far
    mark = side.mark()           a point of the side stream
    side.after(mark)             what is launched here from now on comes after that point
    side.join()                  ... after everything on the side stream

Memory: PyTorch gives a tensor's memory back to the stream that it was made on, as soon as Python drops it. A tensor
that crosses must therefore live until the stream that made it has been told to wait for the other's last use of it:
``work`` begins with such a wait in one direction, ``after`` and ``join`` are those of the other. Callers keep what
crosses in local variables until then; k3-nvidia's ``test_nvidia_beside.py`` checks it launch by launch.

A kernel whose launch follows an event is launched plainly, not programmatically dependent: what a capture makes of such
a launch with two predecessors is not documented.

In a CUDA graph the waits become edges. One side stream a device serves all layers; it must not be left unjoined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


class Side:
    """The side stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launches inside go to the side stream, after everything launched on the current one so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """The point that the side stream has been given work up to."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        """What is launched on the current stream from now on waits for that point."""
        torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def join(self) -> None:
        """What is launched on the current stream from now on waits for the whole side stream."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@lru_cache(maxsize=16)
def side(device: torch.device) -> Side:
    """The side stream of ``device``, made at the first call."""
    return Side(device)
