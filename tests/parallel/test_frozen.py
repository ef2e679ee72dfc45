"""An optimizer that was given frozen parameters, too: they have no update to deal to the ranks of the sharding axis."""

import numpy as np
import paddle
from paddle import nn

from tests.ranks import run_ranks


class Scale(nn.Layer):
    """A learned factor, with shape []."""

    def __init__(self):
        super().__init__()
        self.factor = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x):
        return x * self.factor


def sequential():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), Scale())
    for parameter in model[2].parameters():
        parameter.stop_gradient = True
    return model


def learn(strategy, model="sequential"):
    from paddle_dp.data import Loader
    from paddle_dp.losses.cross_entropy import Config as CrossEntropy
    from paddle_dp.mesh import join
    from paddle_dp.parallel import Task
    from paddle_dp.part import read_part

    mesh = join(seed=1)
    paddle.seed(1)
    model = {"sequential": sequential, "Tied": Tied}[model]()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    learner = (
        read_part("strategies", strategy)
        .build(mesh)
        .place(Task(model=model, loss=CrossEntropy().build(), optimizer=optimizer))
    )
    data = [(np.full([4], i / 8, "float32"), np.int64(i % 3)) for i in range(8)]
    for batch in Loader.plain(data, 4, learner.mesh).read(0):
        learner.train_batch(batch)
    learner.check("at the end")
    return {n: p.numpy() for n, p in learner.named_parameters() if learner.is_stored(p)}


def learn_each(strategies):
    return [learn(strategy) for strategy in strategies]


def test_frozen_parameters_of_an_optimizer_are_nobodys_in_every_stage():
    one = run_ranks(learn, 1, {"use": "single"})[0]
    stages = [{"use": "hybrid", "sharding": 2, "sharding_stage": stage} for stage in (1, 2, 3)]
    ranks = run_ranks(learn_each, 2, stages)
    for weights in zip(*ranks, strict=True):
        together = {name: value for found in weights for name, value in found.items()}
        assert set(together) == set(one)
        for name, value in together.items():
            np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-6, err_msg=name)
        assert all({"2.weight", "2.bias"} <= set(found) for found in weights)  # each rank has them, whole


class Tied(nn.Layer):
    """The first block and the last one share a frozen weight."""

    def __init__(self):
        super().__init__()
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        first.weight.stop_gradient = True
        last.weight = first.weight
        self.blocks = nn.LayerList([first, nn.Tanh(), nn.Linear(4, 4), last])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_frozen_weight_that_two_stages_share_has_no_gradient_to_add_up():
    one = run_ranks(learn, 1, {"use": "single"}, "Tied")[0]
    stages = run_ranks(learn, 2, {"use": "hybrid", "pipeline": 2}, "Tied")
    together = {name: value for found in stages for name, value in found.items()}
    assert set(together) == set(one)
    for name, value in together.items():
        np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-6, err_msg=name)
