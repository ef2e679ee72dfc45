"""Compares runs: the settings that differ, then scores, then curves; as a page, and as tables for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from paddle_dp.errors import UsageError
from paddle_dp.report.charts import Curve, line_chart
from paddle_dp.report.facts import MEASURED, STATES, main_scores, split_facts, timespan
from paddle_dp.report.html_page import Html, legend, note, page, paragraph, section, table, write_page
from paddle_dp.report.report import NAME
from paddle_dp.report.run_record import RunRecord, read_run
from paddle_dp.text import amount, plural

ABSENT = "–"
_IGNORED = ("name", "output_dir")
_MOST_TEXT = 120  # characters of a setting
_MOST_SCORES = 12
_POSITIONS = {
    "step": "steps", "samples": "samples", "elapsed": "seconds", "sent_bytes": "bytes sent by a rank",
}  # fmt: skip

Row = tuple[str, ...]


def settings_of(content: Any, prefix: str = "") -> dict[str, str]:
    """A recipe's settings by dotted key; parts of a list by their name, "callbacks.evaluate.every"."""
    if isinstance(content, dict) and content:
        flat: dict[str, str] = {}
        for key, value in content.items():
            flat |= settings_of(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if isinstance(content, list) and content and all(isinstance(c, dict) and "use" in c for c in content):
        flat, counts = {}, dict[str, int]()
        for component in content:
            name = str(component["use"])
            counts[name] = counts.get(name, 0) + 1
            number = f"[{counts[name]}]" if counts[name] > 1 else ""
            flat |= settings_of(component, f"{prefix}.{name}{number}")
        return flat
    text = "null" if content is None else str(content).lower() if isinstance(content, bool) else str(content)
    return {prefix: text}


@dataclass(frozen=True)
class RunComparison:
    """Two or more runs, and their labels."""

    runs: Sequence[RunRecord]
    labels: Sequence[str]

    @cached_property
    def differences(self) -> list[Row]:
        """(key, value in each run) of the recipes' settings that differ, in the order of the recipes."""
        rows = [settings_of({k: v for k, v in run.recipe.items() if k not in _IGNORED}) for run in self.runs]
        known = [row for row, run in zip(rows, self.runs, strict=True) if run.recipe]
        keys = dict.fromkeys(key for row in known for key in row)
        different = [key for key in keys if len({row.get(key) for row in known}) > 1]
        return [(key, *_cut([row.get(key, ABSENT) for row in rows])) for key in different]

    @cached_property
    def circumstances(self) -> list[Row]:
        """(fact, value in each run) of ranks, machines and versions that differ."""
        rows = [
            {
                "ranks": str(run.ranks), "layout": _layout(run), "device": _fact(run, "device"),
                "machine": _fact(run, "host"), **_texts(run.attempt.get("versions")),
            }
            for run in self.runs
        ]  # fmt: skip
        keys = dict.fromkeys(key for row in rows for key in row)
        table_rows = [(key, *(row.get(key, ABSENT) for row in rows)) for key in keys]
        return [row for row in table_rows if len({*row[1:]}) > 1]

    @cached_property
    def score_names(self) -> list[str]:
        """The held-out scores of any run."""
        return list(dict.fromkeys(name for run in self.runs for name in main_scores(run)))[:_MOST_SCORES]

    @cached_property
    def results(self) -> list[Row]:
        """(result, value in each run): the end, time and losses, and each held-out score at the end and at its best."""
        columns = [_results(run, self.score_names) for run in self.runs]
        keys = dict.fromkeys(key for column in columns for key in column)
        return [(key, *(column.get(key, ABSENT) for column in columns)) for key in keys]

    @cached_property
    def warnings(self) -> list[str]:
        """Sentences on quantities that cannot be compared, or may differ by chance."""
        sentences = []
        for run, label in zip(self.runs, self.labels, strict=True):
            if not run.events:
                absent = "has no metrics.jsonl (the callback `metrics`), so no scores and no curves."
                sentences.append(f"{label} {absent}")
            if not run.recipe:
                sentences.append(f"{label} has no recipe: its settings cannot be compared.")
        digests = {_test_digest(run) for run in self.runs} - {""}
        if len(digests) > 1:
            sentences.append("The held-out samples differ: scores over other samples cannot be compared.")
        elif sentence := self._chance():
            sentences.append(sentence)
        return sentences

    def _chance(self) -> str:
        """A sentence if the main accuracy of all runs lies within what chance allows."""
        for name in self.score_names[:1]:
            limits = [run.bounds(name, y) for run in self.runs for _, y in run.curve("evaluated", name)[-1:]]
            known = [limit for limit in limits if limit]
            overlap = known and max(low for low, _ in known) <= min(high for _, high in known)
            if overlap and len(known) == len(limits) > 1:
                return f"{name}: the 95 % intervals of the runs overlap, so the differences may be chance."
        return ""

    def charts(self) -> Iterator[Html]:
        """A chart for each quantity over each position that the runs record."""
        step_names = [name for run in self.runs for name in run.score_names("step") if name == "loss"]
        quantities = [*(("step", name, f"training {name}") for name in dict.fromkeys(step_names)),
                      *(("evaluated", name, f"held-out {name}") for name in self.score_names)]  # fmt: skip
        for event, name, title in quantities:
            yield from (self._chart(event, name, title, x) for x in _POSITIONS)
        yield from (self._chart("step", key, title, "step") for key, title in MEASURED.items())

    def _chart(self, event: str, name: str, title: str, x: str) -> Html:
        curves = [
            Curve(label=label, points=run.curve(event, name, x), dots=event == "evaluated", colour=index)
            for index, (run, label) in enumerate(zip(self.runs, self.labels, strict=True))
        ]
        over = _POSITIONS[x]
        return line_chart(f"{title}, over {over}", curves, over.split()[0], may_be_log=name != "lr")


def _cut(texts: Sequence[str]) -> Iterator[str]:
    """Yields the texts, of which at most _MOST_TEXT characters from shortly before their first difference."""
    known = [*{*texts} - {ABSENT}]
    alike = takewhile(lambda column: len({*column}) == 1, zip(*known, strict=False))
    begin = max(len([*alike]) - _MOST_TEXT // 2, 0) if len(known) > 1 else 0
    for text in texts:
        end = begin + _MOST_TEXT
        yield text if text == ABSENT else "…" * (begin > 0) + text[begin:end] + "…" * (end < len(text))


def _results(run: RunRecord, score_names: Sequence[str]) -> dict[str, str]:
    texts = {"end": STATES[run.ending[0]][0], "updates": f"{run.step:,}"}
    texts |= {"time": timespan(run.seconds)} if run.seconds else {}
    if speeds := [speed for _, speed in run.curve("step", "samples_per_second")]:
        texts["samples per second, median"] = f"{median(speeds):,.0f}"
    if sent := [size for _, size in run.curve("step", "sent_bytes", "sent_bytes")]:
        texts["sent by a rank"] = amount(sent[-1])
    if losses := run.curve("step", "loss"):
        texts["training loss"] = f"{losses[-1][1]:.4g}"
    for name in score_names:
        points, best = run.curve("evaluated", name), run.best(name)
        if points and best is not None:
            texts[f"held-out {name}"] = f"{points[-1][1]:.4g}"
            texts[f"  best {name}"] = f"{best[1]:.4g} at step {best[0]:.0f}"
    return texts


def _texts(value: Any) -> dict[str, str]:
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}


def _fact(run: RunRecord, key: str) -> str:
    return str(run.attempt.get(key) or run.last("start").get(key) or ABSENT)


def _layout(run: RunRecord) -> str:
    layout = run.attempt.get("layout")
    split = [f"{axis} {n}" for axis, n in layout.items() if n != 1] if isinstance(layout, dict) else []
    return " × ".join(split) or ABSENT


def _test_digest(run: RunRecord) -> str:
    digest = split_facts(run, "test").get("digest")
    return f"{digest}, {run.last('evaluated').get('held_out')} samples" if digest else ""


def read_runs(folders: Sequence[Path]) -> RunComparison:
    """Reads the runs. Raises UsageError for fewer than two, for one that is given twice, and as `read_run` does."""
    if len(folders) < 2:
        raise UsageError("compare needs two runs or more: paddle-dp compare runs/NAME runs/OTHER")
    real = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, real, strict=True):
        if real.count(path) > 1:
            raise UsageError(f"{folder} is given twice: name each run once.")
    names = [path.name for path in real]
    labels = [n if names.count(n) == 1 else str(folder) for n, folder in zip(names, folders, strict=True)]
    return RunComparison([read_run(folder) for folder in folders], labels)


