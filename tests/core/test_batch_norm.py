"""Our batch normalization is Paddle's on one rank, in values, gradients, statistics and names."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.batch_norm import (
    RunningStatistics,
    SyncBatchNorm,
    desynchronize,
    local_norms,
    statistics,
    synchronize,
)
from paddle_dp.errors import UsageError
from paddle_dp.learner import Task
from paddle_dp.mesh import Mesh, join
from paddle_dp.strategies.data_parallel import Config
from tests.ranks import run_ranks

CASES = [
    (nn.BatchNorm1D, {}, [6, 3]),
    (nn.BatchNorm1D, {"data_format": "NLC"}, [6, 5, 3]),
    (nn.BatchNorm2D, {}, [4, 3, 5, 2]),
    (nn.BatchNorm2D, {"data_format": "NHWC", "momentum": 0.5, "epsilon": 1e-3}, [4, 5, 2, 3]),
    (nn.BatchNorm2D, {"weight_attr": False, "bias_attr": False}, [4, 3, 5, 2]),
    (nn.BatchNorm3D, {}, [2, 3, 4, 5, 2]),
    (nn.BatchNorm, {"act": "relu"}, [4, 3, 5, 2]),
    (nn.BatchNorm, {"data_layout": "NHWC", "momentum": 0.5}, [4, 5, 2, 3]),
    (nn.BatchNorm1D, {}, [1, 3]),
]


@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings", "shape", "dtype"),
    [*((*case, "float32") for case in CASES), (nn.BatchNorm2D, {}, [4, 3, 5, 2], "float64")],
)
def test_one_rank_is_paddles_own(kind, settings, shape, dtype, first_layer):
    """In float64 to the last digits: epsilon and momentum are float32 in Paddle's kernel, and as doubles they would be
    off by 4e-13 and 3e-8. The inputs of a model's first layer need no gradient: with one value per channel, Paddle's
    bias has one then, on CPUs, and none else."""
    results = []
    for wrap in (lambda layer: layer, lambda layer: synchronize(layer, Mesh.alone())):
        paddle.seed(0)
        layer = wrap(kind(3, **settings))
        layer.to(dtype=dtype)
        x, weigh = paddle.randn(shape, dtype) * 3 + 1, paddle.randn(shape, dtype)
        x.stop_gradient = first_layer
        y = layer(x)
        if first_layer and not trained(layer):
            assert y.stop_gradient
        else:
            (y * weigh).sum().backward()
        gradients = [] if first_layer else [x.grad]
        results.append([y, *gradients, layer._mean, layer._variance, *(p.grad for p in trained(layer))])
        layer.eval()
        results[-1] += [layer(x)] if dtype == "float32" else []
    bounds = {"atol": 2e-5, "rtol": 1e-4} if dtype == "float32" else {"atol": 1e-13, "rtol": 1e-13}
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), **bounds)


def trained(layer):
    return [p for p in layer.parameters() if not p.stop_gradient]


def test_synchronize_keeps_names_and_weights():
    model = nn.Sequential(nn.Conv2D(1, 3, 3), nn.BatchNorm2D(3), nn.Sequential(nn.BatchNorm2D(3)))
    before = model.state_dict()
    assert local_norms(model) == ["1", "2.0"]
    synchronize(model, Mesh.alone())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert local_norms(model) == []
    assert synchronize(model, Mesh.alone())[1] is model[1]


def test_desynchronize_gives_a_batch_norm_back_as_it_was():
    for kind in (nn.BatchNorm, nn.BatchNorm1D, nn.SyncBatchNorm):
        norm = kind(3)
        attributes = {*vars(norm)}
        desynchronize(synchronize(nn.Sequential(norm), Mesh.alone()))
        assert type(norm) is kind and {*vars(norm)} == attributes
        assert local_norms(nn.Sequential(norm)) == ["0"]


def test_a_training_has_its_batch_norms_after_another_changed_them():
    """It would go on with the other's ranks, or with none."""
    mesh, other = Mesh.alone(), Mesh.alone()
    model = synchronize(nn.Sequential(nn.BatchNorm1D(3)), mesh)
    training = RunningStatistics(model, mesh)
    for change in (desynchronize, lambda model: synchronize(model, other)):
        change(model)
        training.restore_norms()
        assert isinstance(model[0], SyncBatchNorm) and model[0].mesh is mesh
    alone = RunningStatistics(desynchronize(model) or model, mesh)
    synchronize(model, other)
    alone.restore_norms()
    assert type(model[0]) is nn.BatchNorm1D


