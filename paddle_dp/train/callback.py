"""The contract of a callback: the moments that it hears of, and what it may ask of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from paddle_dp.train.progress import Progress
from paddle_dp.units import Every

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Snapshot
    from paddle_dp.mesh import Mesh
    from paddle_dp.parallel import Learner
    from paddle_dp.train.evaluation import Evaluation

Name = Literal["start", "step", "epoch", "evaluated", "saved", "end", "failed"]


class Training(Protocol):
    """What a callback sees of the training that it belongs to, as `moment.trainer`.

    `learner` has the model (`learner.named_parameters()`), `mesh` the ranks. `total_steps`: of the whole training.
    `stopped`: why it ends early, once somebody has called `stop`. `differences`: sentences on how what was learned
    differs from what one process learns; known at the end.
    """

    learner: Learner
    mesh: Mesh
    total_steps: int
    stopped: str | None
    differences: list[str]

    def stop(self, reason: str) -> None:
        """Ends the training after the current update, in good order. To be called on every rank alike."""

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample, and tells all callbacks by `evaluated`. Collective."""
        ...

    def snapshot(self) -> Snapshot:
        """What this rank brings to a checkpoint. Collective; raises where weights are not fit to be saved."""
        ...

    def tell_saved(self, path: Path) -> None:
        """Tells all callbacks, by `saved`, that a checkpoint was written to `path`. To be called on every rank."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that happened in a training. `name` is the method that hears of it; `numbers` are there in `step`."""

    name: Name
    progress: Progress
    trainer: Training
    numbers: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """Reacts to moments of a training: override those that matter; the others cost nothing.

    Each is called with a Moment: how far the training is (`moment.progress`) and the training itself
    (`moment.trainer`, a `Training`); three come with what they are about. Every rank has the same callbacks and tells
    them the same moments in the same order, so a callback may do collective work, if it does so on every rank; what
    goes to a screen or a file is the first rank's (`moment.trainer.mesh.is_main`). An exception ends the training on
    all ranks, and is told to all callbacks by `failed`.

    `every` limits `step` and `epoch`; None: each of them. `reads` says whether `step` wants `moment.numbers`: the
    loss, its scores, `lr`, `gradient_norm` and the speed since the last reading; they cost one small exchange of all
    ranks. Of one step, callbacks that read are told first and those that do not (they evaluate, save or profile) after
    them, and the time of these does not count as training; of an epoch and of the end, the other way round.
    """

    every: Every | None = None
    reads: bool = True

    def start(self, moment: Moment) -> None:
        """Before the first update, after a resume."""

    def step(self, moment: Moment) -> None:
        """After an update, every so many steps."""

    def epoch(self, moment: Moment) -> None:
        """After the last update of an epoch, every so many epochs; progress.epoch counts the complete ones."""

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        """After an evaluation, whoever asked for it; the same `evaluation` on every rank."""

    def saved(self, moment: Moment, path: Path) -> None:
        """After a checkpoint was written to the folder `path`, and is whole there."""

    def end(self, moment: Moment) -> None:
        """After the last update."""

    def failed(self, moment: Moment, error: BaseException) -> None:
        """When the training ends by `error`. No collective work here: other ranks may be gone."""

    def due_at_step(self, step: int) -> bool:
        """Whether `step` is called after update `step` (from 1). The same on every rank."""
        return self.every is None or self.every.due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        """Whether `epoch` is called after so many epochs. The same on every rank."""
        return self.every is None or self.every.unit == "steps" or self.every.due_at_epoch(epochs)
