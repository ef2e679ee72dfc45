"""Copies of a model in one process learn what the model learns alone; and what they cannot is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.checks.repeats import recompute_gradients, shared_batch
from paddle_dp.errors import UsageError
from paddle_dp.losses.contrastive import Config as Contrastive
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh
from paddle_dp.model.compiled import is_compiled
from paddle_dp.part import read_part
from paddle_dp.recipe import Precision
from tests.house.learners import task_of
from tests.house.recipes import small_recipe
from tests.house.training import trained
from tests.ranks import run_ranks


def batch(samples=11, micro_batches=2, dtype="float32"):
    random = np.random.RandomState(0)
    parts = []
    for number in range(micro_batches):
        x = paddle.to_tensor(random.randn(samples, 6).astype(dtype))
        y = paddle.to_tensor(random.randint(0, 3, samples))
        parts.append(MicroBatch(x, y, samples, number * samples))
    return Batch(tuple(parts), samples * micro_batches, 0, 0)


def network(norm=False):
    paddle.seed(1)
    layers = [nn.Linear(6, 8), nn.BatchNorm1D(8) if norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def learner(strategy, model, loss=None, **more):
    task = task_of(model, loss, "Momentum", samples=lambda: batch().micro_batches[0].inputs[:2], **more)
    return read_part("strategies", strategy).build(Mesh.alone()).place(task)


@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize("loss", [CrossEntropy().build(), Contrastive().build()])
def test_copies_learn_what_one_learns_with_its_dropout_masks(count, loss):
    """Also with more copies than samples, and with a loss that compares samples. In float64: how far float32 strays
    in three updates depends on the processor's kernels."""
    one = learner({"use": "single"}, network().to(dtype="float64"), loss)
    many = learner({"use": "replicas", "count": count}, network().to(dtype="float64"), loss)
    for _ in range(3):
        alone, found = (
            each.train_batch(batch(dtype="float64"), collect_metrics=True) for each in (one, many)
        )
        assert found == pytest.approx(alone, rel=1e-12)
    for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-13)
    assert many.differences() == []


class Tempered(nn.Layer):
    def __init__(self):
        super().__init__()
        paddle.seed(1)
        self.linear, self.drop = nn.Linear(6, 3), nn.Dropout(0.1)
        self.temperature, self.factors = 1.0, {"a": [2.0]}

    def forward(self, x):
        return self.drop(self.linear(x)) * sum(sum(each) for each in self.factors.values()) / self.temperature


def doubled(each):
    """A checkpoint, or a callback, may have changed weights and modes."""
    with paddle.no_grad():
        each.model[0].weight.set_value(each.model[0].weight * 2)
    each.model[2].eval()


def cooled(each):
    """A callback may change settings of layers: a dropout's rate, a temperature that falls, a list that grows."""
    each.model.drop.p, each.model.temperature, each.model.factors["b"] = 0.6, 0.5, [3.0]


def computed_again(each):
    """guard.recompute looks at a batch once more; what it left on the copies was added to the next gradient."""
    recompute_gradients(each, shared_batch(each, batch()))


@pytest.mark.parametrize(
    ("model", "count", "change"), [(network, 2, doubled), (Tempered, 3, cooled), (network, 2, computed_again)]
)
def test_copies_begin_each_update_as_the_model_is(model, count, change):
    one, many = learner({"use": "single"}, model()), learner({"use": "replicas", "count": count}, model())
    for each in (one, many):
        each.train_batch(batch())
        change(each)
    alone, found = (each.train_batch(batch(), collect_metrics=True) for each in (one, many))
    assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_copy_computes_in_the_precision_of_the_recipe(dtype):
    """Copies are made before the model is prepared: all but the first once computed in float32."""
    many = learner({"use": "replicas", "count": 3}, network(), precision=Precision(dtype=dtype))
    with many.mixed.context():
        found = many.runner.parallel_model(batch().micro_batches[0].inputs)
    np.testing.assert_array_equal(found.astype(dtype).astype("float32").numpy(), found.numpy())


def test_every_copy_is_the_program_of_a_compiled_model():
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    many = learner({"use": "replicas"}, plain, compile=True)
    assert all(is_compiled(model) for model in many.runner.parallel_model._replicas)


