"""A loss or a model that gives something else for a rank's samples than for the whole batch is refused, or named."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from paddle_dp.assembly import sample_trial
from paddle_dp.assembly.sample_trial import ForkRunner, in_fork, understood
from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.checks import samplewise
from paddle_dp.checks.model_mixing import mixing
from paddle_dp.checks.samplewise import Findings, findings
from paddle_dp.core import process_runner
from paddle_dp.core.optimizer import check_ungrouped
from paddle_dp.core.process_runner import in_this_process
from paddle_dp.errors import LossError, UsageError
from paddle_dp.learner import Precision, Task, full_model_learner
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh, join
from paddle_dp.text import CAN_DIFFER
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes
CLASSES = 4


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


def writing(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    """The losses of the samples that are not of class 1, which becomes class 0 in its own targets."""
    weights = (targets != 1).astype("float32")
    targets[targets == 1] = 0
    return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum(), len(targets)


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


class LayerDrop(nn.Layer):
    """Leaves a layer out by a generator of its own, which no state of Paddle's, NumPy's or Python's module shows."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.first, self.last, self.generator = nn.Linear(6, 6), nn.Linear(6, CLASSES), generator

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.last(self.first(x) if self.generator.random() < 0.5 else x)


class InPython(nn.Layer):
    """Keeps a moving mean as a float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, CLASSES), 0.0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
        return self.linear(x - self.mean)


class Late:
    """A loss that remembers from its fifth call on."""

    def __init__(self) -> None:
        self.calls, self.total = 0, 0.0

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        losses = F.cross_entropy(outputs, targets, reduction="none")
        self.total += float(losses.sum()) if self.calls > 4 else 0.0
        return losses * (1 + self.total)


class Stated:
    """Divides by another count than it returns."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return F.cross_entropy(outputs, targets, reduction="sum"), len(outputs)

    def count(self, targets: paddle.Tensor) -> int:
        return 1


class Scored:
    """A score that is a mean."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return {"right": (outputs[:, 0] > -9).astype("float32").mean()}


class FirstClass(Stated):
    """Divides each sample's loss by the number of targets of class 0, which it states only."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return F.cross_entropy(outputs, targets, reduction="none")

    def count(self, targets: paddle.Tensor) -> paddle.Tensor:
        return (targets == 0).sum()


class Constant(FirstClass):
    def count(self, targets: paddle.Tensor) -> int:
        return 3


