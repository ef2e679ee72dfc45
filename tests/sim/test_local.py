"""Ranks that learn on their own on devices: what they learn on CPUs, and without waiting, weights that are equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.sim.test_parameter_server import learn


@pytest.mark.long
@pytest.mark.parametrize("more", ["", ", outer: {use: momentum}", ", optimizer_states: averaged"])
def test_local_steps_and_their_means_are_those_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """A resume in the midst of a period, too: eight steps and four, in periods of three."""
    found = {}
    for place in ("device", "cpu"):
        folder, strategy = str(tmp_path / place), f"{{use: local_sgd, every: 3 steps{more}}}"
        first = run_ranks(learn, 2, folder, strategy)
        then = run_ranks(learn, 2, folder, strategy, resume=True)
        assert ("sim" in first[1]["places"][0]) == (place == "device")
        found[place] = [*first[0]["rows"], *then[0]["rows"], [then[1]["held"], 0.0]]
        monkeypatch.delenv("CUSTOM_DEVICE_ROOT", raising=False)
    assert len(found["cpu"]) == 13
    np.testing.assert_allclose(found["device"], found["cpu"], rtol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_without_waiting_all_have_equal_weights_where_they_meet(tmp_path: Path, every: int) -> None:
    strategy = f"{{use: async_average, every: {every} steps, staleness: 2}}"
    found = run_ranks(learn, 2, str(tmp_path), strategy)
    assert all("sim" in row["places"][0] for row in found)
    assert len(found[0]["rows"]) == 8 and len({row["held"] for row in found}) == 1
    assert abs(found[0]["held"] - 3.47) < 0.1
    resumed = run_ranks(learn, 2, str(tmp_path), strategy, resume=True)
    assert len(resumed[0]["rows"]) == 4
