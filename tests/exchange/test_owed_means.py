"""What compressed gradients owe is of means: whatever a loss counts, and when it tells, all is paid in the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from tests.house.learners import task_of
from tests.ranks import run_ranks

COUNTS = [4, 1, 4, 1, 4]  # samples of each rank that count, by update
SAMPLES, WIDTH = 4, 8


class Some:
    """Of samples with a positive target a sum of the outputs, and their number, which only its answer tells."""

    def __call__(self, outputs: Any, targets: Any) -> Any:
        counts = (targets > 0).astype("float32")
        return (outputs * waves(targets) * counts.unsqueeze(1)).sum(), counts.sum()


def waves(targets: Any) -> Any:
    """For each target other weights of the outputs, so that a gradient is no matrix of rank 1."""
    return (paddle.arange(1, WIDTH + 1).astype("float32") * targets.astype("float32").unsqueeze(1)).cos()


def owed(compress: str) -> list[list[list[float]]]:
    """In every rank: how far a weight has gone, the sum of the true gradients, and what this rank owes."""
    mesh = join()
    paddle.seed(1)
    model = nn.Linear(WIDTH, WIDTH, bias_attr=False)
    task = task_of(model, Some(), "SGD", 1.0)
    strategy = read_part("strategies", {"use": "data_parallel", "compress": compress}).build(mesh)
    learner, before = strategy.place(task), model.weight.numpy()
    draw, true = np.random.RandomState(0), np.zeros([WIDTH, WIDTH])
    for index, count in enumerate(COUNTS):
        x = draw.randn(mesh.ranks, SAMPLES, WIDTH).astype("float32")
        y = np.where(np.arange(SAMPLES) < count, np.arange(1, SAMPLES + 1), 0)
        of_outputs = waves(paddle.to_tensor(y[:count])).numpy()
        true += np.einsum("rsi,so->io", x[:, :count], of_outputs) / (mesh.ranks * count)
        mine = MicroBatch(paddle.to_tensor(x[mesh.rank]), paddle.to_tensor(y), SAMPLES, SAMPLES * mesh.rank)
        learner.train_batch(Batch((mine,), SAMPLES * mesh.ranks, index, 0))
    debt = learner.extra_state().local["error/weight"].numpy()
    return [(before - model.weight.numpy()).tolist(), true.tolist(), debt.tolist()]


def test_all_is_paid_though_updates_count_unequally() -> None:
    """An update of one sample once got four times what the one before it owed."""
    ranks = [
        [np.array(part) for part in found] for found in run_ranks(owed, 2, "power_sgd rank 1 after 0 steps")
    ]
    (gone, true, _), debt = ranks[0], sum(found[2] for found in ranks)
    assert np.abs(debt).max() > 1e-3, "nothing is owed, and nothing is shown"
    np.testing.assert_allclose(gone + debt, true, atol=1e-5)
