"""A loss or a model that gives something else for a rank's samples than for the whole batch is refused, or named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.errors import LossError, UsageError
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Precision, Task, place_whole
from paddle_dp.parallel.given_optimizer import check_ungrouped
from paddle_dp.parallel.loss import as_loss
from paddle_dp.parallel.samplewise import Samplewise, mixing
from paddle_dp.part import read_part
from paddle_dp.strategies.data_parallel import Config as DataParallel
from paddle_dp.strategies.hybrid import Config as Hybrid
from tests.ranks import run_ranks

CLASSES = 4
SEEN: list[str] = []  # not within a loss, whose own would be put back


def batch(samples: int = 8) -> Batch:
    x = paddle.to_tensor(np.random.RandomState(0).randn(samples, 6).astype("float32"))
    y = x[:, :CLASSES].argmax(1)
    return Batch((MicroBatch(x, y, samples),), samples, 0, 0)


def network(outputs: int = CLASSES) -> nn.Sequential:
    paddle.seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def contrastive(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    near = F.normalize(outputs)
    return F.cross_entropy(near @ near.T, paddle.arange(near.shape[0]), reduction="none")


def mean_and_samples(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    return F.cross_entropy(outputs, targets), targets.shape[0]


def mean_and_one(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    return F.cross_entropy(outputs, targets), 1


def weighted(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    weight = paddle.to_tensor([1.0, 5.0, 0.1, 2.0])
    return F.cross_entropy(outputs, targets, weight=weight, reduction="sum"), weight[targets].sum()


def drawn(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    return F.cross_entropy(outputs + paddle.randn(outputs.shape), targets, reduction="none")


class Centre(nn.Layer):
    """Pulls outputs to a centre that moves with them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", paddle.zeros([CLASSES]))

    def forward(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        losses = (outputs - self.centre).square().sum(1)
        with paddle.no_grad():
            self.centre.set_value(0.9 * self.centre + 0.1 * outputs.mean(0))
        return losses


class Alike(nn.Layer):
    """Subtracts the mean of whoever is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x - x.mean(0))


class InTraining(Alike):
    """The same, but not in evaluation."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x) if self.training else self.linear(x)


class Towers(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.LayerList([nn.Linear(6, CLASSES) for _ in range(2)])

    def forward(self, x: paddle.Tensor) -> dict[str, list[paddle.Tensor]]:
        return {"both": [tower(x) for tower in self.towers]}


class Balanced(nn.Layer):
    """Experts, and a loss that takes their balance over the batch from the last forward (Switch Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.LayerList([nn.Linear(6, CLASSES) for _ in range(3)])
        self.balance = [paddle.zeros([])]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        p = F.softmax(self.gate(x) * 3)
        self.balance[0] = (F.one_hot(p.argmax(-1), 3).mean(0) * p.mean(0)).sum()
        return sum(p[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    def loss(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") + self.balance[0]


class _Shortened(PyLayer):
    """The gradient of a batch as a vector of length 1, whatever the batch."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient / gradient.norm()


class Backwards(nn.Layer):
    """Looks at other samples in its backward only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.last(_Shortened.apply(self.first(x)))


class InLargeBatches(Alike):
    """Looks at other samples where there are more than twelve."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x) if len(x) > 12 else self.linear(x)


class InRows(Alike):
    """Gives two rows for each sample."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x).reshape([-1, CLASSES // 2])


class SlightlyBalanced(Balanced):
    """With the usual weight of a balance."""

    def loss(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") + 0.01 * self.balance[0]


class Honest(nn.Layer):
    """What counts its calls, moves its vectors in each forward and drops elements, but compares no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.utils.spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1D(8)
        self.drop, self.last, self.calls = nn.Dropout(0.5), nn.Linear(8, CLASSES), 0

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        self.calls += 1
        hidden = self.drop(paddle.tanh(self.norm(self.first(x))))
        return self.last(hidden), hidden

    def loss(self, outputs: tuple[paddle.Tensor, paddle.Tensor], targets: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(outputs[0], targets, reduction="none") + outputs[1].square().sum(1)


def learner(loss: Any, model: nn.Layer | None = None) -> Any:
    model = model or network()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    return place_whole(Task(model=model, loss=loss, optimizer=optimizer), Mesh.alone())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            mean_and_one,
            "is over 1 things for 8 samples together, and over 1 and 1 for 4 and 4 .* not a mean and",
        ),
        (Centre(), "Centre gives .* and then .* for the same outputs and targets: it remembers"),
    ],
)
def test_a_loss_that_no_number_of_ranks_can_share_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(LossError, match=said):
        learner(loss).train_batch(batch())


