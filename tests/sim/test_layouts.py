"""Every kind of layout learns on two devices what one process learns on one, over Paddle's own groups and fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from paddle_dp.proof import Comparison, compare_sides
from tests.jobs import comparisons_in_forks
from tests.sim.recipes import gpt

LAYOUTS = {
    "data_parallel": "strategy={use: data_parallel}",
    "data 2": "strategy.data=2",
    "tensor 2": "strategy.tensor=2",
    "tensor 2, sequence_parallel": "strategy={use: hybrid, tensor: 2, sequence_parallel: true}",
    "tensor 2, recompute": "strategy={use: hybrid, tensor: 2, recompute: full}",
    "sequence 2": "strategy.sequence=2",
    "pipeline 2": "strategy.pipeline=2",
    "pipeline 2, interleaved": "strategy={use: hybrid, pipeline: 2, pipeline_schedule: interleaved}",
    "pipeline 2, recompute": "strategy={use: hybrid, pipeline: 2, recompute: full}",
    "sharding 2, stage 1": "strategy={use: hybrid, sharding: 2, sharding_stage: 1}",
    "sharding 2, stage 2": "strategy={use: hybrid, sharding: 2, sharding_stage: 2}",
    "sharding 2, stage 3": "strategy={use: hybrid, sharding: 2, sharding_stage: 3}",
}


QUICK = ("data_parallel", "tensor 2", "pipeline 2", "sharding 2, stage 3")


def test_some_layouts_are_one_process(tmp_path: Path) -> None:
    assert_one_process({name: LAYOUTS[name] for name in QUICK}, tmp_path)


@pytest.mark.long
def test_a_dozen_layouts_are_one_process(tmp_path: Path) -> None:
    assert_one_process(LAYOUTS, tmp_path)


def assert_one_process(layouts: Mapping[str, str], tmp_path: Path) -> None:
    comparison = Comparison(gpt(tmp_path), (), 2, 2, tmp_path, wide=False)
    with comparisons_in_forks():
        sides = {
            name: comparison.many(2, [words], f"side-{i}") for i, (name, words) in enumerate(layouts.items())
        }
        one = comparison.one(list(sides.values()))
    verdicts = {name: compare_sides(one, side) for name, side in sides.items()}
    assert {name: verdict.sentences for name, verdict in verdicts.items() if not verdict.same} == {}
