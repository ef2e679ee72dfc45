"""A training whose batch grows: one process's on other numbers of ranks, through a resume in the midst of the ramp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.house.datasets import Samples
from tests.house.training import diary
from tests.ranks import run_ranks

SIZES = [4, 4, 7, 7, 10, 10, 1, 13, 16, 14, 16, 16, 11]  # an epoch has 43 samples


def point(i: int) -> tuple[np.ndarray, np.int64]:
    """Of three classes, with noise that is drawn anew in each epoch."""
    numbers = np.eye(5)[i % 5] * (1 + i / 43) + 0.1 * np.random.standard_normal(5)
    return numbers.astype("float32"), np.int64(i % 3)


def trained(folder: str, length: str, resume: bool, **more: Any) -> dict[str, Any]:
    """In every rank: losses, rates and samples of each update, the epochs that ended, the weights."""
    import paddle
    from paddle import nn

    from paddle_dp import Trainer
    from paddle_dp.mesh import join

    join(seed=3)
    paddle.seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))
    more = {"batch_ramp": {"start": 4, "increment": 3, "every": "2 steps"}, **more}
    trainer = Trainer.of(
        model=model, train=Samples(43, point), batch=16, micro_batches=2, length="3 epochs", seed=7, folder=folder,
        loss={"use": "cross_entropy"},
        optimizer={"use": "adamw"}, schedule={"use": "cosine", "learning_rate": 0.05, "warmup": "3 steps"},
        resume=resume, callbacks=[{"use": "checkpoint", "every": "1 step", "keep": 20}], **more,
    )  # fmt: skip
    lines = diary(trainer)
    trainer.fit(length)
    return {
        "losses": [step["loss"] for step in lines.steps], "samples": [step["samples"] for step in lines.steps],
        "epochs": lines.epochs, "weights": [p.numpy() for p in model.parameters()], "total": trainer.run.total_steps,
    }  # fmt: skip


def trained_twice(whole: str, part: str) -> list[dict[str, Any]]:
    return [trained(whole, "3 epochs", False), trained(part, "5 steps", False)]


def same(some: dict[str, Any], alone: dict[str, Any], first: int = 0) -> None:
    np.testing.assert_allclose(some["losses"], alone["losses"][first:], rtol=1e-5, atol=1e-6)
    assert some["samples"] == alone["samples"][first:]


def test_other_ranks_go_on_in_the_midst_of_the_ramp(tmp_path: Path) -> None:
    ((alone, begun),) = run_ranks(trained_twice, 1, str(tmp_path / "1"), str(tmp_path / "2"))
    assert alone["samples"] == np.cumsum(SIZES).tolist() and alone["epochs"] == [7, 10, 13]
    assert alone["total"] == 13
    assert begun["losses"] == alone["losses"][:5]
    same(run_ranks(trained, 2, str(tmp_path / "2"), "3 epochs", True)[0], alone, 5)


@pytest.mark.long
@pytest.mark.parametrize("more", [{"loader": {"num_workers": 2}}, {"reading": "scatter"}])
def test_a_resume_on_two_ranks_is_bit_equal(tmp_path: Path, more: dict[str, Any]) -> None:
    (alone,) = run_ranks(trained, 1, str(tmp_path / "1"), "3 epochs", False)
    (two, _) = run_ranks(trained, 2, str(tmp_path / "2"), "3 epochs", False, **more)
    same(two, alone)
    same(run_ranks(trained, 3, str(tmp_path / "3"), "3 epochs", False, **more)[0], alone)
    for stop in (1, 7, 8, 11):  # after an update, at an epoch's end, in the second epoch, after the ramp
        folder = str(tmp_path / f"stopped{stop}")
        run_ranks(trained, 2, folder, f"{stop} steps", False, **more)
        resumed = run_ranks(trained, 2, folder, "3 epochs", True, **more)[0]
        assert resumed["losses"] == two["losses"][stop:] and resumed["weights"] == two["weights"]


def test_another_ramp_is_another_training(tmp_path: Path) -> None:
    from paddle_dp.errors import UsageError

    trained(str(tmp_path), "2 steps", False)
    other = {"start": 4, "increment": 3, "every": "3 steps"}
    sentence = r"batch_ramp was \{start: 4, increment: 3, every: 2 steps\} and is \{.*every: 3 steps\}"
    with pytest.raises(UsageError, match=sentence):
        trained(str(tmp_path), "2 steps", True, batch_ramp=other)
    with pytest.raises(UsageError, match=r"batch_ramp was .* and is (null|None)"):
        trained(str(tmp_path), "2 steps", True, batch_ramp=None)
