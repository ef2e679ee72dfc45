"""Silent faults, each put into the ranks of one side by `SideRunner.run_candidate(patch=…)`."""

import os
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import paddle

from paddle_dp.core import batch_norm
from paddle_dp.exchange import pushed_gradients
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.runner import BatchRunner

CHANGED = (batch_norm, PushedGradients, Learner, BatchRunner)  # by the faults of the first steps
LAST = os.environ.get("PADDLE_TRAINER_ID", "0") == "1"


def of_learners(change):
    """A fault that calls `change(learner)` when a learner is made."""

    def fault():
        made = Learner.__post_init__

        def changed(self):
            made(self)
            change(self)

        Learner.__post_init__ = changed

    return fault


def _one(learner):
    """Of the matrices that lie on this rank the middle one: its name, and itself."""
    matrices = [(name, p) for name, p in learner.placed.named_parameters(trainable=True) if p.ndim > 1]
    return matrices[len(matrices) // 2]


@of_learners
def one_gradient(learner):
    """A thousandth too much in one parameter's gradient, on one rank."""
    if LAST:
        weight = dict(learner.placed.named_parameters())["body.4.weight"]
        weight.register_hook(lambda gradient: gradient * 1.001)


def evaluation_spoils_a_gradient():
    """One matrix's gradient is three times too large on one rank, from the first evaluation of a trainer on."""
    from paddle_dp.assembly.trainer import Trainer

    evaluate = Trainer.evaluate

    def spoiled(self):
        found = evaluate(self)
        if LAST:
            _one(self.learner)[1].register_hook(lambda gradient: gradient * 3)
        return found

    Trainer.evaluate = spoiled


@of_learners
def any_gradient(learner):
    """A thousandth too much in one matrix's gradient, on one rank, whatever the model."""
    if LAST:
        _one(learner)[1].register_hook(lambda gradient: gradient * 1.001)


@of_learners
def faster(learner):
    """One matrix learns 1 % faster, on every rank."""
    parameter = _one(learner)[1]
    parameter.optimize_attr = {**parameter.optimize_attr, "learning_rate": 1.01}


@of_learners
def no_decay(learner):
    """One matrix does not decay, on every rank."""
    spared, optimizer = _one(learner)[1], learner.optimizer
    spared.regularizer = None
    for word in ("_apply_decay_param_fun", "_exclude_from_weight_decay_fn"):
        asked = getattr(optimizer, word, None)
        if asked is not None:
            out = word.startswith("_exclude")
            setattr(optimizer, word, _but(asked, spared, out))


def _but(asked, spared, answer):
    """`asked`, with this answer for one parameter: optimizers ask for its name or give itself."""
    return lambda given: answer if getattr(given, "name", given) == spared.name else asked(given)


@of_learners
def stale_moment(learner):
    """From the second update on, one matrix's first moment (or velocity) is the one before the last update's."""
    step, spared = learner.update, _one(learner)[1]
    kept = []  # before each update; nothing before the first, which makes them

    def stepping():
        tables = {n: t for n, t in learner.optimizer._accumulators.items() if "pow" not in n}
        mine = {n: t[spared.name] for n, t in tables.items() if spared.name in t and "moment2" not in n}
        kept.append({n: tensor.clone() for n, tensor in mine.items()})
        if len(kept) > 1:
            for name, tensor in mine.items():
                tensor.set_value(kept[-2].get(name, paddle.zeros_like(tensor)))
        step()

    learner.update = stepping


def no_exchange():
    """Gradients never meet."""
    PushedGradients.backward = lambda self, last, counted=0: nullcontext()
    PushedGradients.finish = lambda self: []


def mean_of_means():
    """Every rank's mean counts alike."""
    factor = BatchRunner._factor

    BatchRunner._factor = lambda self, micro_batch, count, exchange: (
        factor(self, micro_batch, count, exchange) * count / (2 * micro_batch.samples)
    )


def local_norm():
    """BatchNorm sees one rank's samples."""
    batch_norm.synchronize = lambda model, mesh: model


def held_out_twice():
    """The last rank's sums over held-out samples are twice what they are."""
    score = BatchRunner.score

    def doubled(self, micro_batch):
        scored = score(self, micro_batch)
        return (
            replace(scored, sums={name: 2 * value for name, value in scored.sums.items()}) if LAST else scored
        )

    BatchRunner.score = doubled


@of_learners
def nothing_counts(learner):
    """Batches are called empty in which samples count: a training would pass over their numbers."""
    metrics = learner._metrics

    def emptied(*arguments):
        values = metrics(*arguments)
        learner.empty = True
        return values

    learner._metrics = emptied


@of_learners
def moved_buffer(learner):
    """A buffer that only the ranks have: counted on by nobody else."""
    learner.model.register_buffer("clock", paddle.to_tensor([6.2]))


@of_learners
def late_gradient(learner):
    """In the ninth backward and later ones one matrix's gradient is 10 % too large, on one rank."""
    seen = []

    def changed(gradient):
        seen.append(gradient.shape)
        return gradient * 1.1 if LAST and len(seen) > 8 else gradient

    _one(learner)[1].register_hook(changed)


def fewer_digits():
    """What travels is rounded to four digits of base 2 instead of eight."""
    rounded = pushed_gradients.bytes_from

    def coarser(numbers, dtype):
        if dtype == "bfloat16":
            numbers = np.ldexp(np.round(np.ldexp(np.frexp(numbers)[0], 4)), np.frexp(numbers)[1] - 4)
        return rounded(numbers.astype("float32"), dtype)

    pushed_gradients.bytes_from = coarser
