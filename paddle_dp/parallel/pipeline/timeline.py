"""When this rank computed what in a batch: recorded on request, on a clock that all ranks of a job can read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import paddle

from paddle_dp.mesh import Mesh
from paddle_dp.plan.pipeline_schedule import Span, Work


@dataclass(frozen=True)
class Recording:
    """One batch of one pipeline: its spans, in seconds from the first start on.

    `calm` is the least share of its computing time that a rank's thread really had a core: below 1, other programs took
    it away meanwhile (or, on a GPU, the thread only waited), and the spans are those of a disturbed machine.
    """

    spans: list[Span]
    calm: float


@dataclass
class Recorder:
    """The start and the stop of each piece of work of one batch, once `armed`.

    On an accelerator each piece is waited for, so that its time is its own; a recorded batch is a little slower.
    """

    mesh: Mesh
    armed: bool = False
    zero: float = 0.0
    on_core: float = 0.0
    rows: list[tuple[Work, float, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Before a batch: all ranks of the job set out together, and from there each counts for itself."""
        self.rows, self.on_core = [], 0.0
        if self.armed:
            self._wait_for_device()
            self.mesh.sum([1.0])
            self.zero = time.perf_counter()

    @contextmanager
    def span(self, work: Work) -> Iterator[None]:
        """Around one piece of work."""
        if not self.armed:
            yield
            return
        self._wait_for_device()
        start, computed = time.perf_counter(), time.thread_time()
        yield
        self._wait_for_device()
        self.on_core += time.thread_time() - computed
        self.rows.append((work, start, time.perf_counter()))

    def recordings(self) -> list[Recording]:
        """The recorded batch of each pipeline, of the rank that reads first to the last. Collective over all ranks.

        Clocks of one machine are one clock; another machine's is set to it where they set out together.
        """
        mine = [[work.kind, work.micro_batch, work.chunk, start, stop] for work, start, stop in self.rows]
        told = self.mesh.gather([self.mesh.host, self.zero, self.on_core, mine])
        host, zero, _, _ = told[0]
        found: dict[tuple[int, ...], list[Span]] = {}
        calm: dict[tuple[int, ...], float] = {}
        for rank, (where, set_out, on_core, rows) in enumerate(told):
            coords = self.mesh.axes.coords(rank)
            stage, pipeline, ahead = (
                coords.pop("pipeline"),
                tuple(coords.values()),
                zero if where == host else set_out,
            )
            spans = [
                Span(stage, Work(kind, micro_batch, chunk), a - ahead, z - ahead)
                for kind, micro_batch, chunk, a, z in rows
            ]
            found.setdefault(pipeline, []).extend(spans)
            share = on_core / sum(span.stop - span.start for span in spans)
            calm[pipeline] = min(calm.get(pipeline, 1.0), share)
        return [Recording(_from_zero(spans), calm[pipeline]) for pipeline, spans in sorted(found.items())]

    def _wait_for_device(self) -> None:
        if self.mesh.device != "cpu":
            paddle.device.synchronize()


def _from_zero(spans: list[Span]) -> list[Span]:
    first = min(span.start for span in spans)
    shifted = [Span(s.stage, s.work, s.start - first, s.stop - first) for s in spans]
    return sorted(shifted, key=lambda span: (span.stage, span.start))