def test_a_model_that_is_a_batch_norm_stays_synchronized_and_is_absent_for_a_dummy_sample():
    """At each fit it became local, silently; and the dummy sample of a rank without a share counted."""
    mesh = Mesh.alone()
    model = synchronize(nn.BatchNorm1D(3), mesh)
    training = RunningStatistics(model, mesh)
    training.restore_norms()
    assert isinstance(model, SyncBatchNorm) and model.mesh is mesh
    with training.unchanged():
        assert not model.present
    assert model.present


def test_synchronize_replaces_the_ranks_of_an_earlier_training():
    """After servers, whose workers exchange through server 0, data_parallel ended in an AssertionError."""
    model = nn.Sequential(nn.BatchNorm2D(3), nn.Sequential(nn.BatchNorm2D(3)))
    earlier, later = Mesh.alone(), Mesh.alone()
    for mesh in (earlier, later):
        synchronize(model, mesh)
        assert [(norm.mesh is mesh, norm.index) for norm in (model[0], model[1][0])] == [(True, 0), (True, 1)]


class Own(nn.BatchNorm2D):
    def forward(self, x):
        return super().forward(x) + 1


def test_what_is_frozen_or_computes_something_else_stays():
    frozen = nn.BatchNorm2D(3)
    frozen.eval()
    model = nn.Sequential(
        nn.BatchNorm(3, act="relu"), nn.BatchNorm2D(3, use_global_stats=True), frozen, Own(3)
    )
    assert local_norms(model) == ["0", "3"]
    model.append(replaced := nn.BatchNorm2D(3))
    replaced.forward = lambda x: x + 1
    assert local_norms(model) == ["0", "3", "4"]
    ours, *others = synchronize(model, Mesh.alone())
    assert isinstance(ours, SyncBatchNorm) and isinstance(ours, nn.BatchNorm)
    assert [type(layer) for layer in others] == [nn.BatchNorm2D, nn.BatchNorm2D, Own, nn.BatchNorm2D]
    assert local_norms(model) == ["3", "4"]


def test_lists_and_hooks_keep_the_layer_that_they_know():
    """A list had the local layer, and hooks acted in evaluation only."""
    model = nn.Sequential(nn.BatchNorm1D(3))
    layers, calls = [model[0]], []
    layers[0].register_forward_post_hook(lambda layer, inputs, output: calls.append(layer) or output + 1)
    synchronize(model, Mesh.alone())
    assert layers[0] is model[0] and isinstance(layers[0], SyncBatchNorm)
    np.testing.assert_allclose(model(paddle.randn([9, 3])).mean(0).numpy(), 1, atol=1e-6)
    model.eval()
    model(paddle.randn([9, 3]))
    assert calls == [layers[0], layers[0]]


def test_a_norm_that_two_layers_share_is_one():
    shared = nn.BatchNorm1D(3)
    model = synchronize(nn.Sequential(shared, nn.Sequential(shared), nn.BatchNorm1D(3)), Mesh.alone())
    assert model[0] is model[1][0] is shared and [model[0].index, model[2].index] == [0, 1]


def test_in_evaluation_it_is_a_program_of_paddle():
    layer = synchronize(nn.BatchNorm1D(3), Mesh.alone())
    layer.eval()
    x = paddle.randn([5, 3])
    expected = layer(x).numpy()
    np.testing.assert_array_equal(paddle.jit.to_static(layer)(x).numpy(), expected)


