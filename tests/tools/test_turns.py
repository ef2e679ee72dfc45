"""Turns: a busy minute meets every way, a turn to get warm does not count, and ratios are those within a turn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.benchmark.turns import in_turns, ratio, train_in_turns


def test_ratios_within_a_turn_do_not_see_a_machine_that_becomes_slower() -> None:
    time, load = [0.0], [100.0]  # the first turn is far slower

    def call(seconds: float) -> None:
        time[0] += load[0] * seconds

    def last() -> None:
        call(3.0)
        load[0] = 1.0 if load[0] == 100.0 else load[0] + 1

    seconds = in_turns({"a": lambda: call(1.0), "b": last}, 3, 1, lambda: time[0])
    assert seconds == {"a": [1.0, 2.0, 3.0], "b": [3.0, 6.0, 9.0]}
    assert ratio(seconds["b"], seconds["a"]) == 3.0


def test_a_turn_has_its_number_of_calls_and_their_mean_counts() -> None:
    calls: list[int] = []
    seconds = in_turns({"a": lambda: calls.append(1)}, 2, 5, lambda: float(len(calls)))
    assert len(calls) == 15 and seconds == {"a": [1.0, 1.0]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_trainer_waits_as_often_as_the_others(tmp_path: Path, rank: int) -> None:
    meetings, batches = [], list[Any]()
    mesh = SimpleNamespace(sum=meetings.append, is_main=rank == 0)
    loader = SimpleNamespace(read=lambda epoch: [(epoch, 0), (epoch, 1)])
    trainer = SimpleNamespace(loader=loader, learner=SimpleNamespace(train_batch=batches.append))
    train_in_turns({"one": None if rank else trainer, "all": trainer}, mesh, 3, 1, str(tmp_path))
    assert len(meetings) == 2 * 2 * 2
    assert batches[:3] == [(0, 0), (0, 1), (1, 0)]  # epoch after epoch
    assert len(batches) == (6 if rank else 12)
    written = tmp_path / "seconds.json"
    assert written.exists() == (rank == 0)
    if rank == 0:
        assert {name: len(times) for name, times in json.loads(written.read_text()).items()} == {
            "one": 1,
            "all": 1,
        }
