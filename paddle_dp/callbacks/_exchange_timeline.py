"""Records when each rank computes and when its gradients travel, on a clock that is common to all ranks."""

from __future__ import annotations

import json
import time
from typing import Any

from paddle_dp.callbacks._exchange_picture import Row, draw, trace
from paddle_dp.callbacks._files import Files
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.tape import Film
from paddle_dp.train import Callback, Moment, Run


class ExchangeTimeline(Callback):
    """Writes <run>/timeline.png and timeline.json at the end of the training: a trace of the step of median length, for
    ui.perfetto.dev. Each step of the window begins when all ranks have come to it."""

    reads = False

    def __init__(self, run: Run, start: int, steps: int):
        self.run, self._start, self._steps = run, start, steps
        self._first = 0
        self._film: Film | None = None
        self._zero = 0.0
        self.recorded: list[tuple[int, list[Row]]] = []  # steps, with what each rank did

    def start(self, moment: Moment) -> None:
        self._first = moment.progress.step + self._start
        self._begin(moment)

    def step(self, moment: Moment) -> None:
        self._end(moment)
        self._begin(moment)

    def end(self, moment: Moment) -> None:
        if self.run.mesh.is_main:
            self._finish()

    def _begin(self, moment: Moment) -> None:
        """Before an update of the window, unless the training measures itself in it. Collective."""
        wanted = moment.progress.step >= self._first and len(self.recorded) < self._steps
        if not wanted or heartbeat.tape is not None:
            return
        moment.trainer.learner.film_exchange()
        self._film = Film(*_waits(self.run.mesh.device))
        self.run.mesh.sum([1.0])  # all begin together
        self._zero = time.monotonic()
        heartbeat.begin_tape(self._film)

    def _end(self, moment: Moment) -> None:
        """After it. Collective."""
        film, self._film = self._film, None
        if film is None or heartbeat.tape is not film:  # a measurement has begun meanwhile
            return
        heartbeat.end_tape()
        rows = [
            [kind, what, start - self._zero, stop - self._zero]
            for kind, what, start, stop in (
                *(("work", phase, start, stop) for phase, start, stop in film.spans),
                *(("work" if w[5] else "wait", w[2], w[3], w[4]) for w in film.waits),
                *(("given", what, start, stop) for what, start, stop in film.given),
                *(("link", "", start, stop) for start, stop in film.transfers),
                *(("wait", "exchange", start, _end_around(start, film)) for start in film.computed_at),
            )
        ]
        of_ranks = self.run.mesh.gather(rows)
        self.recorded.append((moment.progress.step, [Row(*row) for row in _numbered(of_ranks)]))

    def _finish(self) -> None:
        if not self.recorded:
            print(
                f"timeline: nothing was recorded, the training ended before its step {self._first + 1}.",
                flush=True,
            )
            return
        step, rows = sorted(self.recorded, key=lambda one: max(row.stop for row in one[1]))[
            len(self.recorded) // 2
        ]
        files, folder = Files(), self.run.folder
        files.write(folder / "timeline.json", json.dumps(trace(rows, self.run.mesh.axes)).encode())
        files.write(folder / "timeline.png", draw(rows, f"{self.run.name}, step {step}", self.run.mesh.axes))
        print(
            f"timeline: step {step}, of median length among {len(self.recorded)}. Picture: {folder / 'timeline.png'}; "
            f"for ui.perfetto.dev: {folder / 'timeline.json'}",
            flush=True,
        )


def _numbered(of_ranks: list[list[list[Any]]]) -> list[list[Any]]:
    return [[rank, *row] for rank, rows in enumerate(of_ranks) for row in rows]


def _end_around(time: float, film: Film) -> float:
    """When that ended in the midst of which the device had computed all."""
    spans = [*((start, stop) for _, start, stop in film.spans), *((w[3], w[4]) for w in film.waits)]
    return max((stop for start, stop in spans if start <= time <= stop), default=time)


def _waits(device: str) -> tuple[Any, Any]:
    """What a film waits for before each reading of the clock, and what when all is computed and some still travels."""
    if device == "cpu":
        return None, None
    import paddle

    return paddle.device.synchronize, lambda: paddle.device.current_stream().synchronize()
