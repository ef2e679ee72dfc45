"""The training itself: progress, callbacks, the trainer's loop, evaluation, and how a recipe becomes a trainer.

Nothing here knows how ranks exchange gradients (`parallel`), how files are written (`checkpoint`) or how processes are
started (`launch`).
"""

from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.evaluate import Evaluation, evaluate
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run
from paddle_dp.train.trainer import Trainer

__all__ = ["Callback", "Evaluation", "Moment", "Progress", "Run", "Trainer", "evaluate"]
