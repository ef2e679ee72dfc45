"""Stopped anywhere, it goes on from there: bitwise on the same ranks, with the same batches on others."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.checkpoint import load, newest
from tests.house.recipes import small_recipe
from tests.house.runs import events, saved_bits
from tests.jobs import do, train_in_forks
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 22 steps, batch: 50, micro_batches: 2", optimizer="adamw, clip: 1.0",
    model="convnet, classes: 10, widths: [8, 16], norm: batch, dropout: 0.2",
    dataset="digits, as_image: true, held_out: 0.6",  # an epoch of 15 batches
    schedule="cosine, learning_rate: 2.0e-3, warmup: 5 steps",
    strategy="data_parallel, sync_batch_norm: true",
    callbacks="[{use: metrics, every: 1 step}, {use: checkpoint, every: 4 steps, keep: 3}]",
)  # fmt: skip


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(run, "step")}


def killed(recipe: Path, out: Path) -> int:
    """Trains on two ranks, all of which end by kill -9 in mid-epoch; returns the newest checkpoint's step."""
    with pytest.raises(AssertionError, match="ended with -9"):
        run_ranks(train_until_killed, 2, str(recipe), str(out))
    return load(newest(out / "checkpoints")).state["progress"]["step"]


def train_until_killed(recipe: str, out: str) -> None:
    """In a rank: rank 0 ends both, before either can miss the other."""

    def kill() -> None:
        while not list(Path(out).glob("checkpoints/step-*08")):
            time.sleep(0.005)
        for other in (1, 0):
            os.kill(int(Path(f"{out}.{other}").read_text()), signal.SIGKILL)

    rank = os.environ["PADDLE_TRAINER_ID"]
    Path(f"{out}.{rank}").write_text(str(os.getpid()))
    if rank == "0":
        threading.Thread(target=kill, daemon=True).start()
    do("train", recipe, [f"output_dir={out}"], {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run, and a run that was killed."""
    folder = tmp_path_factory.mktemp("resume")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    train_in_forks(recipe, folder / "whole", 2)
    step = killed(recipe, folder / "killed")
    assert 8 <= step < 22 and step % 15  # in mid-epoch
    return recipe, folder


def copied(folder: Path, name: str) -> Path:
    import shutil

    return Path(shutil.copytree(folder / "killed", folder / name))


@pytest.mark.timeout(400)
def test_a_killed_job_resumes_bit_by_bit(whole):
    recipe, folder = whole
    again = copied(folder, "again")
    train_in_forks(recipe, again, 2, resume="newest")
    assert load(newest(again / "checkpoints")).state["progress"]["step"] == 22
    assert saved_bits(again) == saved_bits(folder / "whole")
    assert losses(again) == losses(folder / "whole")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.long)])
def test_other_ranks_go_on_with_the_same_batches(whole, ranks):
    recipe, folder = whole
    again = copied(folder, f"on-{ranks}")
    train_in_forks(recipe, again, ranks, resume="newest")
    ours, truth = losses(again), losses(folder / "whole")
    assert list(ours) == list(truth)
    np.testing.assert_allclose(list(ours.values()), list(truth.values()), rtol=1e-5, atol=1e-6)
