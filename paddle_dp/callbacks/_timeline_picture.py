"""The picture of a pipeline's batch: what each stage did when, above what the schedule predicts."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from paddle_dp.plan.pipeline_schedule import Span, Work, bubble, idle, orders, timeline

INK, QUIET, GROUND = "#1f2933", "#7b8794", "#f3f4f6"
FORWARD, BACKWARD = ("#9cc5eb", "#3f7fbf"), ("#f9cf9a", "#e08a3c")  # of a rank's first and last stage
WIDTH, LANE, BAR = 11.0, 0.62, 0.78  # inches, inches of a stage, share of it that a bar fills


def draw(spans: Sequence[Span], title: str, schedule: str, virtual_stages: int = 1) -> bytes:
    """A PNG of a batch's spans, above the same batch with equal stages and sends that take no time."""
    # Not pyplot: no window system is asked for, and nothing stays in a global list of figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages, micro_batches = (
        1 + max(values) for values in zip(*((s.stage, s.work.micro_batch) for s in spans), strict=True)
    )
    figure = Figure(
        figsize=(WIDTH, 2 * LANE * stages + 2.1), dpi=150, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    ideal = timeline(orders(schedule, stages, micro_batches, virtual_stages), _equal(spans))
    end = max(span.stop for span in [*spans, *ideal])
    rows = (
        (above, spans, "measured"),
        (below, ideal, f"arithmetic, equal stages: (p−1) / ({'v·' * (virtual_stages > 1)}m+p−1)"
                       f" = {bubble(stages, micro_batches, virtual_stages):.1%}"),
    )  # fmt: skip
    for axes, shown, what in rows:
        _lanes(axes, shown, stages, virtual_stages, end)
        axes.set_title(what, loc="left", fontsize=9.5, color=INK, pad=6)
    below.set_xlabel("milliseconds", fontsize=9, color=QUIET)
    each = f", {virtual_stages} stages on each" if virtual_stages > 1 else ""
    head = f"{title}: {schedule}, {stages} ranks{each}, {micro_batches} micro-batches"
    figure.suptitle(head, x=0.01, ha="left", fontsize=11.5, color=INK, fontweight="bold")
    _legend(figure, virtual_stages)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _equal(spans: Sequence[Span]) -> Callable[[int, Work], float]:
    """Durations for the prediction: every forward takes the mean forward's time, every backward the mean backward's."""
    lengths = {
        kind: mean(span.stop - span.start for span in spans if span.work.kind == kind)
        for kind in ("forward", "backward")
    }
    return lambda _, work: lengths[work.kind]


def _lanes(axes: Any, spans: Sequence[Span], stages: int, virtual_stages: int, end: float) -> None:
    """One lane per stage: grey when it is idle, a numbered bar for each forward or backward."""
    length = max(span.stop for span in spans)
    for stage, share in enumerate(idle(spans, stages)):
        axes.barh(stage, length * 1e3, height=BAR, color=GROUND, zorder=1)
        axes.text(
            end * 1e3 * 1.012, stage, f"idle {share:.0%}", va="center", fontsize=9, color=QUIET, clip_on=False
        )
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
    axes.tick_params(length=0, labelcolor=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(figure: Any, virtual_stages: int) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=shade(colours, chunk, virtual_stages), label=_label(kind, chunk, virtual_stages))
        for kind, colours in (("forward", FORWARD), ("backward", BACKWARD))
        for chunk in range(virtual_stages)
    ]
    patches.append(Patch(facecolor=GROUND, edgecolor="#d5d9df", label="idle"))
    figure.legend(
        handles=patches,
        loc="outside lower right",
        ncols=len(patches),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )


def _label(kind: str, chunk: int, virtual_stages: int) -> str:
    return f"{kind} of a micro-batch" if virtual_stages == 1 else f"{kind}, stage {chunk + 1}"


def shade(colours: tuple[str, str], chunk: int, virtual_stages: int) -> tuple[float, float, float]:
    """The colour of a rank's stage number `chunk`, from light for its first to strong for its last."""
    from matplotlib.colors import to_rgb

    far = chunk / (virtual_stages - 1) if virtual_stages > 1 else 0.35
    red, green, blue = (a + (b - a) * far for a, b in zip(*map(to_rgb, colours), strict=True))
    return red, green, blue
