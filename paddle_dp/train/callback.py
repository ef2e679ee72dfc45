"""What happened, and who reacts: moments and callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddle_dp.train.progress import Progress
from paddle_dp.units import Every

if TYPE_CHECKING:
    from paddle_dp.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that happened in a training, with its numbers where they were asked for.

    `name` is start, step, epoch, evaluated, saved, end or failed; `detail` is the Evaluation, the saved checkpoint's
    path, or the exception.
    """

    name: str
    progress: Progress
    trainer: Trainer
    numbers: Mapping[str, float] = field(default_factory=dict)
    detail: Any = None


class Callback:
    """Reacts to moments: override those that matter.

    Every rank has the same callbacks and tells them the same moments, so a callback may do collective work; screens
    and files are the first rank's (`trainer.mesh.is_main`). `every` limits `step` and `epoch`. `reads` says whether
    `step` wants numbers, which cost one small exchange; callbacks that do not read (they evaluate or save) are told
    of a step last and of all else first, and their time does not count as training.
    """

    every: Every | None = None
    reads: bool = True

    def start(self, moment: Moment) -> None:
        """Before the first update, after a resume."""

    def step(self, moment: Moment) -> None:
        """After an update, every so many steps."""

    def epoch(self, moment: Moment) -> None:
        """After the last update of an epoch, every so many epochs; progress.epoch counts the complete ones."""

    def evaluated(self, moment: Moment) -> None:
        """After an evaluation; `moment.detail` is the Evaluation."""

    def saved(self, moment: Moment) -> None:
        """After a checkpoint was written; `moment.detail` is its path."""

    def end(self, moment: Moment) -> None:
        """After the last update."""

    def failed(self, moment: Moment) -> None:
        """When the training ends by an exception (`moment.detail`); no collective work here."""

    def due_at_step(self, step: int) -> bool:
        return self.every is None or self.every.due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        return self.every is None or self.every.unit == "steps" or self.every.due_at_epoch(epochs)
