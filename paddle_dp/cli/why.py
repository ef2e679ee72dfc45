"""What `paddle-dp why` says: the last measurement in a run's metrics.jsonl."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.plan.changes import changes
from paddle_dp.plan.measured import NOT_MEASURED, Measured
from paddle_dp.plan.why_lines import lines


def told(run: Path, json: bool = False) -> str:
    """The lines of a run's last measurement, or one JSON object. Raises UsageError for a run without any."""
    found = _last(run)
    measured = Measured.of_fields(found)
    if not json:
        return "\n".join(lines(measured))
    advice = [asdict(change) for change in changes(measured.parts, measured.facts)]
    return json_text.dumps({**measured.as_fields(), "changes": advice}, indent=2)


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
            f"{path} has no measurement of a step's parts, after {steps} steps. {NOT_MEASURED} Any other training "
            "makes the first when 15 steps are done, a shorter one after a third of them; going back to a checkpoint "
            "takes those behind it away: train on, or look at it live, paddle-dp train RECIPE --why."
        )
    return found
