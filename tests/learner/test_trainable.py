"""What is frozen in the midst of a training is as on one process, or refused; what is unfrozen is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.learner import Task
from paddle_dp.learner.learner_checks import FrozenCheck
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from paddle_dp.strategies.async_average.elastic_rank import ElasticRank
from paddle_dp.strategies.parameter_server.async_worker import AsyncWorker
from tests.house.learners import stored_weights, task_of
from tests.ranks import run_ranks

STRATEGIES: list[dict[str, Any]] = [
    {"use": "data_parallel"},
    {"use": "data_parallel", "find_unused_parameters": True},
    {"use": "hybrid", "data": 2},
    {"use": "hybrid", "sharding": 2, "sharding_stage": 2},
]


def learn(mesh: Mesh, words: dict[str, Any], frozen_first: bool) -> Any:
    """The last weight after four updates, where the first one's training was switched after two; or what was said."""
    paddle.seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    weight = model[0].weight
    weight.stop_gradient = frozen_first
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    task = Task(model=model, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=optimizer)
    one = read_part("strategies", words).build(mesh).place(task)
    draw = np.random.RandomState(0)
    x, y = paddle.to_tensor(draw.randn(8, 6).astype("float32")), paddle.to_tensor(draw.randint(0, 4, 8))
    share = 8 // one.mesh.dp_size
    mine = slice(one.mesh.dp_rank * share, (one.mesh.dp_rank + 1) * share)
    for index in range(4):
        weight.stop_gradient = frozen_first if index < 2 else not frozen_first
        try:
            one.train_batch(Batch((MicroBatch(x[mine], y[mine], share, mine.start),), 8, index, 0))
        except UsageError as error:
            return str(error)
    return model[2].weight.numpy()


def each(frozen_first: bool) -> list[Any]:
    mesh = join(seed=0)
    return [learn(mesh, words, frozen_first) for words in STRATEGIES]


def told_by_two() -> list[Any]:
    return [each(False), each(True), staged({"use": "hybrid", "pipeline": 2})]


@pytest.fixture(scope="module")
def two() -> list[Any]:
    """By case, what each of two ranks found."""
    return list(zip(*run_ranks(told_by_two, 2), strict=True))


def test_what_is_frozen_in_the_midst(two: list[Any]) -> None:
    one = learn(Mesh.alone(), {"use": "single"}, False)
    for plain, *others in two[0]:
        assert "'0.weight' was frozen after the model was placed" in plain
        assert "strategy.find_unused_parameters=true" in plain
        for weight in others:
            np.testing.assert_allclose(weight, one, rtol=1e-5, atol=1e-7)


def staged(words: dict[str, Any]) -> dict[str, Any]:
    """The weights of this rank after three updates; before the first of them a callback freezes one of stage 1."""
    mesh = join(seed=0)
    paddle.seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    learner = read_part("strategies", words).build(mesh).place(task_of(model))
    for name, parameter in learner.placed.named_parameters():
        parameter.stop_gradient |= name == "4.weight"
    data = [(np.full([4], i / 12, "float32"), np.int64(i % 3)) for i in range(12)]
    for batch in Loader.plain(data, 4, learner.mesh).read(0):
        learner.train_batch(batch)
    return stored_weights(learner)


def test_what_one_stage_alone_freezes_before_the_first_update(two: list[Any]) -> None:
    """It was still looked for at the second update, which only this stage's rank did: that waited for the other."""
    one, stages = staged({"use": "single"}), two[2]
    assert all(stages)
    for name, value in {name: value for stage in stages for name, value in stage.items()}.items():
        np.testing.assert_allclose(value, one[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", [ElasticRank, AsyncWorker])
def test_what_is_unfrozen_in_the_midst_of_a_round(kind: Any) -> None:
    """Its gradient was pushed to nobody, and it stayed what it was, in silence."""
    parameter = paddle.create_parameter([2], "float32")
    parameter.stop_gradient = True
    mesh = SimpleNamespace(ranks=2)
    placed = SimpleNamespace(named_parameters=lambda: [("body", parameter)], mesh=mesh)
    modes = SimpleNamespace(counter=None)
    learner = SimpleNamespace(mesh=mesh, mode=modes)
    worker = SimpleNamespace(_learner=learner, _weights=modes, _frozen=FrozenCheck(placed))
    parameter.stop_gradient = False
    with pytest.raises(UsageError, match="'body' was unfrozen after the model was placed"):
        kind.train_share(worker, None, False)


def test_what_is_unfrozen_in_the_midst(two: list[Any]) -> None:
    for told in two[1]:
        assert all("'0.weight' was unfrozen after the model was placed" in said for said in told)


def test_what_is_unfrozen_in_the_midst_on_one_rank() -> None:
    """Its gradient was not divided by the count, and its optimizer stepped it, in silence."""
    told = learn(Mesh.alone(), {"use": "single"}, True)
    assert "'0.weight' was unfrozen after the model was placed" in told
    assert "scaled or clipped" in told and "the ranks" not in told and "accept=['frozen']" in told
