"""Turns a batch into an update: learners, exact gradients, precision, batch normalization over all ranks.

Nothing here reads data, writes files or knows epochs. `strategies` place models on the ranks of a `mesh`.
"""

from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.precision.amp import MixedPrecision
from paddle_dp.parallel.runner import Dropout
from paddle_dp.parallel.strategy import Strategy, Task, full_model_learner, prepare
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
