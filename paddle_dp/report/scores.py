"""Curves, held-out scores, and the classes that are mistaken for each other: the sections on what was learned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from paddle_dp.report.charts import Curve, line_chart
from paddle_dp.report.facts import MEASURED, MOST_CURVES, MOST_ROWS, main_scores
from paddle_dp.report.html_page import Html, cards, details, paragraph, section, table
from paddle_dp.report.run_record import RunRecord, number
from paddle_dp.scores import smaller_is_better, standard_error

_MOST_CLASSES, _MOST_SAMPLES = 20, 24
_MOST_PICTURE = 70_000  # characters: 128 × 128 pixels of noise
_BASE64 = re.compile("[A-Za-z0-9+/=]+")

# Curves and scores ----------------------------------------------------------------------------------------------------


def curves(run: RunRecord) -> Html:
    begun = [line["step"] for line in run.events.get("start", ())[-100:]]
    marks = [(step, f"resumed at step {step}") for step in begun if step > 0]
    marks += [(line["step"], f"step {line['step']}: refused") for line in run.events.get("refused", ())[:200]]
    charts = [line_chart(*chart, marks=marks) for chart in _score_charts(run)]
    speeds = {"tokens_per_second": "tokens per second", "waiting": "share of the time waiting for data"}
    for key, title in (MEASURED | speeds).items():
        curve = Curve(label=title, points=run.curve("step", key))
        charts.append(line_chart(title, [curve], marks=marks, may_be_log=key != "lr"))
    shape = "Where there are many points, a line is a mean, in a band from the smallest to the largest value."
    shape += f" Each {run.thinned}th recorded step was read." if run.thinned > 1 else ""
    with_bounds = any(run.bounds(name, 0.5) for name in run.score_names("evaluated"))
    chance = (
        " The band around a held-out accuracy is its 95 % interval (Wilson), by the number of held-out samples: two "
        "accuracies that lie in each other's band may differ by chance."
    )
    resumed = " Vertical lines: the training was resumed there, or an update was refused." if marks else ""
    if not any(charts):
        return section("Curves", paragraph("No curve: metrics.jsonl holds no step and no evaluation."))
    return section(
        "Curves",
        f'<div class="charts">{"".join(charts)}</div>',
        paragraph(shape + (chance if with_bounds else "") + resumed, "quiet"),
    )


def _score_charts(run: RunRecord) -> Iterator[tuple[str, list[Curve]]]:
    """A chart for the loss and each score: of training batches and of the held-out data together."""
    names = list(dict.fromkeys([*run.score_names("step"), *run.score_names("evaluated")]))
    for name in sorted(names, key=lambda name: name != "loss")[:MOST_CURVES]:
        evaluated = run.curve("evaluated", name)
        limits = [run.bounds(name, value, count) for count, value in run.curve("evaluated", name, "held_out")]
        bounds = [limit for limit in limits if limit]
        bounds = bounds if len(bounds) == len(evaluated) else []
        batches = Curve(
            label="training batches", points=run.curve("step", name), colour=7 if evaluated else 0
        )
        held_out = Curve(label="held-out samples", points=evaluated, bounds=bounds, dots=True, colour=1)
        yield name, [batches, held_out]


def scores(run: RunRecord) -> Html:
    rows = []
    for name in main_scores(run)[:MOST_ROWS]:
        points, best = run.curve("evaluated", name), run.best(name)
        if points and best:
            direction, last = "smaller" if smaller_is_better(name) else "larger", points[-1][1]
            at_the_end = run.shown(name, last), _error(run, name, last)
            rows.append((name, *at_the_end, f"{best[1]:.4g}", f"{best[0]:.0f}", direction))
    lines = run.events.get("evaluated", ())
    names = main_scores(run)[:MOST_CURVES]
    history = [(int(line["step"]), *(number(line.get(name)) for name in names)) for line in lines]
    stride = -(-len(history) // MOST_ROWS) or 1
    every = f", each {stride}th" if stride > 1 else ""
    head = ("score", "at the end", "standard error", "best", "at step", "better is")
    shown = (["–" if cell is None else cell for cell in row] for row in history[::-stride][::-1])
    every_score = details(f"All evaluations ({len(history)}{every})", table(("step", *names), shown))
    return section("Held-out scores", table(head, rows), every_score)


def _error(run: RunRecord, name: str, share: float) -> str:
    if run.bounds(name, share) is None:
        return "not known"
    error = standard_error(share, run.independent_samples())
    return f"± {error:.2g}" if error else "see the interval"  # 0 of a few samples is no certainty


# Errors by class ------------------------------------------------------------------------------------------------------


def errors(run: RunRecord) -> Html:
    rows = [row for row in run.evaluation.get("per_class") or () if isinstance(row, dict)]
    names = [str(row.get("class")) for row in rows]
    matrix = run.confusion
    names = names if len(names) == len(matrix) or not matrix else list(map(str, range(len(matrix))))
    step, checkpoint = run.evaluation.get("step"), run.evaluation.get("checkpoint", "")
    at = f"step {step}" if "step" in run.evaluation else str(checkpoint)
    at += ", with averaged weights (ema)" if run.evaluation.get("weights") == "ema" else ""
    worst = sorted(rows, key=lambda row: number(row.get("f1")) or 0.0)[:MOST_ROWS]
    ordered = rows if len(rows) <= MOST_ROWS else worst
    worst_of = f" (the {MOST_ROWS} worst of {len(rows)})" if len(rows) > MOST_ROWS else ""
    columns = ("class", "precision", "recall", "f1", "support")
    per_class = table(columns, ([row.get(column, "") for column in columns] for row in ordered))
    if not matrix and not per_class:
        return ""
    right, total = sum(row[i] for i, row in enumerate(matrix)), sum(map(sum, matrix))
    explained = f"After {at}" + (f": {right} of {total} held-out samples are right." if matrix else ".")
    return section(
        "Which classes are mistaken for which",
        paragraph(explained, "quiet"),
        _matrix(matrix, names) if 0 < len(matrix) <= _MOST_CLASSES else _pairs(matrix, names),
        details(f"Precision, recall and F1 of each class{worst_of}", per_class),
    )


def samples(run: RunRecord) -> Html:
    """Held-out samples with the model's answers, from the callback `samples`."""
    predicted = [row for row in run.samples.get("samples") or () if isinstance(row, dict)][:_MOST_SAMPLES]
    texts = [row for row in run.samples.get("texts") or () if isinstance(row, dict)][:_MOST_SAMPLES]
    if not predicted and not texts:
        return ""
    explained = f"After step {run.samples.get('step')}. {run.samples.get('sentence')}"
    explained += " The continuation is bold." if texts else ""
    return section(
        "Held-out samples",
        paragraph(explained, "quiet"),
        cards(_answer(row) for row in predicted),
        "".join(_continued(row) for row in texts),
    )