class Failing(Scored):
    """A score that fails, and counts that do not add up."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return mean_and_one(outputs, targets)

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        raise RuntimeError("scored")


class ScoredCentre(Centre):
    """Its score is a sum, to a centre that moves with each call."""

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
        return {"distance": (outputs - self.centre).square().sum()}


def task(loss: Any, model: nn.Layer | None = None, **more: Any) -> Task:
    model = model or network()
    trained = [p for p in model.parameters() if not p.stop_gradient]
    return Task(model=model, loss=loss, optimizer=paddle.optimizer.SGD(0.1, parameters=trained), **more)


def tried(
    loss: Any, model: nn.Layer | None = None, samples: int = 8, several: bool = True, **more: Any
) -> Findings:
    """What a trial in another process finds."""
    return understood(in_fork(task(loss, model, **more), batch(samples).micro_batches[0], several, ""))


def tried_here(
    loss: Any, model: nn.Layer | None = None, samples: int = 8, several: bool = True, **more: Any
) -> Findings:
    """The same of what leaves no trace, without the forks."""
    return findings(task(loss, model, **more), batch(samples).micro_batches[0], in_this_process, several)


def said(loss: Any, model: nn.Layer | None = None, **more: Any) -> str:
    """The one difference that a trial finds."""
    found = tried_here(loss, model, **more)
    (sentence,) = found.differences
    assert not found.unknown
    return sentence


def cross_entropy() -> nn.Layer:
    return nn.CrossEntropyLoss(reduction="none")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            mean_and_one,
            "is over 1 things for 8 samples together, and over 1 and 1 for 4 and 4 .* not a mean and",
        ),
        (Centre(), "Centre gives .* and then .* for the same outputs and targets: it remembers"),
        (Late(), "Late gives .* and then .* for the same outputs and targets: it remembers"),
        (Stated(), r"Stated returns a count of 8, and its count\(targets\) is 1, by which"),
        (Constant(), "is over 3 things for 8 samples together, and over 3 and 3"),
        (Failing(), "is over 1 things for 8 samples together, and over 1 and 1"),
        (Scored(), r"score right of the loss Scored is .* for 8 samples together, .*\.sum\(\), not"),
    ],
)
def test_a_loss_that_no_number_of_ranks_can_share_is_refused(loss: Any, sentence: str) -> None:
    """On one process, too, and out of forks, of which each begins with the same state."""
    for several in (True, False):
        with pytest.raises(LossError, match=sentence):
            (tried if several else tried_here)(loss, several=several)


def test_targets_that_are_broadcast_against_every_output_are_refused() -> None:
    (micro_batch,) = batch().micro_batches
    of_floats = MicroBatch(micro_batch.inputs, micro_batch.targets.astype("float32"), 8)
    with pytest.raises(
        LossError, match=r"64 things for 8 samples .* \[8, 1\] and targets \[8\] are probably broad"
    ):
        findings(task(nn.MSELoss(reduction="none"), network(1)), of_floats, in_this_process, True)


@pytest.mark.parametrize("loss", [weighted, drawn, CrossEntropy().build(), cross_entropy(), FirstClass()])
def test_an_honest_loss_is_tried_without_a_word(loss: Any) -> None:
    found = tried_here(loss)
    assert not found.unknown and len(found.differences) == (loss is drawn)


def test_a_loss_that_writes_into_its_targets_remembers_nothing() -> None:
    assert tried(writing) == Findings()


@pytest.mark.parametrize("loss", [contrastive, mean_and_samples])
def test_a_loss_that_compares_samples_is_named(loss: Any) -> None:
    assert re.match(rf"the loss {loss.__name__} is .* for 8 samples together", said(loss))
    assert "a method across: docs/add-a-part.md#a-loss-that-compares-samples" in said(loss)
    assert tried_here(loss, several=False).differences == []


def test_a_loss_is_tried_in_the_types_of_the_forward() -> None:
    """A loss that multiplies matrices gives another number outside the forward's float64, bfloat16 or rounding."""

    def loss(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        assert paddle.get_default_dtype() == "float64"
        return F.cross_entropy(outputs, targets, reduction="none") * paddle.ones([1]).astype("float64")

    assert tried_here(loss, precision=Precision(dtype="float64")) == Findings()


@pytest.mark.parametrize("kind", [Centre, ScoredCentre])
def test_a_state_of_the_loss_that_the_model_keeps_is_nobodys_fault(kind: type[Centre]) -> None:
    model = network()
    model.add_sublayer("centre", centre := kind())
    model.forward = lambda x: model[2](model[1](model[0](x)))
    assert tried(centre, model) == Findings()


@pytest.mark.parametrize("model", [Alike(), InRows()])
def test_a_model_that_looks_at_other_samples_is_named(model: nn.Layer) -> None:
    pair = batch(2).micro_batches[0].inputs
    ((sentence,), _) = mixing(model, pair, ForkRunner(60))
    name = type(model).__name__
    assert sentence.startswith(f"the outputs of {name} for a sample depend on the other samples in its batch")


def test_honest_layers_do_not_look_at_other_samples() -> None:
    pair = batch(2).micro_batches[0].inputs
    honest = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Dropout(0.5), nn.LSTM(8, 4))
    honest[3].forward = lambda x, own=honest[3].forward: own(x.unsqueeze(1))[0]
    assert mixing(honest, pair, ForkRunner(60)) == ([], [])
    norm = nn.BatchNorm(6, trainable_statistics=True)  # of the batch in evaluation, too: the learner names it
    assert tried_here(cross_entropy(), nn.Sequential(norm, network())) == Findings()
    assert norm.training and norm._trainable_statistics
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Dropout(0.5), InTraining())
    ((sentence,), _) = mixing(model, pair, ForkRunner(60))
    assert sentence.startswith("the outputs of Sequential for a sample depend") and "in training" in sentence
    assert mixing(model[:2], pair, ForkRunner(60)) == ([], [])


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
    pair = paddle.rand([2, 3])
    (samples, _), *others = [
        mixing(Counting(what), pair, ForkRunner(60)) for what in ("samples", "calls", "mean")
    ]
    assert others == [([], []), ([], [])]
    assert "buffer seen depends on the number of samples that forward gets" in samples[0]
    assert samples[0].endswith(CAN_DIFFER)  # the outputs were equal


