"""What `paddle-dp why` says: the last measurement in a run's metrics.jsonl."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.plan.changes import Facts, changes
from paddle_dp.plan.step_parts import RankParts
from paddle_dp.plan.why_lines import lines


def told(run: Path, json: bool = False) -> str:
    """The lines of a run's last measurement, or one JSON object. Raises UsageError for a run without any."""
    found = _last(run)
    parts, facts = [RankParts.of_json(row) for row in found["ranks"]], Facts(**found["facts"])
    if not json:
        return "\n".join(lines(parts, facts, found["first"], found["last"]))
    advice = [{"what": one.what, "why": one.why, "seconds": one.seconds} for one in changes(parts, facts)]
    return json_text.dumps({**found, "changes": advice}, indent=2)


def _last(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{path} is not there: give a run's folder, such as runs/digits_mlp, whose recipe has the callback "
            "`metrics` (it is one of those by default)."
        )
    found, steps = None, 0
    for text in path.read_text().splitlines():
        try:
            line = json_text.loads(text)
        except ValueError:
            continue  # it is being written
        steps = max(steps, line.get("step", 0))
        found = line if line.get("event") == "measured" else found
    if found is None:
        raise UsageError(
            f"{path} has no measurement of a step's parts, after {steps} steps: a training makes the first when 15 are "
            "done, and a shorter one after a third of its steps. Train on, or look at it live: paddle-dp train "
            "RECIPE --why."
        )
    return {key: found[key] for key in ("first", "last", "ranks", "facts")}
