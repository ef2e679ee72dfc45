"""When this rank computed what in a batch: recorded on request, on a clock that all ranks of a job can read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import paddle

from paddle_dp.mesh import Mesh
from paddle_dp.plan.schedule import Span, Work


class Recorder:
    """The start and the stop of each piece of work of one batch, once `armed`.

    On an accelerator each piece is waited for, so that its time is its own; a recorded batch is a little slower.
    """

    def __init__(self, mesh: Mesh):
        self.mesh, self.armed = mesh, False
        self._rows: list[tuple[Work, float, float]] = []
        self._zero = 0.0

    def begin(self) -> None:
        """Before a batch: all ranks of the job set out together, and from there each counts for itself."""
        self._rows = []
        if self.armed:
            self._wait_for_device()
            self.mesh.sum([1.0])
            self._zero = time.perf_counter()

    @contextmanager
    def span(self, work: Work) -> Iterator[None]:
        """Around one piece of work."""
        if not self.armed:
            yield
            return
        self._wait_for_device()
        start = time.perf_counter()
        yield
        self._wait_for_device()
        self._rows.append((work, start, time.perf_counter()))

    def spans(self) -> list[list[Span]]:
        """The recorded batch of each pipeline, from its first start on. Collective over all ranks.

        Clocks of one machine are one clock; another machine's is set to it where they set out together.
        """
        mine = [[work.kind, work.micro, work.chunk, start, stop] for work, start, stop in self._rows]
        told = self.mesh.gather([self.mesh.host, self._zero, mine])
        host, zero, _ = told[0]
        found: dict[tuple[int, ...], list[Span]] = {}
        for rank, (where, set_out, rows) in enumerate(told):
            seats = self.mesh.axes.seats(rank)
            stage = seats.pop("pipeline")
            ahead = zero if where == host else set_out
            for kind, micro, chunk, start, stop in rows:
                span = Span(stage, Work(kind, micro, chunk), start - ahead, stop - ahead)
                found.setdefault(tuple(seats.values()), []).append(span)
        return [_from_zero(spans) for _, spans in sorted(found.items())]

    def _wait_for_device(self) -> None:
        if self.mesh.device != "cpu":
            paddle.device.synchronize()


def _from_zero(spans: list[Span]) -> list[Span]:
    first = min(span.start for span in spans)
    shifted = [Span(s.stage, s.work, s.start - first, s.stop - first) for s in spans]
    return sorted(shifted, key=lambda span: (span.stage, span.start))
