"""The page of one run, `RUN/report.html`: result, proof, curves, mistakes, layout, time, attempts, recipe."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from paddle_dp.mesh.degrees import AXES, AXIS_ROLES, Degrees
from paddle_dp.plan.measured import Measured
from paddle_dp.plan.rank_times import RankTimes
from paddle_dp.report.charts import Curve, line_chart
from paddle_dp.report.html_page import (
    Html,
    bar,
    command,
    details,
    legend,
    note,
    page,
    paragraph,
    section,
    table,
    tiles,
    write_page,
)
from paddle_dp.report.run_record import RunRecord, begin_seconds, number, read_run
from paddle_dp.scores import smaller_is_better, standard_error
from paddle_dp.text import duration, few, plural

NAME = "report.html"
STATES = {
    "done": ("finished", "good"), "stopped": ("stopped", "warn"), "failed": ("failed", "bad"),
    "open": ("no end on record", "warn"),
}  # fmt: skip
_COMPONENTS = {
    "forward": 0, "backward": 1, "update": 2, "data": 3, "exchange": 4, "waiting": 7, "callbacks": 6, "other": 5,
}  # fmt: skip
_AXIS_COLOURS = {"data": 0, "pipeline": 1, "sharding": 3, "sequence": 2, "tensor": 4, "servers": 6}
_MOST_ROWS, _MOST_CLASSES, _MOST_DRAWN_RANKS, _MOST_BARS = 50, 20, 64, 8
_MOST_CURVES = 12  # charts of scores
_MOST_TEXT = 100_000  # characters of a recipe


def write_report(folder: Path) -> Path:
    """Writes the report of the run in `folder` and returns its path. Raises UsageError if there is no run, OSError if
    the file cannot be written."""
    path = folder / NAME
    write_page(path, report_page(read_run(folder)))
    return path


def report_page(run: RunRecord) -> Html:
    """The whole page. A section that fails is a sentence on it."""
    sections = (
        _headline, _proof, _curves, _scores, _errors, _layout, _time, _attempts, _environment, _recipe,
    )  # fmt: skip
    body: list[Html] = []
    for draw in sections:
        try:
            body.append(draw(run))
        except Exception as error:  # noqa: BLE001 - a file of another version may hold anything
            name = draw.__name__.strip("_")
            body.append(
                note(f"The section «{name}» could not be made: {type(error).__name__}: {error}", "warn")
            )
    return page(f"{run.name}: report", body)


def timespan(seconds: float) -> str:
    """ "12.5 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 120:
        return duration(seconds)
    minutes = round(seconds) // 60
    if minutes < 120:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


# The headline ---------------------------------------------------------------------------------------------------------


def _headline(run: RunRecord) -> Html:
    state, sentence = run.ending
    shown, kind = STATES[state]
    facts = note(sentence, kind) if state != "done" else ""
    body = [
        f'<p class="quiet">paddle_dp · report of one training</p><h1>{escape(run.name)}</h1>',
        f'<p><span class="state {kind}">{shown}</span></p>',
        paragraph(_story(run)),
        facts,
        tiles([*_score_tiles(run), *_tiles(run)]),
        *(note(text, "warn") for text in run.notes),
    ]
    return "\n".join(body)


def _story(run: RunRecord) -> str:
    """A few sentences: the model, its data, how long on which ranks, and what its scores are over."""
    model, dataset, loss, optimizer = (
        _use(run.recipe.get(k)) for k in ("model", "dataset", "loss", "optimizer")
    )
    samples, test_samples, degrees = _samples(run, "train"), _samples(run, "test"), _degrees(run)
    trained = (
        f"The model {model} was trained on the data set {dataset}"
        if model
        else "A script's model was trained"
    )
    trained += f" ({samples:,} samples)" if samples else ""
    batch = _setting(run, "train", "batch")
    steps = plural(run.step, "update") + (f" of {batch} samples" if batch else "")
    ranks = "one process" if run.ranks == 1 else f"{run.ranks} ranks" + (f" ({degrees})" if degrees else "")
    device = run.last("start").get("device") or run.attempt.get("device")
    machine = ", ".join([ranks, *([str(device)] if device else [])])
    sentences = [
        f"{trained}: {steps} on {machine}" + (f", in {timespan(run.seconds)}." if run.seconds else ".")
    ]
    sentences += [f"Loss: {loss}, optimizer: {optimizer}."] if loss and optimizer else []
    if not run.events.get("evaluated"):
        sentences.append("It was not evaluated on held-out samples.")
    elif evaluated := int(number(run.last("evaluated").get("held_out")) or test_samples):
        count = (
            f"all {evaluated:,}" if evaluated >= test_samples else f"{evaluated:,} of the {test_samples:,}"
        )
        sentences.append(f"Scores are over {count} held-out samples, which it did not learn from.")
    return " ".join(sentences)


