"""One batch in, one update done: skipped on overflow, counted by the loss, left alone by dummies."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.data import Batch, MicroBatch
from paddle_dp.errors import DivergenceError, UsageError
from paddle_dp.exchange.paddle_reducer import PaddleReducer
from paddle_dp.learner import Task, full_model_learner
from paddle_dp.losses.cross_entropy import CrossEntropy
from paddle_dp.losses.mean_squared_error import MeanSquaredError
from paddle_dp.mesh import Mesh
from tests.house.learners import task_of


class Summed:
    """Squared error over the targets that are not -1."""

    def __call__(self, outputs, targets):
        keep = (targets != -1).astype("float32")
        return ((outputs - targets).square() * keep).sum(), keep.sum()

    def count(self, targets):
        return (targets != -1).astype("float32").sum()


def learner(loss, precision="float32", model=None):
    paddle.seed(0)
    task = task_of(model or nn.Linear(3, 2), loss, dtype=precision)
    return full_model_learner(task, Mesh.alone())


def batch(*pieces):
    random = np.random.RandomState(0)
    micro_batches = tuple(
        MicroBatch(
            paddle.to_tensor(random.randn(max(n, 1), 3).astype("float32")),
            paddle.to_tensor(random.randn(max(n, 1), 2).astype("float32")),
            n,
        )
        for n in pieces
    )
    return Batch(micro_batches, sum(pieces), 0, 0)


def test_the_global_count_is_the_losss_own():
    """Unequal micro-batches with holes: the gradient is that of one mean over all counted targets."""
    holed = batch(3, 5)
    holed.micro_batches[0].targets[0] = -1.0
    ours = learner(Summed())
    metrics = ours.train_batch(holed, collect_metrics=True)
    plain = learner(Summed())
    x = paddle.concat([m.inputs for m in holed.micro_batches])
    y = paddle.concat([m.targets for m in holed.micro_batches])
    total, count = plain.loss(plain.model(x), y)
    assert count.item() == 14
    (total / count).backward()
    plain.optimizer.step()
    np.testing.assert_allclose(ours.model.weight.numpy(), plain.model.weight.numpy(), atol=1e-6)
    assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-6)


def test_a_score_is_the_losss_own_sums_and_leaves_nothing_behind():
    held_out = batch(5).micro_batches[0]
    held_out.targets[0] = -1.0
    ours = learner(Summed())
    score = ours.runner.score(held_out)
    total, count = ours.loss(ours.model(held_out.inputs), held_out.targets)
    assert score.sums == {"loss": pytest.approx(total.item(), rel=1e-6)}
    assert (score.count, score.samples) == (count.item(), 5) == (8.0, 5)
    assert score.outputs.stop_gradient and score.outputs.shape == [5, 2]
    assert ours.runner.score(batch(0).micro_batches[0]) is None  # a dummy
    metrics = learner(Summed()).train_batch(Batch((held_out,), 5, 0, 0), collect_metrics=True)
    assert metrics["loss"] == pytest.approx(score.sums["loss"] / score.count, rel=1e-6)


def test_metrics_are_for_those_who_ask():
    assert learner(Summed()).train_batch(batch(4)) is None


class Logarithms(nn.Layer):
    """Scores of which those of negative numbers are NaN, in a width at which Paddle's kernel hides it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 200)

    def forward(self, x):
        return self.linear(x).log()


class Weighted(CrossEntropy):
    """Learns the weight of its total, so that the total's value is in a gradient."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def __call__(self, outputs, targets):
        total, count = super().__call__(outputs, targets)
        return (-self.weight).exp() * total + count * self.weight, count


def trained(loss, model, collect):
    labelled = replace(batch(4).micro_batches[0], targets=paddle.zeros([4], "int64"))
    labelling = learner(loss, model=model)
    metrics = labelling.train_batch(Batch((labelled,), 4, 0, 0), collect_metrics=collect)
    return metrics, [parameter.numpy() for parameter in model.parameters()]


def test_hidden_nan_shows_where_the_loss_is_read_and_changes_no_weight():
    paddle.seed(0)
    first, second = Logarithms(), Logarithms()
    second.set_state_dict(first.state_dict())
    metrics, weights = trained(CrossEntropy(), first, collect=True)
    nothing, same = trained(CrossEntropy(), second, collect=False)
    assert math.isnan(metrics["loss"]) and nothing is None
    for one, other in zip(weights, same, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("collect", [True, False])
def test_a_loss_that_computes_with_a_total_gets_its_nan_though_nobody_reads_it(collect):
    model = Logarithms()
    model.weight = model.create_parameter([1])
    _, weights = trained(Weighted(model.weight), model, collect)
    assert np.isnan(weights[0]).all()


def test_an_overflow_leaves_the_weights_alone_and_halves_the_scale():
    overflowing = learner(Summed(), "float16")
    overflowing.mixed.scale.scale = 1e38
    before = overflowing.model.weight.numpy().copy()
    overflowing.train_batch(batch(4))
    np.testing.assert_array_equal(overflowing.model.weight.numpy(), before)
    assert overflowing.mixed.scale.scale == 0.5e38
    assert overflowing.model.weight.grad is None


def test_float16_takes_its_scale_out_again():
    scaled, plain = learner(Summed(), "float16"), learner(Summed(), "float16")
    scaled.mixed.scale.scale, plain.mixed.scale.scale = 256.0, 1.0
    ours, theirs = (each.train_batch(batch(4), collect_metrics=True) for each in (scaled, plain))
    np.testing.assert_allclose(scaled.model.weight.numpy(), plain.model.weight.numpy(), atol=2e-3)
    assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=5e-3)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_low_precision_computes_with_the_numbers_of_one_process(precision):
    """The exchange's average over 3 ranks is undone behind the backward: in it, numbers would be rounded otherwise."""
    alone, third = learner(Summed(), precision), learner(Summed(), precision)
    third.exchange.mean_over = 3
    theirs, ours = (each.train_batch(batch(4), collect_metrics=True) for each in (alone, third))
    assert ours["gradient_norm"] == pytest.approx(3 * theirs["gradient_norm"], rel=1e-6)


