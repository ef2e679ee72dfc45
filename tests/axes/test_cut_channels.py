"""Convolutions, norms and dropouts of cut channels: two ranks learn what one learns, whatever stands between them."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.recipe.yaml_document import parse
from tests.house.datasets import Samples
from tests.parity import assert_same_weights, recorded, weights
from tests.ranks import run_ranks

CUTS = {
    "wide": "channels", "norm": "channels", "drop": "channels", "drop2d": "channels", "each": "channels",
    "narrow": "rowwise", "flat": "channels", "rows": "rowwise", "same": "channels",
}  # fmt: skip
TENSOR = "{use: hybrid, tensor: 2}"


class Net(nn.Layer):
    """Biases in every convolution, one of them with a group for each channel; columns of cut channels in the end."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2D(1, 4, 3, padding=1)
        self.wide, self.norm = nn.Conv2D(4, 8, 3, padding=1), nn.BatchNorm2D(8)
        self.drop, self.drop2d = nn.Dropout(0.2), nn.Dropout2D(0.2)
        self.each = nn.Conv2D(8, 8, 3, padding=1, stride=2, groups=8)
        self.narrow, self.after = nn.Conv2D(8, 4, 3, padding=1), nn.BatchNorm2D(4)
        self.flat, self.rows = nn.Conv2D(4, 4, 2, stride=2), nn.Linear(16, 3)
        self.same = self.wide  # two names of one layer

    def forward(self, x):
        x = self.drop2d(self.drop(nn.functional.relu(self.norm(self.wide(self.stem(x))))))
        x = self.after(self.narrow(nn.functional.relu(self.each(x))))
        return self.rows(self.flat(nn.functional.relu(x)).flatten(1))


def picture(index):
    return np.random.default_rng(index).normal(size=(1, 8, 8)).astype("float32"), np.int64(index % 3)


def train(folder, strategy, precision, sync=True):
    """Losses and norms of each step, and where the weights are saved."""
    paddle.seed(5)
    settings = {**parse(strategy, "").values, **({} if sync else {"sync_batch_norm": False})}
    trainer = Trainer.of(
        model=Net(), train=Samples(12, picture), batch=4, length="6 steps", loss="cross_entropy", cuts=CUTS,
        optimizer={"use": "momentum", "clip": 0.5}, schedule={"use": "constant", "learning_rate": 0.05},
        strategy=settings, precision=precision, folder=folder, callbacks=[],
    )  # fmt: skip
    rows = recorded(trainer)
    trainer.fit("3 steps")
    saved = checkpoint.save(trainer.snapshot(), Path(folder) / "checkpoints", trainer.mesh)
    held = sum(int(p.size) for _, p in trainer.learner.placed.named_parameters())
    return {"rows": rows, "saved": str(saved), "held": held}


def trained_both_ways(folder, strategy):
    """In float64 and in bfloat16, which CPUs emulate."""
    return [train(f"{folder}/{kind}", strategy, kind) for kind in ("float64", "bfloat16")]


def test_two_ranks_of_cut_channels_learn_what_one_process_learns(tmp_path):
    one = trained_both_ways(tmp_path / "one", "{use: single}")
    for many in run_ranks(trained_both_ways, 2, str(tmp_path / "cut"), TENSOR):
        for found, want, rtol in zip(many, one, (1e-11, 2e-2), strict=True):
            np.testing.assert_allclose(found["rows"], want["rows"], rtol=rtol)
            assert found["held"] < 0.6 * want["held"]
            assert_same_weights(found["saved"], want["saved"], rtol)
            assert "model/norm._mean" in weights(want["saved"])


@pytest.mark.long
@pytest.mark.parametrize("strategy", [TENSOR, "{use: hybrid, tensor: 2, sharding: 2, sharding_stage: 3}"])
def test_samples_over_ranks_of_cut_channels(strategy, tmp_path):
    """Data or sharding beside tensor: running statistics are those of the ranks with the same channels."""
    one = train(f"{tmp_path}/one", "{use: single}", "float64")
    many = run_ranks(train, 4, str(tmp_path / "four"), strategy, "float64")
    for found in many:
        np.testing.assert_allclose(found["rows"], one["rows"], rtol=1e-11)
    assert_same_weights(many[0]["saved"], one["saved"], 1e-11)
    local = run_ranks(train, 4, str(tmp_path / "local"), strategy, "float64", sync=False)
    means, theirs = (weights(each["saved"]) for each in (local[0], one))
    assert not np.allclose(means["model/norm._variance"], theirs["model/norm._variance"], atol=1e-6)
    np.testing.assert_allclose(means["model/norm._mean"], theirs["model/norm._mean"], atol=0.05)
