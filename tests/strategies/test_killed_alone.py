"""Ranks with weights of their own, and one process with copies of its model: one is killed, and the job goes on bit by
bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.checkpoint import checkpoints
from tests.faults.lost import different

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
RECIPE = """
model: {{use: convnet, classes: 10, norm: batch, dropout: 0.2}}
dataset: {{use: digits, as_image: true}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw, clip: 1.0}}
schedule: {{use: cosine, learning_rate: 2.0e-3, warmup: 5 steps}}
strategy: {strategy}
train: {{length: 40 steps, batch: 50, micro_batches: 2}}
callbacks:
  - {{use: metrics, every: 1 step}}
  - {{use: checkpoint, every: 7 steps, keep: 3}}
  - {{use: tests.faults.killer.KillsRank1Once, step: 17, note: {note}}}
"""
DILOCO = "{use: local_sgd, every: 6 steps, warmup: 3 steps, outer: {use: momentum}}"


def train(folder: Path, strategy: str, kills: bool, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    note, recipe = folder / "killed", folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(strategy=strategy, note=note))
    if not kills:
        note.touch()
    words = ["train", str(recipe), "--ranks", str(ranks), "--out", str(folder / "run"), "--restarts", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "paddle_dp", *words],
        capture_output=True, text=True, timeout=180, env=environment, check=False,
    )  # fmt: skip


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
    killed = train(tmp_path / "killed", strategy, kills=True, ranks=ranks)
    assert killed.returncode == 0, killed.stderr
    assert re.search(rf"rank {ranks - 1} of {ranks} on \S+: ended by SIGKILL", killed.stderr), killed.stderr
    assert "starts again from step 14" in killed.stderr
    assert train(tmp_path / "whole", strategy, kills=False, ranks=ranks).returncode == 0
    assert different(last(tmp_path / "killed"), last(tmp_path / "whole")) == 0


def test_an_asynchronous_run_goes_on_too(tmp_path):
    killed = train(tmp_path / "killed", "{use: async_average}", kills=True)
    assert killed.returncode == 0, killed.stderr
    assert re.search(r"rank 1 of 2 on \S+: ended by SIGKILL", killed.stderr), killed.stderr
    assert last(tmp_path / "killed").name == "step-00000040"