def test_a_model_that_cannot_compute_one_sample_is_not_judged() -> None:
    model = network()
    model.register_forward_pre_hook(lambda _, inputs: 1 / (len(inputs[0]) - 1) and None)
    (_, (doubt,)) = mixing(model, batch(2).micro_batches[0].inputs, ForkRunner(60))
    assert doubt.endswith(
        "treats each sample alone: its trial of one sample failed (ZeroDivisionError: division by zero)"
    )


def test_a_trial_without_memory_is_one_sentence() -> None:
    """Paddle's hint stood on the screen: "[Hint: Expected error == 0, but received error:12 != 0:0.] (at …)"."""

    def lack(layer: nn.Layer, inputs: Any) -> None:
        if len(inputs[0]) == 1:
            raise SystemError("run_backward returned a result with an exception set") from MemoryError(
                "(ResourceExhausted) Fail to alloc memory of 3200000000 size.\n  [Hint: Expected error == 0]"
            )

    model = network()
    model.register_forward_pre_hook(lack)
    (_, (doubt,)) = mixing(model, batch(2).micro_batches[0].inputs, ForkRunner(60))
    assert doubt == (
        "whether Sequential treats each sample alone: the trial ran out of memory (3.2 GB): the training itself "
        "probably will, too"
    )


class StepsFirst(nn.Layer):
    """Outputs [T, n, c], as for a CTC loss, with T = 8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(8 * CLASSES)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.layers(x).reshape([-1, 8, CLASSES]).transpose([1, 0, 2])


def of_each(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    return outputs.square().mean([0, 2])


class SamplesFirst(nn.Layer):
    """Outputs [n, 8, c]; `fewest`: of a model that takes no fewer samples."""

    def __init__(self, fewest: int = 1) -> None:
        super().__init__()
        self.layers, self.fewest = network(8 * CLASSES), fewest

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        assert len(x) >= self.fewest
        return self.layers(x).reshape([-1, 8, CLASSES])


class Pairs(nn.Layer):
    """Outputs [n, n, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        near = self.layers(x)
        return (near @ near.T).unsqueeze(-1)


def square_and_one(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    return outputs.square().mean(), 1


def sum_and_samples(outputs: paddle.Tensor, targets: paddle.Tensor) -> Any:
    return outputs.square().sum(), outputs.shape[1]


def test_as_many_steps_as_samples_are_not_cut_into_samples() -> None:
    for loss in (of_each, sum_and_samples):
        assert tried_here(loss, StepsFirst()) == Findings()
    for model in (SamplesFirst(), SamplesFirst(fewest=8), Pairs()):
        with pytest.raises(
            LossError, match="is over 1 things for 8 samples together, and over 1 and 1 for 4"
        ):
            tried_here(square_and_one, model)


def test_as_many_classes_as_samples_are_no_steps() -> None:
    """They are ordinary: no further forward, and no trial with fewer samples."""
    calls = Counter[int]()
    for classes in (7, 8):
        model = network(classes)
        model.register_forward_pre_hook(lambda layer, inputs: calls.update([classes]))  # noqa: B023
        with pytest.raises(
            LossError, match="is over 1 things for 8 samples together, and over 1 and 1 for 4"
        ):
            tried_here(mean_and_one, model)
    assert calls[7] == calls[8] > 0


def test_outputs_of_several_tensors_are_tried() -> None:
    def pairs(outputs: dict[str, list[paddle.Tensor]], targets: paddle.Tensor) -> paddle.Tensor:
        return contrastive(outputs["both"][0] + outputs["both"][1], targets)

    def each(outputs: dict[str, list[paddle.Tensor]], targets: paddle.Tensor) -> paddle.Tensor:
        return sum(F.cross_entropy(one, targets, reduction="none") for one in outputs["both"])

    assert said(pairs, Towers()).startswith("the loss pairs is ")
    assert tried_here(each, Towers()) == Findings()


def test_forward_loss_and_backward_are_tried_together() -> None:
    paddle.seed(1)
    balanced, honest = Balanced(), Honest()
    assert re.match(
        r"the loss loss is .* for 8 samples in one forward.* method across: docs/",
        said(balanced.loss, balanced),
    )
    paddle.seed(1)  # other weights may send all samples to one expert, whose balance mixes nothing
    slightly = SlightlyBalanced()
    assert "the loss loss is " in said(slightly.loss, slightly)
    assert "for 16 samples in one forward" in said(cross_entropy(), InLargeBatches(), samples=16)
    assert re.match(
        r"the gradient of first\.\w+ from 8 samples in one backward is \d+% off the sum",
        said(cross_entropy(), Backwards()),
    )
    found = tried(honest.loss, honest)
    assert (found.differences, found.unknown, found.remembers) == ([], [], ["model.calls"])


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)])
def test_what_a_forward_keeps_in_plain_python_is_told(generator: Any) -> None:
    found = tried_here(cross_entropy(), LayerDrop(generator), several=False)
    assert found.remembers == ["model.generator"]


