"""Records the start and end of each rank's forwards and backwards in a batch, on a common clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.device import synchronize
from paddle_dp.plan.pipeline_schedule import Work, WorkSpan


@dataclass(frozen=True)
class Recording:
    """One batch of one pipeline: its spans, in seconds after the first start.

    `calm` is the smallest fraction of its compute time that a rank's thread spent on a core. Below 1, other programs
    disturbed the measurement (or, on a GPU, the thread only waited).
    """

    spans: list[WorkSpan]
    calm: float


@dataclass
class PipelineRecorder:
    """Records the start and end of each piece of work of one batch, if `armed`.

    On an accelerator it synchronizes with the device around each piece, which slows the recorded batch slightly.
    """

    mesh: Mesh
    armed: bool = False
    zero: float = 0.0
    on_core: float = 0.0
    rows: list[tuple[Work, float, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Synchronizes all ranks of the job before a batch and starts the clock. Collective if `armed`."""
        self.rows, self.on_core = [], 0.0
        if self.armed:
            synchronize(self.mesh.device)
            self.mesh.sum([1.0])
            self.zero = time.perf_counter()

    @contextmanager
    def span(self, work: Work) -> Iterator[None]:
        """Records one piece of work."""
        if not self.armed:
            yield
            return
        synchronize(self.mesh.device)
        start, computed = time.perf_counter(), time.thread_time()
        yield
        synchronize(self.mesh.device)
        self.on_core += time.thread_time() - computed
        self.rows.append((work, start, time.perf_counter()))

    def recordings(self) -> list[Recording]:
        """The recorded batch of each pipeline, in the order of `dp_rank`. Collective over all ranks.

        Ranks of one machine share a clock; another machine's clock is aligned at `begin`.
        """
        lines = [[work.kind, work.micro_batch, work.chunk, start, stop] for work, start, stop in self.rows]
        rank_recordings = self.mesh.gather([self.mesh.host, self.zero, self.on_core, lines])
        first_host, first_zero, _, _ = rank_recordings[0]
        recorded: dict[tuple[int, ...], list[WorkSpan]] = {}
        calm: dict[tuple[int, ...], float] = {}
        for rank, (host, own_zero, on_core, rows) in enumerate(rank_recordings):
            coords = self.mesh.axes.coords(rank)
            stage, pipeline = coords.pop("pipeline"), tuple(coords.values())
            zero = first_zero if host == first_host else own_zero
            spans = [
                WorkSpan(stage, Work(kind, micro_batch, chunk), start - zero, stop - zero)
                for kind, micro_batch, chunk, start, stop in rows
            ]
            recorded.setdefault(pipeline, []).extend(spans)
            share = on_core / sum(span.stop - span.start for span in spans)
            calm[pipeline] = min(calm.get(pipeline, 1.0), share)
        return [Recording(_from_zero(spans), calm[pipeline]) for pipeline, spans in sorted(recorded.items())]


def _from_zero(spans: list[WorkSpan]) -> list[WorkSpan]:
    first = min(span.start for span in spans)
    shifted = [WorkSpan(s.stage, s.work, s.start - first, s.stop - first) for s in spans]
    return sorted(shifted, key=lambda span: (span.stage, span.start))
