"""Silent faults, each put into the ranks of one side by `Comparison.many(patch=…)`."""

import os

import paddle

from paddle_dp.parallel import batch_norm
from paddle_dp.parallel.learner import Learner

LAST = os.environ.get("PADDLE_TRAINER_ID", "0") == "1"


def _after_placing(change):
    """Calls `change(learner)` when a learner is made."""
    made = Learner.__post_init__

    def changed(self):
        made(self)
        change(self)

    Learner.__post_init__ = changed


def one_gradient():
    """A thousandth too much in one parameter's gradient, on one rank."""

    def change(learner):
        if LAST:
            dict(learner.named_parameters())["body.4.weight"].register_hook(lambda gradient: gradient * 1.001)

    _after_placing(change)


def no_exchange():
    """Gradients never meet."""
    learn = Learner._learn

    def alone(self, *given):
        with self.placed.no_sync():
            return learn(self, *given)

    Learner._learn = alone


def mean_of_means():
    """Every rank's mean counts alike."""
    factor = Learner._factor

    Learner._factor = lambda self, micro, count: factor(self, micro, count) * count / (2 * micro.samples)


def local_norm():
    """BatchNorm sees one rank's samples."""
    batch_norm.synchronize = lambda model, mesh: model


def moved_buffer():
    """A buffer that only the ranks have: counted on by nobody else."""

    def change(learner):
        learner.model.register_buffer("clock", paddle.to_tensor([6.2]))

    _after_placing(change)