def test_what_blocks_keep_where_recompute_cannot_put_it_back_is_told() -> None:
    """Attributes, and frozen weights that a forward writes: an inner teacher's."""

    class Teaches(InPython):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            with paddle.no_grad():
                self.linear.bias.set_value(self.linear.bias * 0.9 + 0.1)
            return super().forward(x)

    chain = nn.Sequential(nn.Linear(6, 6), Teaches())
    chain[1].linear.bias.stop_gradient = True
    names = ["model.1.mean", "model.1.linear.bias"]
    found = tried_here(cross_entropy(), chain, several=False)
    assert (found.remembers, found.in_blocks) == (names, names)
    alone = tried_here(cross_entropy(), InPython(), several=False)
    assert (alone.remembers, alone.in_blocks) == (["model.mean"], [])


def test_a_trial_leaves_no_trace_in_this_process() -> None:
    """Not in generators of the model's own, nor in lists, nor on the screen, nor in Paddle's random numbers."""
    model, seen = LayerDrop(random.Random(0)), []
    model.register_forward_post_hook(lambda *_: seen.append(print("never seen")))
    before = model.generator.getstate(), paddle.get_rng_state()[0].__getstate__()
    weights = model.last.weight.numpy()
    tried(drawn, model)
    assert (model.generator.getstate(), paddle.get_rng_state()[0].__getstate__()) == before and not seen
    assert (model.last.weight.numpy() == weights).all() and model.last.weight.grad is None


@pytest.mark.parametrize(
    ("end", "seconds", "sentence"),
    [
        (os.abort, 30.0, "the process that tried it was ended by SIGABRT"),
        (lambda: os._exit(3), 30.0, "the process that tried it left with exit status 3"),
        (lambda: time.sleep(60), 0.4, "it takes longer than 0.4 s"),
        (
            lambda: paddle.ones([2, 3]) @ paddle.ones([2, 3]),
            30.0,
            "its trial with the first samples failed (ValueError: (",
        ),
    ],
)
def test_a_trial_that_fails_is_a_sentence(
    end: Any, seconds: float, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_trial, "SECONDS", seconds)
    model = network()
    model.register_forward_pre_hook(lambda *_: end())
    found = tried(cross_entropy(), model)
    assert not found.differences and sentence in found.unknown[0] and "\n" not in found.unknown[0]


def test_a_loss_that_returns_no_pair_is_refused_also_if_outputs_have_no_sample_dim() -> None:
    """Its error was a sentence on a trial first, and then an error of the first update."""
    model = network()
    model.forward = lambda x: (model[2](model[1](model[0](x))), x.mean())
    with pytest.raises(LossError, match="without its count"):
        tried(lambda outputs, targets: F.cross_entropy(outputs[0], targets), model)


