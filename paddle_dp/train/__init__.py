"""The training: progress, callbacks, the loop and its hooks, evaluation, the state that a checkpoint holds.

How a recipe becomes a trainer is `assembly`'s subject, how ranks exchange gradients `exchange`'s, how files are
written `checkpoint`'s, how processes are started `launch`'s. These names need no Paddle: a callback's settings are
checked without it.
"""

from __future__ import annotations

from paddle_dp.train.callback import Callback, Moment, Progress, Training
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.judge import Refusal
from paddle_dp.train.run import Run

__all__ = ["Callback", "Evaluation", "Moment", "Progress", "Refusal", "Run", "Training"]
