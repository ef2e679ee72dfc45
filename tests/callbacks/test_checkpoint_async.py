"""The checkpoint callback that writes in the background, and what a disk that takes nothing does to a training."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks.checkpoint import CheckpointCallback, Config
from paddle_dp.checkpoint import NotWrittenError, background, saving
from paddle_dp.part import read_part
from paddle_dp.train import Callback, Run
from paddle_dp.units import Every
from tests.callbacks.moments import At, Capture, Found, best_step, saved_steps

Tell = Callable[..., None]


@pytest.fixture
def saves(trainer: SimpleNamespace) -> SimpleNamespace:
    """The trainer; what is saved and what is not stands in `told` with the step."""
    trainer.told = []

    def saved(path: Path, progress: Any = None, numbers: Any = None) -> None:
        trainer.told.append(("saved", progress.step, sorted(numbers)))

    trainer.tell_saved = saved
    trainer.tell_save_failed = lambda error, progress=None: trainer.told.append(("failed", progress.step))
    return trainer


@pytest.fixture
def tell(at: At, saves: SimpleNamespace) -> Tell:
    """Tells the callback of a moment after a step; "step" only when it is due."""

    def moment(callback: Callback, name: Any, step: int, *detail: Any) -> None:
        saves.step = step
        if name != "step" or callback.due_at_step(step):
            getattr(callback, name)(at(name, step), *detail)

    return moment


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, nothing is written."""
    opened, write = threading.Event(), background.write_rank

    def held(*given: Any) -> Any:
        assert opened.wait(20)
        return write(*given)

    monkeypatch.setattr(background, "write_rank", held)
    yield opened
    opened.set()


def build(run: Run, at: At, **config: Any) -> CheckpointCallback:
    callback = Config(**{"async_": True, "every": Every.parse("10 steps"), **config}).build(run)
    assert isinstance(callback, CheckpointCallback)
    callback.start(at("start", 0))
    return callback


def written(callback: CheckpointCallback, is_under_way: bool = True) -> None:
    """Waits for it: a save that waits for the one before says so, and how long that takes is the machine's matter."""
    assert callback._writing is not None or not is_under_way
    if callback._writing is not None:
        callback._writing.save._thread.join()


NUMBERS = ["seconds_stalled", "seconds_waiting", "seconds_writing"]


def test_async_is_its_name_in_a_recipe() -> None:
    part = read_part("callbacks", {"use": "checkpoint", "async": True})
    assert part.config.async_ is True and part.settings["async"] is True


def test_training_goes_on_and_hears_of_it_when_it_is_there(
    run: Run, at: At, tell: Tell, saves: SimpleNamespace, gate: threading.Event
) -> None:
    callback = build(run, at)
    asked = []
    for step in range(1, 18):
        asked += [step] if callback.due_at_step(step) else []
        tell(callback, "step", step)
    assert asked == [10, 11, 12, 14] and saved_steps(run) == [] and saves.told == []
    gate.set()
    written(callback)
    assert saved_steps(run) == [10] and saves.told == []
    tell(callback, "step", 18)
    assert saves.told == [("saved", 10, NUMBERS)]


def test_never_two_at_once(
    run: Run, at: At, tell: Tell, saves: SimpleNamespace, gate: threading.Event, capsys: Capture
) -> None:
    callback = build(run, at)
    tell(callback, "step", 10)
    second = threading.Thread(target=tell, args=(callback, "step", 20))
    second.start()
    second.join(0.3)
    assert second.is_alive() and saves.told == []  # it waits, however long that takes here
    gate.set()
    second.join()
    assert saves.told == [("saved", 10, NUMBERS)] and 10 in saved_steps(run)
    assert re.search(r"The checkpoint of step 20 waited [\d.]+ s for the one before", capsys.readouterr().err)
    tell(callback, "end", 21)
    assert [row[1] for row in saves.told] == [10, 20, 21] and saved_steps(run) == [10, 20, 21]


@pytest.mark.parametrize(
    ("moment", "step", "detail", "saved", "told"),
    [
        ("end", 10, (), [10], [("saved", 10, NUMBERS)]),
        ("interrupted", 10, (), [10], [("saved", 10, NUMBERS)]),
        ("rewinding", 12, (), [10], [("saved", 10, NUMBERS)]),
        ("failed", 12, (ValueError("a reason"),), [10], []),
        ("failed", 12, (KeyboardInterrupt(),), [], []),
    ],
)
def test_all_but_a_second_interrupt_wait_for_it(
    run: Run, at: At, tell: Tell, saves: SimpleNamespace, gate: threading.Event,
    moment: str, step: int, detail: Any, saved: list[int], told: list[Any],
) -> None:  # fmt: skip
    callback = build(run, at)
    tell(callback, "step", 10)
    if saved:
        threading.Timer(0.1, gate.set).start()
    tell(callback, moment, step, *detail)
    assert saved_steps(run) == saved and saves.told == told


def test_the_best_is_named_when_it_is_there(
    run: Run, at: At, tell: Tell, found: Found, gate: threading.Event
) -> None:
    callback, folder = build(run, at, best="acc1", keep=1), run.folder / "checkpoints"
    tell(callback, "evaluated", 5, found(acc1=0.5))
    assert checkpoints.best(folder) is None
    gate.set()
    tell(callback, "step", 10)
    assert best_step(run) == 5
    tell(callback, "evaluated", 10, found(acc1=0.4))
    tell(callback, "step", 20)
    tell(callback, "evaluated", 20, found(acc1=0.6))  # it is being written for its step
    tell(callback, "end", 22)
    assert best_step(run) == 20
    assert saved_steps(run) == [20, 22]


