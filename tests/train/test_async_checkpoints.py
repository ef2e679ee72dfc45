"""Checkpoints in the background, on real ranks: the same files, and after a kill in mid-write the one before."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.checkpoint import checkpoints, disk, newest
from paddle_dp.launch.command import Job
from paddle_dp.train import Callback, Moment, Run
from tests.house.recipes import small_recipe
from tests.jobs import run_in_forks

DATA = "{use: data_parallel}"


def train(
    folder: Path, out: str, ranks: int, strategy: str = DATA, resume: str | None = None, background: bool = True,
    more: str = "",
) -> int:  # fmt: skip
    recipe = folder / f"{out}.yaml"
    saves = f"{{use: checkpoint, every: 7 steps, keep: 9, async: {str(background).lower()}}}"
    recipe.write_text(small_recipe(
        "length: 20 steps, batch: 8, micro_batches: 2, seed: 3", strategy=strategy, optimizer="adamw, clip: 0.5",
        model="gpt, vocab: 32, width: 32, depth: 4, heads: 4, length: 16, dropout: 0.1",
        dataset="random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 10",
        schedule="cosine, learning_rate: 3.0e-3, warmup: 3 steps",
        callbacks=f"[{more}{{use: metrics, every: 1 step}}, {saves}]",
    ))  # fmt: skip
    return run_in_forks(Job(recipe=recipe, ranks=ranks, output_dir=folder / out, resume=resume))


def shards(run: Path) -> dict[str, Any]:
    """What the ranks wrote, but for the generators that nobody seeds. The recipe, which says how, is in other files."""
    found: dict[str, Any] = {}
    for path in checkpoints(run / "checkpoints"):
        for file in path.glob("rank-*"):
            content: Any = file.read_bytes()
            if file.suffix == ".json":
                content = json.loads(content)
                del content["own"]["rng"]["numpy"], content["own"]["rng"]["python"]
            found[f"{path.name}/{file.name}"] = content
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        pytest.param(2, DATA, marks=pytest.mark.long),
        pytest.param(2, "{use: hybrid, tensor: 2}", marks=pytest.mark.long),
        pytest.param(2, "{use: hybrid, pipeline: 2}", marks=pytest.mark.long),
        pytest.param(2, "{use: hybrid, sharding: 2, sharding_stage: 3}", marks=pytest.mark.long),
        pytest.param(4, "{use: hybrid, tensor: 2, pipeline: 2}", marks=pytest.mark.long),
    ],
)
def test_they_are_the_files_that_are_written_at_once(tmp_path: Path, ranks: int, strategy: str) -> None:
    assert train(tmp_path, "once", ranks, strategy, background=False) == 0
    assert train(tmp_path, "background", ranks, strategy) == 0
    once, background = shards(tmp_path / "once"), shards(tmp_path / "background")
    assert background == once and len(once) == 3 * 2 * ranks
    assert sorted(path.name for path in (tmp_path / "background/checkpoints").iterdir()) == [
        "step-00000007", "step-00000014", "step-00000020",
    ]  # fmt: skip


class KilledInMidWrite(Callback):
    """Kills a rank, as `kill -9` would, while half of the checkpoint of step 14 is on the disk."""

    reads = False

    def __init__(self, run: Run, rank: int = 0):
        self.victim, self.mesh = rank, run.mesh
        self.folder = run.folder / "checkpoints"

    def start(self, moment: Moment) -> None:
        chunks = disk._chunks

        def half(parts: Any) -> Any:
            for chunk in chunks(parts):
                yield chunk[: max(len(chunk) // 2, 1)]
                while self._writing():
                    time.sleep(60)
                yield chunk[max(len(chunk) // 2, 1) :]

        disk._chunks = half

    def _writing(self) -> list[Path]:
        return list(self.folder.glob(".step-00000014.partial-*/rank-*"))

    def step(self, moment: Moment) -> None:
        if moment.progress.step == 16 and self.mesh.rank == self.victim:
            while not any(path.stat().st_size for path in self._writing()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_kill_in_mid_write_costs_one_checkpoint_and_nothing_else(
    tmp_path: Path, ranks: int, victim: int
) -> None:
    assert train(tmp_path, "whole", ranks) == 0
    killer = f"{{use: tests.train.test_async_checkpoints.KilledInMidWrite, rank: {victim}}}, "
    assert train(tmp_path, "killed", ranks, more=killer) != 0
    folder = tmp_path / "killed/checkpoints"
    assert (
        newest(folder) == folder / "step-00000007" and len(list(folder.glob(".step-00000014.partial-*"))) == 1
    )
    assert train(tmp_path, "killed", ranks, resume="newest") == 0
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    assert not list(folder.glob(".*"))
