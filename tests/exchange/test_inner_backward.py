"""A model whose forward runs a backward of its own, for an adversary's step, whose gradients nobody exchanges."""

import numpy as np
import paddle
from paddle import nn

from paddle_dp.data import Loader
from paddle_dp.learner import Task
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from tests.house.learners import stored_weights
from tests.ranks import run_ranks

LAYOUTS = [
    {"use": "data_parallel"},
    *({"use": "hybrid", "sharding": 2, "sharding_stage": stage} for stage in (1, 2, 3)),
]


class Adversarial(nn.Layer):
    """Trains on inputs that are moved to where the outputs grow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        if self.training and paddle.is_grad_enabled():
            kept = [(p, p.grad.clone() if p.grad is not None else None) for p in self.parameters()]
            moved = x.detach()
            moved.stop_gradient = False
            self.layers(moved).square().sum().backward()
            for parameter, gradient in kept:
                parameter.clear_gradient(False)
                if gradient is not None:
                    parameter.grad = gradient
            x = x + 0.1 * moved.grad.sign()
        return self.layers(x)


def learn(strategy, mesh):
    paddle.seed(1)
    model = Adversarial()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    placed = read_part("strategies", strategy).build(mesh)
    learner = placed.place(Task(model=model, loss=CrossEntropy().build(), optimizer=optimizer))
    data = [(np.full([4], i / 8, "float32"), np.int64(i % 3)) for i in range(16)]
    for batch in Loader.plain(data, 4, placed.mesh, micro_batches=2, seed=1).read(0):
        learner.train_batch(batch)
    return stored_weights(learner)


def learn_each():
    """In every rank: how far its weights are from one process's, by layout."""
    mesh = join(seed=1)
    one = learn({"use": "single"}, Mesh(rank=0, ranks=1, device="cpu"))
    return [
        max(float(np.abs(value - one[name]).max()) for name, value in learn(layout, mesh).items())
        for layout in LAYOUTS
    ]


def test_the_gradients_of_a_backward_within_forward_stay_where_they_are():
    for apart in run_ranks(learn_each, 2):
        assert max(apart) < 1e-6, list(zip(LAYOUTS, apart, strict=True))
