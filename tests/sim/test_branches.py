"""Branches on two and four devices: one process, the same bits in two runs, and what CPUs learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.house.training import trained
from tests.ranks import run_ranks
from tests.strategies.test_branches import (
    APART,
    CROSSED,
    DEEP,
    FOUR,
    PAIRS,
    THREE,
    TWO,
    assert_one_process,
    recipe,
)

ALL = {"deep": DEEP, "shared": PAIRS, "apart": APART}


def test_joins_that_backward_could_mix_up_are_one_process(tmp_path: Path) -> None:
    assert_one_process(tmp_path, *TWO, CROSSED)


@pytest.mark.long
def test_so_they_are_beside_shares_of_the_data(tmp_path: Path) -> None:
    assert_one_process(tmp_path, *FOUR, CROSSED)


@pytest.mark.long
@pytest.mark.parametrize("parts", ALL.values(), ids=ALL)
@pytest.mark.parametrize("place", [TWO, FOUR], ids=["2", "4"])
def test_they_are_one_process(parts: dict[str, str], place: tuple[int, str], tmp_path: Path) -> None:
    assert_one_process(tmp_path, *place, parts)


@pytest.mark.long
def test_a_tower_of_two_among_three_ranks_is_one_process(tmp_path: Path) -> None:
    assert_one_process(tmp_path, 3, "{use: branches, over: 3}", THREE)


@pytest.mark.long
@pytest.mark.parametrize("parts", [DEEP, PAIRS], ids=["deep", "shared"])
def test_two_runs_have_the_same_bits_also_where_the_link_is_slow(
    parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what CPUs learn. The second run's link makes every wait that was forgotten a wrong number."""
    text, found = recipe(FOUR[1], parts), {}
    for name, (bandwidth, latency) in {"quick": ("0", "0"), "slow": ("2e7", "2e-3")}.items():
        monkeypatch.setenv("SIM_BANDWIDTH", bandwidth)
        monkeypatch.setenv("SIM_LATENCY", latency)
        found[name] = run_ranks(trained, FOUR[0], text, str(tmp_path / name))
    assert [rank["rows"] for rank in found["quick"]] == [rank["rows"] for rank in found["slow"]]
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    cpus = run_ranks(trained, FOUR[0], text, str(tmp_path / "cpus"))
    np.testing.assert_allclose(found["quick"][0]["rows"], cpus[0]["rows"], rtol=1e-5)
