"""Stages that exchange beside compute on two and four devices: the bits of those that wait, in any kind of send."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.proof import SideRunner
from tests.jobs import comparisons_in_forks
from tests.sim.recipes import gpt
from tools.verify_matrix import first_change

pytestmark = pytest.mark.long
TWO = {
    "1f1b": "strategy.pipeline=2",
    "f_then_b": "strategy={use: hybrid, pipeline: 2, pipeline_schedule: f_then_b}",
    "recompute": "strategy={use: hybrid, pipeline: 2, recompute: full}",
    "tied": "model.tied=true",
}
FOUR = {
    "pipeline 4": "strategy.pipeline=4",
    "data 2": "strategy={use: hybrid, pipeline: 2, data: 2}",
    "stage 3": "strategy={use: hybrid, pipeline: 2, sharding: 2, sharding_stage: 3}",
    "tensor 2": "strategy={use: hybrid, pipeline: 2, tensor: 2, sequence_parallel: true}",
}


def waiting() -> None:
    """In each rank: as fleet has it, on the stream that computes."""
    from paddle_dp.axes.pipeline.schedules import Engine

    Engine.asynchronous = False


@pytest.mark.parametrize(("layouts", "ranks"), [(TWO, 2), (FOUR, 4)])
@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
def test_beside_compute_stages_have_the_bits_of_those_that_wait(
    layouts: dict[str, str], ranks: int, sends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_LATENCY", "0.005")  # what is read before it came is wrong
    words = ("strategy.pipeline=2", "train.micro_batches=4")
    runner = SideRunner(gpt(tmp_path), words, 3, ranks, tmp_path, wide=False)
    found = {}
    with comparisons_in_forks():
        for i, (name, layout) in enumerate(layouts.items()):
            monkeypatch.setenv("SIM_SENDS", "buffered")
            before = runner.run_candidate(ranks, [layout], f"before-{i}", "tests.sim.test_pipeline:waiting")
            monkeypatch.setenv("SIM_SENDS", sends)
            found[name] = first_change(before, runner.run_candidate(ranks, [layout], f"beside-{i}"))
    assert found == dict.fromkeys(layouts, "")
