"""Whether a job starts again, when, and why not: from how its attempts ended, without a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.launch.failures import Failure
from paddle_dp.launch.restarts import AttemptResult, Restart, decide


def failed(step: int = 7, message: str = "the culprit's own words", **more) -> AttemptResult:
    """An attempt that began at step 0, did `step` updates and saved nothing."""
    kind, status = more.pop("kind", "ValueError"), more.pop("status", 1)
    known = {name: more.pop(name) for name in ("expected", "outside", "rank") if name in more}
    cause = Failure(**{"rank": 1, **known}, kind=kind, message=message, exit_status=status, pid=1, host="h")
    return AttemptResult(attempt=Path("logs/attempt-001"), status=status, cause=cause, step=step, **more)


KILLED = {"kind": "SIGKILL", "status": 137, "message": "ended by SIGKILL"}


def waits(history: list[AttemptResult], restarts: int) -> list[float | None]:
    """What was decided after each attempt: the wait, or None for the end."""
    found = [decide(history[: n + 1], restarts) for n in range(len(history))]
    return [then.wait if isinstance(then, Restart) else None for then in found]


def test_each_restart_waits_twice_as_long_and_after_the_budget_it_ends() -> None:
    history = [failed(step, **KILLED) for step in (3, 4, 5, 6)]
    assert waits(history, 3) == [1, 2, 4, None]
    assert decide(history, 3) == "not started again: 3 restarts were spent without a new checkpoint."
    assert waits(history, 0) == [None] * 4 and decide(history[:1], 0) == ""


def test_a_rank_that_somebody_killed_is_replaced_at_once_the_first_time() -> None:
    killed = [failed(step, **KILLED, outside=True) for step in (3, 4)]
    assert waits([*killed, failed(25, **KILLED, outside=True, saved=20)], 3) == [0, 2, 0]
    assert waits([failed(3)], 3) == [1]  # its own failure may come again


def test_a_wait_is_a_minute_at_most() -> None:
    assert waits([failed(step, **KILLED) for step in range(12)], 20)[5:9] == [32, 60, 60, 60]


def test_a_new_checkpoint_makes_the_budget_whole_and_the_wait_short() -> None:
    history = [
        failed(3, **KILLED),
        failed(5, **KILLED),
        failed(27, **KILLED, saved=20),
        failed(28, **KILLED, began=20, saved=20),
        failed(29, **KILLED, began=20, saved=20),
    ]
    assert waits(history, 2) == [1, 2, 1, 2, None]
    assert [then.number for then in [decide(history[:n], 2) for n in range(1, 5)]] == [1, 2, 1, 2]


def test_what_fell_back_past_a_damaged_checkpoint_progresses_when_it_saves_again() -> None:
    assert failed(45, began=20, saved=40).progressed
    assert not failed(45, began=40, saved=20).progressed  # its own was damaged at once
    assert not failed(45, began=40, saved=40).progressed
    assert failed(45, began=0, saved=40).progressed and not failed(45).progressed


def test_the_same_failure_at_the_same_step_ends_it_whatever_the_budget() -> None:
    history = [failed(45, saved=40), failed(45, began=40, saved=40), failed(45, began=40, saved=40)]
    assert waits(history, 100) == [1, 2, None]
    assert (
        decide(history, 100)
        == "not started again: the same failure three times after step 45, with no new checkpoint in between."
    )


def test_a_small_budget_that_one_failure_has_spent_says_so() -> None:
    found = decide([failed(0), failed(0)], 1)
    assert isinstance(found, str)
    assert "the same failure twice before the first step was done, with no new checkpoint" in found
    found = decide([failed(3), failed(4)], 1)
    assert found == "not started again: the restart was spent without a new checkpoint."


def test_the_steps_and_checkpoints_of_a_script_are_not_known() -> None:
    """It ended after 3 of 10 attempts, "before the first step was done, with no new checkpoint in between"."""
    history = [failed(0) for _ in range(5)]
    assert isinstance(decide(history[:4], 4, script=True), Restart)
    assert decide(history, 4, script=True) == "not started again: 4 restarts were spent."
    trainer = [failed(45)] * 3  # its Trainer says the step
    assert decide(trainer, 9, script=True) == "not started again: the same failure three times after step 45."


@pytest.mark.parametrize(
    "other",
    [
        failed(46),
        failed(45, message="something else"),
        failed(45, **KILLED),
        failed(45, rank=0),
        failed(45, saved=40),
    ],
)
def test_another_failure_another_step_or_a_checkpoint_in_between_is_not_the_same(
    other: AttemptResult,
) -> None:
    assert None not in waits([failed(45), other, failed(45)], 100)
    assert None not in waits([failed(45), failed(45), other], 100)


def test_kills_from_outside_say_nothing_of_the_training_and_spend_the_budget_alone() -> None:
    kills = [failed(0, **KILLED, outside=True)] * 5
    assert waits(kills, 4) == [0, 2, 4, 8, None]
    assert decide(kills, 4) == "not started again: 4 restarts were spent without a new checkpoint."
    assert waits([failed(0, **KILLED)] * 5, 4)[:3] == [1, 2, None]  # memory runs out at the same step again


def test_numbers_in_a_message_do_not_make_another_failure() -> None:
    pids = [failed(45, message=f"ended, process {n}, at 0x{n:x}") for n in (11, 4242, 777)]
    assert waits(pids, 9)[-1] is None
    stands = [
        failed(45, kind="stood still", status=124, message=f"ranks {who} wait") for who in ("0", "0, 2", "2")
    ]
    assert waits(stands, 9)[-1] is None


def on_each(first: int, message: str = "labels are 1 to 10, of device {}") -> AttemptResult:
    """An error that all of three ranks raised, of which one rank's was the earliest."""
    others = [
        Failure(rank=rank, kind="ValueError", message=message.format(rank))
        for rank in range(3)
        if rank != first
    ]
    return failed(45, rank=first, message=message.format(first), consequences=others)


