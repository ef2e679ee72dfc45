"""Five places where fleet alone is silently wrong: each is shown to be wrong without its mend, and right with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

CASES = "tests/mesh/bridge/cases.py"
RIGHT, WRONG = 5e-6, 1e-4
# The layout, what leaves the mend out, the optimizer that shows it, and in long tests only or not.
MENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tied weights count once in the norm": ({"pipeline": 2, "tied": True}, {"mend": False}, "adamw"),
    "norms are marked under sequence parallel": ({"tensor": 2, "sequence": True}, {"mark": False}, "sgd"),
    "sharding v2 gradients are zeroed in place": ({"sharding": 2, "version": 2}, {"mend": False}, "sgd"),
    "the sum over the sequence axis is scaled": ({"sequence_axis": 2}, {"mend": False}, "sgd"),
    "activations travel whole": ({"tensor": 2, "pipeline": 2, "sequence": True}, {"mend": False}, "sgd"),
}


def largest(options: dict[str, Any], optimizer: str) -> float:
    axes = ("data", "tensor", "pipeline", "sharding", "sequence_axis")
    ranks = 1
    for axis in axes:
        ranks *= options.get(axis, 1)
    found = run_ranks(f"{CASES}:layout", ranks, {**options, "optimizers": [optimizer]}, timeout=150)
    return max(one[f"{optimizer} weights"] for one in found)


@pytest.mark.parametrize("name", MENDS)
def test_with_its_mend_fleet_is_right(name: str) -> None:
    layout, _, optimizer = MENDS[name]
    assert largest(layout, optimizer) < RIGHT


@pytest.mark.parametrize("name", MENDS)
def test_without_it_fleet_is_wrong(name: str) -> None:
    """When this fails, a newer Paddle is right by itself, and the mend may go."""
    layout, without, optimizer = MENDS[name]
    assert largest({**layout, **without}, optimizer) > WRONG