class Gathering(nn.Layer):
    """Gathers the samples of all ranks, as MoCo does for its queue."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        paddle.distributed.all_gather([], x.detach())
        return self.inner(x)


def trial_of_gathering() -> list[str]:
    """In a rank: the doubts of a trial, before and after which the ranks can exchange."""
    mesh = join(seed=0)
    unknown = tried(cross_entropy(), Gathering()).unknown
    Gathering()(batch(2).micro_batches[0].inputs)
    return unknown if mesh.ranks > 1 else []


def test_a_model_that_exchanges_is_told_by_that_cause() -> None:
    """ "there is the process that tried it was ended by SIGABRT", it was said."""
    for (doubt,) in run_ranks(trial_of_gathering, 2):
        cause = "failed (the model or the loss exchanges with other ranks, by all_gather"
        assert re.search(
            rf"{re.escape(cause)} \(.*test_samplewise.py, line \d+, in forward\), and a trial has none", doubt
        )
        assert "let a loss return (total, count)" in doubt


def test_a_model_that_is_too_large_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplewise, "MAX_TRIED_BYTES", 100)
    (doubt,) = tried_here(cross_entropy()).unknown
    assert doubt.startswith("whether Sequential and its loss treat each sample alone: ")


def test_what_neither_exchange_nor_checkpoint_takes_is_refused() -> None:
    table = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, CLASSES))
    with pytest.raises(UsageError, match="layer 0 is an Embedding with sparse=True"):
        full_model_learner(task(cross_entropy(), table), Mesh.alone())
    model = network()
    ahead = paddle.incubate.LookAhead(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    with pytest.raises(UsageError, match="LookAhead keeps another optimizer inside"):
        full_model_learner(Task(model=model, loss=contrastive, optimizer=ahead), Mesh.alone())
    groups = [{"params": model[0].parameters(), "learning_rate": 0.1}, {"params": model[2].parameters()}]
    with pytest.raises(UsageError, match=r"strategy\.sharding assigns one list .* SGD has parameter groups"):
        check_ungrouped(paddle.optimizer.SGD(0.1, parameters=groups), "strategy.sharding")
    check_ungrouped(paddle.optimizer.SGD(0.1, parameters=model.parameters()), "strategy.sharding")
    rate = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    waits = paddle.optimizer.SGD(rate, parameters=model.parameters())
    with pytest.raises(UsageError, match="ReduceOnPlateau needs a metric at each step"):
        full_model_learner(Task(model=model, loss=contrastive, optimizer=waits), Mesh.alone())


@pytest.mark.processes
def test_a_trial_that_takes_too_long_names_its_own_limit() -> None:
    with pytest.raises(sample_trial.TrialError, match=r"it takes longer than 0\.2 s"):
        ForkRunner(0.2)(lambda: time.sleep(60))


class Later(Alike):
    """Subtracts the mean from its second forward on."""

    calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 1 else self.linear(x)


def normalized() -> nn.Layer:
    """With statistics, and a frozen weight."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Linear(8, CLASSES))
    model[0].weight.stop_gradient = True
    return model


def of_a_users(model: nn.Layer) -> nn.Layer:
    """With a forward that may keep anything anywhere."""
    layers = list(model)

    def forward(x: paddle.Tensor) -> paddle.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    model.forward = forward
    return model


@pytest.mark.parametrize(
    ("model", "expected", "more", "remembers"),
    [
        (network(), 1, 3, []),
        (normalized(), 1, 3, []),  # the model, what a forward changes, halves of a batch with their gradients
        (Later(), 6, 11, ["model.calls"]),
        (of_a_users(network()), 6, 11, []),
    ],
)
def test_runs_share_a_process_and_begin_with_one_state(model, expected, more, remembers, monkeypatch):
    monkeypatch.setattr(process_runner, "SECONDS", 1000.0)
    runner, processes = ForkRunner(30.0), []

    def run(function):
        processes.append(1)
        return runner(function)

    assert mixing(model, batch(2).micro_batches[0].inputs, run) == ([], [])
    assert len(processes) == expected
    processes.clear()
    assert findings(task(CrossEntropy().build(), model), batch().micro_batches[0], run, True) == Findings(
        remembers=remembers
    )
    assert len(processes) == more


def test_what_a_gradients_hook_keeps_is_not_seen_by_the_next_run():
    model, kept = network(), {}
    model[0].weight.register_hook(lambda g: g / kept.setdefault("norm", g.norm()))
    found = tried(CrossEntropy().build(), model)
    assert re.match(
        "the gradient of 0.weight from 8 samples .* the backward mixes samples", *found.differences
    )


def test_a_loss_that_is_false_is_not_taken_for_one_of_the_package():
    class Queue(list):
        def __call__(self, outputs, targets):
            return mean_and_one(outputs, targets)

    with pytest.raises(LossError, match="over 1 things for 8 samples together, and over 1 and 1"):
        tried_here(Queue())
