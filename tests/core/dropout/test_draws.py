"""What a learner draws: its dropout by arithmetic, and all else is noticed in its first update and named."""

import random

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.core.dropout.uncaught import cut_unsaid
from paddle_dp.data import Loader
from paddle_dp.errors import UsageError
from paddle_dp.learner import full_model_learner
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from paddle_dp.train.evaluate import evaluate
from tests.house.learners import task_of
from tests.ranks import run_ranks


class Drawing(nn.Layer):
    """Draws in its own forward as `how` says, and in two of its layers."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body = how, nn.Linear(4, 4)
        self.act = nn.RReLU() if "rrelu" in how else nn.ReLU()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(self.act(self.body(x)))
        x = x + np.random.rand() if "numpy" in self.how else x
        return x * random.random() if "python" in self.how else x


def samples(count):
    return [
        (np.random.RandomState(i).randn(4).astype("float32"), np.zeros(4, "float32")) for i in range(count)
    ]


def loss(outputs, targets):
    return (outputs - targets).square().mean(-1)


def learner(how="", dropout="exact", loss=loss):
    paddle.seed(0)
    task = task_of(Drawing(how), loss, dropout=dropout)
    return full_model_learner(task, Mesh.alone())


def trained(one, epochs=1, micro_batches=2, seed=0):
    loader = Loader.plain(samples(12), 6, seed=seed, shuffle=False, micro_batches=micro_batches)
    for epoch in range(epochs):
        for batch in loader.read(epoch):
            one.train_batch(batch, collect_metrics=True)
    return one.model.body.weight.numpy()


def test_dropout_of_ours_is_no_difference():
    one = learner()
    assert one.runner.draws.differences() == []
    trained(one)
    assert one.runner.draws.differences() == []


def test_other_draws_are_named_once_and_no_more_watched():
    one = learner("rrelu numpy")
    trained(one)
    (said,) = one.runner.draws.differences()
    assert said.startswith(
        "act (RReLU) and 1 more draw from NumPy's and Paddle's generator, which differs on another number"
    )
    one.model.how = "rrelu numpy python"
    trained(one)
    assert one.runner.draws.differences() == [said]


def test_draws_that_begin_later_are_named_by_a_proof():
    """It watches every forward; a training only those of its first batch."""
    one = learner()
    one.runner.draws.watch_on()
    trained(one)
    one.model.how = "python"
    trained(one)
    assert one.runner.draws.differences() == []
    one.runner.draws.gather_later()
    assert one.runner.draws.differences()[0].startswith("the model (Drawing) draws from Python's generator")


@pytest.mark.parametrize(
    ("shape", "clear"),
    [
        ([3, 5], True),
        ([15, 4], True),  # flattened tokens
        ([6, 4, 4], True),  # flattened heads
        ([7, 3, 4], False),  # [t, n, h]
        ([6, 3, 4], False),  # the same, where t happens to be a multiple of n
        ([5, 4], False),  # chosen rows
    ],
)
def test_rows_that_cannot_be_told_from_samples_are_a_difference(shape, clear):
    """Each rank drew the masks of its own shape, and no one said so but a verify."""
    one = learner(loss=lambda outputs, targets: loss(outputs, targets) + F.dropout(paddle.ones(shape)).mean())
    trained(one)
    said = one.runner.draws.differences()
    assert bool(said) is not clear
    assert clear or f"drops elements of a tensor {shape} in a micro-batch of 3 samples" in said[0]


@pytest.mark.parametrize(
    ("shape", "exact"), [([3, 1], True), ([3, 1, 1], True), ([3, 4], False), ([1, 4], False)]
)
def test_a_number_for_each_sample_is_no_difference(shape, exact):
    """Three samples in each micro-batch. Another shape may be a slice of a whole, or the whole batch's: it is named."""

    def drawing(outputs, targets):
        return loss(outputs + paddle.rand(shape).mean(), targets)

    one = learner(loss=drawing)
    trained(one)
    assert bool(one.runner.draws.differences()) is not exact
    own = learner(loss=drawing, dropout="own")
    trained(own)
    assert own.runner.draws.differences()


