"""What a node says of an attempt's end fits into a line, whatever it was, and other nodes can show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddle_dp.launch.failures import Failure, describe
from paddle_dp.launch.nodes.job import end_of, outcome_of
from paddle_dp.launch.nodes.messages import MAX_LINE_BYTES
from paddle_dp.launch.restarts import AttemptResult


def failure(**more) -> Failure:
    return Failure(
        **{"rank": 1, "kind": "ValueError", "message": "no", "traceback": "ValueError: no", **more}
    )


def test_the_longest_failure_fits_into_a_line():
    worst = "\x00" * 100_000  # six characters each in JSON
    cause = failure(message=worst, traceback=worst, waited=worst, host="h")
    own = AttemptResult(attempt=Path("a"), status=1, cause=cause, consequences=[cause] * 100)
    assert len(json.dumps(end_of(own, 1, False))) < MAX_LINE_BYTES - 200


def test_the_end_of_a_traceback_is_kept():
    cause = failure(traceback="x" * 100_000 + "ValueError: the last line")
    told = end_of(AttemptResult(attempt=Path("a"), status=1, cause=cause), 1, False)
    shown = outcome_of({**told, "node": 1}, Path("b"), 0, None)
    assert describe(shown.cause, 2, None).splitlines()[0].endswith("ValueError: the last line")


@pytest.mark.parametrize(
    ("own", "told_to_end", "how"),
    [
        (AttemptResult(attempt=Path("a"), status=0), False, "done"),
        (AttemptResult(attempt=Path("a"), status=0), True, "ended"),
        (AttemptResult(attempt=Path("a"), status=75, cause=failure(kind="StoppedError")), False, "stopped"),
        (AttemptResult(attempt=Path("a"), status=130, signal="SIGINT"), False, "failed"),
        (AttemptResult(attempt=Path("a"), status=1), True, "failed"),
        (AttemptResult(attempt=Path("a"), status=1, cause=failure()), True, "failed"),
    ],
)
def test_how_an_attempt_ended(own, told_to_end, how):
    assert end_of(own, 1, told_to_end)["how"] == how


def test_a_signal_to_one_nodes_supervisor_is_final_for_all():
    told = end_of(AttemptResult(attempt=Path("a"), status=143, signal="SIGTERM"), 1, False)
    assert not told["consequence"]  # as a rank's SIGTERM would be
    outcome = outcome_of({**told, "node": 1}, Path("b"), 0, None)
    assert outcome.final and outcome.status == 143
    assert outcome.cause.message == "node 1 was ended by SIGTERM."


def test_what_followed_here_is_shown_with_anothers_cause():
    told = end_of(AttemptResult(attempt=Path("a"), status=1, cause=failure()), 1, False)
    own = AttemptResult(
        attempt=Path("b"), status=134, cause=failure(rank=0, kind="SIGABRT", message="ended by SIGABRT")
    )
    assert [other.rank for other in outcome_of({**told, "node": 1}, Path("b"), 0, own).consequences] == [0]
    assert outcome_of({**told, "node": 1}, Path("b"), 1, own).consequences == []
