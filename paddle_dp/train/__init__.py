"""The training itself: progress, callbacks, the trainer's loop, evaluation, and how a recipe becomes a trainer.

Nothing here knows how ranks exchange gradients (`parallel`), how files are written (`checkpoint`) or how processes are
started (`launch`). The words are loaded when they are used: a callback's settings are checked without paddle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what an editor completes, and a type checker checks
    from paddle_dp.train.callback import Callback as Callback
    from paddle_dp.train.callback import Moment as Moment
    from paddle_dp.train.callback import Training as Training
    from paddle_dp.train.evaluation import Evaluation as Evaluation
    from paddle_dp.train.progress import Progress as Progress
    from paddle_dp.train.run import Run as Run
    from paddle_dp.train.trainer import Trainer as Trainer

_WORDS = {
    "Callback": "callback",
    "Evaluation": "evaluation",
    "Moment": "callback",
    "Progress": "progress",
    "Run": "run",
    "Trainer": "trainer",
    "Training": "callback",
}
__all__ = ["Callback", "Evaluation", "Moment", "Progress", "Run", "Trainer", "Training"]


def __getattr__(word: str) -> Any:
    if word not in _WORDS:
        raise AttributeError(f"module 'paddle_dp.train' has no attribute '{word}'")
    return getattr(import_module(f"paddle_dp.train.{_WORDS[word]}"), word)