@pytest.mark.parametrize("full_graph", [False, True])
def test_draws_in_a_program_of_the_model_count_as_its_caller_s(full_graph):
    """Paddle traces hooks of layers in a program, or calls them only while it traces."""
    one = learner("rrelu", dropout="own")
    paddle.jit.to_static(one.model, full_graph=full_graph)
    trained(one)
    assert one.runner.draws.differences()[0].startswith("the model (Drawing) draws")


def test_the_loss_is_watched_too():
    one = learner(loss=lambda outputs, targets: loss(outputs + paddle.rand([4]), targets))
    trained(one)
    assert one.runner.draws.differences()[0].startswith(
        "the loss, or code around the model draws from Paddle's"
    )


def test_own_dropout_is_a_difference():
    one = learner(dropout="own")
    trained(one)
    (said,) = one.runner.draws.differences()
    assert said.startswith("drop (Dropout) draws other random numbers on each rank; train.dropout=exact")


def test_another_word_is_refused():
    with pytest.raises(UsageError, match="dropout: 'exactly' is neither 'exact' nor 'own'"):
        learner(dropout="exactly")


def test_masks_depend_on_seed_and_update_and_on_nothing_that_was_drawn_before():
    first = trained(learner(), 2)
    paddle.seed(7)
    other = learner()
    paddle.rand([100])
    np.testing.assert_allclose(trained(other, 2, micro_batches=3), first, rtol=1e-5, atol=1e-7)
    assert np.abs(trained(learner(), 2, seed=1) - first).max() > 1e-3


def test_a_model_outside_of_its_update_draws_as_paddle_does():
    one = learner()
    trained(one)
    ones = paddle.ones([100])
    paddle.seed(5)
    drawn = F.dropout(ones, 0.5)
    paddle.seed(5)
    assert (F.dropout(ones, 0.5) == drawn).all()
    assert (F.dropout(ones, 0.5) != drawn).any()


def test_only_the_first_batch_is_watched_where_ranks_tell_of_it_after_many():
    """As under local_sgd: of two batches, the second's activations were another slice of the first's, it was said."""
    one = learner()
    watch = one.runner.draws._watch
    one._after_update.remove(one.runner.draws.after_update)
    trained(one)
    assert watch.dropped and cut_unsaid([({"data": 0}, watch.dropped)]) == {}


def differences_of_evaluations(hows):
    """What is said after two evaluations on two ranks, of which one has no held-out sample; a training was before."""
    mesh, found = join(seed=3), []
    for how in hows:
        one = read_part("strategies", {"use": "data_parallel"}).build(mesh).place(task_of(Drawing(""), loss))
        trained(one)
        one.model.how = how
        for _ in range(2):
            evaluate(one, Loader.plain(samples(1), 6, mesh, shuffle=False), mesh)
        found.append(one.runner.draws.differences())
    return found


def test_a_draw_in_the_evaluation_alone_is_said():
    for nothing, python in run_ranks(differences_of_evaluations, 2, ["", "python"]):
        assert nothing == []
        (said,) = python
        assert said.startswith(
            "the model (Drawing) draws from Python's generator, which differs on another number"
        )


class Cut(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)
        self.last = nn.Dropout(0.1)

    def forward(self, x):
        return self.last(self.down(self.drop(F.gelu(self.up(x)))))


def differences_of_tables(cuts):
    """What is said after one update on two ranks of a tensor axis."""
    mesh = join(seed=3)
    found = []
    for table in cuts:
        model = Cut()
        model.cuts = table
        learner = (
            read_part("strategies", {"use": "hybrid", "tensor": 2}).build(mesh).place(task_of(model, loss))
        )
        for batch in Loader.plain(samples(8), 8, learner.mesh, shuffle=False).read(0):
            learner.train_batch(batch, collect_metrics=True)
        found.append(learner.runner.draws.differences())
    return found


def test_a_dropout_between_cut_layers_that_the_table_forgot_is_said():
    table = {"up": "colwise", "down": "rowwise"}
    for said, forgot in run_ranks(differences_of_tables, 2, [table | {"drop": "colwise"}, table]):
        assert said == []
        assert len(forgot) == 1 and forgot[0].startswith("drop (Dropout) drops by the same mask"), forgot
        assert "on all ranks of the tensor axis" in forgot[0]
