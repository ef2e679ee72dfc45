"""Facts of a run that several sections show, collected from its record: state, data, layout, scores, spans of time."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.report.run_record import RunRecord
from paddle_dp.text import duration

STATES = {
    "done": ("finished", "good"), "stopped": ("stopped", "warn"), "failed": ("failed", "bad"),
    "open": ("no end on record", "warn"),
}  # fmt: skip
MOST_ROWS = 50  # of a table
MOST_CURVES = 12  # charts of scores


def timespan(seconds: float) -> str:
    """ "12.5 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 120:
        return duration(seconds)
    minutes = round(seconds) // 60
    if minutes < 120:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"


def component_name(entry: Any) -> str:
    return str(entry.get("use", "")) if isinstance(entry, dict) else str(entry or "")


def setting(run: RunRecord, section_name: str, key: str) -> Any:
    entry = run.recipe.get(section_name)
    return entry.get(key) if isinstance(entry, dict) else None


def sample_count(run: RunRecord, split: str) -> int:
    data = run.certificate.get("data")
    facts = data.get(split) if isinstance(data, dict) else None
    count = facts.get("samples") if isinstance(facts, dict) else None
    return count if type(count) is int else 0


def degrees_of(run: RunRecord) -> Degrees | None:
    layout = run.attempt.get("layout")
    known = {field.name for field in fields(Degrees)}
    if not isinstance(layout, dict) or not layout or not layout.keys() <= known:
        return None
    sizes = {axis: size for axis, size in layout.items() if type(size) is int and 0 < size < 10**6}
    return Degrees(**sizes)


def main_scores(run: RunRecord) -> list[str]:
    """The held-out scores, the most telling first: the one that `best` of a callback watches, then others, the loss
    last."""
    callbacks = run.recipe.get("callbacks")
    watched = [c.get("best") for c in callbacks if isinstance(c, dict)] if isinstance(callbacks, list) else []
    names = run.score_names("evaluated")
    return sorted(names, key=lambda name: (name not in watched, name == "loss"))


def recipe_path(run: RunRecord) -> str:
    return shlex.quote(str(run.folder / "recipe.yaml"))