def test_targets_that_are_broadcast_against_every_output_are_refused() -> None:
    (micro_batch,) = batch().micro_batches
    of_floats = Batch((MicroBatch(micro_batch.inputs, micro_batch.targets.astype("float32"), 8),), 8, 0, 0)
    with pytest.raises(
        LossError, match=r"64 things for 8 samples .* \[8, 1\] and targets \[8\] are probably broad"
    ):
        learner(nn.MSELoss(reduction="none"), network(1)).train_batch(of_floats)


@pytest.mark.parametrize(
    "loss", [weighted, drawn, CrossEntropy().build(), nn.CrossEntropyLoss(reduction="none")]
)
def test_an_honest_loss_is_tried_without_a_trace(loss: Any) -> None:
    """Also in Paddle's generator: what is drawn after the first update is drawn after it without the trial, too."""
    tried, not_tried = learner(loss), learner(loss)
    not_tried._samplewise.wanted = False
    after = []
    for one in (tried, not_tried):
        paddle.seed(3)
        one.train_batch(batch())
        after.append([paddle.randn([2]).numpy(), one.model[0].weight.numpy()])
    np.testing.assert_array_equal(after[0][0], after[1][0])
    np.testing.assert_array_equal(after[0][1], after[1][1])
    assert tried._samplewise.differences(Mesh.alone()) == []


@pytest.mark.parametrize("loss", [contrastive, mean_and_samples])
def test_a_loss_that_compares_samples_is_named(loss: Any) -> None:
    one = learner(loss)
    one.train_batch(batch())
    (said,) = one._samplewise.differences(Mesh.alone())
    assert said.startswith(f"the loss {loss.__name__} is ")
    assert "for 8 samples together" in said


def test_a_loss_is_tried_in_the_types_of_the_forward() -> None:
    """A loss that multiplies matrices gives another number outside the forward's float64, bfloat16 or rounding."""
    model = network()
    SEEN.clear()

    def loss(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        SEEN.append(paddle.get_default_dtype())
        return F.cross_entropy(outputs, targets, reduction="none") * paddle.ones([1]).astype("float64")

    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    double = Precision(dtype="float64")
    place_whole(
        Task(model=model, loss=loss, optimizer=optimizer, precision=double), Mesh.alone()
    ).train_batch(batch())
    assert SEEN == ["float64"] * 4  # the micro-batch, again, and its halves


def test_a_state_of_the_loss_that_the_model_keeps_is_nobodys_fault() -> None:
    model = network()
    model.add_sublayer("centre", centre := Centre())
    model.forward = lambda x: model[2](model[1](model[0](x)))
    one = learner(centre, model)
    one.train_batch(batch())
    assert one._samplewise.differences(Mesh.alone()) == []
    assert np.abs(centre.centre.numpy()).max() > 0  # its one call's, and not of the trials'
    with paddle.no_grad():
        expected = 0.1 * network()(batch().micro_batches[0].inputs).mean(0)
    np.testing.assert_allclose(centre.centre.numpy(), expected.numpy(), rtol=1e-5)


def test_a_model_that_looks_at_other_samples_is_named() -> None:
    pair = batch(2).micro_batches[0].inputs
    (said,) = mixing(Alike(), lambda: pair)
    assert said.startswith("the outputs of Alike for a sample depend on the other samples in its batch")
    honest = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Dropout(0.5), nn.LSTM(8, 4))
    honest[3].forward = lambda x, own=honest[3].forward: own(x.unsqueeze(1))[0]
    assert mixing(honest, lambda: pair) == []
    assert honest.training
    assert mixing(network(), None) == []
    (said,) = mixing(InRows(), lambda: pair)
    assert said.startswith("the outputs of InRows for a sample depend")