def test_a_second_training_may_freeze_its_statistics():
    layer = synchronize(nn.BatchNorm1D(3), Mesh.alone())
    layer._use_global_stats = True
    x = paddle.randn([5, 3])
    np.testing.assert_allclose(layer(x).numpy(), x.numpy(), rtol=1e-4)
    np.testing.assert_array_equal(layer._mean.numpy(), np.zeros(3))


def test_copied():
    layer = synchronize(nn.BatchNorm1D(3), Mesh.alone())
    other = copy.deepcopy(layer)
    other(paddle.randn([5, 3]) + 3)
    assert isinstance(other, SyncBatchNorm) and float(other._mean.sum()) > 0 == float(layer._mean.sum())
    assert other.mesh is layer.mesh  # under hybrid it has process groups, which cannot be copied


def test_a_dummy_leaves_no_trace():
    layer = synchronize(nn.BatchNorm1D(3), Mesh.alone())
    layer.present = False
    x = paddle.randn([4, 3])
    x.stop_gradient = False
    (layer(x) * paddle.randn([4, 3])).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 0)
    np.testing.assert_array_equal(layer._mean.numpy(), np.zeros(3))  # empty on all ranks
    np.testing.assert_array_equal(layer._variance.numpy(), np.ones(3))


def test_statistics_are_not_parameters_to_learn():
    model = nn.Sequential(nn.BatchNorm1D(3), nn.Linear(3, 2))
    assert set(statistics(model)) == {"0._mean", "0._variance"}
    assert set(statistics(synchronize(model, Mesh.alone()))) == {"0._mean", "0._variance"}


class Alone:
    """The only rank."""

    def gather_tensor(self, tensor):
        return [tensor]

    def sum_tensor(self, tensor):
        return tensor


def test_a_micro_batch_with_one_value_per_channel_adds_nothing_to_the_gradients():
    x = paddle.to_tensor(np.random.RandomState(0).randn(3, 6).astype("float32"))
    gradients = []
    for make in (lambda model: model, lambda model: synchronize(model, Alone())):
        paddle.seed(1)
        model = make(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1D(6), nn.Linear(6, 3)))
        for part in (x[2:], x[:2]):
            model(part).square().sum().backward()
        gradients.append([p.grad.numpy() for p in model.parameters() if not p.stop_gradient])
    for ours, paddles in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, paddles, rtol=1e-4, atol=1e-5)


def norm_of_its_own():
    """Each rank runs another BatchNorm than the other; the error that says so."""
    mesh = join()
    model = synchronize(nn.Sequential(nn.BatchNorm1D(3), nn.BatchNorm1D(3)), mesh)
    together = [layer(paddle.randn([4, 3])) for layer in model]
    try:
        model[mesh.rank](paddle.randn([4, 3]))
    except UsageError as error:
        return [len(together), str(error)]
    return [len(together), ""]


@pytest.mark.processes
def test_statistics_of_different_layers_are_not_mixed():
    """Experts that a gate leaves out on one rank: the ranks' statistics met all the same, and were added up."""
    for count, said in run_ranks(norm_of_its_own, 2):
        assert count == 2
        assert "ranks are in different BatchNorm layers" in said
        assert "strategy.sync_batch_norm=false" in said


def in_evaluation() -> list[str]:
    """The differences of a model with a BatchNorm whose statistics are the batch's in evaluation, too."""
    mesh = join(seed=0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm(8, trainable_statistics=True), nn.BatchNorm(8))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    task = Task(model=model, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=optimizer)
    return list(Config().build(mesh).place(task).differences())


def test_a_norm_over_the_batch_in_evaluation_is_named() -> None:
    """In training it is over all ranks."""
    ((sentence,), again) = run_ranks(in_evaluation, 2)
    assert again == [sentence]
    assert re.match(
        r"1 BatchNorm layer normalizes by .* in evaluation, too \(1: trainable_statistics=True\)", sentence
    )
    assert run_ranks(in_evaluation, 1) == [[]]


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
