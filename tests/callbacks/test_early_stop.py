"""Early stop: patience is counted in evaluations, on every rank alike, through a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.callbacks.early_stop import Config
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.train import Callback, Run
from tests.callbacks.moments import At, Found

Feed = Callable[..., list[Any]]
NAN = float("nan")


@pytest.fixture
def feed(run: Run, at: At, found: Found, trainer: SimpleNamespace) -> Feed:
    """Starts after step `begin`, evaluates after each step from `begin` + 1, and returns why it was stopped."""

    def fed(values: list[float], begin: int = 0, run: Run = run, **config: Any) -> list[Any]:
        stop = Config(**config).build(run)
        stop.start(at("start", begin))
        trainer.asked.clear()
        for step, value in enumerate(values, start=begin + 1):
            stop.evaluated(at("evaluated", step), found(**{config.get("watch", "loss"): value}))
        return list(trainer.asked)

    return fed


def test_it_stops_when_patience_is_over_and_says_why(feed: Feed) -> None:
    assert feed([3, 2, 2, 2.5], patience=3) == []
    (reason,) = feed([3, 2, 2, 2.5, 4], patience=3)
    assert reason == "loss did not improve in 3 evaluations; the best was 2 at step 2"


@pytest.mark.parametrize(
    ("values", "config", "is_stopped"),
    [
        ([3, 4, 2, 4, 1, 4], {}, False),  # an improvement begins the wait anew
        ([0.5, 0.505, 0.509], {"watch": "acc1", "by": 0.01}, True),  # a little is no improvement
        ([0.5, 0.505, 0.52], {"watch": "acc1", "by": 0.01}, False),
        ([NAN, NAN, NAN], {}, True),  # no improvement, and no best
        ([NAN, 2.0, NAN, 1.0], {}, False),
    ],
)
def test_patience_is_two_evaluations(
    feed: Feed, values: list[float], config: dict[str, Any], is_stopped: bool
) -> None:
    assert bool(feed(values, patience=2, **config)) == is_stopped


def test_a_resume_remembers_what_it_waited_and_forgets_its_future(feed: Feed) -> None:
    feed([3, 2, 2, 1], patience=3)
    assert not feed([2], begin=3, patience=3)  # the 1 of step 4 was in a future that was not saved
    assert feed([2, 2], begin=3, patience=3)
    assert not feed([2, 2], begin=0, patience=3)  # a new beginning


def test_a_resume_of_a_training_that_is_over_ends_at_once(
    feed: Feed, run: Run, at: At, trainer: SimpleNamespace
) -> None:
    """It trained on until the next evaluation, to other last weights, and maybe beyond."""
    assert feed([3, 2, 2, 2.5], patience=2)
    for patience, count in ((2, 1), (3, 0)):
        trainer.asked.clear()
        Config(patience=patience).build(run).start(at("start", 4))
        assert len(trainer.asked) == count, patience
        assert all(
            reason.endswith("a higher callbacks.early_stop.patience trains on") for reason in trainer.asked
        )


def test_a_resume_in_another_folder_goes_on_with_the_history(
    feed: Feed, run: Run, at: At, trainer: SimpleNamespace
) -> None:
    feed([3, 2, 2, 1], patience=3)
    for old, new in (("run", "new"), ("new", "newer")):  # the second resumes before its first evaluation
        resumed: Any = SimpleNamespace(folder=run.folder.parent / old / "checkpoints/step-00000003")
        other = dataclasses.replace(run, folder=run.folder.parent / new, resumed=resumed)
        Config(patience=3).build(other).start(at("start", 3))
    assert feed([2, 2], begin=3, run=other, patience=3)


def test_another_number_has_another_history(feed: Feed) -> None:
    feed([3, 3, 3], patience=9)
    assert not feed([0.5], begin=3, watch="acc1", patience=2)


def test_the_last_step_needs_no_stop(feed: Feed, trainer: SimpleNamespace) -> None:
    trainer.total_steps = 3
    assert feed([1, 1, 1], patience=2) == []


def test_other_ranks_get_the_first_ones_history_and_write_nothing(
    run: Run, at: At, found: Found, trainer: SimpleNamespace
) -> None:
    class Second(Mesh):
        def gather(self, value: Any) -> list[Any]:
            assert value == []
            return [[[1, 1.0], [2, 1.0]], value]

    stop: Callback = Config(patience=2).build(dataclasses.replace(run, mesh=Second(rank=1, ranks=2)))
    stop.start(at("start", 2))
    stop.evaluated(at("evaluated", 3), found(loss=1.0))
    assert trainer.asked and not run.folder.exists()


def test_a_number_that_evaluations_will_not_have_is_refused_before_the_training(run: Run, at: At) -> None:
    with pytest.raises(
        UsageError, match=r"^callbacks\.early_stop\.watch: .* 'iou'\. They have acc1, glossary, loss\."
    ):
        Config(watch="iou").build(run).refuse(at("refuse", 0))
