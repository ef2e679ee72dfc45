"""A training with Mixup and CutMix: one process's on 2 and 3 ranks, and bit-equal after a resume in mid-epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.house.datasets import Samples
from tests.house.training import diary
from tests.ranks import run_ranks

MIX = {"mixup": 0.4, "cutmix": 1.0, "probability": 0.8}


def stripes(i: int) -> tuple[np.ndarray, np.int64]:
    """An image [1, 8, 8] of four classes, with noise that is drawn anew in each epoch."""
    image = 0.3 * np.random.standard_normal((1, 8, 8))
    image[:, i % 4 :: 4] += 1
    return image.astype("float32"), np.int64(i % 4)


def trained(folder: str, length: str, resume: bool, micro_batches: int = 1) -> dict[str, Any]:
    """In every rank: the losses of each update, the held-out numbers and the weights of a training."""
    import paddle
    from paddle import nn

    from paddle_dp import Trainer
    from paddle_dp.mesh import join

    join(seed=3)
    paddle.seed(3)
    model = nn.Sequential(
        nn.Conv2D(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.AdaptiveAvgPool2D(4), nn.Flatten(),
        nn.Linear(96, 4),
    )  # fmt: skip
    data = Samples(40, stripes)
    trainer = Trainer.of(
        model=model, train=data, test=data, batch=14, micro_batches=micro_batches, length="3 epochs",
        loss={"use": "cross_entropy", "label_smoothing": 0.1}, optimizer={"use": "momentum"},
        schedule={"use": "cosine", "learning_rate": 0.05}, mix=MIX, folder=folder, resume=resume, seed=7,
        callbacks=[{"use": "evaluate", "every": "1 epoch"}, {"use": "checkpoint", "every": "4 steps"}],
    )  # fmt: skip
    lines = diary(trainer)
    trainer.fit(length)
    weights = [parameter.numpy() for parameter in model.parameters()]
    return {"losses": [step["loss"] for step in lines.steps], "held_out": lines.held_out, "weights": weights}


def test_ranks_and_micro_batches_learn_what_one_process_learns_and_a_resume_too(tmp_path: Path) -> None:
    (alone,) = run_ranks(trained, 1, str(tmp_path / "1"), "9 steps", False)
    assert len(alone["losses"]) == 9 and len(alone["held_out"]) >= 2
    two, three = (
        run_ranks(trained, ranks, str(tmp_path / str(ranks)), "9 steps", False, micro_batches)[0]
        for ranks, micro_batches in ((2, 1), (3, 2))
    )
    for several in (two, three):
        np.testing.assert_allclose(several["losses"], alone["losses"], rtol=1e-5, atol=1e-6)
        for name, number in alone["held_out"].items():
            np.testing.assert_allclose(several["held_out"][name], number, rtol=1e-5, atol=1e-6, err_msg=name)
    begun = run_ranks(trained, 2, str(tmp_path / "again"), "4 steps", False)[0]
    resumed = run_ranks(trained, 2, str(tmp_path / "again"), "9 steps", True)[0]
    assert begun["losses"] + resumed["losses"] == two["losses"]
    assert resumed["weights"] == two["weights"]
