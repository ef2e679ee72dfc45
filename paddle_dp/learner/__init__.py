"""Turns a global batch into an update: the learner and the parts that it is composed of.

`task` is the input and the contract of a strategy, `learner` the update, `runner` its forward and backward; `update`
has the parts in which strategies differ. Nothing here reads data, writes files or knows epochs. The parts below are in
`core` and `exchange`, and `strategies` compose a learner for the ranks of a `mesh`.
"""

from paddle_dp.core.precision import MixedPrecision
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.runner import Dropout
from paddle_dp.learner.task import Strategy, Task, full_model_learner, prepare
from paddle_dp.recipe import Precision

__all__ = [
    "Dropout",
    "Learner",
    "MixedPrecision",
    "Precision",
    "Strategy",
    "Task",
    "full_model_learner",
    "prepare",
]
