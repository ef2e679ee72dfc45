"""`paddle-dp why RUN` tells the last measurement of a run, or how to get one."""

from __future__ import annotations

import json

import pytest

from paddle_dp.cli.runs import step_report
from paddle_dp.errors import UsageError

RANK = {
    "rank": 0, "host": "a", "step": 0.1, "data": 0.08, "forward": 0.01, "backward": 0.01, "exchange": 0.0,
    "hidden": 0.0, "waiting": 0.0, "update": 0.0, "callbacks": 0.0, "exchanges": 0.0, "busy": 0.02,
    "workers_busy": 0.0, "reading_on_core": 0.0, "waits_for": {}, "wire": {}, "works": {},
}  # fmt: skip
LINES = [
    {"event": "start", "step": 0},
    {"event": "measured", "step": 15, "first": 11, "last": 15, "ranks": [RANK | {"data": 0.5}], "facts": {}},
    {"event": "measured", "step": 120, "first": 101, "last": 120, "ranks": [RANK],
     "facts": {"batch": 8, "degrees": {}, "cores": 4}},
    {"event": "step", "step": 125},
]  # fmt: skip


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"event": "st')


def test_the_last_measurement_is_told_as_lines_or_as_json(tmp_path):
    write(tmp_path, LINES)
    text = step_report(tmp_path)
    assert text.startswith("Where a step of 100 ms goes, in ms (steps 101 to 120):")
    assert "loader.num_workers=4" in text
    found = json.loads(step_report(tmp_path, json=True))
    assert found["ranks"][0]["data"] == 0.08 and found["changes"][0]["what"] == "loader.num_workers=4"


def test_a_long_wait_is_told_first_and_without_a_measurement_too(tmp_path):
    log = tmp_path / "logs/attempt-001/workerlog.0"
    log.parent.mkdir(parents=True)
    line = "rank 0 waited 41 s for rank 1 (in data) in the exchange of gradients after step 7"
    log.write_text(f"{line}\n")
    for lines, then in (
        (LINES, "Where a step of 100 ms goes"),
        (LINES[:1], f"{tmp_path}/metrics.jsonl has no meas"),
    ):
        write(tmp_path, lines)
        assert step_report(tmp_path).startswith(f"The longest wait:\n  {line}.\n{then}")
        assert json.loads(step_report(tmp_path, json=True))["longest_wait"] == line


def test_a_run_without_a_measurement_says_how_to_get_one(tmp_path):
    with pytest.raises(UsageError, match=r"metrics.jsonl is not there: give a run's folder"):
        step_report(tmp_path)
    write(tmp_path, [{"event": "step", "step": 7}])
    with pytest.raises(UsageError, match=r"after 7 steps\. .*do not wait for one another.*RECIPE --why"):
        step_report(tmp_path)
