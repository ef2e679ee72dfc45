"""The arithmetic of the recovery table, from logs that are written by hand."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.benchmark import recovery
from tools.benchmark.recovery_table import (
    Kill,
    counting,
    distance,
    lost_and_twice,
    median_step,
    read_log,
    row,
    samples_by_step,
    seconds_to_update,
    table,
)

Line = dict[str, Any]


def update(step: int, time: float, *samples: int, rank: int = 0, pid: int = 1) -> Line:
    return {
        "time": time, "began": time - 1.0, "rank": rank, "pid": pid, "step": step, "samples": list(samples)
    }  # fmt: skip


def begin(step: int, time: float, pid: int) -> Line:
    return {"time": time, "rank": 0, "pid": pid, "from": step}


# Of six samples, two a step. Step 3 is made twice, as the checkpoint is of step 2.
UNDISTURBED = samples_by_step([update(1, 1.0, 0, 1), update(2, 2.0, 2, 3), update(3, 3.0, 4, 5)])
RESTARTED = [
    begin(0, 10.0, 1), update(1, 11.0, 0, 1), update(2, 12.0, 2, 3), update(3, 13.0, 4, 5),
    begin(2, 18.0, 2), update(3, 19.0, 4, 5, pid=2),
]  # fmt: skip


def test_updates_after_the_checkpoint_of_a_restart_are_void() -> None:
    kept = counting(RESTARTED)
    assert [(line["step"], line["pid"]) for line in kept] == [(1, 1), (2, 1), (3, 2)]
    assert lost_and_twice(samples_by_step(kept), UNDISTURBED, 3) == (0, 0)


def test_samples_that_are_missing_or_come_again_are_counted() -> None:
    alone = samples_by_step([update(1, 1.0, 0), update(2, 2.0, 2, 3), update(3, 3.0, 4, 5)])
    assert lost_and_twice(alone, UNDISTURBED, 3) == (1, 0)
    again = samples_by_step([update(1, 1.0, 0, 1), update(2, 2.0, 0, 1), update(3, 3.0, 4, 5)])
    assert lost_and_twice(again, UNDISTURBED, 3) == (2, 2)
    swapped = samples_by_step([update(1, 1.0, 2, 3), update(2, 2.0, 0, 1), update(3, 3.0, 4, 5)])
    assert lost_and_twice(swapped, UNDISTURBED, 3) == (0, 0)
    assert lost_and_twice(swapped, UNDISTURBED, 1) == (4, 4)  # in another epoch it is another use
    both = samples_by_step([update(1, 1.0, 0, rank=0), update(1, 1.0, 0, rank=1)])
    assert both == {1: Counter({0: 2})}


def test_the_wait_after_a_kill_ends_with_an_update_that_began_after_it() -> None:
    # The update at 13.0 was on its way at 12.5: a survivor's, that ends after the kill, is no recovery.
    assert seconds_to_update(Kill(time=12.5, kind="rank"), RESTARTED) == pytest.approx(6.5)
    assert seconds_to_update(Kill(time=30.0, kind="rank"), RESTARTED) is None
    # An orphan's, between its supervisor's end and its own, is none either.
    orphan = [update(4, 13.6, 7), *RESTARTED]
    kill = Kill(time=12.5, kind="supervisor", ended=frozenset([1]))
    assert seconds_to_update(Kill(time=12.5, kind="supervisor"), orphan) == pytest.approx(1.1)
    assert seconds_to_update(kill, orphan) == pytest.approx(6.5)


def test_a_row_has_goodput_by_samples_and_by_updates() -> None:
    kills = [Kill(time=12.5, kind="rank")]
    found = row("ours", 30.0, RESTARTED, kills, UNDISTURBED, 3, (0, 0.0))
    assert median_step(RESTARTED) == 1.0 and found.seconds == 9.0
    assert found.goodput == found.by_updates == pytest.approx(3 / 9)
    survivor = [update(1, 11.0, 0, 1), update(2, 12.0, 2), update(3, 13.0, 4, 5)]
    found = row("survivor", 30.0, survivor, kills, UNDISTURBED, 3, (7, 0.25))
    assert (found.goodput, found.by_updates) == (pytest.approx(5 / 6), 1.0) and (found.lost, found.twice) == (
        1,
        0,
    )
    assert table([found]).splitlines()[-1] == (
        "| survivor | 30 s | 1 | 3 | 83% | 100% | – | – | 1 | 0 | 2.5e-01 |"
    )


def test_distances_are_counted_in_bits() -> None:
    one, minus = {"w": np.array([0.0, 1.0], "float32")}, {"w": np.array([-0.0, 1.5], "float32")}
    assert distance(one, one) == (0, 0.0)
    assert distance(one, minus) == (2, 0.5)
    with pytest.raises(ValueError, match="not the same weights"):
        distance(one, {"w": np.zeros(3, "float32")})


def test_half_a_line_of_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-0-1.jsonl").write_text(json.dumps(RESTARTED[1]) + "\n" + '{"time": 12')
    (tmp_path / "rank-1-2.jsonl").write_text(json.dumps(RESTARTED[0]) + "\n")
    assert read_log(tmp_path) == RESTARTED[:2]


def test_rows_are_chosen_and_added_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def systems(*words: str) -> list[recovery.System]:
        monkeypatch.setattr(sys, "argv", ["recovery.py", *words])
        return recovery.chosen_systems(recovery.arguments())

    assert systems() == recovery.SYSTEMS
    added = systems("--systems", "torchrun", "--ours", "quick=--ranks 2 --restarts 9 'watch.patience=9 s'")
    assert [system.name for system in added] == ["torchrun", "quick"]
    assert added[1].options == ("--ranks", "2", "--restarts", "9", "watch.patience=9 s")
    with pytest.raises(SystemExit, match="'torhcrun' is none of"):
        systems("--systems", "torhcrun")
    with pytest.raises(SystemExit):
        systems("--kinds", "rank,planet")
