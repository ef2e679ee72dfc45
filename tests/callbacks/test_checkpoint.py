"""The checkpoint callback: one save a step, the newest few and the best, in whatever order it is told."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks.checkpoint import Config
from paddle_dp.errors import UsageError
from paddle_dp.train import Callback, Run
from paddle_dp.units import Every
from tests.callbacks.moments import At, Found, best_step, saved_steps

Built, Tell = Callable[..., Callback], Callable[..., None]


@pytest.fixture
def built(run: Run, at: At) -> Built:
    """The callback, started after step `begin`; the trainer's snapshot is of the step it is asked at."""

    def build(begin: int = 0, resumed: Any = None, **config: Any) -> Callback:
        callback = Config(**config).build(dataclasses.replace(run, resumed=resumed))
        callback.refuse(at("refuse", begin))
        callback.start(at("start", begin))
        return callback

    return build


@pytest.fixture
def tell(at: At, trainer: SimpleNamespace) -> Tell:
    def told(callback: Callback, name: str, step: int, *what: Any) -> None:
        trainer.step = step
        getattr(callback, name)(at(name, step), *what)

    return told


def test_the_newest_few_stay_and_every_save_is_told(
    run: Run, built: Built, tell: Tell, trainer: SimpleNamespace
) -> None:
    callback = built(keep=2)
    for step in (4, 8, 12):
        tell(callback, "epoch", step)
    assert saved_steps(run) == [8, 12]
    assert trainer.asked == [("saved", run.folder / f"checkpoints/step-{s:08d}") for s in (4, 8, 12)]


def test_a_save_removes_the_unfinished_folder_of_a_killed_job_that_appears_late(
    run: Run, built: Built, tell: Tell
) -> None:
    """On a shared disk the start removed what it saw of the folder, without another machine's file."""
    callback, late = built(), run.folder / "checkpoints/.step-00000002.partial-1-0123abcd"
    late.mkdir(parents=True)
    (late / "rank-1.tensors").touch()
    tell(callback, "epoch", 4)
    assert saved_steps(run) == [4] and not late.exists()


def test_the_end_is_saved_once(run: Run, built: Built, tell: Tell) -> None:
    callback = built()
    tell(callback, "epoch", 4)
    tell(callback, "end", 4)
    assert saved_steps(run) == [4]
    tell(callback, "end", 6)
    assert saved_steps(run) == [4, 6]


@pytest.mark.parametrize("first", ["epoch", "evaluated"])
def test_the_best_is_the_evaluated_step_whatever_is_told_first(
    run: Run, built: Built, tell: Tell, found: Found, first: str
) -> None:
    callback = built(keep=1, best="acc1")
    for step, accuracy in ((4, 0.5), (8, 0.9), (12, 0.7), (16, 0.8)):
        moments = [("epoch",), ("evaluated", found(acc1=accuracy))]
        for name, *what in moments if first == "epoch" else reversed(moments):
            tell(callback, name, step, *what)
    assert best_step(run) == 8
    assert checkpoints.best_numbers(run.folder / "checkpoints") == {"acc1": 0.9, "held_out": 8}
    assert saved_steps(run) == [8, 16]


def test_a_best_that_is_not_due_is_saved_for_itself(run: Run, built: Built, tell: Tell, found: Found) -> None:
    callback = built(every=None, best="loss")
    assert not callback.due_at_step(4) and not callback.due_at_epoch(1)
    tell(callback, "evaluated", 4, found(loss=1.0))
    tell(callback, "evaluated", 8, found(loss=2.0))
    assert saved_steps(run) == [4]


def test_who_was_the_best_goes_at_once(run: Run, built: Built, tell: Tell, found: Found) -> None:
    callback = built(keep=1, best="acc1")
    for step, accuracy in ((4, 0.5), (8, 0.9)):
        tell(callback, "epoch", step)
        tell(callback, "evaluated", step, found(acc1=accuracy))
    assert saved_steps(run) == [8]


def test_a_resume_knows_the_best_but_not_one_of_its_future(
    run: Run, built: Built, tell: Tell, found: Found
) -> None:
    tell(built(best="acc1"), "evaluated", 8, found(acc1=0.9))
    tell(built(begin=8, best="acc1"), "evaluated", 12, found(acc1=0.8))
    assert saved_steps(run) == [8]
    tell(built(begin=4, best="acc1"), "evaluated", 6, found(acc1=0.7))
    assert best_step(run) == 6


