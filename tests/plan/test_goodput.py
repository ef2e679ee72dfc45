"""Goodput by arithmetic: runs whose lines are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli.runs import step_report
from paddle_dp.plan.goodput import Goodput, dropped_pause, goodput, read_goodput

Line = dict[str, Any]


def start(step: int, time: float, **fields: Any) -> Line:
    return {"event": "start", "step": step, "time": time, **fields}


def steps(first: int, last: int, time: float, seconds: float = 1.0) -> list[Line]:
    """Lines of each tenth step until `last`, from updates that begin after `time`."""
    return [
        {"event": "step", "step": s, "time": time + (s - first) * seconds, "seconds_per_step": seconds}
        for s in range(first + 10, last + 1, 10)
    ]


def failed(step: int, time: float, kind: str = "ValueError") -> Line:
    return {"event": "failed", "step": step, "time": time, "kind": kind}


# 5 s of start; 25 updates of 1 s count, of which the last 5 have no line; 20 s are lost; 40 more updates with 3 s of an
# evaluation between them, and 7 s of a last one.
RESTARTED = [
    start(0, 1000.0, job_seconds=5.0),
    *steps(0, 20, 1000.0),
    start(25, 1045.0, job_seconds=50.0),
    *steps(25, 45, 1045.0),
    *steps(45, 65, 1068.0),
    {"event": "end", "step": 65, "time": 1095.0},
]


def test_updates_that_count_are_a_share_of_the_wall_time() -> None:
    assert goodput(RESTARTED) == Goodput(attempts=2, updates=65, updating=65.0, restarting=25.0, seconds=93.0)
    assert str(goodput(RESTARTED)) == (
        "goodput 70%: of 93 s in 2 attempts, 65 s went into the 65 updates that count, 25 s into starts and repeated "
        "updates, 3 s into checkpoints and other callbacks"
    )


def test_lines_after_the_last_update_change_nothing() -> None:
    """The screen shows it before the training's end, and a page after it."""
    assert goodput(RESTARTED[:-1]) == goodput(RESTARTED)


def test_last_updates_without_a_line_take_the_mean_time() -> None:
    measured = goodput([*RESTARTED[:-1], failed(68, 1099.0)])
    assert measured == Goodput(attempts=2, updates=68, updating=68.0, restarting=25.0, seconds=96.0)


def test_a_pause_after_a_request_to_stop_costs_nothing_and_one_after_a_failure_does() -> None:
    def paused(kind: str) -> Goodput:
        last = [start(20, 9000.0, job_seconds=4.0), *steps(20, 40, 9000.0)]
        measured = goodput([start(0, 1000.0), *steps(0, 20, 1000.0), failed(20, 1021.0, kind), *last])
        assert measured is not None
        return measured

    stopped = paused("StoppedError")
    assert (stopped.seconds, stopped.updating, stopped.restarting) == (45.0, 40.0, 4.0)
    assert paused("ValueError").seconds == 8020.0 and paused("ValueError").restarting == 7979.0


def test_a_pause_whose_lines_an_earlier_step_drops_costs_nothing_either() -> None:
    """A training ended after 40 steps; a job resumed it from step 30, and was stopped; a third one resumes step 20."""
    second = start(30, 5000.0, job_seconds=4.0)
    first_pause = dropped_pause([{"event": "end", "step": 40, "time": 1040.0}], second)
    assert first_pause == 4996.0 - 1040.0
    second["pause_seconds"] = first_pause
    third = start(20, 9000.0, job_seconds=4.0)
    dropped = [second, failed(38, 5008.0, "StoppedError")]
    third["pause_seconds"] = dropped_pause(dropped, third)
    measured = goodput([start(0, 1000.0), *steps(0, 20, 1000.0), third, *steps(20, 40, 9000.0)])
    lost = 20.0 + (4.0 + 8.0) + 4.0
    assert measured == Goodput(attempts=2, updates=40, updating=40.0, restarting=lost, seconds=40.0 + lost)
    assert dropped_pause([failed(40, 1040.0)], start(30, 5000.0)) == 0.0  # somebody waited


def test_ranks_that_change_within_a_job_are_not_a_pause() -> None:
    lines = [start(0, 1000.0, job_seconds=2.0), *steps(0, 20, 1000.0), failed(20, 1020.0, "StoppedError")]
    measured = goodput([*lines, start(20, 1026.0, job_seconds=28.0), *steps(20, 40, 1026.0, seconds=2.0)])
    assert measured == Goodput(attempts=2, updates=40, updating=60.0, restarting=8.0, seconds=68.0)


def test_updates_that_began_anew_count_once() -> None:
    measured = goodput([start(0, 1000.0), start(0, 1030.0), *steps(0, 10, 1030.0)])
    assert measured == Goodput(attempts=2, updates=10, updating=10.0, restarting=30.0, seconds=40.0)
    assert goodput([start(0, 1000.0), start(0, 1030.0)]) is None  # no update is on record


def write(run: Path, lines: list[Line]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')


def test_only_a_run_that_was_restarted_has_one(tmp_path: Path) -> None:
    assert read_goodput(tmp_path) is None
    write(tmp_path, RESTARTED[:3])
    assert read_goodput(tmp_path) is None
    for job in ("attempt-001", "attempt-002"):  # the training, and an export of it
        (tmp_path / "logs" / job).mkdir(parents=True)
    assert read_goodput(tmp_path) is None
    write(tmp_path, RESTARTED)
    assert read_goodput(tmp_path) == goodput(RESTARTED)


def test_why_shows_it_with_and_without_a_measurement(tmp_path: Path) -> None:
    write(tmp_path, RESTARTED)
    assert step_report(tmp_path).startswith("goodput 70%: of 93 s in 2 attempts,\n  65 s went into the 65")
    assert "no measurement of a step's parts, after 65 steps" in step_report(tmp_path)
    assert json.loads(step_report(tmp_path, json=True))["restarts"]["goodput"] == pytest.approx(
        65 / 93, abs=1e-4
    )
