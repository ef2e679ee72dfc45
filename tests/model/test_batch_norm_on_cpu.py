"""A paddle.nn.SyncBatchNorm computes on CPUs: bit for bit BatchNorm1D, where that normalizes a rank's samples."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh, join
from paddle_dp.model.batch_norm_on_cpu import local_batch_norms
from paddle_dp.part import read_part
from tests.house.learners import numbers_of, task_of
from tests.ranks import run_ranks


class Paths(nn.Layer):
    """Two branches, one with a norm."""

    branches = (("left",), ("norm", "right"))

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.left, self.norm, self.right = nn.Linear(8, 8), kind(8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.left(x) + self.right(self.norm(x))


def model_of(kind: Any, paths: bool) -> nn.Layer:
    paddle.seed(1)
    middle = Paths(kind) if paths else kind(8)
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 3))


def learn(words: dict[str, Any], kind: Any, mesh: Mesh) -> list[Any]:
    """The numbers of three updates, what this rank holds then, its outputs in evaluation, and what differs."""
    draw = np.random.RandomState(0)
    data = [(draw.randn(4).astype("float32"), np.int64(i % 3)) for i in range(24)]
    inputs = paddle.to_tensor(np.stack([x for x, _ in data]))
    task = task_of(model_of(kind, words["use"] == "branches"), samples=lambda: inputs[:4])
    learner = read_part("strategies", words).build(mesh).place(task)
    numbers = numbers_of(learner, Loader.plain(data, 8, learner.mesh).read(0))
    learner.statistics.sync()
    state = [tensor.tolist() for tensor in learner.placed.state().values()]
    return [numbers, state, learner.differences()]


STRATEGIES: list[dict[str, Any]] = [
    {"use": "data_parallel", "sync_batch_norm": False},
    {"use": "hybrid", "pipeline": 2},
    {"use": "hybrid", "data": 2, "sync_batch_norm": False},
    {"use": "branches", "over": 2},
]
ALONE: list[dict[str, Any]] = [{"use": "single"}, {"use": "replicas", "count": 2}]


def each() -> list[Any]:
    mesh = join(seed=0)
    return [[learn(words, kind, mesh) for kind in (nn.SyncBatchNorm, nn.BatchNorm1D)] for words in STRATEGIES]


def test_it_is_a_local_one_under_every_strategy() -> None:
    """Also in the trials before placement, of a pipeline's blocks and of branches."""
    for rank in run_ranks(each, 2):
        for words, (synced, local) in zip(STRATEGIES, rank, strict=True):
            assert synced == local, words
            is_named = any("over one rank's samples" in sentence for sentence in synced[2])
            assert is_named == (words.get("sync_batch_norm") is False)


@pytest.mark.parametrize("words", ALONE, ids=lambda words: words["use"])
def test_it_is_a_local_one_in_one_process(words: dict[str, Any]) -> None:
    assert learn(words, nn.SyncBatchNorm, Mesh.alone()) == learn(words, nn.BatchNorm1D, Mesh.alone())


@pytest.mark.parametrize(
    ("shape", "layout"), [([3, 2, 4, 5], "NCHW"), ([3, 4, 5, 2], "NHWC"), ([6, 2], "NCHW")]
)
def test_layouts_and_evaluation(shape: list[int], layout: str) -> None:
    x, layer = paddle.randn(shape), nn.SyncBatchNorm(2, data_format=layout)
    local_batch_norms(layer)
    trained = layer(x)
    np.testing.assert_allclose(trained.mean(), 0, atol=1e-6)
    layer.eval()
    assert layer(x).shape == shape
    assert np.abs(layer(x).numpy() - trained.numpy()).max() > 1e-3


def test_a_wrapped_forward_stays_wrapped() -> None:
    """A strategy makes another task of the model once it has wrapped its blocks."""
    layer = nn.SyncBatchNorm(2)
    local_batch_norms(layer)
    layer.forward = wrapped = lambda x: x
    task_of(layer)
    assert layer.forward is wrapped


def test_copied_and_pickled() -> None:
    layer = nn.SyncBatchNorm(2)
    local_batch_norms(layer)
    other = copy.deepcopy(layer)
    other(paddle.randn([5, 2]) + 3)
    assert float(other._mean.sum()) > 0 and float(layer._mean.sum()) == 0
    assert pickle.loads(pickle.dumps(layer))._data_format == "NCHW"