def test_a_model_that_looks_at_other_samples_in_training_alone_is_named() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Dropout(0.5), InTraining())
    vector, pair = model[0].weight_u.numpy(), batch(2).micro_batches[0].inputs
    paddle.seed(3)
    (said,) = mixing(model, lambda: pair)
    drawn = paddle.randn([2]).numpy()
    assert said.startswith("the outputs of Sequential for a sample depend")
    assert "in training" in said
    np.testing.assert_array_equal(model[0].weight_u.numpy(), vector)
    paddle.seed(3)
    np.testing.assert_array_equal(paddle.randn([2]).numpy(), drawn)
    assert model[2].training
    assert mixing(model[:2], lambda: pair) == []


class Counting(nn.Layer):
    """Counts samples, or calls, or keeps a mean of them."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what
        self.register_buffer("seen", paddle.zeros([1], "int64" if what != "mean" else "float32"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.training:
            more = {"samples": x.shape[0], "calls": 1, "mean": x.mean()}[self.what]
            self.seen.set_value(self.seen + more)
        return x * 2


def test_a_counter_of_samples_is_named_and_one_of_calls_or_of_what_differs_is_not() -> None:
    """Of equal shares all ranks count as many, so that no comparison of ranks finds it."""
    said = [mixing(Counting(what), lambda: paddle.rand([2, 3])) for what in ("samples", "calls", "mean")]
    assert said[1:] == [[], []] and "buffer seen hangs on how many samples forward gets" in said[0][0]


def test_a_model_that_cannot_compute_one_sample_is_not_judged() -> None:
    model = network()
    model.register_forward_pre_hook(lambda _, inputs: 1 / (len(inputs[0]) - 1) and None)
    (said,) = mixing(model, lambda: batch(2).micro_batches[0].inputs)
    assert said.endswith(
        "treats each sample alone: of one sample there is ZeroDivisionError: division by zero"
    )


def test_outputs_of_several_tensors_are_tried() -> None:
    def pairs(outputs: dict[str, list[paddle.Tensor]], targets: paddle.Tensor) -> paddle.Tensor:
        return contrastive(outputs["both"][0] + outputs["both"][1], targets)

    one = learner(pairs, Towers())
    one.train_batch(batch())
    (said,) = one._samplewise.differences(Mesh.alone())
    assert said.startswith("the loss pairs is ")

    def apart(outputs: dict[str, list[paddle.Tensor]], targets: paddle.Tensor) -> paddle.Tensor:
        return sum(F.cross_entropy(each, targets, reduction="none") for each in outputs["both"])

    one = learner(apart, Towers())
    one.train_batch(batch())
    assert one._samplewise.differences(Mesh.alone()) == []


def test_a_sample_at_a_time_is_joined_with_the_next() -> None:
    paddle.seed(1)
    model, whole = Balanced(), batch(10).micro_batches[0]
    tried = Samplewise(as_loss(model.loss), model)
    singles = [MicroBatch(whole.inputs[i : i + 1], whole.targets[i : i + 1], 1, i) for i in range(10)]

    def forward(part: MicroBatch) -> Any:
        return tried._loss(model(part.inputs), part.targets)

    assert tried.keep(singles[1])
    (said,) = tried.differences(Mesh.alone(), forward)
    assert said.endswith("no rank had two samples to compare")
    assert not any(tried.keep(single) for single in singles[2:])
    assert tried._kept is not None
    assert tried._kept.places == tuple(range(1, 9))
    (said,) = tried.differences(Mesh.alone(), forward)
    assert said.startswith("the loss loss is ")
    assert "for 8 samples in one forward" in said


def test_a_rank_without_memory_for_a_trial_ends_instead_of_leaving_the_others_in_it() -> None:
    paddle.seed(1)
    model, whole = Balanced(), batch(8).micro_batches[0]
    tried = Samplewise(as_loss(model.loss), model)

    def forward(_: MicroBatch) -> Any:
        raise error

    tried.keep(whole)
    error: Exception = ValueError("of a shape that every rank has")
    (said,) = tried.differences(Mesh.alone(), forward)
    assert "ValueError: of a shape that every rank has" in said
    error = MemoryError("ResourceExhaustedError: Out of memory")
    with pytest.raises(MemoryError):
        tried.differences(Mesh.alone(), forward)


def test_what_neither_exchange_nor_checkpoint_takes_is_refused() -> None:
    table = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, CLASSES))
    with pytest.raises(UsageError, match="layer 0 is an Embedding with sparse=True"):
        learner(nn.CrossEntropyLoss(reduction="none"), table)
    model = network()
    ahead = paddle.incubate.LookAhead(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    with pytest.raises(UsageError, match="LookAhead keeps another optimizer inside"):
        place_whole(Task(model=model, loss=contrastive, optimizer=ahead), Mesh.alone())
    groups = [{"params": model[0].parameters(), "learning_rate": 0.1}, {"params": model[2].parameters()}]
    with pytest.raises(UsageError, match=r"strategy\.sharding assigns one list .* SGD has parameter groups"):
        check_ungrouped(paddle.optimizer.SGD(0.1, parameters=groups), "strategy.sharding")
    check_ungrouped(paddle.optimizer.SGD(0.1, parameters=model.parameters()), "strategy.sharding")
    rate = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    waits = paddle.optimizer.SGD(rate, parameters=model.parameters())
    with pytest.raises(UsageError, match="ReduceOnPlateau needs a metric at each step"):
        place_whole(Task(model=model, loss=contrastive, optimizer=waits), Mesh.alone())


def named_differences() -> list[Any]:
    """In each rank: what is said of a contrastive loss and a mixing model; and SyncBatchNorm in evaluation."""
    mesh = join(seed=0)
    model = nn.Sequential(Alike(), nn.SyncBatchNorm(CLASSES))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    whole = batch().micro_batches[0]
    task = Task(model=model, loss=contrastive, optimizer=optimizer, samples=lambda: whole.inputs[:2])
    one = DataParallel(sync_batch_norm=True).build(mesh).place(task)
    half = 8 // mesh.ranks
    mine = slice(mesh.rank * half, (mesh.rank + 1) * half)
    one.train_batch(Batch((MicroBatch(whole.inputs[mine], whole.targets[mine], half),), 8, 0, 0))
    one.model.eval()
    return [one.differences(), bool(paddle.isfinite(one.predict(whole.inputs)).all())]


def differences_of(model: nn.Layer, loss: Any, strategy: Any, samples: int = 8) -> list[str]:
    """In each rank: what is said after an update, and that asking leaves no trace."""
    mesh = join(seed=0)
    whole = batch(samples).micro_batches[0]
    trained = [p for p in model.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.SGD(0.1, parameters=trained)
    task = Task(model=model, loss=loss, optimizer=optimizer, samples=lambda: whole.inputs[:2])
    one = strategy.build(mesh).place(task)
    share = samples // 2
    half = slice(one.mesh.dp_rank * share, (one.mesh.dp_rank + 1) * share)
    one.train_batch(
        Batch((MicroBatch(whole.inputs[half], whole.targets[half], share, half.start),), samples, 0, 0)
    )
    before = {name: tensor.numpy() for name, tensor in one.state().items()}
    calls, drawn = getattr(model, "calls", 0), paddle.get_rng_state()[0].__getstate__()
    said = one.differences()
    assert all((tensor.numpy() == before[name]).all() for name, tensor in one.state().items())
    assert (getattr(model, "calls", 0), paddle.get_rng_state()[0].__getstate__()) == (calls, drawn)
    assert all(p.grad is None for p in one.trainable)
    return said


def found_on_two_ranks() -> list[list[str]]:
    paddle.seed(1)
    cross_entropy, data = nn.CrossEntropyLoss(reduction="none"), DataParallel(sync_batch_norm=True)
    stage3 = Hybrid(sharding=2, sharding_stage=3, sync_batch_norm=True)
    balanced, honest, sharded, mixed = Balanced(), Honest(), Honest(), Alike()
    return [
        differences_of(balanced, balanced.loss, data),
        differences_of(honest, honest.loss, data),
        differences_of(sharded, sharded.loss, stage3),
        differences_of(mixed, cross_entropy, Hybrid(data=2)),
    ]


def test_forward_and_loss_are_tried_together_on_two_ranks() -> None:
    (balanced, honest, sharded, mixed), again = run_ranks(found_on_two_ranks, 2)
    assert again == [balanced, honest, sharded, mixed]
    (said,) = balanced
    assert said.startswith("the loss loss is ")
    assert "for 4 samples in one forward" in said
    assert honest == sharded == []
    assert mixed[0].startswith("the outputs of Alike for a sample depend")


def found_in_backward_and_elsewhere() -> list[list[str]]:
    cross_entropy, data = nn.CrossEntropyLoss(reduction="none"), DataParallel()
    paddle.seed(1)
    slightly = SlightlyBalanced()
    return [
        differences_of(Backwards(), cross_entropy, data),
        differences_of(Backwards(), cross_entropy, Hybrid(sharding=2, sharding_stage=3)),
        differences_of(InLargeBatches(), cross_entropy, data, samples=32),
        differences_of(slightly, slightly.loss, data),
        differences_of(network(), cross_entropy, Hybrid(sharding=2, sharding_stage=2)),
        differences_of(network(), cross_entropy, data),
    ]


def test_what_mixes_in_backward_or_in_large_batches_or_slightly_is_named() -> None:
    backward, sharded, large, slightly, *honest = run_ranks(found_in_backward_and_elsewhere, 2)[0]
    for (said,) in (backward, sharded):
        assert re.match(
            r"the gradient of first\.\w+ from 4 samples in one backward is \d+% off the sum", said
        )
    assert "for 16 samples in one forward" in large[0]
    assert "the loss loss is " in slightly[0]
    assert honest == [[], []]


def in_stages() -> list[list[str]]:
    stages = Hybrid(data=2, pipeline=2, sync_batch_norm=True)

    def chain(last: nn.Layer) -> nn.Layer:
        paddle.seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), last)

    paddle.seed(1)  # other weights may send all samples to one expert, whose balance mixes nothing
    balanced, honest = Balanced(), Honest()
    return [
        differences_of(chain(balanced), balanced.loss, stages),
        differences_of(chain(InLargeBatches()), nn.CrossEntropyLoss(reduction="none"), stages, samples=32),
        differences_of(chain(honest), honest.loss, stages),
    ]


def test_in_stages_forward_and_loss_are_tried_together() -> None:
    ranks = run_ranks(in_stages, 4)
    (balanced,), (large,), honest = ranks[0]
    assert all(rank == ranks[0] for rank in ranks)
    assert "for 4 samples in one forward" in balanced
    assert "for 16 samples in one forward" in large
    assert honest == []


def test_two_ranks_are_told_and_one_needs_no_kernel() -> None:
    assert run_ranks(named_differences, 1) == [[[], True]]
    both = run_ranks(named_differences, 2)
    assert both[0] == both[1]
    (model, loss), evaluated = both[0]
    assert model.startswith("the outputs of Sequential")
    assert loss.startswith("the loss contrastive is ")
    assert evaluated


def going_on(words: list[dict[str, Any]]) -> list[Any]:
    """By strategy, the weights here after four updates: where somebody asked after the second one, and where not."""
    mesh = join(seed=0)
    return [[_updated(strategy, mesh, asked) for asked in (False, True)] for strategy in words]


def _updated(words: dict[str, Any], mesh: Mesh, asked: bool) -> Any:
    paddle.seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = paddle.optimizer.AdamW(0.05, parameters=model.parameters())
    task = Task(model=model, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=optimizer)
    one = read_part("strategies", words).build(mesh).place(task)
    whole, share = batch().micro_batches[0], 8 // one.mesh.dp_size
    mine = slice(one.mesh.dp_rank * share, (one.mesh.dp_rank + 1) * share)
    micro_batch = MicroBatch(whole.inputs[mine], whole.targets[mine], share, mine.start)
    for index in range(4):
        one.train_batch(Batch((micro_batch,), 8, index, 0))
        if asked and index == 1:
            assert one.differences() == []
    return {name: tensor.numpy() for name, tensor in one.state().items()}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, [
            {"use": "data_parallel"}, {"use": "data_parallel", "recompute": "full"}, {"use": "hybrid", "sharding": 2},
            {"use": "hybrid", "sharding": 2, "sharding_stage": 2},
            {"use": "hybrid", "sharding": 2, "sharding_stage": 3},
        ]),
        (4, [{"use": "hybrid", "pipeline": 2, "data": 2}]),
    ],
)  # fmt: skip
def test_a_training_goes_on_as_if_nobody_had_asked(ranks: int, words: list[dict[str, Any]]) -> None:
    for rank in run_ranks(going_on, ranks, words):
        for strategy, (plain, asked) in zip(words, rank, strict=True):
            assert asked == plain, strategy
