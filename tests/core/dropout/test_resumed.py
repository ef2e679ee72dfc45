"""A run with dropout that goes on in another layout goes on with the masks of the run that was never stopped."""

import numpy as np
import pytest

from tests.parity import train
from tests.ranks import run_ranks


def run(folder, ranks, until, resume, strategy):
    return run_ranks(
        train, ranks, str(folder), strategy, until, resume, model="gpt, dropout: 0.3", timeout=300
    )[0]


@pytest.mark.long
def test_two_readers_and_then_two_stages_are_one_process(tmp_path):
    whole = run(tmp_path / "whole", 1, "6 steps", False, "{use: single}")
    first = run(tmp_path / "parts", 2, "3 steps", False, "{use: data_parallel, recompute: full}")
    last = run(tmp_path / "parts", 2, "6 steps", True, "{use: hybrid, pipeline: 2, recompute: full}")
    np.testing.assert_allclose(first["rows"] + last["rows"], whole["rows"], rtol=2e-5)
    assert last["held_out"]["loss"] == pytest.approx(whole["held_out"]["loss"], rel=1e-5)
