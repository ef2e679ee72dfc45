"""Records when each rank does what: a picture of one batch; of a pipeline its stages, else compute and exchange."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paddle_dp.callbacks._exchange_timeline import ExchangeTimeline
from paddle_dp.callbacks._files import Files
from paddle_dp.callbacks._timeline_picture import draw
from paddle_dp.errors import UsageError
from paddle_dp.plan.pipeline_schedule import Span, bubble, idle
from paddle_dp.train import Callback, Moment, Run
from paddle_dp.units import Count, Positive

if TYPE_CHECKING:
    from paddle_dp.parallel.pipeline.timeline import Recorder
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    start: Count = 10
    """Steps before the window: the first ones are slower."""

    steps: Positive = 10
    """Steps of the window."""

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError for one rank. Called before any process starts."""
        if ranks == 1:
            raise UsageError(
                "callback timeline shows what ranks exchange, and the stages of a pipeline, and there is one rank: "
                "give --ranks 2, or leave the callback out."
            )

    def build(self, run: Run) -> Callback:
        if run.mesh.axes.pipeline > 1:
            return Timeline(run, self)
        return ExchangeTimeline(run, self.start, self.steps)


class Timeline(Callback):
    """Writes <run>/timeline.json and timeline.png at the end of the training."""

    reads = False

    def __init__(self, run: Run, config: Config):
        self.run, self.config = run, config
        self._first = 0
        self.batches: list[dict[str, Any]] = []

    def start(self, moment: Moment) -> None:
        self._first = moment.progress.step + self.config.start
        self._arm(moment)

    def step(self, moment: Moment) -> None:
        recorder = _recorder(moment)
        if recorder.armed:
            first, *_ = recorder.recordings()
            shares = idle(first.spans, self.run.mesh.axes.pipeline)
            self.batches.append(
                {"step": moment.progress.step, "calm": first.calm, "idle": shares, "spans": first.spans}
            )
        self._arm(moment)

    def end(self, moment: Moment) -> None:
        if self.batches and self.run.mesh.is_main:
            self._finish(moment)
        elif self.run.mesh.is_main:
            print(
                f"timeline: nothing was recorded, the training ended before its step {self._first + 1}.",
                flush=True,
            )

    def _arm(self, moment: Moment) -> None:
        """Switches recording on or off for the next update."""
        _recorder(moment).armed = 0 <= moment.progress.step - self._first < self.config.steps

    def _finish(self, moment: Moment) -> None:
        schedule, each = self.run.layout.pipeline_schedule, self.run.layout.virtual_stages
        stages = self.run.mesh.axes.pipeline
        micro_batches = 1 + max(s.work.micro_batch for s in self.batches[0]["spans"])
        middle = _typical(self.batches)
        summary = {
            "schedule": schedule, "stages": stages, "virtual_stages": each, "micro_batches": micro_batches,
            "predicted": bubble(stages, micro_batches, each),
            "idle": [median(shares) for shares in zip(*(b["idle"] for b in self.batches), strict=True)],
        }  # fmt: skip
        batches = [{**batch, "spans": [_row(span) for span in batch["spans"]]} for batch in self.batches]
        files = Files()
        files.write(self.run.folder / "timeline.json", json.dumps({**summary, "batches": batches}).encode())
        picture = draw(middle["spans"], f"{self.run.name}, step {middle['step']}", schedule, each)
        files.write(self.run.folder / "timeline.png", picture)
        shares = ", ".join(f"{share:.1%}" for share in summary["idle"])
        print(
            f"timeline: stages idle {shares} of the time (medians of {len(batches)} steps); equal stages would be "
            f"{summary['predicted']:.1%}. Picture: {self.run.folder / 'timeline.png'}",
            flush=True,
        )


def _recorder(moment: Moment) -> Recorder:
    recorder = moment.trainer.learner.recorder
    assert recorder is not None, "refuse() requires stages"
    return recorder


def _typical(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the batches that other programs disturbed least, the one with the median idle time."""
    calmest = max(batch["calm"] for batch in batches)
    calm = [batch for batch in batches if batch["calm"] > calmest - 0.03]
    return sorted(calm, key=lambda batch: sum(batch["idle"]))[len(calm) // 2]


def _row(span: Span) -> dict[str, Any]:
    return {
        "stage": span.stage,
        **asdict(span.work),
        "start": round(span.start, 6),
        "stop": round(span.stop, 6),
    }
