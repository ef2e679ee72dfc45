"""A start that is refused leaves the run of that name where it is, with every byte of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

RECIPE = """
model: {use: mlp, inputs: 64, hidden: [8], classes: 10}
dataset: {use: digits}
loss: {use: cross_entropy}
optimizer: {use: adamw}
train: {length: 2 steps, batch: 32}
callbacks: [{use: evaluate}, {use: checkpoint}, {use: metrics}]
"""
EMPTY = """
class Nothing:
    def __init__(self, split): pass
    def __len__(self): return 0
    def __getitem__(self, index): raise IndexError(index)
"""


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paddle_dp", "train", "small.yaml", *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def content(folder: Path) -> dict[str, str]:
    """The digest of each file of a run, without the logs of attempts."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "logs" not in path.parts)
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.name != ".lock"
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, whose run is trained."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "nothing.py").write_text(EMPTY)
    done = train(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "2", "callbacks.checkpoint.best=f1"], "best: evaluations of this model have no number"),
        (["--ranks", "2", "dataset={use: text_files, tokenizer: gpt2}"], "dataset.tokenizer: gpt2 does not exist"),
        (["--ranks", "2", "strategy={use: hybrid, tensor: 3}"], "tensor"),
        (["dataset={use: nothing.Nothing}"], "the train split is empty"),
        (["callbacks.3={use: early_stop, watch: val_loss}"], "watch: evaluations of this model have no number"),
        (["train.bacth=3"], "has no setting 'bacth'"),
    ],
)  # fmt: skip
def test_a_refused_start_moves_nothing(good: Path, words: list[str], said: str) -> None:
    """It moved the good run to NAME.1, before the ranks had looked at anything."""
    before = content(good / "runs/small")
    refused = train(good, *words)
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr
    assert content(good / "runs/small") == before and before
    assert not (good / "runs/small.1").exists()


@pytest.mark.processes
def test_a_refused_resume_leaves_the_recipe_of_the_run(good: Path) -> None:
    before = content(good / "runs/small")
    refused = train(good, "--resume", "optimizer.use=sgd")
    assert refused.returncode == 2 and content(good / "runs/small") == before, refused.stderr


@pytest.mark.processes
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_what_starts_moves_it_and_keeps_its_own_logs(good: Path, ranks: str) -> None:
    before, number = content(good / "runs/small"), len(list((good / "runs").iterdir()))
    done = train(good, "--ranks", ranks, f"train.seed={ranks}")
    assert done.returncode == 0, done.stderr
    aside = good / f"runs/small.{number}"
    assert f"the earlier run is now runs/{aside.name}" in done.stdout and content(aside) == before
    assert (good / "runs/small/checkpoints").is_dir() and (good / "runs/small/.lock").exists()
    (attempt,) = (good / "runs/small/logs").iterdir()
    assert not (aside / "logs" / attempt.name).exists()
    assert (attempt / "workerlog.0").exists() == (ranks == "2")
