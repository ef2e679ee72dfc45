"""A BatchNorm that is frozen in the midst of a training: one set of statistics for all ranks, and no word forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.learner import Task
from paddle_dp.mesh import join
from paddle_dp.strategies.data_parallel import Config
from tests.ranks import run_ranks

FROZEN_AFTER, UPDATES = 3, 6


def learn(interrupted: bool, sync: bool) -> list[Any]:
    """Weights and statistics, and what is said at the end, where the norm is frozen by whoever made it."""
    mesh = join(seed=0)
    paddle.seed(1)
    norm = nn.BatchNorm1D(8)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 4))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    task = Task(model=model, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=optimizer)
    learner = Config(sync_batch_norm=sync).build(mesh).place(task)
    for index in range(UPDATES):
        if index == FROZEN_AFTER:
            norm.eval()
        draw = np.random.RandomState(10 * index + mesh.rank)
        x = paddle.to_tensor(draw.randn(4, 6).astype("float32") * (1 + mesh.rank))
        micro_batch = MicroBatch(x, paddle.to_tensor(draw.randint(0, 4, 4)), 4, 4 * mesh.rank)
        learner.train_batch(Batch((micro_batch,), 4 * mesh.ranks, index, 0))
        if interrupted:
            learner.statistics.sync()
        if index == FROZEN_AFTER - 1:
            mine = norm._mean.numpy()
    moved = float(np.abs(norm._mean.numpy() - mine).max())
    return [{name: t.numpy() for name, t in learner.placed.state().items()}, learner.differences(), moved]


def each() -> list[Any]:
    return [learn(interrupted, sync) for interrupted, sync in ((False, False), (True, False), (False, True))]


def test_frozen_in_the_midst_of_a_training() -> None:
    first, second = run_ranks(each, 2)
    (local, said, _), (saved, _, _), (synced, nothing, moved) = first
    assert [part[0] for part in second] == [local, saved, synced]  # weights and statistics, bit by bit
    for name, value in local.items():  # to the last place: averages of averages are rounded
        np.testing.assert_allclose(saved[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    (sentence,) = said
    assert sentence.startswith("1 BatchNorm layer normalizes over one rank's samples (1)")
    assert nothing == []
    assert moved == 0, "a frozen layer goes on keeping statistics"
