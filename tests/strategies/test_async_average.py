"""Ranks that do not wait for each other: every sample once, who is slow delays nobody, and it learns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.strategies.local_runs import train, trainer

ASYNC = "strategy={use: async_average, staleness: 4}"


def watched(
    folder: str, words: list[str], slow: int | None = None, seconds: float = 0.0, computes: float = 0.0
) -> dict[str, Any]:
    """Trains; each share takes a rank `computes` seconds more, and the `slow` one `seconds` besides. What this rank
    has learned from, (epoch, batch, first sample), when, and what it was told."""
    from paddle_dp.train import Callback

    here = trainer(folder, words)
    learner, seen, rows, looked = here.learner, [], [], []
    part, name = (
        (learner, "train_batch") if learner.async_rank is None else (learner.async_rank, "train_share")
    )
    learn = getattr(part, name)

    def watching(batch: Any, *given: Any, **named: Any) -> Any:
        time.sleep(computes + (seconds if here.mesh.rank == slow else 0.0))
        found = learn(batch, *given, **named)
        seen.append([time.monotonic(), batch.epoch, batch.index, batch.micro_batches[0].first])
        return found

    class Told(Callback):
        def step(self, moment: Any) -> None:
            rows.append(
                [moment.progress.step, moment.progress.samples, moment.numbers.get("loss")]
            )  # none before a share is done

    class Looks(Callback):
        reads = False

        def step(self, moment: Any) -> None:
            if moment.progress.step % 30 == 0:
                looked.append([moment.progress.step, moment.progress.samples, len(seen)])

        def due_at_step(self, step: int) -> bool:
            return step % 30 == 0

    setattr(part, name, watching)
    here.add(Told())
    here.add(Looks())
    here.fit()
    return {"seen": seen, "rows": rows, "looked": looked, "held_out": dict(here.evaluate().numbers)}


def each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [watched(**case) for case in cases]


def rate(seen: list[list[float]]) -> float:
    """Shares a second between a rank's first and its last."""
    return (len(seen) - 1) / (seen[-1][0] - seen[0][0])


@pytest.mark.long
def test_every_share_is_learned_from_once_and_meetings_are_where_they_are_due(tmp_path: Path):
    """25 samples in one micro-batch are 8 + 8 + 9 on three ranks; the last batch of an epoch has 12."""
    dashboard = "callbacks=[{use: metrics, every: 7 steps}, {use: dashboard, every: 7 steps, images: 0}]"
    words = [ASYNC, "train.length=2 epochs", "train.micro_batches=1", dashboard]
    found = run_ranks(watched, 3, str(tmp_path), words, slow=1, seconds=0.01)
    seen = [tuple(row[1:]) for rank in found for row in rank["seen"]]
    wanted = [
        (epoch, k, first)
        for epoch in range(2)
        for k in range(58)
        for first in ((0, 8, 16) if k < 57 else (0, 4, 8))
    ]
    assert sorted(seen) == wanted
    assert len(found[1]["seen"]) < len(found[0]["seen"])
    for rank in found:
        assert [row[0] for row in rank["rows"]] == list(range(1, 117))
        assert rank["rows"][-1][1] == 2 * 1437
        assert [row[:2] for row in rank["looked"]] == [[30, 750], [60, 1487], [90, 2237]]
    assert sum(rank["looked"][0][2] for rank in found) == 90, "all shares are done where the ranks meet"
    assert found[0]["held_out"] == found[2]["held_out"]
    assert found[0]["held_out"]["loss"] < 1.9


@pytest.mark.long
def test_a_slow_rank_leaves_the_others_their_speed(tmp_path: Path):
    """Of four ranks that compute 10 ms a share one takes 50 ms more. Sleeping stands for computing: four ranks that
    compute on two cores gain from one that is slow."""
    more = ["train.length=230 steps", "train.batch=64", "strategy.check_every=null", "train.micro_batches=1"]
    data = ["strategy={use: data_parallel, check_every: null}", *more]
    free = ["strategy={use: async_average, staleness: 4, check_every: null}", *more]
    cases = [
        {"folder": str(tmp_path / str(n)), "words": words, "slow": 3, "seconds": seconds, "computes": 0.01}
        for n, (words, seconds) in enumerate([(data, 0.0), (data, 0.05), (free, 0.0), (free, 0.05)])
    ]
    found = run_ranks(each, 4, cases, timeout=300)
    of_cases = [[rate(of_rank[case]["seen"]) for of_rank in found] for case in range(4)]
    kept = [sum(of_cases[n + 1][:3]) / sum(of_cases[n][:3]) for n in (0, 2)]
    print(
        f"shares a second by rank: {of_cases}; the others keep {kept[0]:.0%} in data_parallel, {kept[1]:.0%} here"
    )
    assert kept[0] < 0.5
    assert kept[1] > 0.8
    samples = [len(of_rank[3]["seen"]) for of_rank in found]
    assert sum(samples) == 230 * 4
    assert samples[3] < samples[0] / 2


def test_one_rank_alone_learns_what_one_process_learns(tmp_path: Path):
    """With α = β it was exchanged for its center, and learned every second step."""
    alone, one = (
        train(str(tmp_path / str(number)), [strategy], "6 steps")
        for number, strategy in enumerate(
            ["strategy={use: async_average, every: 1 step}", "strategy={use: single}"]
        )
    )
    assert alone["held_out"] == pytest.approx(one["held_out"], rel=1e-5)
