"""A training with Mixup and CutMix: one process's on ranks, and bit-equal after a resume in mid-epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.errors import LossError
from tests.house.datasets import Samples
from tests.house.training import diary, untried
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


def trained_each(folder: str, micro_batches: int) -> list[dict[str, Any]]:
    """Six steps, four of them, and the rest after a resume."""
    untried()
    runs = [("whole", "6 steps", False), ("again", "4 steps", False), ("again", "6 steps", True)]
    return [trained(f"{folder}/{name}", length, resume, micro_batches) for name, length, resume in runs]


def assert_same(several: dict[str, Any], alone: dict[str, Any]) -> None:
    assert len(alone["losses"]) == 6 and len(alone["held_out"]) >= 2
    np.testing.assert_allclose(several["losses"], alone["losses"], rtol=1e-5, atol=1e-6)
    for name, number in alone["held_out"].items():
        np.testing.assert_allclose(several["held_out"][name], number, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(trained, 1, str(tmp_path_factory.mktemp("one")), "6 steps", False)[0]


def test_ranks_and_micro_batches_learn_what_one_process_learns_and_a_resume_too(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    """Batches of 14 in three micro-batches, on two ranks: unequal shares."""
    whole, begun, resumed = run_ranks(trained_each, 2, str(tmp_path), 3)[0]
    assert_same(whole, alone)
    assert begun["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (3, 2)])
def test_other_ranks_and_micro_batches(
    alone: dict[str, Any], tmp_path: Path, ranks: int, micro_batches: int
) -> None:
    assert_same(run_ranks(trained, ranks, str(tmp_path), "6 steps", False, micro_batches)[0], alone)


def with_loss(folder: Path, loss: Any) -> dict[str, Any]:
    import paddle
    from paddle import nn

    from paddle_dp import Trainer

    paddle.seed(3)
    model, data = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), Samples(16, stripes)
    trainer = Trainer.of(
        model=model, train=data, test=data, batch=8, loss=loss, optimizer="sgd", mix={"mixup": 0.4}, folder=folder,
    )  # fmt: skip
    lines = diary(trainer)
    trainer.fit("1 epoch")
    return lines.held_out


def test_a_loss_that_takes_no_mixed_targets_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    """The trial calls a loss with the targets of a training batch: a script's own, and one that can mix."""
    from paddle.nn import functional as F

    def plain(outputs: Any, targets: Any) -> Any:
        return F.cross_entropy(outputs, targets, reduction="none")

    def mixing(outputs: Any, targets: Any) -> Any:
        if not isinstance(targets, dict):
            return plain(outputs, targets)
        first, second, share = targets["first"], targets["second"], targets["share"]
        return share * plain(outputs, first) + (1 - share) * plain(outputs, second)

    with pytest.raises(
        LossError, match=r"^the loss plain fails with mixed targets: .*\{first, second, share\}"
    ):
        with_loss(tmp_path, plain)
    assert not list(tmp_path.glob("**/metrics.jsonl"))
    right, shelf = with_loss(tmp_path / "mixing", mixing), with_loss(tmp_path / "shelf", "cross_entropy")
    np.testing.assert_allclose(right["loss"], shelf["loss"], rtol=1e-5)


class Collated(Samples):
    """The stripes with soft targets, in batches that are mixed if `mixes`."""

    mixes = True

    def collate_fn(self, samples: list[Any]) -> Any:
        images, classes = np.stack([image for image, _ in samples]), np.eye(4)[[each for _, each in samples]]
        order = slice(None, None, -1 if self.mixes else 1)
        return (images + images[order]) / 2, ((classes + classes[order]) / 2).astype("float32")


class Stacked(Collated):
    mixes = False


def test_a_collate_fn_of_the_training_data_alone_mixes_no_held_out_sample(tmp_path: Path) -> None:
    """docs/augmentation.md: that of `Trainer.of` makes the held-out batches, too."""
    from paddle import nn

    from paddle_dp import Trainer

    def loss(outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs, targets, soft_label=True, reduction="none").flatten()

    def mixed(outputs: Any, targets: Any) -> float:
        return float((targets == 0.5).any(1).mean())

    train, test = Collated(16, stripes), Stacked(16, stripes)
    for collate_fn, expected in ((None, 0.0), (train.collate_fn, 1.0)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        trainer = Trainer.of(
            model=model, train=train, test=test, batch=8, loss=loss, optimizer="sgd", collate_fn=collate_fn,
            loader={"collate": "batch"}, metrics=[mixed], length="1 step", folder=tmp_path / str(expected),
        )  # fmt: skip
        assert trainer.evaluate().numbers["mixed"] == expected