def _answer(row: dict[str, Any]) -> tuple[str, Html, Html]:
    """A sample's picture, its classes, and its loss and name."""
    true, predicted = str(row.get("true")), str(row.get("predicted"))
    kind, verdict = ("good", "right") if true == predicted else ("bad", f"taken for {escape(predicted)}")
    head = f'<b>{escape(true)}</b><span class="{kind}"> {verdict}</span>'
    share, loss = number(row.get("probability")), number(row.get("loss"))
    facts = [f"at {share:.0%}"] if share is not None else []
    facts += [f"loss {loss:.3g}" if loss is not None else "loss not finite", str(row.get("name"))]
    png = row.get("picture")
    is_picture = isinstance(png, str) and len(png) < _MOST_PICTURE and _BASE64.fullmatch(png) is not None
    return str(png) if is_picture else "", head, escape(", ".join(facts))


def _continued(row: dict[str, Any]) -> Html:
    """A text's beginning, the model's continuation, and the text's own."""
    keys = ("prompt", "continuation", "reference")
    prompt, written, reference = (escape(str(row.get(key, ""))) for key in keys)
    return (
        f'<div class="card text"><span class="quiet">{prompt}</span><b>{written}</b>'
        f'<small class="quiet">the text itself: {reference}</small></div>'
    )


def _matrix(matrix: list[list[int]], names: list[str]) -> Html:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    rows = ""
    for name, row in zip(names, matrix, strict=True):
        cells = "".join(
            f'<td style="background:color-mix(in srgb,var(--c{0 if name is other else 4}) '
            f'{_shade(count, sum(row))}%,transparent)">{count or "·"}</td>'
            for other, count in zip(names, row, strict=True)
        )
        rows += f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>"
    caption = "True classes down, predicted classes across; shaded by the share of the true class."
    cells = f"<tr><th></th>{head}</tr>{rows}"
    return f'{paragraph(caption, "quiet")}<div class="wide"><table class="confusion">{cells}</table></div>'


def _shade(count: int, total: int) -> int:
    return round(8 + 52 * count / total) if count else 0


def _pairs(matrix: list[list[int]], names: list[str]) -> Html:
    """The most frequent mistakes of many classes."""
    pairs = [
        (names[i], names[j], count, f"{count / (sum(row) or 1):.1%}")
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if count and i != j
    ]
    frequent = sorted(pairs, key=lambda pair: -pair[2])[:20]
    return table(("true class", "predicted", "samples", "share of the true class"), frequent)