def test_statistics_are_the_mean_of_the_copies_and_batch_norm_is_named():
    many = learner({"use": "replicas"}, network(norm=True))
    mean = paddle.stack([many.model[0](part).mean(0) for part in halves(batch().micro_batches[0].inputs)])
    one_batch = batch(micro_batches=1)
    many.train_batch(one_batch)
    np.testing.assert_allclose(many.model[1]._mean.numpy(), 0.1 * mean.mean(0).numpy(), atol=1e-6)
    assert "1 BatchNorm layer normalizes over one copy's samples (1)" in many.differences()[0]


def halves(x):
    return x[: len(x) // 2], x[len(x) // 2 :]


class Counts(nn.Layer):
    """Counts the samples that it has seen; `scalar`: and returns a number beside its outputs."""

    def __init__(self, scalar=False):
        super().__init__()
        self.linear, self.scalar = nn.Linear(6, 3), scalar
        self.register_buffer("seen", paddle.zeros([1]))

    def forward(self, x):
        self.seen += x.sum()
        return (self.linear(x), paddle.ones([])) if self.scalar else self.linear(x)


class Recurrent(nn.Layer):
    """Paddle's LSTM has a buffer without memory on a CPU, `_dropout_state`."""

    def __init__(self):
        super().__init__()
        paddle.seed(1)
        self.lstm, self.head = nn.LSTM(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x.reshape([-1, 3, 2]))[0].mean(1))


def test_a_buffer_without_memory_is_copied_as_it_is():
    one, many = learner({"use": "single"}, Recurrent()), learner({"use": "replicas"}, Recurrent())
    for _ in range(2):
        alone, found = (each.train_batch(batch(), collect_metrics=True) for each in (one, many))
        assert found == pytest.approx(alone, rel=1e-5)


def test_a_buffer_of_each_copy_is_named():
    paddle.seed(1)
    many = learner({"use": "replicas"}, Counts())
    many.train_batch(batch())
    assert "buffer seen is updated by forward from each copy's own samples" in many.differences()[-1]


def test_what_cannot_be_put_together_is_refused():
    many = learner({"use": "replicas"}, Counts(scalar=True))
    with pytest.raises(UsageError, match=r"forward gave \[\] for \d samples"):
        many.train_batch(batch())


def test_several_ranks_and_fewer_accelerators_than_copies_are_refused(monkeypatch):
    part = read_part("strategies", {"use": "replicas", "count": 3})
    with pytest.raises(UsageError, match="start it with --ranks 1"):
        part.build(Mesh(rank=0, ranks=2))
    monkeypatch.setenv("FLAGS_selected_gpus", "2,0")
    with pytest.raises(
        UsageError, match=r"This process has gpu:2, gpu:0, and .* each of its 3 copies on a separate one"
    ):
        part.build(Mesh(device="gpu:2"))
    monkeypatch.setenv("FLAGS_selected_gpus", "2,0,5,1")
    assert part.build(Mesh(device="gpu:2")).devices == ("gpu:2", "gpu:0", "gpu:5")
    one = read_part("strategies", {"use": "replicas", "count": 3, "devices": "one"})
    assert one.build(Mesh(device="gpu:2")).devices == ("gpu:2",) * 3


def recipe(strategy: str) -> str:
    return small_recipe(
        "length: 8 steps, batch: 11, micro_batches: 2, seed: 3", optimizer="adamw, clip: 0.5",
        model="mlp, inputs: 64, hidden: [16], classes: 10, dropout: 0.2", strategy=strategy,
        schedule="constant, learning_rate: 0.01", callbacks="[]",
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_resume_has_the_same_bits_and_any_strategy_goes_on(tmp_path: Path) -> None:
    copies, folder = recipe("replicas, count: 3"), str(tmp_path / "parts")
    (whole,) = run_ranks(trained, 1, copies, str(tmp_path / "whole"))
    (begun,) = run_ranks(trained, 1, copies, folder, until="3 steps")
    (again,) = run_ranks(trained, 1, copies, folder, until="6 steps", resume=True)
    assert begun["rows"] + again["rows"] == whole["rows"][:6]
    last, _ = run_ranks(trained, 2, recipe("data_parallel"), folder, resume=True)
    np.testing.assert_allclose(last["rows"], whole["rows"][6:], rtol=2e-5)