def write_comparison(comparison: RunComparison, path: Path) -> None:
    """Writes the page. Raises UsageError if it cannot be written."""
    if path.is_dir():
        wrong = "this is a folder, and --html takes the file to write, such as compare.html."
        raise UsageError(f"--html {path}: {wrong}")
    try:
        write_page(path, comparison_page(comparison, path.parent))
    except OSError as error:
        raise UsageError(f"--html {path} cannot be written: {error.strerror}.") from None


def comparison_page(comparison: RunComparison, folder: Path) -> Html:
    """The page; its links to the runs' reports are relative to `folder`."""
    runs, labels = comparison.runs, comparison.labels
    count = plural(len(runs), "run")
    same = "The recipes have the same settings." if all(run.recipe for run in runs) else ""
    charts = "".join(comparison.charts())
    absent = {"Settings that differ": paragraph(same)}
    contents = ((title, table(head, rows)) for title, head, rows in tables(comparison))
    body = [
        f'<p class="quiet">paddle_dp · comparison</p><h1>{escape(" · ".join(labels))}</h1>',
        legend({label: index for index, label in enumerate(labels)}),
        _links(runs, labels, folder),
        *(note(sentence, "warn") for sentence in comparison.warnings),
        *(section(title, content or absent.get(title, "")) for title, content in contents),
        section("Curves", f'<div class="charts">{charts}</div>' if charts else ""),
    ]
    return page(f"{count} compared", body)


def _links(runs: Sequence[RunRecord], labels: Sequence[str], folder: Path) -> Html:
    links = [
        f'<a href="{escape(quote(os.path.relpath(run.folder / NAME, folder)))}">{escape(label)}</a>'
        for run, label in zip(runs, labels, strict=True)
        if (run.folder / NAME).is_file()
    ]
    return f'<p class="quiet">Reports: {" · ".join(links)}</p>' if links else ""


def tables(comparison: RunComparison) -> Iterator[tuple[str, Sequence[str], Sequence[Row]]]:
    """(title, head, rows) of the tables."""
    head = ("setting", *comparison.labels)
    yield "Settings that differ", head, comparison.differences
    yield "Ranks, machines and versions that differ", head, comparison.circumstances
    yield "Results", ("result", *comparison.labels), comparison.results