def test_an_error_of_all_ranks_is_the_same_failure_whichever_rank_was_first() -> None:
    assert waits([on_each(0), on_each(2), on_each(1)], 100) == [1, 2, None]
    assert [on_each(0).culprit, failed(45, rank=0).culprit, failed(kind="launcher").culprit] == [
        None,
        0,
        None,
    ]
    followed = failed(rank=2, consequences=[Failure(rank=0, kind="LostPeerError", message="rank 2 has left")])
    assert followed.culprit == 2


FINAL = [
    AttemptResult(attempt=Path("a"), status=0),
    AttemptResult(attempt=Path("a"), status=130, signal="SIGINT"),
    AttemptResult(attempt=Path("a"), status=2),  # Paddle's launcher, of its arguments
    failed(kind="UsageError", status=2, expected=True),
    failed(kind="StoppedError", status=75, expected=True),
    failed(kind="LostFolderError", status=1, expected=True),
    failed(kind="KeyboardInterrupt", status=130),
    failed(kind="SIGTERM", status=143),
    replace(failed(**KILLED), signal="SIGINT"),  # it failed while it was being ended
]


@pytest.mark.parametrize("result", FINAL)
def test_what_is_done_asked_for_or_mistyped_is_not_repeated(result: AttemptResult) -> None:
    assert decide([result], 9) == ""


AGAIN = [
    AttemptResult(attempt=Path("a"), status=1),  # the launcher's own end
    failed(kind="SystemExit", status=2),  # a rank's own sys.exit(2)
    failed(kind="left", status=1, message="left with exit status 0 while the job was running"),
    failed(kind="SIGSEGV", status=139),
    failed(kind="SIGABRT", status=134),
    failed(kind="launcher", status=137, expected=True),
    failed(kind="stood still", status=124, expected=True),
    failed(kind="CheckpointError", expected=True),
]


@pytest.mark.parametrize("result", AGAIN)
def test_every_other_end_is_a_failure_to_start_again_from(result: AttemptResult) -> None:
    assert decide([result], 1) == Restart(wait=1, number=1)
