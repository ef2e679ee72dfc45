"""Places where fleet alone is silently wrong: each is shown to be wrong without its mend, and right with it.

Sharding v2, which needs an accelerator, is in `tests/sim/test_fleet.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.gloo.cases import with_and_without
from tests.ranks import run_ranks

RIGHT, WRONG = 5e-6, 1e-4
AXES = {"data", "tensor", "pipeline", "sharding", "sequence_axis"}
# The layout, what leaves the mend out, and the optimizer that shows it.
MENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tied weights count once in the norm": ({"pipeline": 2, "tied": True}, {"mend": False}, "adamw"),
    "norms are marked under sequence parallel": ({"tensor": 2, "sequence": True}, {"mark": False}, "sgd"),
    "the sum over the sequence axis is scaled": ({"sequence_axis": 2}, {"mend": False}, "sgd"),
    "activations travel whole": ({"tensor": 2, "pipeline": 2, "sequence": True}, {"mend": False}, "sgd"),
}


@pytest.mark.parametrize("name", MENDS)
def test_fleet_is_right_with_its_mend_and_wrong_without(name: str) -> None:
    """When only the last line fails, a newer Paddle is right by itself, and the mend may go."""
    layout, without, optimizer = MENDS[name]
    options = {**layout, "optimizers": [optimizer]}
    found = run_ranks(with_and_without, math.prod(layout[a] for a in AXES & set(layout)), options, without)
    assert max(mended for mended, _ in found) < RIGHT
    assert max(alone for _, alone in found) > WRONG
