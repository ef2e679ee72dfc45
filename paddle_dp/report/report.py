"""The page of one run, `RUN/report.html`: result, proof, curves, mistakes, layout, time, attempts, recipe."""

from __future__ import annotations

from pathlib import Path

from paddle_dp.report.history import attempts, environment, recipe
from paddle_dp.report.html_page import Html, note, page, write_page
from paddle_dp.report.outcome import headline, proof
from paddle_dp.report.resources import layout, time_shares
from paddle_dp.report.run_record import RunRecord, read_run
from paddle_dp.report.scores import curves, errors, samples, scores

NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Writes the report of the run in `folder` and returns its path. Raises UsageError if there is no run, OSError if
    the file cannot be written."""
    path = folder / NAME
    write_page(path, report_page(read_run(folder)))
    return path


def report_page(run: RunRecord) -> Html:
    """The whole page. A section that fails is a sentence on it."""
    sections = (
        headline, proof, curves, scores, errors, samples, layout, time_shares, attempts, environment, recipe,
    )  # fmt: skip
    body: list[Html] = []
    for draw in sections:
        try:
            body.append(draw(run))
        except Exception as error:  # noqa: BLE001 - a file of another version may hold anything
            name, reason = draw.__name__.replace("_", " "), f"{type(error).__name__}: {error}"
            body.append(note(f"The section «{name}» could not be made: {reason}", "warn"))
    return page(f"{run.name}: report", body)
