"""Runs share a process as long as they leave the state as it was."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from paddle_dp.core.process_runner import results_of


def test_runs_share_a_process_until_one_changes_the_state_or_fails():
    state, processes = [0], []

    def run(function):
        processes.append(1)
        before = list(state)
        try:
            return function()
        finally:
            state[:] = before  # a process takes its state with it

    def kept(number):
        return {"number": number, "arrays": [np.full(2, number)], "state": state[0]}

    def changed():
        state[0] += 1
        return {"number": 2, "state": state[0]}

    def failed():
        raise ValueError(f"with state {state[0]}")

    results = results_of(
        run, [lambda: kept(0), lambda: kept(1), changed, lambda: kept(3), failed], lambda: list(state)
    )
    answers = [next(results) for _ in range(4)]
    assert [(answer["number"], answer["state"]) for answer in answers] == [(0, 0), (1, 0), (2, 1), (3, 0)]
    assert [len(answer.get("arrays", ())) for answer in answers] == [1, 1, 0, 1]
    np.testing.assert_array_equal(answers[3]["arrays"][0], [3, 3])
    with pytest.raises(ValueError, match="with state 0"):
        next(results)
    assert len(processes) == 3  # 0 to 2, 3, and the one that fails


def test_results_before_the_end_of_a_process_are_not_lost():
    def run(function):
        try:
            return function()
        except SystemExit as end:
            raise ValueError(f"the process left with {end}") from end

    results = results_of(run, [lambda: {"number": 0}, lambda: sys.exit(7)], lambda: 0)
    assert next(results) == {"number": 0}
    with pytest.raises(ValueError, match="left with 7"):
        next(results)
