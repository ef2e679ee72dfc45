"""Dropout from a slice of an activation that nobody called one: each rank would draw the first rank's mask."""

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.ranks import run_ranks


class Cut(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)
        self.last = nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.down(self.drop(F.gelu(self.up(x)))))


class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.random.RandomState(i).randn(4).astype("float32"), np.zeros(4, "float32")


def differences(cuts):
    """What is said after one update on two ranks of a tensor axis."""
    from paddle_dp.data import Loader, Sampler
    from paddle_dp.learner import Task
    from paddle_dp.mesh import join
    from paddle_dp.part import read_part

    mesh = join(seed=3)
    found = []
    for table in cuts:
        model = Cut()
        model.cuts = table
        task = Task(
            model=model,
            loss=lambda outputs, targets: (outputs - targets).square().mean(-1),
            optimizer=lambda rate, named: paddle.optimizer.SGD(0.1, parameters=[p for _, p in named]),
        )
        learner = read_part("strategies", {"use": "hybrid", "tensor": 2}).build(mesh).place(task)
        for batch in Loader(Samples(), Sampler.for_mesh(8, 8, learner.mesh, seed=0, shuffle=False)).read(0):
            learner.train_batch(batch, collect_metrics=True)
        found.append(learner.runner.draws.differences())
    return found


def test_a_dropout_between_cut_layers_that_the_table_forgot_is_said():
    table = {"up": "colwise", "down": "rowwise"}
    for said, forgot in run_ranks(differences, 2, [table | {"drop": "colwise"}, table]):
        assert said == []
        assert len(forgot) == 1 and forgot[0].startswith("drop (Dropout) drops by the same mask"), forgot
        assert "on all ranks of the tensor axis" in forgot[0]
