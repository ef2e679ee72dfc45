"""`paddle-dp verify` as a person runs it: the table, the verdict, the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.errors import EndedError, RunError
from paddle_dp.launch.command import Job
from paddle_dp.proof.sides import Comparison

RECIPE = """
model: {{use: convnet, classes: 10, norm: {norm}}}
dataset: {{use: digits, as_image: true}}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum}}
schedule: {{use: constant, peak: 0.05}}
strategy: {{use: data_parallel, sync_batch_norm: {sync}}}
train: {{length: 1 epoch, batch: 50, micros: 2}}
"""


def verify(folder: Path, norm: str, sync: str, ranks: int) -> subprocess.CompletedProcess[str]:
    recipe = folder / "case.yaml"
    recipe.write_text(RECIPE.format(norm=norm, sync=sync))
    words = [sys.executable, "-m", "paddle_dp", "verify", str(recipe), "--ranks", str(ranks), "--steps", "4"]
    return subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.parametrize(("norm", "ranks"), [("none", 2), ("batch", 3)])
def test_equal_layouts_pass(tmp_path, norm, ranks):
    done = verify(tmp_path, norm, "true", ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SAME: {ranks} ranks learn what one process learns" in done.stdout
    assert "=49" in done.stdout  # the batch that cannot be shared equally


def test_local_batch_norm_differs_and_verify_says_why(tmp_path):
    done = verify(tmp_path, "batch", "false", 2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BatchNorm layers" in done.stdout
    assert "DIFFERENT" in done.stdout


def test_one_rank_has_nothing_to_compare(tmp_path):
    done = verify(tmp_path, "none", "true", 1)
    assert done.returncode == 2
    assert "2 ranks or more" in done.stderr


@pytest.mark.parametrize(
    ("status", "error"), [(143, EndedError), (130, EndedError), (1, RunError), (137, RunError)]
)
def test_a_comparison_that_somebody_ends_is_not_one_that_failed(tmp_path, status, error):
    """137 is a rank that somebody killed, or the machine for want of memory: the next layout may well run."""
    comparison = Comparison(Path("configs/gpt_tiny.yaml"), (), 1, 2, tmp_path)
    with pytest.raises(RunError) as caught:
        comparison._side(status, Job(recipe=tmp_path, ranks=2))
    assert type(caught.value) is error
    assert caught.value.exit_status == (status if error is EndedError else 1)