def test_the_best_is_named_by_the_time_it_is_there(
    run: Run, at: At, tell: Tell, found: Found, gate: threading.Event
) -> None:
    """A kill may come before the next look at it, and the resumed training would not know of it."""
    callback, folder = build(run, at, best="acc1"), run.folder / "checkpoints"
    tell(callback, "step", 10)
    tell(callback, "evaluated", 10, found(acc1=0.5))
    gate.set()
    written(callback)
    assert checkpoints.best(folder) == folder / "step-00000010"
    tell(callback, "step", 20)
    written(callback)  # before it is known that it is the best
    tell(callback, "evaluated", 20, found(acc1=0.6))
    assert checkpoints.best(folder) == folder / "step-00000020"


def full(*given: Any) -> Any:
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_is_loud_and_ends_nothing_but_the_last_save(
    run: Run, at: At, tell: Tell, saves: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Capture,
    found: Found, in_background: bool,
) -> None:  # fmt: skip
    saves.total_steps = 51
    callback = build(run, at, async_=in_background, best="acc1")

    tell(callback, "step", 10)
    written(callback, is_under_way=False)
    with monkeypatch.context() as disk:
        disk.setattr(background, "write_rank", full)
        disk.setattr(saving, "write_rank", full)
        tell(callback, "evaluated", 20, found(acc1=0.9))
        written(callback, is_under_way=False)
        tell(callback, "step", 30)
        written(callback, is_under_way=False)
        tell(callback, "step", 31)
        said = capsys.readouterr().err
        first, second = said.splitlines()
        assert (
            "step-00000020 was not saved: No space left on device" in first
            and "The training goes on" in first
        )
        assert re.fullmatch(
            r"step-00000030: still no room: it needs \d\.\d KB, \d+\.\d MB are free\.", second
        )
        assert saved_steps(run) == [10]
        with pytest.raises(NotWrittenError, match=r"step-00000045 was not saved: No space left.*Make room"):
            tell(callback, "end", 45)
    assert [row[:2] for row in saves.told] == [("saved", 10), ("failed", 20), ("failed", 30)]
    tell(callback, "evaluated", 50, found(acc1=0.8))  # the 0.9 is in no checkpoint
    tell(callback, "end", 51)
    assert best_step(run) == 50 and saved_steps(run) == [10, 50, 51]


@pytest.mark.parametrize("in_background", [True, False])
def test_no_worse_checkpoint_is_the_best_after_a_disk_that_refused_one(
    run: Run, at: At, tell: Tell, monkeypatch: pytest.MonkeyPatch, found: Found, in_background: bool
) -> None:
    """The refusal of the first was heard after the second had become the best, which was forgotten then."""
    callback = build(run, at, async_=in_background, best="acc1")
    with monkeypatch.context() as disk:
        disk.setattr(background, "write_rank", full)
        disk.setattr(saving, "write_rank", full)
        tell(callback, "evaluated", 1, found(acc1=0.8))
        written(callback, is_under_way=in_background)
    for step, value in ((2, 0.7), (3, 0.9), (4, 0.5)):
        tell(callback, "evaluated", step, found(acc1=value))
    tell(callback, "end", 5)
    assert best_step(run) == 3 and saved_steps(run) == [2, 3, 5]


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_cannot_be_named_is_not_what_others_have_to_beat(
    run: Run, at: At, tell: Tell, monkeypatch: pytest.MonkeyPatch, found: Found, in_background: bool
) -> None:
    callback = build(run, at, async_=in_background, best="acc1")
    tell(callback, "evaluated", 1, found(acc1=0.5))
    tell(callback, "step", 10)
    with monkeypatch.context() as disk:
        disk.setattr("paddle_dp.checkpoint.folder.replace", full)
        tell(callback, "evaluated", 11, found(acc1=0.9))
        tell(callback, "step", 20)
    tell(callback, "evaluated", 21, found(acc1=0.8))
    tell(callback, "end", 22)
    assert best_step(run) == 21


def test_a_short_sentence_is_for_the_same_reason_in_a_row_and_the_end_promises_no_next_one(
    run: Run, at: At, tell: Tell, saves: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    saves.total_steps = 80
    callback = build(run, at, async_=False)
    said: list[str] = []
    for step, number in ((10, 28), (20, 28), (30, 5), (40, 5), (50, 0), (60, 28), (70, 28), (80, 5)):
        with monkeypatch.context() as disk:
            if number:
                disk.setattr(saving, "write_rank", lambda *given, n=number: (_ for _ in ()).throw(refused(n)))
            tell(callback, "step", step)
        said.append(capsys.readouterr().err)
    goes_on = "The training goes on, and tries again at the next checkpoint: make room.\n"
    assert [text.endswith(goes_on) for text in said] == [True, False, True, False, False, True, False, False]
    assert re.fullmatch(r"step-00000020: still no room: \d+\.\d MB are free\.\n", said[1])
    assert said[3] == f"step-00000040: not saved either: {os.strerror(5)}.\n" and not said[4]
    assert "still no room: it needs " in said[6]
    assert said[7].endswith("Earlier checkpoints are untouched. One more is tried, the last: make room.\n")


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number))