def test_a_dummy_changes_neither_weights_nor_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    idle = learner(MeanSquaredError(), model=model)
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    dummy = Batch((batch(0).micro_batches[0],), 4, 0, 0)
    metrics = idle.train_batch(dummy, collect_metrics=True)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)
    assert metrics["loss"] == 0.0


def scheduled(maker):
    schedule = paddle.optimizer.lr.LambdaDecay(0.5, lambda step: 1.0 / (1 + step))
    task = Task(model=nn.Linear(3, 2), loss=Summed(), optimizer=maker, schedule=schedule)
    return full_model_learner(task, Mesh.alone())


def test_the_rate_follows_the_schedule_and_its_state():
    """Each update is made at the schedule's rate, also after the schedule was put somewhere else."""
    ours = scheduled(lambda rate, named: paddle.optimizer.SGD(rate, parameters=[p for _, p in named]))
    weight = ours.model.weight
    for expected in (0.5, 0.25):
        before = weight.numpy()
        seen = {}
        hook = weight.register_hook(lambda gradient, seen=seen: seen.update(g=gradient.numpy()))
        ours.train_batch(batch(4))
        hook.remove()
        np.testing.assert_allclose(before - weight.numpy(), expected * seen["g"], rtol=1e-5)
    state = ours.rate.schedule.state_dict()
    other = scheduled(lambda rate, named: paddle.optimizer.SGD(rate, parameters=[p for _, p in named]))
    other.rate.schedule.set_state_dict(state)
    other.rate.apply()
    assert other.optimizer.get_lr() == ours.optimizer.get_lr() == pytest.approx(0.5 / 3)


def test_an_optimizer_that_does_not_take_the_schedules_rate_is_refused():
    with pytest.raises(UsageError, match=r"the schedule's learning rate 0\.5, but has 0\.05"):
        scheduled(lambda rate, named: paddle.optimizer.SGD(rate / 10, parameters=[p for _, p in named]))


def test_a_finished_optimizer_follows_the_schedule_from_its_first_update():
    model, schedule = nn.Linear(3, 2), paddle.optimizer.lr.LambdaDecay(0.5, lambda step: 1.0)
    finished = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    ours = full_model_learner(
        Task(model=model, loss=Summed(), optimizer=finished, schedule=schedule), Mesh.alone()
    )
    assert ours.optimizer.get_lr() == 0.5


def test_an_optimizer_with_another_schedule_is_refused():
    model = nn.Linear(3, 2)
    one, other = (paddle.optimizer.lr.LambdaDecay(0.5, lambda step: 1.0) for _ in range(2))
    finished = paddle.optimizer.SGD(one, parameters=model.parameters())
    with pytest.raises(UsageError, match="has another scheduler"):
        full_model_learner(Task(model=model, loss=Summed(), optimizer=finished, schedule=other), Mesh.alone())


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_gradient_norm_has_the_type_of_the_precision_though_nothing_learns(precision, learns):
    """Ranks that add their norms up abort where one of them has another type."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.stop_gradient = not learns
    ours = learner(Summed(), precision, model)
    if learns:
        assert ours.train_batch(batch(4), collect_metrics=True)["gradient_norm"] > 0
    assert str(ours.mode.norm.global_norm().dtype) == f"paddle.{precision}"
    assert ours.mode.norm.global_norm().shape == []


def test_paddle_s_word_on_an_unused_parameter_becomes_ours(monkeypatch):
    """Raised within its reducer, with a hint of its C++."""

    def fails(*_):
        raise RuntimeError(
            "(PreconditionNotMet) … has been ready before. Please set find_unused_parameters=True to …"
        )

    ours = learner(Summed())
    monkeypatch.setattr(ours.runner, "run", fails)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        ours.train_batch(batch(3))
    exchange = PaddleReducer(None, ours.trainable, SimpleNamespace(ranks=2))
    ours.weights.mode = replace(ours.mode, exchange=exchange)
    with pytest.raises(DivergenceError, match=r"strategy\.find_unused_parameters=true"):
        ours.train_batch(batch(3))
