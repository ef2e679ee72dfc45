"""metrics.jsonl: every event a line of standard JSON, and a resumed run's file reads as if it was never stopped."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.callbacks.metrics import Config
from paddle_dp.errors import StoppedError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import Callback, Moment, Refusal, Run
from tests.callbacks.moments import At, Found


def lines(run: Run) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not standard JSON")

    text = (run.folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def started(run: Run, moment: Moment) -> Callback:
    metrics = Config().build(run)
    metrics.start(moment)
    return metrics


def test_every_event_is_a_line(run: Run, at: At, found: Found) -> None:
    metrics = started(run, at("start", 0))
    metrics.step(at("step", 4, loss=1.5, acc1=0.5))
    metrics.epoch(at("epoch", 4))
    metrics.evaluated(at("evaluated", 4), found(loss=1.0))
    metrics.saved(at("saved", 4), Path("checkpoints/step-00000004"))
    metrics.end(at("end", 4))
    metrics.failed(at("failed", 4), ValueError("a reason"))
    start, step, epoch, evaluated, saved, end, failed = lines(run)
    assert start["event"] == "start" and start["ranks"] == 1 and start["total_steps"] == 20
    assert step["loss"] == 1.5 and step["acc1"] == 0.5 and step["samples"] == 8 and step["step"] == 4
    assert epoch["event"] == "epoch" and epoch["epoch"] == 1
    assert evaluated["loss"] == 1.0 and evaluated["held_out"] == 8
    assert saved["checkpoint"] == "step-00000004"
    assert end["stopped"] is None
    assert failed["kind"] == "ValueError" and failed["message"] == "a reason"


def test_a_job_of_several_nodes_names_their_number(run: Run, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes in ("1", "2"):
        monkeypatch.setenv("PADDLE_NNODES", nodes)
        started(run, at("start", 0))
    alone, both = lines(run)
    assert "nodes" not in alone and both["nodes"] == 2


def test_numbers_that_are_not_finite_are_null_and_said(run: Run, at: At) -> None:
    metrics = started(run, at("start", 0))
    metrics.step(at("step", 1, loss=float("nan"), gradient_norm=float("inf"), lr=0.1))
    line = lines(run)[-1]
    assert line["loss"] is None and line["gradient_norm"] is None and line["lr"] == 0.1
    assert line["not_finite"] == {"loss": "nan", "gradient_norm": "inf"}


def test_a_resume_drops_what_will_be_done_again(run: Run, at: At) -> None:
    metrics = started(run, at("start", 0))
    for step in range(1, 8):
        metrics.step(at("step", step, loss=float(step)))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "step": 4, "lo')  # killed in the middle of a line
    again = started(run, at("start", 5))
    again.step(at("step", 6, loss=60.0))
    steps = [(line["step"], line["loss"]) for line in lines(run) if line["event"] == "step"]
    assert steps == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 60.0)]
    assert [line["step"] for line in lines(run) if line["event"] == "start"] == [0, 5]


@pytest.mark.parametrize(
    ("error", "pause"), [(None, 8000.0), (StoppedError("SIGTERM"), 8000.0), (ValueError(), 0.0)]
)
def test_a_resume_from_an_earlier_step_keeps_how_long_nobody_waited(
    run: Run, at: At, monkeypatch: pytest.MonkeyPatch, error: Exception | None, pause: float
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(heartbeat, "born", 995.0)
    metrics = started(run, at("start", 0))
    if error is None:
        metrics.end(at("end", 8))
    else:
        metrics.failed(at("failed", 8), error)
    now = 9003.0
    monkeypatch.setattr(heartbeat, "born", 9000.0)
    started(run, at("start", 4))
    first, last = lines(run)
    assert "pause_seconds" not in first and last.get("pause_seconds", 0.0) == pause


def test_a_rewind_to_before_a_resume_keeps_its_start(
    run: Run, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it went the ranks, and the seconds of the pause before it, in which nobody waited."""
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(heartbeat, "born", 1000.0)
    metrics = started(run, at("start", 0))
    metrics.step(at("step", 3))
    metrics.end(at("end", 8))
    now = 9000.0
    monkeypatch.setattr(heartbeat, "born", 9000.0)
    metrics = started(run, at("start", 8))
    assert [line["event"] for line in lines(run)] == ["start", "step", "end", "start"]
    for step in (5, 4):
        now += 10
        refusal = Refusal(step=10, epoch=0, batch=9, samples=[], why="", action="rewind")
        metrics.refused(at("refused", step), refusal)
        first, _, again, refused = lines(run)
        assert (again["event"], again["step"], again["time"], again["ranks"]) == ("start", step, 9000.0, 1)
        assert "pause_seconds" not in first and again["pause_seconds"] == 8000.0
        assert refused["event"] == "refused"


def test_an_evaluation_told_again_at_the_step_of_a_resume_is_one_line(run: Run, at: At, found: Found) -> None:
    started(run, at("start", 0)).evaluated(at("evaluated", 4), found(loss=1.0))
    started(run, at("start", 4)).evaluated(at("evaluated", 4), found(loss=1.0))
    assert [line["event"] for line in lines(run)] == ["start", "evaluated", "start"]


def test_an_evaluation_after_the_end_is_written_too(run: Run, at: At, found: Found) -> None:
    metrics = started(run, at("start", 0))
    metrics.end(at("end", 3))
    metrics.evaluated(at("evaluated", 3), found(loss=1.0))
    assert lines(run)[-1]["event"] == "evaluated"


def test_other_ranks_write_nothing_and_are_due_at_the_same_steps(run: Run, at: At) -> None:
    other = Config().build(dataclasses.replace(run, mesh=Mesh(rank=1, ranks=2)))
    first = Config().build(run)
    assert type(first) is type(other)
    other.start(at("start", 0))
    other.step(at("step", 10, loss=1.0))
    assert not run.folder.exists()
    # Numbers are an exchange of all ranks: who is due and who reads must agree.
    assert all(first.due_at_step(step) == other.due_at_step(step) for step in range(1, 40))
    assert first.reads == other.reads


def test_a_long_file_is_resumed_without_being_held_in_memory(run: Run, at: At) -> None:
    started(run, at("start", 0)).step(at("step", 4, loss=1.5))
    path = run.folder / "metrics.jsonl"
    text = path.read_bytes()
    step = text.splitlines(keepends=True)[-1]
    odd = b'{"event": "step", "epoch": 0, "step": 4, "lo' + step + b"7\n[]\n{}\n" + step.rstrip()
    path.write_bytes(text + 100_000 * step + odd)
    tracemalloc.start()
    started(run, at("start", 4))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.read_bytes().startswith(text + 100_001 * step + b'{"event": "start"')
    assert path.stat().st_size > 10e6 and peak < 6e6
