"""One process is the truth: losses, gradient norms and weights of several ranks against those of one."""

from typing import Any

import numpy as np
import pytest

from tests.house.datasets import Arrays
from tests.ranks import run_ranks

SAMPLES, FEATURES, CLASSES = 47, 12, 7


def points():
    """A small classification problem, the same in every process."""
    random = np.random.RandomState(0)
    points = random.randn(SAMPLES, FEATURES).astype("float32")
    return Arrays(points, random.randint(0, CLASSES, SAMPLES).astype("int64"))


def network(norm):
    from paddle import nn

    norms = [nn.BatchNorm1D(16)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, 16), *norms, nn.GELU(), nn.Linear(16, CLASSES))


def learn(batch=10, micro_batches=1, norm=False, epochs=2, kind="Momentum", dtype="float32", **settings):
    """Trains on all ranks; returns [losses, gradient norms, weights] of this rank's view of the whole."""
    import paddle

    from paddle_dp.core.batch_norm import statistics
    from paddle_dp.data import Loader
    from paddle_dp.mesh import join
    from paddle_dp.strategies.data_parallel import Config
    from tests.house.learners import numbers_of, task_of

    mesh = join(seed=3)
    rate, clip = {"Momentum": 0.1, "AdamW": 1e-2}[kind], paddle.nn.ClipGradByGlobalNorm(0.5)
    task = task_of(network(norm), None, kind, rate, dtype, settings={"grad_clip": clip})
    learner = Config(**settings).build(mesh).place(task)
    loader = Loader.plain(points(), batch, mesh, micro_batches=micro_batches, seed=1)
    rows = numbers_of(learner, (group for epoch in range(epochs) for group in loader.read(epoch)))
    losses, norms = zip(*rows, strict=True)
    learner.check("test")
    weights = {name: p.numpy() for name, p in learner.placed.named_parameters()}
    learner.statistics.sync()
    return [losses, norms, weights, {name: t.numpy() for name, t in statistics(learner.model).items()}]


def assert_same(one, many, tolerance=1e-5):
    for rank in many:
        np.testing.assert_allclose(rank[0], one[0], rtol=tolerance)
        np.testing.assert_allclose(rank[1], one[1], rtol=20 * tolerance)
        for name, weight in one[2].items():
            np.testing.assert_allclose(rank[2][name], weight, rtol=0, atol=2 * tolerance, err_msg=name)


PLAIN: dict[str, Any] = {}
NORM: dict[str, Any] = {"norm": True, "sync_batch_norm": False}
LAYOUTS: list[dict[str, Any]] = [
    {"micro_batches": 3},
    {"micro_batches": 2, "norm": True},
    {"batch": 45, "norm": True},
    {"find_unused_parameters": True, "kind": "AdamW", "init": "seed"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
]
ALL = [PLAIN, NORM, *LAYOUTS]


def learn_each(cases):
    """One case after the other in the same ranks."""
    return [learn(**case) for case in cases]


@pytest.fixture(scope="module")
def one():
    return run_ranks(learn_each, 1, ALL, timeout=300)[0]


@pytest.fixture(scope="module")
def two():
    return run_ranks(learn_each, 2, [PLAIN, NORM])


@pytest.fixture(scope="module")
def three():
    """By case, what each of three ranks found."""
    return list(zip(*run_ranks(learn_each, 3, [PLAIN, *LAYOUTS], timeout=300), strict=True))


def test_plain_model_with_a_short_last_batch(one, two):
    """47 samples in batches of 10: a last batch of 7."""
    assert_same(one[0], [rank[0] for rank in two])


@pytest.mark.long
def test_plain_model_on_four_ranks(one):
    """Shares of 2 and 3 samples."""
    assert_same(one[0], run_ranks(learn, 4))


def test_plain_model_on_three_ranks(one, three):
    assert_same(one[0], three[0])


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_layouts_on_three_ranks(one, three, settings):
    """Batches of 45 of 47 leave a batch of two samples: one of three ranks computes on a dummy."""
    truth, many = one[ALL.index(settings)], three[1 + LAYOUTS.index(settings)]
    assert_same(truth, many, 1e-5 if settings.get("dtype", "float32") == "float32" else 2e-3)
    if settings.get("norm"):
        assert set(truth[3]) == {"1._mean", "1._variance"}
        for name, statistic in truth[3].items():
            np.testing.assert_allclose(many[2][3][name], statistic, atol=1e-5, err_msg=name)


def test_batch_norm_of_one_rank_only_differs(one, two):
    """The comparison can fail: with sync_batch_norm: false the ranks normalize by their own samples."""
    assert abs(two[0][1][0][3] - one[ALL.index(NORM)][0][3]) > 1e-4
