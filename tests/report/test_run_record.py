"""What is read of a run's folder: all of a short one, a thinned long one in a bounded time, and none of its damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.report import run_record
from paddle_dp.report.run_record import ENDED, RunRecord, read_run
from paddle_dp.report.scores import _score_charts
from paddle_dp.scores import interval
from tests.report import runs


def ended(folder: Path, **fields: Any) -> None:
    path = folder / "logs" / "attempt-001" / ENDED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"status": 137, "stopped": False, "began": 999.0, "ended": 1100.0, **fields}))


def test_a_resumed_run_has_one_time_and_one_count_of_bytes(tmp_path: Path) -> None:
    again = [runs.line("step", s, loss=1.0, sent=2000.0) | {"seconds": s - 10.0} for s in range(11, 14)]
    run = read_run(
        runs.write(tmp_path, runs.start(), *runs.steps(1, 10), runs.start(10, seconds=0.0), *again)
    )
    assert run.curve("step", "loss", "elapsed")[-1] == (13.0, 1.0)  # 10 seconds, and 3 of the second attempt
    assert run.curve("step", "loss", "sent_bytes")[-1] == (10 * 1000.0 + 3 * 2000.0, 1.0)
    assert run.seconds == 13.0 and run.step == 13


@pytest.mark.parametrize(
    ("why", "fields", "state"),
    [
        ("done", {}, "done"), ("done: acc1 has not improved", {}, "early"), ("ValueError: x", {}, "failed"),
        ("StoppedError: stopped by SIGTERM", {}, "stopped"), (None, {}, "open"),
        (None, {"cause": "rank 1 of 2: SIGKILL"}, "failed"), ("LostPeerError: …", {"cause": "rank 1"}, "failed"),
        (None, {"cause": "SIGTERM", "stopped": True}, "stopped"), (None, {"ended": 900.0, "cause": "old"}, "open"),
    ],
)  # fmt: skip
def test_how_a_training_ended(tmp_path: Path, why: str | None, fields: dict[str, Any], state: str) -> None:
    runs.write(tmp_path, runs.start(), *runs.steps(1, 3), certificate=runs.certificate(runs.attempt(why=why)))
    if fields:
        ended(tmp_path, **fields)
    run = read_run(tmp_path)
    assert run.ending[0] == state
    if state == "failed" and fields:
        assert run.ending[1] == fields["cause"]  # the first cause, not a peer's loss


def test_without_a_certificate_the_metrics_say_how_it_ended(tmp_path: Path) -> None:
    failed = runs.line("failed", 3, kind="ValueError", message="a reason")
    assert read_run(runs.write(tmp_path, runs.start(), failed)).ending == ("failed", "ValueError: a reason")
    later = [runs.start(3, time=2000.0), runs.line("end", 9, time=2001.0, stopped=None)]
    assert read_run(runs.write(tmp_path, runs.start(), failed, *later)).ending[0] == "done"


def test_many_lines_are_thinned_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "MOST_LINES", 50)
    run = read_run(
        runs.write(tmp_path, runs.start(), *runs.steps(1, 1001), runs.line("evaluated", 7, acc1=0.5))
    )
    points = run.curve("step", "loss")
    assert len(points) <= 101 and points[0] == (1, 1.0) and points[-1] == (1001, 1 / 1001)
    assert run.thinned > 1 and run.curve("evaluated", "acc1") == [(7, 0.5)]


def test_of_a_huge_file_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "MOST_BYTES", 4000)
    monkeypatch.setattr(run_record, "_BLOCK", 1000)
    run = read_run(runs.write(tmp_path, runs.start(), *runs.steps(1, 2000)))
    points = run.curve("step", "loss")
    assert 8 < len(points) < 40 and points[-1][0] == 2000 and all(y == 1 / x for x, y in points)
    assert run.partial and "best score may be another" in run.notes[-1]


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    runs.write(tmp_path, runs.start(), *runs.steps(1, 4, acc1=float("nan")), recipe="a: [", evaluation={})
    (tmp_path / "certificate.json").write_text("{")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"event": "step", "step": "x"}\n{"event": "step", "step": 9, "loss": [1]}\nnothing\n{"event": "st'
        )
    run = read_run(tmp_path)
    assert run.recipe == {} and len(run.curve("step", "loss")) == 4 and not run.curve("step", "acc1")
    assert run.notes == ["certificate.json is damaged: it is no JSON."]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds nothing of a training"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        read_run(tmp_path / "missing")


def test_only_an_accuracy_of_single_decisions_has_an_interval(tmp_path: Path) -> None:
    def with_evaluation(content: dict[str, Any]) -> RunRecord:
        evaluated = runs.line("evaluated", 40, acc1=0.9, held_out=20)
        return read_run(runs.write(tmp_path, runs.start(), evaluated, evaluation=content))

    run = with_evaluation(runs.evaluation([[8, 2], [0, 10]]))
    assert run.independent_samples() == 20 and run.bounds("f1", 0.9) is None
    assert run.bounds("acc1", 0.9) == pytest.approx((0.699, 0.972), abs=1e-3)
    assert run.bounds("accept_rate", 0.9) is None
    several = {**runs.evaluation([[8, 2], [0, 10]]), "samples": 4}  # several decisions in a sample
    assert with_evaluation(several).bounds("acc1", 0.9) is None
    assert with_evaluation({"samples": 20}).bounds("acc1", 0.9) is None  # tokens of a text: not independent
    assert with_evaluation({"confusion": [[1, "x"], [0, 1]]}).confusion == []


def test_an_interval_has_its_own_evaluations_count_not_a_later_commands(tmp_path: Path) -> None:
    lines = [
        runs.line("evaluated", step, acc1=0.9, held_out=count) for step, count in ((10, 1000), (20, 500))
    ]
    later = runs.evaluation(
        [[22000, 3000], [2000, 23000]]
    )  # `paddle-dp evaluate RUN evaluation.samples=null`
    run = read_run(runs.write(tmp_path, runs.start(), *lines, evaluation=later))
    assert run.independent_samples() == 500 and run.bounds("acc1", 0.9) == interval(0.9, 500)
    charts = dict(_score_charts(run))
    assert charts["acc1"][-1].bounds == [interval(0.9, 1000), interval(0.9, 500)]
