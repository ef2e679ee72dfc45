"""Facts of a run that several sections show, collected from its record: state, data, layout, scores, spans of time."""

from __future__ import annotations

import shlex
from dataclasses import fields
from functools import partial
from typing import Any

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan import goodput
from paddle_dp.report.run_record import Json, RunRecord

STATES = {
    "done": ("finished", "good"), "early": ("stopped early", "quiet"), "stopped": ("stopped", "warn"),
    "failed": ("failed", "bad"), "open": ("no end on record", "warn"),
}  # fmt: skip
MEASURED = {
    "lr": "learning rate", "gradient_norm": "gradient norm", "samples_per_second": "samples per second",
}  # fmt: skip
MOST_ROWS = 50  # of a table
MOST_CURVES = 12  # charts of scores


timespan = partial(goodput.timespan, shortest=120.0)  # "12.5 s", "3 min 20 s", "2 h 5 min"


def component_name(entry: Any) -> str:
    return str(entry.get("use", "")) if isinstance(entry, dict) else str(entry or "")


def split_facts(run: RunRecord, split: str) -> Json:
    """The certificate's facts of the training data ("train") or the held-out data ("test"); {} without any."""
    data = run.certificate.get("data")
    facts = data.get(split) if isinstance(data, dict) else None
    return facts if isinstance(facts, dict) else {}


def sample_count(run: RunRecord, split: str) -> int:
    count = split_facts(run, split).get("samples")
    return count if type(count) is int else 0


def degrees_of(run: RunRecord) -> Degrees | None:
    layout = run.attempt.get("layout")
    known = {field.name for field in fields(Degrees)}
    if not isinstance(layout, dict) or not layout or not layout.keys() <= known:
        return None
    sizes = {axis: size for axis, size in layout.items() if type(size) is int and 0 < size < 10**6}
    return Degrees(**sizes)


def main_scores(run: RunRecord) -> list[str]:
    """The held-out scores: first those that `best` of a callback watches, then others, the loss last."""
    callbacks = run.recipe.get("callbacks")
    watched = [c.get("best") for c in callbacks if isinstance(c, dict)] if isinstance(callbacks, list) else []
    names = run.score_names("evaluated")
    return sorted(names, key=lambda name: (name not in watched, name == "loss"))


def recipe_path(run: RunRecord) -> str:
    return shlex.quote(str(run.folder / "recipe.yaml"))
