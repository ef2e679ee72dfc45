"""The training: progress, callbacks, the loop and its hooks, evaluation, the state that a checkpoint holds.

How a recipe becomes a trainer is `assembly`'s subject, how ranks exchange gradients `exchange`'s, how files are
written `checkpoint`'s, how processes are started `launch`'s. Names are imported when they are first used, so that a
callback's settings are checked without paddle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from paddle_dp.train.callback import Callback as Callback
    from paddle_dp.train.callback import Moment as Moment
    from paddle_dp.train.callback import Training as Training
    from paddle_dp.train.evaluation import Evaluation as Evaluation
    from paddle_dp.train.judge import Refusal as Refusal
    from paddle_dp.train.progress import Progress as Progress
    from paddle_dp.train.run import Run as Run

_MODULES = {
    "Callback": "callback",
    "Evaluation": "evaluation",
    "Moment": "callback",
    "Progress": "progress",
    "Refusal": "judge",
    "Run": "run",
    "Training": "callback",
}
__all__ = ["Callback", "Evaluation", "Moment", "Progress", "Refusal", "Run", "Training"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paddle_dp.train' has no attribute '{name}'")
    return getattr(import_module(f"paddle_dp.train.{_MODULES[name]}"), name)
