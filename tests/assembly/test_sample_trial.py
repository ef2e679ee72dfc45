"""The trial of a model is made once in a job for the same inputs, and never saved where it failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.assembly.sample_trial import RECORD, once_a_job

Tried = Callable[..., tuple[dict[str, Any], bool]]
DONE = {"differences": ["a sentence"], "lendable": True}


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tried:
    """tried(attempt, inputs, …): the result in this attempt of a job, and whether a trial was made for it."""

    def call(
        attempt: int, inputs: Any, result: dict[str, Any] = DONE, job: str = "12-1", started: str = "5.5"
    ) -> tuple[dict[str, Any], bool]:
        folder = tmp_path / f"attempt-{attempt:03d}"
        folder.mkdir(exist_ok=True)
        for name, value in (
            ("PADDLE_LOG_DIR", str(folder)),
            ("PADDLE_DP_JOB", job),
            ("PADDLE_DP_STARTED", started),
        ):
            monkeypatch.setenv(name, value)
        made: list[bool] = []
        return once_a_job(inputs, lambda: made.append(True) or result), bool(made)  # type: ignore[func-returns-value]

    return call


def test_a_later_attempt_of_the_job_takes_the_result_of_equal_inputs(tried: Tried) -> None:
    assert tried(1, ["facts", 2]) == (DONE, True)
    assert tried(2, ["facts", 2], {}, job="12-7") == (DONE, False)  # the mark ends with each attempt's time
    assert tried(3, ["facts", 3], {}) == ({}, True)
    assert tried(4, ["facts", 2], {}) == (DONE, False)


def test_another_job_in_the_folder_tries_for_itself(tried: Tried) -> None:
    tried(1, "facts")
    assert tried(2, "facts", {}, job="13-1") == ({}, True)
    assert tried(3, "facts", {}, started="6.5") == ({}, True)


@pytest.mark.parametrize("result", [{"failed": "it takes longer"}, {"refused": ["LossError", "no"]}])
def test_a_trial_that_failed_is_made_again(tried: Tried, result: dict[str, Any]) -> None:
    assert tried(1, "facts", result) == (result, True)
    assert tried(2, "facts") == (DONE, True)


def test_a_damaged_record_is_no_result(tried: Tried, tmp_path: Path) -> None:
    tried(1, "facts")
    (tmp_path / "attempt-001" / RECORD).write_text('{"inputs": ')
    assert tried(2, "facts") == (DONE, True)


def test_without_a_supervisor_it_is_always_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADDLE_DP_STARTED", raising=False)
    assert once_a_job("facts", lambda: DONE) == DONE
