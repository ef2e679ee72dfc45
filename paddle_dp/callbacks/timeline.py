"""Records the activity of each rank over time and draws one batch: a pipeline's stages, else compute and exchange.

The picture of a pipeline's batch shows each stage's measured activity above the schedule's prediction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from paddle_dp.callbacks import _lines
from paddle_dp.callbacks._exchange_timeline import ExchangeTimeline
from paddle_dp.callbacks._files import Files
from paddle_dp.callbacks._pictures import add_legend, clear_frame, timeline_figure
from paddle_dp.errors import UsageError
from paddle_dp.figures import INK, QUIET, png_of
from paddle_dp.plan.pipeline_schedule import Work, WorkSpan, bubble, idle, orders, timeline
from paddle_dp.train import Callback, Moment, Run
from paddle_dp.units import Count, Positive

if TYPE_CHECKING:
    from paddle_dp.learner.timeline import PipelineRecorder
    from paddle_dp.recipe import Recipe


GROUND = "#f3f4f6"
FORWARD, BACKWARD = ("#9cc5eb", "#3f7fbf"), ("#f9cf9a", "#e08a3c")  # a rank's first and last stage
LANE, BAR = 0.62, 0.78  # inches per stage, share of the lane that a bar fills


def draw(spans: Sequence[WorkSpan], title: str, schedule: str, virtual_stages: int = 1) -> bytes:
    """A PNG of a batch's spans, above the same batch with equal stages and sends that take no time."""
    stages, micro_batches = 1 + max(s.stage for s in spans), 1 + max(s.work.micro_batch for s in spans)
    each = f", {virtual_stages} stages on each" if virtual_stages > 1 else ""
    head = f"{title}: {schedule}, {stages} ranks{each}, {micro_batches} micro-batches"
    figure = timeline_figure(2 * LANE * stages + 2.1, head)
    above, below = figure.subplots(2, 1, sharex=True)
    ideal = timeline(orders(schedule, stages, micro_batches, virtual_stages), _equal(spans))
    end = max(span.stop for span in [*spans, *ideal])
    rows = (
        (above, spans, "measured"),
        (below, ideal, f"arithmetic, equal stages: (p−1) / ({'v·' * (virtual_stages > 1)}m+p−1)"
                       f" = {bubble(stages, micro_batches, virtual_stages):.1%}"),
    )  # fmt: skip
    for axes, shown, title_text in rows:
        _lanes(axes, shown, stages, virtual_stages, end)
        axes.set_title(title_text, loc="left", fontsize=9.5, color=INK, pad=6)
    below.set_xlabel("milliseconds", fontsize=9, color=QUIET)
    _legend(figure, virtual_stages)
    return png_of(figure)


def _equal(spans: Sequence[WorkSpan]) -> Callable[[int, Work], float]:
    """The durations for the prediction: the mean time of all forwards, and of all backwards."""
    lengths = {
        kind: mean(span.stop - span.start for span in spans if span.work.kind == kind)
        for kind in ("forward", "backward")
    }
    return lambda _, work: lengths[work.kind]


def _lanes(axes: Any, spans: Sequence[WorkSpan], stages: int, virtual_stages: int, end: float) -> None:
    """Draws one lane per stage: grey when idle, a numbered bar for each forward or backward."""
    length = max(span.stop for span in spans)
    for stage, share in enumerate(idle(spans, stages)):
        axes.barh(stage, length * 1e3, height=BAR, color=GROUND, zorder=1)
        right = end * 1e3 * 1.012
        axes.text(right, stage, f"idle {share:.0%}", va="center", fontsize=9, color=QUIET, clip_on=False)
    for span in spans:
        colour = shade(FORWARD if span.work.kind == "forward" else BACKWARD, span.work.chunk, virtual_stages)
        width = (span.stop - span.start) * 1e3
        axes.barh(
            span.stage, width, left=span.start * 1e3, height=BAR, color=colour, edgecolor="white", linewidth=0.8,
            zorder=2,
        )  # fmt: skip
        if width > end * 1e3 / 70:
            axes.text(
                span.start * 1e3 + width / 2, span.stage, str(span.work.micro_batch + 1), ha="center", va="center",
                fontsize=8, color="white" if sum(colour) < 1.6 else INK, zorder=3,
            )  # fmt: skip
    axes.set(xlim=(0, end * 1e3), ylim=(stages - 0.45, -0.55))
    axes.set_yticks(range(stages), [f"rank {stage}" for stage in range(stages)], fontsize=9, color=INK)
    clear_frame(axes, 9)


def _legend(figure: Any, virtual_stages: int) -> None:
    from matplotlib.patches import Patch

    patches = []
    for kind, colours in (("forward", FORWARD), ("backward", BACKWARD)):
        for chunk in range(virtual_stages):
            label = f"{kind} of a micro-batch" if virtual_stages == 1 else f"{kind}, stage {chunk + 1}"
            patches.append(Patch(color=shade(colours, chunk, virtual_stages), label=label))
    add_legend(figure, [*patches, Patch(facecolor=GROUND, edgecolor="#d5d9df", label="idle")], 8.5)


def shade(colours: tuple[str, str], chunk: int, virtual_stages: int) -> tuple[float, float, float]:
    """The colour of a rank's stage number `chunk`, from light (first) to strong (last)."""
    from matplotlib.colors import to_rgb

    far = chunk / (virtual_stages - 1) if virtual_stages > 1 else 0.35
    red, green, blue = (a + (b - a) * far for a, b in zip(*map(to_rgb, colours), strict=True))
    return red, green, blue


@dataclass(frozen=True, kw_only=True)
class Config:
    start: Count = 10
    """Number of steps before the window: the first steps are slower."""

    steps: Positive = 10
    """Number of steps in the window."""

    needs_job = True

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError for one rank. Called before any process starts."""
        if ranks == 1:
            raise UsageError(
                "callback timeline shows the ranks' exchange and a pipeline's stages, and there is one rank: "
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
            batch = {"step": moment.progress.step, "calm": first.calm, "idle": shares, "spans": first.spans}
            self.batches.append(batch)
        self._arm(moment)

    def end(self, moment: Moment) -> None:
        if self.batches and self.run.mesh.is_main:
            self._finish(moment)
        elif self.run.mesh.is_main:
            print(_lines.nothing_recorded("timeline", self._first), flush=True)

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


def _recorder(moment: Moment) -> PipelineRecorder:
    recorder = moment.trainer.learner.runner.recorder
    assert recorder is not None, "refuse() requires stages"
    return recorder


def _typical(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch with the median idle time, among the batches that other programs disturbed least."""
    calmest = max(batch["calm"] for batch in batches)
    calm = [batch for batch in batches if batch["calm"] > calmest - 0.03]
    return sorted(calm, key=lambda batch: sum(batch["idle"]))[len(calm) // 2]


def _row(span: WorkSpan) -> dict[str, Any]:
    times = {"start": round(span.start, 6), "stop": round(span.stop, 6)}
    return {"stage": span.stage, **asdict(span.work), **times}
