"""Frozen parameters on the sharding axis: they have no update to deal, and in stage 3 an owner that stores them; where
few parameters learn, some ranks own none of them."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.data import Loader
from paddle_dp.learner import Task
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from tests.house.learners import Chain, stored_weights
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
    mesh = join(seed=1)
    paddle.seed(1)
    model = {"sequential": sequential, "Tied": Tied, "head_only": head_only}[model]()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    task = Task(model=model, loss=CrossEntropy().build(), optimizer=optimizer)
    learner = read_part("strategies", strategy).build(mesh).place(task)
    data = [(np.full([4], i / 8, "float32"), np.int64(i % 3)) for i in range(8)]
    for batch in Loader.plain(data, 4, learner.mesh).read(0):
        learner.train_batch(batch)
    learner.check("at the end")
    owned = sum(learner.placed.is_updated(p) for _, p in learner.placed.named_parameters(trainable=True))
    return stored_weights(learner), owned


def learn_each(strategies, model="sequential"):
    return [learn(strategy, model) for strategy in strategies]


def stages_of(ranks):
    return [{"use": "hybrid", "sharding": ranks, "sharding_stage": stage} for stage in (1, 2, 3)]


def assert_one_process(found, one):
    """What ranks store is together, each weight once or more, what one process has; the frozen ones bit by bit."""
    together = {name: value for weights in found for name, value in weights.items()}
    assert set(together) == set(one)
    for name, value in together.items():
        np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-6, err_msg=name)


def learn_all():
    return [*learn_each(stages_of(2)), learn({"use": "hybrid", "pipeline": 2}, "Tied")]


@pytest.fixture(scope="module")
def two():
    """By case, what each of two ranks has."""
    return list(zip(*run_ranks(learn_all, 2), strict=True))


def test_frozen_parameters_have_no_update_in_any_stage_and_an_owner_in_the_third(two):
    one, _ = learn({"use": "single"})
    for stage, found in enumerate(two[:3], start=1):
        assert_one_process([weights for weights, _ in found], one)
        copies = [sum(name in weights for weights, _ in found) for name in ("2.weight", "2.bias", "0.weight")]
        assert copies == ([1, 1, 1] if stage == 3 else [2, 2, 2])


def head_only():
    """A body that is frozen, with a norm in it, and a head of two parameters: fewer than ranks."""
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8, use_global_stats=True), nn.Linear(8, 8))
    for parameter in body.parameters():
        parameter.stop_gradient = True
    return nn.Sequential(body, nn.Linear(8, 3))


@pytest.mark.long
def test_ranks_that_own_nothing_that_learns_are_exact():
    one, _ = learn({"use": "single"}, "head_only")
    for found in zip(*run_ranks(learn_each, 3, stages_of(3), "head_only"), strict=True):
        assert_one_process([weights for weights, _ in found], one)
        assert sorted(owned for _, owned in found) == [0, 1, 1]


class Tied(Chain):
    """The first block and the last one share a frozen weight."""

    def __init__(self):
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        first.weight.stop_gradient = True
        last.weight = first.weight
        super().__init__(first, nn.Tanh(), nn.Linear(4, 4), last)


def test_a_frozen_weight_that_two_stages_share_has_no_gradient_to_add_up(two):
    (one, _), stages = learn({"use": "single"}, "Tied"), two[3]
    assert_one_process([weights for weights, _ in stages], one)