def _use(entry: Any) -> str:
    return str(entry.get("use", "")) if isinstance(entry, dict) else str(entry or "")


def _setting(run: RunRecord, section_name: str, key: str) -> Any:
    entry = run.recipe.get(section_name)
    return entry.get(key) if isinstance(entry, dict) else None


def _samples(run: RunRecord, split: str) -> int:
    data = run.certificate.get("data")
    facts = data.get(split) if isinstance(data, dict) else None
    count = facts.get("samples") if isinstance(facts, dict) else None
    return count if type(count) is int else 0


def main_scores(run: RunRecord) -> list[str]:
    """The held-out scores, the most telling first: the one that `best` of a callback watches, then others, the loss
    last."""
    callbacks = run.recipe.get("callbacks")
    watched = [c.get("best") for c in callbacks if isinstance(c, dict)] if isinstance(callbacks, list) else []
    names = run.score_names("evaluated")
    return sorted(names, key=lambda name: (name not in watched, name == "loss"))


def _score_tiles(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    for name in main_scores(run)[:2]:
        points = run.curve("evaluated", name)
        best = run.best(name)
        if not points or best is None:
            continue
        limits = run.bounds(name, points[-1][1])
        more = [f"with 95 % confidence {limits[0]:.3g} to {limits[1]:.3g}"] if limits else []
        is_last = best[1] == points[-1][1]
        more += ["the best of all evaluations" if is_last else f"best {best[1]:.4g} at step {best[0]:.0f}"]
        yield f"held-out {name}", f"{points[-1][1]:.4g}", "; ".join(more)


def _tiles(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    losses = run.curve("step", "loss")
    if losses:
        yield "training loss", f"{losses[-1][1]:.4g}", f"{losses[0][1]:.4g} at step {losses[0][0]:.0f}"
    total = run.last("start").get("total_steps") or run.certificate.get("steps")
    epochs = max((number(lines[-1].get("epoch")) or 0 for lines in run.events.values() if lines), default=0)
    done = f"{run.step:,} of {total:,}" if type(total) is int and total else f"{run.step:,}"
    yield "updates", done, plural(int(epochs), "complete epoch")
    if run.seconds:
        speeds = [speed for _, speed in run.curve("step", "samples_per_second")]
        yield "time", timespan(run.seconds), f"{median(speeds):,.0f} samples/s (median)" if speeds else ""
    proven = "proven" if run.attempt.get("verdict") else "one process" if run.ranks == 1 else "not proven"
    yield "same as one process?", proven, "see «What was proven»"


# What was proven ------------------------------------------------------------------------------------------------------


def _proof(run: RunRecord) -> Html:
    attempt, folder = run.attempt, run.folder
    sentence = attempt.get("proof")
    recipe = shlex.quote(str(folder / "recipe.yaml"))
    if attempt.get("verdict"):
        since = f"; these are the updates since step {attempt.get('from')}" if len(run.attempts) > 1 else ""
        proven = str(sentence or "paddle-dp verify compared just this training with one process")
        body = [note(f"Proven: {proven}{since}.", "good")]
    elif isinstance(sentence, str):
        body = [note(f"The proof, when the training ended: {sentence}", "warn")]
    elif run.ranks == 1:
        body = [
            paragraph("One process trained it: this is the result that others are compared with."),
            command(f"paddle-dp verify {recipe} --ranks 2") if run.recipe else "",
        ]
    elif "proof" not in attempt:
        body = [note("Not proven: the training left no verdict on record.", "warn")]
    elif run.recipe:
        body = [note("Not proven: this strategy learns something else than one process, on purpose.", "warn")]
    else:
        body = [
            note("Not proven: paddle-dp verify compares recipes, and this training is a script's.", "warn")
        ]
    body.append(
        paragraph(
            "Proven means: the first steps of this recipe, code and data, on as many ranks, were computed on one "
            "process, too, and every gradient and update was equal but for rounding.",
            "quiet",
        )
    )
    differences = [str(each) for row in run.attempts[-1:] for each in row.get("differences") or ()]
    body += [note(f"Not as on one process: {difference}", "warn") for difference in differences]
    if run.certificate:
        data = [
            (split, facts.get("samples", ""), str(facts.get("digest", ""))[:12])
            for split, facts in dict(run.certificate.get("data") or {}).items()
        ]
        replay = " --replay 1" if run.certificate.get("replay") else ""
        body += [
            details(
                "The certificate: data, weights, and how to check them",
                table(("data", "samples", "digest"), data),
                table(("checkpoint of step", "digest of its weights"), _saved(run)),
                paragraph(
                    "Compare the checkpoints with these digests, and train a part again on one process:"
                ),
                command(f"paddle-dp certificate {shlex.quote(str(folder))}{replay}"),
            )
        ]
    return section("What was proven", *body)


def _saved(run: RunRecord) -> list[tuple[int, str]]:
    rows = [(row["step"], str(row.get("model"))[:12]) for a in run.attempts for row in a.get("saved") or ()]
    return rows[-_MOST_ROWS:]


# Curves and scores ----------------------------------------------------------------------------------------------------


def _curves(run: RunRecord) -> Html:
    marks = [
        (line["step"], f"resumed at step {line['step']}")
        for line in run.events.get("start", ())[-100:]
        if line["step"] > 0
    ]
    marks += [(line["step"], f"step {line['step']}: refused") for line in run.events.get("refused", ())[:200]]
    charts = [line_chart(*chart, marks=marks) for chart in _score_charts(run)]
    measures = {
        "lr": "learning rate", "gradient_norm": "gradient norm", "samples_per_second": "samples per second",
        "tokens_per_second": "tokens per second", "waiting": "share of the time waiting for data",
    }  # fmt: skip
    charts += [
        line_chart(
            title, [Curve(label=title, points=run.curve("step", key))], marks=marks, may_be_log=key != "lr"
        )
        for key, title in measures.items()
    ]
    thinned = f" Each {run.thinned}th recorded step was read." if run.thinned > 1 else ""
    shape = (
        "Where there are many points, a line is a mean, in a band from the smallest to the largest value."
        + thinned
    )
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
    for name in sorted(names, key=lambda name: name != "loss")[:_MOST_CURVES]:
        evaluated = run.curve("evaluated", name)
        limits = [run.bounds(name, value) for _, value in evaluated]
        curves = [
            Curve(label="training batches", points=run.curve("step", name), colour=7 if evaluated else 0)
        ]
        bounds = [limit for limit in limits if limit]
        bounds = bounds if len(bounds) == len(evaluated) else []
        curves.append(Curve(label="held-out samples", points=evaluated, bounds=bounds, dots=True, colour=1))
        yield name, curves


def _scores(run: RunRecord) -> Html:
    rows = []
    for name in main_scores(run)[:_MOST_ROWS]:
        points, best = run.curve("evaluated", name), run.best(name)
        if points and best:
            direction = "smaller" if smaller_is_better(name) else "larger"
            last = run.shown(name, points[-1][1])
            rows.append(
                (name, last, _error(run, name, points[-1][1]), f"{best[1]:.4g}", f"{best[0]:.0f}", direction)
            )
    lines = run.events.get("evaluated", ())
    names = main_scores(run)[:_MOST_CURVES]
    history = [(int(line["step"]), *(number(line.get(name)) for name in names)) for line in lines]
    stride = -(-len(history) // _MOST_ROWS) or 1
    every = f", each {stride}th" if stride > 1 else ""
    head = ("score", "at the end", "standard error", "best", "at step", "better is")
    return section(
        "Held-out scores",
        table(head, rows),
        details(
            f"All evaluations ({len(history)}{every})",
            table(
                ("step", *names),
                ((row if None not in row else _dashed(row)) for row in history[::-stride][::-1]),
            ),
        ),
    )


def _error(run: RunRecord, name: str, share: float) -> str:
    known = run.bounds(name, share) is not None
    return f"± {standard_error(share, run.independent_samples):.2g}" if known else "not known"


def _dashed(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("–" if cell is None else cell for cell in row)


# Errors by class ------------------------------------------------------------------------------------------------------


def _errors(run: RunRecord) -> Html:
    rows = [row for row in run.evaluation.get("per_class") or () if isinstance(row, dict)]
    names = [str(row.get("class")) for row in rows]
    matrix = run.confusion
    names = names if len(names) == len(matrix) or not matrix else list(map(str, range(len(matrix))))
    at = (
        f"step {run.evaluation['step']}"
        if "step" in run.evaluation
        else str(run.evaluation.get("checkpoint", ""))
    )
    worst = sorted(rows, key=lambda row: number(row.get("f1")) or 0.0)[:_MOST_ROWS]
    ordered = rows if len(rows) <= _MOST_ROWS else worst
    worst_of = f" (the {_MOST_ROWS} worst of {len(rows)})" if len(rows) > _MOST_ROWS else ""
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


# Layout and time ------------------------------------------------------------------------------------------------------


def _degrees(run: RunRecord) -> Degrees | None:
    layout = run.attempt.get("layout")
    known = {*AXES, "servers"}
    if not isinstance(layout, dict) or not layout or not layout.keys() <= known:
        return None
    sizes = {axis: size for axis, size in layout.items() if type(size) is int and 0 < size < 10**6}
    return Degrees(**sizes)


def _layout(run: RunRecord) -> Html:
    degrees = _degrees(run)
    if degrees is None:
        return ""
    split = [axis for axis in AXES if degrees[axis] > 1]
    roles = {f"{axis} {degrees[axis]}: ranks {AXIS_ROLES[axis]}": _AXIS_COLOURS[axis] for axis in split}
    if degrees.servers:
        roles[f"servers {degrees.servers}: ranks {AXIS_ROLES['servers']}"] = _AXIS_COLOURS["servers"]
    if not roles:
        return section("Layout", paragraph("One process: nothing is split, and nothing is exchanged."))
    text = f"{plural(degrees.ranks, 'rank')}: {degrees}. A rank is a process; those in one frame share its coordinate."
    if degrees.ranks > _MOST_DRAWN_RANKS:
        picture = paragraph(f"More than {_MOST_DRAWN_RANKS} ranks are not drawn.", "quiet")
    else:
        servers = "".join(
            f'<span class="rank">rank {rank} (server)</span>' for rank in range(degrees.servers)
        )
        frame = (
            f'<div class="frame c6"><span>servers</span><div class="in">{servers}</div></div>'
            if servers
            else ""
        )
        picture = f'<div class="card"><div class="in">{frame}{_frames(degrees, split, {})}</div></div>'
    return section("Layout", paragraph(text), picture, legend(roles))


def _frames(degrees: Degrees, axes: list[str], coords: Mapping[str, int]) -> Html:
    if not axes:
        rank = degrees.rank(dict(coords))
        return f'<span class="rank">rank {rank}</span>'
    axis, *inner = axes
    frames = "".join(
        f'<div class="frame c{_AXIS_COLOURS[axis]}"><span>{axis} {i}</span>'
        f'<div class="in">{_frames(degrees, inner, {**coords, axis: i})}</div></div>'
        for i in range(degrees[axis])
    )
    return f'<div class="in{" down" * (axis == "pipeline")}">{frames}</div>'


def _time(run: RunRecord) -> Html:
    body: list[Html] = []
    stalled = sum(number(line.get("seconds_stalled")) or 0.0 for line in run.events.get("saved", ()))
    if run.seconds:
        text = f"The training took {timespan(run.seconds)}, pauses between attempts not counted."
        if stalled:
            text += (
                f" For {timespan(stalled)} ({stalled / run.seconds:.0%}) it stood still to write checkpoints."
            )
        body.append(paragraph(text))
    line = run.last("measured")
    if not line:
        return section("Where the time went", *body, paragraph(_UNMEASURED, "quiet") if run.events else "")
    measured = Measured.from_fields(line)
    body.append(paragraph(f"A step, as measured over steps {measured.first} to {measured.last}:"))
    for times in measured.rank_times[:_MOST_BARS]:
        body.append(
            f"<small class=quiet>rank {times.rank}, {duration(times.step)}</small>{bar(_shares(times))}"
        )
    body += [
        legend({name: colour for name, colour in _COMPONENTS.items() if any(_shares(t)[name][0] > 0.001 for t in
                measured.rank_times[:_MOST_BARS])}),
        details("The numbers, and what would make a step shorter", command("\n".join(measured.report()))),
        paragraph(
            "exchange: on the wire; waiting: for a slower rank; callbacks: evaluations, checkpoints, screen, files.",
            "quiet",
        ),
    ]  # fmt: skip
    return section("Where the time went", *body)


_UNMEASURED = "The parts of a step were not measured: that takes a training of more than a few steps."


def _shares(times: RankTimes) -> dict[str, tuple[float, int]]:
    whole = max(times.step, 1e-12)
    return {name: (min(getattr(times, name) / whole, 1.0), colour) for name, colour in _COMPONENTS.items()}


# Attempts, environment, recipe ----------------------------------------------------------------------------------------


def _attempts(run: RunRecord) -> Html:
    rows, begun = [], [begin_seconds(attempt) for attempt in run.attempts]
    for index, attempt in enumerate(run.attempts):
        until = begun[index + 1] if index + 1 < len(begun) else math.inf
        causes = [end.cause for end in run.attempt_ends if begun[index] <= end.ended and end.began < until]
        why = next(filter(None, reversed(causes)), attempt.get("why") or "its end was not recorded")
        changes = [f"changed: {few(attempt['changes'], 3)}"] if attempt.get("changes") else []
        date = str(attempt.get("begun")).replace("T", " ").replace("Z", "")
        steps = f"{attempt.get('from')} to {attempt.get('to')}"
        rows.append((index + 1, date, str(attempt.get("ranks")), steps, "; ".join([why, *changes])))
    before = [
        (end.log, f"exit status {end.status}", end.cause)
        for end in run.attempt_ends
        if end.status and not any(start <= end.ended for start in begun)
    ]
    refused = [
        (
            int(number(line.get("refused_step")) or line["step"]),
            str(line.get("action", "")),
            str(line.get("why", "")),
        )
        for line in run.events.get("refused", ())
    ][-_MOST_ROWS:]
    failed_saves = [
        (int(line["step"]), str(line.get("message"))) for line in run.events.get("save_failed", ())
    ]
    has_story = len(rows) > 1 or run.ending[0] != "done"
    plain = paragraph("One attempt, without a restart, a refused update or a failed checkpoint.")
    body = [
        table(("attempt", "began (UTC)", "ranks", "steps", "end"), rows[-_MOST_ROWS:] if has_story else ()),
        table(("log", "ended with", "cause, before any update"), before),
        table(("step", "refused update", "reason"), refused),
        table(("step", "checkpoint that could not be written"), failed_saves[-_MOST_ROWS:]),
    ]
    resume = command(f"paddle-dp train {_recipe_path(run)} --ranks {run.ranks} --resume")
    goes_on = (
        run.ending[0] in ("stopped", "failed", "open")
        and run.recipe
        and (run.folder / "checkpoints").is_dir()
    )
    return section(
        "Restarts and failures",
        *(body if any(body) else [plain]),
        paragraph("It goes on from its newest checkpoint with:") + resume if goes_on else "",
    )


def _recipe_path(run: RunRecord) -> str:
    return shlex.quote(str(run.folder / "recipe.yaml"))


def _environment(run: RunRecord) -> Html:
    rows: list[tuple[str, str]] = []
    attempt, facts = run.attempt, run.last("measured").get("facts") or {}
    for name, version in dict(attempt.get("versions") or {}).items():
        rows.append((str(name), str(version)))
    for key, label in (("host", "machine"), ("device", "device")):
        if value := attempt.get(key) or run.last("start").get(key):
            rows.append((label, str(value)))
    hosts = {str(row.get("host")) for row in run.last("measured").get("ranks") or () if isinstance(row, dict)}
    rows += [("machines", few(sorted(hosts), 8))] if len(hosts) > 1 else []
    rows += [("processors", str(facts["cores"]))] if facts.get("cores") else []
    memory = [size for _, size in run.curve("step", "memory")]
    rows += [("memory of a rank, at most", f"{max(memory) / 2**30:.2f} GB")] if memory else []
    rows += [(str(name), str(value)) for name, value in dict(attempt.get("variables") or {}).items()]
    return section("Environment", table(("", ""), rows))


def _recipe(run: RunRecord) -> Html:
    if not run.recipe_text:
        text = "The training was described in Python (Trainer.of): run that script again."
        return section("Recipe", paragraph(text))
    text = run.recipe_text[:_MOST_TEXT] + ("\n…" if len(run.recipe_text) > _MOST_TEXT else "")
    return section(
        "Recipe, and how to repeat this",
        paragraph("The same training again; this run is moved aside, not overwritten:"),
        command(f"paddle-dp train {_recipe_path(run)} --ranks {run.ranks}"),
        details("The full recipe, with every default", command(text)),
    )
