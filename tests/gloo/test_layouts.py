"""Every kind of layout that the bridge carries learns what one process learns: losses and weights, clipped and not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.cases import layout
from tests.ranks import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline2 recomputed": {"pipeline": 2, "recompute": True},
    "sharding2": {"sharding": 2},
    "data2 tensor2": {"data": 2, "tensor": 2},
    "tensor2 pipeline2 tied": {"tensor": 2, "pipeline": 2, "tied": True},
}
LONG: dict[str, dict[str, Any]] = {
    "tensor2": {"tensor": 2},
    "tensor4": {"tensor": 4},
    "data2 pipeline2": {"data": 2, "pipeline": 2},
    "pipeline2": {"pipeline": 2},
    "pipeline4": {"pipeline": 4},
    "data2 sharding2": {"data": 2, "sharding": 2},
    "tensor2 sharding2": {"tensor": 2, "sharding": 2},
    "sharding2 pipeline2": {"sharding": 2, "pipeline": 2},
    "tensor4 sequence": {"tensor": 4, "sequence": True},
    "data2 tensor2 pipeline2": {"data": 2, "tensor": 2, "pipeline": 2},
    "sharding2 tensor2 pipeline2": {"sharding": 2, "tensor": 2, "pipeline": 2},
}


def ranks_of(options: dict[str, Any]) -> int:
    axes = ("data", "tensor", "pipeline", "sharding", "sequence_axis")
    product = 1
    for axis in axes:
        product *= options.get(axis, 1)
    return product


def check(found: list[dict[str, float]]) -> None:
    for rank, differences in enumerate(found):
        assert set(differences) == {"sgd loss", "sgd weights", "adamw loss", "adamw weights"}
        for name, difference in differences.items():
            assert difference < (5e-6 if "loss" in name else 5e-5), (
                f"rank {rank}: {name} off by {difference:.1e}"
            )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_learns_what_one_process_learns(name: str) -> None:
    options = LAYOUTS[name]
    check(run_ranks(layout, ranks_of(options), options, timeout=150))


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_larger_layouts_do_as_well(name: str) -> None:
    options = LONG[name]
    check(run_ranks(layout, ranks_of(options), options, timeout=250))
