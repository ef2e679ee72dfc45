"""Collectives of two and three processes over the device: right, asynchronous, and late on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.sim.collectives import timed, unwaited, wrong


def test_what_is_not_waited_for_is_not_there() -> None:
    """A link that needs 0.3 s for what is sent: the host goes on at once, and reads its own number until it waits."""
    found = run_ranks(unwaited, 2, 1_000_000, bandwidth=1.3e7)
    for rank, seen in enumerate(found):
        assert seen["issued"] < 0.2 and not seen["done"]
        assert (seen["early"], seen["late"]) == (rank + 1.0, 3.0)
        assert seen["whole"] > 0.25


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_it_must(ranks: int) -> None:
    assert run_ranks(wrong, ranks) == [[]] * ranks


def test_each_collective_is_a_line_of_the_timeline(tmp_path: Path) -> None:
    run_ranks(timed, 2, str(tmp_path / "timeline"))
    for rank in range(2):
        began, ended, sent, received, _, what = (
            (tmp_path / f"timeline.{rank}").read_text().split("\n")[0].split()
        )
        assert float(began) < float(ended)
        assert (sent, received, what) == ("4000", "4000", "all_reduce")  # half of it scattered, half gathered