def test_a_resume_from_an_earlier_step_leaves_no_newer_checkpoint(
    run: Run, built: Built, tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The abandoned ones stayed the newest, and those of the resumed training were deleted before them."""
    callback = built()
    for step in (4, 8, 12):
        tell(callback, "epoch", step)
    capsys.readouterr()
    resumed = SimpleNamespace(folder=run.folder / "checkpoints/step-00000004")
    callback = built(begin=4, resumed=resumed)
    aside = run.folder / "checkpoints/abandoned-1"
    assert f"(step-00000008, step-00000012) are now in {aside}." in capsys.readouterr().err
    for step in (5, 6):
        tell(callback, "epoch", step)
    assert saved_steps(run) == [4, 5, 6]
    assert [path.name for path in checkpoints.checkpoints(aside)] == ["step-00000008", "step-00000012"]


def test_a_resume_that_has_nothing_to_do_saves_nothing_anew(
    run: Run, built: Built, tell: Tell, trainer: SimpleNamespace
) -> None:
    tell(built(), "end", 4)
    resumed = SimpleNamespace(folder=run.folder / "checkpoints/step-00000004")
    trainer.asked.clear()
    tell(built(begin=4, resumed=resumed), "end", 4)
    assert trainer.asked == []


def test_a_run_from_anothers_checkpoint_saves_its_own(
    run: Run, built: Built, tell: Tell, tmp_path: Path
) -> None:
    resumed = SimpleNamespace(folder=tmp_path / "other/checkpoints/step-00000004")
    tell(built(begin=4, resumed=resumed), "end", 4)
    assert saved_steps(run) == [4]


def test_steps_and_epochs_are_not_mixed_up(built: Built) -> None:
    by_step = built(every=Every.parse("5 steps"))
    assert by_step.due_at_step(5) and not by_step.due_at_step(4) and not by_step.due_at_epoch(1)
    by_epoch = built(every=Every.parse("2 epochs"))
    assert by_epoch.due_at_epoch(2) and not by_epoch.due_at_epoch(1) and not by_epoch.due_at_step(2)


def test_a_best_that_nobody_measures_is_refused_before_the_training(built: Built) -> None:
    with pytest.raises(UsageError, match=r"^callbacks\.checkpoint\.best: .* 'acc'\. Did you mean 'acc1'\?"):
        built(best="acc")


def test_two_of_them_are_refused_if_one_writes_in_the_background(
    run: Run, at: At, trainer: SimpleNamespace
) -> None:
    """One removed the unfinished folder that the other one was writing, and the training ended."""
    settings = [Config(), Config(every=Every.parse("3 steps")), Config(async_=True)]
    trainer.callbacks = [config.build(run) for config in settings]
    for callback in trainer.callbacks:
        with pytest.raises(UsageError, match=r"^callbacks\.checkpoint: 3 of them .*leave async out\.$"):
            callback.refuse(at("refuse", 0))
    del trainer.callbacks[-1]
    trainer.callbacks[0].refuse(at("refuse", 0))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (deque([0.1]), r"^schedule\.recent is a deque.* Let its state_dict\(\) have numbers, strings"),
        (np.zeros(2), r"^schedule\.recent is a ndarray"),
        ({0: 0.1}, r"^schedule\.recent has the key 0"),
        ({"a": (1, np.float64(0.1), float("inf"))}, ""),
    ],
)
def test_a_schedule_that_no_checkpoint_could_hold_is_refused_before_the_training(
    built: Built, trainer: SimpleNamespace, value: Any, told: str
) -> None:
    """The training ended at its first checkpoint, without one."""
    trainer.learner.rate.schedule = SimpleNamespace(state_dict=lambda: {"last_epoch": 0, "recent": value})
    with pytest.raises(UsageError, match=told) if told else nullcontext():
        built()


def test_a_best_that_nobody_measures_is_a_sentence_where_no_one_could_say_so_before(
    built: Built, tell: Tell, found: Found, trainer: SimpleNamespace
) -> None:
    trainer.evaluation_names = lambda: {"accuracy"}
    with pytest.raises(UsageError, match=r"checkpoint\.best: .*'accuracy'"):
        tell(built(best="accuracy"), "evaluated", 4, found(acc1=0.5))


def test_the_best_of_other_held_out_samples_is_no_best(
    run: Run, built: Built, tell: Tell, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a resume with another `evaluation.samples`, acc1 1.0 on three samples stayed the best for good."""
    tell(built(best="acc1"), "evaluated", 4, found(acc1=0.9))
    tell(built(begin=4, best="acc1"), "evaluated", 8, found(acc1=0.8))
    assert best_step(run) == 4
    assert run.test_loader is not None
    object.__setattr__(run.test_loader.sampler, "samples", 3)
    callback = built(begin=8, best="acc1")
    assert (
        "step-00000004 was the best of 8 held-out samples, and 3 are evaluated now" in capsys.readouterr().err
    )
    tell(callback, "evaluated", 12, found(acc1=0.5))
    assert best_step(run) == 12
