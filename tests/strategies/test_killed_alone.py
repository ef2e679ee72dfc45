"""Ranks with weights of their own, and one process with copies of its model: one is killed, and the job goes on bit by
bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddle_dp.checkpoint import checkpoints
from tests.faults.lost import different
from tests.house.programs import run_python
from tests.house.recipes import small_recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

DILOCO = "{use: local_sgd, every: 6 steps, warmup: 3 steps, outer: {use: momentum}}"


def train(folder: Path, strategy: str, kills: bool, ranks: int = 2) -> str:
    """What the screen says."""
    folder.mkdir()
    note, recipe = folder / "killed", folder / "recipe.yaml"
    killer = f"{{use: tests.faults.killer.KillsRank1Once, step: 17, note: {note}}}"
    recipe.write_text(small_recipe(
        "length: 40 steps, batch: 50, micro_batches: 2", dataset="digits, as_image: true", strategy=strategy,
        model="convnet, classes: 10, norm: batch, dropout: 0.2", optimizer="adamw, clip: 1.0",
        schedule="cosine, learning_rate: 2.0e-3, warmup: 5 steps",
        callbacks=f"[{{use: metrics, every: 1 step}}, {{use: checkpoint, every: 7 steps, keep: 3}}, {killer}]",
    ))  # fmt: skip
    if not kills:
        note.touch()
    words = ["train", str(recipe), "--ranks", str(ranks), "--out", str(folder / "run"), "--restarts", "1"]
    return run_python("-m", "paddle_dp", *words, timeout=180).stderr


def last(folder: Path) -> Path:
    return checkpoints(folder / "run" / "checkpoints")[-1]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (DILOCO, 2),  # step 14 is in the midst of the period from 9 to 15
        ("{use: replicas, count: 3}", 1),  # statistics of three copies; weights are saved once
    ],
)
def test_a_killed_rank_is_named_and_the_run_ends_with_the_bits_of_one_that_nobody_disturbed(
    tmp_path, strategy, ranks
):
    said = train(tmp_path / "killed", strategy, kills=True, ranks=ranks)
    assert re.search(rf"rank {ranks - 1} of {ranks} on \S+: ended by SIGKILL", said), said
    assert "starts again from step 14" in said
    train(tmp_path / "whole", strategy, kills=False, ranks=ranks)
    assert different(last(tmp_path / "killed"), last(tmp_path / "whole")) == 0


def test_an_asynchronous_run_goes_on_too(tmp_path):
    said = train(tmp_path / "killed", "{use: async_average}", kills=True)
    assert re.search(r"rank 1 of 2 on \S+: ended by SIGKILL", said), said
    assert last(tmp_path / "killed").name == "step-00000040"
