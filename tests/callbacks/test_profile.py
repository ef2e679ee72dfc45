"""The profile: a window of steps, a trace in the format that Perfetto reads, a table."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import paddle
import pytest

from paddle_dp.callbacks.profile import Config, tidied
from paddle_dp.mesh import Mesh
from paddle_dp.train import Refusal, Run
from tests.callbacks.moments import At, Capture


def train(run: Run, at: At, count: int, begin: int = 0, **config: Any) -> None:
    profile = Config(**config).build(run)
    profile.start(at("start", begin))
    for step in range(begin + 1, begin + count + 1):
        paddle.nn.functional.relu(paddle.ones([4]))
        if profile.due_at_step(step):
            profile.step(at("step", step))
    profile.end(at("end", begin + count))


def shown(run: Run) -> list[dict[str, Any]]:
    content = json.loads((run.folder / "profile/rank-0.json").read_text())
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


@pytest.mark.parametrize("begin", [0, 7])
def test_the_window_is_counted_from_where_the_run_begins(run: Run, at: At, begin: int) -> None:
    train(run, at, 8, begin=begin, start=2, steps=3)
    names = [event["name"] for event in shown(run)]
    assert sorted(n for n in names if n.startswith("ProfileStep")) == [f"ProfileStep#{i}" for i in range(3)]
    assert sum(name == "relu dygraph" for name in names) == 3
    assert "relu" in (run.folder / "profile/rank-0.txt").read_text()


def test_outside_its_window_it_has_no_effect(run: Run, at: At) -> None:
    """Asynchronous ranks met after every step for it, and new weights did not arrive during the next forward."""
    profile = Config(start=2, steps=3).build(run)
    profile.start(at("start", 7))
    assert [step for step in range(8, 20) if profile.due_at_step(step)] == [9, 10, 11, 12]
    assert not profile.weights


def test_every_slice_has_what_the_format_asks_for(run: Run, at: At) -> None:
    train(run, at, 3, start=0, steps=2)
    for event in shown(run):
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] > 0 and event["dur"] >= 0 and event["name"]


def test_a_training_that_ends_in_the_window_leaves_what_there_is(run: Run, at: At) -> None:
    train(run, at, 3, start=1, steps=50)
    assert sum(event["name"] == "relu dygraph" for event in shown(run)) == 2


def test_a_training_that_ends_before_it_says_so(run: Run, at: At, capsys: Capture) -> None:
    train(run, at, 3, start=10)
    assert not (run.folder / "profile").exists()
    assert "nothing was recorded, the training ended before its step 11" in capsys.readouterr().out


@pytest.mark.parametrize("back_to", [1, 3])
def test_a_rewind_begins_the_window_anew(run: Run, at: At, back_to: int) -> None:
    """A second profiler was begun beside the first, and the training ended in an AttributeError."""
    profile = Config(start=2, steps=2).build(run)
    profile.start(at("start", 0))
    for step in range(1, 4):
        profile.step(at("step", step))
    refusal = Refusal(step=4, epoch=0, batch=3, samples=[], why="spike", action="rewind")
    profile.refused(at("refused", back_to), refusal)
    for step in range(back_to + 1, 8):
        paddle.nn.functional.relu(paddle.ones([4]))
        if profile.due_at_step(step):
            profile.step(at("step", step))
    assert sum(event["name"] == "relu dygraph" for event in shown(run)) == 2


def test_other_ranks_record_when_asked(run: Run, at: At) -> None:
    second = dataclasses.replace(run, mesh=Mesh(rank=1, ranks=2))
    train(second, at, 2, start=0, steps=1)
    assert not (run.folder / "profile").exists()
    train(second, at, 2, start=0, steps=1, all_ranks=True)
    assert (run.folder / "profile/rank-1.json").exists()


def test_names_can_be_added_up_and_threads_are_numbers() -> None:
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 7, "tid": "7(C++)", "args": {"name": "main"}},
        {"name": "relu[3.1 us]", "ph": "X", "pid": 7, "tid": "7(C++)", "ts": 1, "dur": 3},
        {"name": "x[0]", "ph": "X", "pid": 7, "tid": "7(Python)", "ts": 1, "dur": 3},
        {},
    ]
    thread, relu, other = tidied(events)
    assert relu["name"] == "relu" and other["name"] == "x[0]"
    assert thread["tid"] == relu["tid"] == 1 and other["tid"] == 2
