"""The contract of a callback: its moments, and the part of the training that it sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paddle_dp.units import Every

if TYPE_CHECKING:
    from paddle_dp.checkpoint import HostMemory, Snapshot
    from paddle_dp.errors import CheckpointError
    from paddle_dp.learner import Learner
    from paddle_dp.mesh import Mesh
    from paddle_dp.train.evaluation import Evaluation
    from paddle_dp.train.gallery import Gallery
    from paddle_dp.train.judge import Refusal


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`epoch`: complete epochs. `batch`: global batches done in the current epoch. `step`: updates done. `samples`:
    samples read in them, by all ranks together."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Progress:
        """The progress after one update from a global batch of `samples`."""
        # `replace` would ask the class for its fields in every step.
        counts = {"batch": self.batch + 1, "step": self.step + 1, "samples": self.samples + samples}
        return type(self)(**{**vars(self), **counts})

    def next_epoch(self) -> Progress:
        """The progress after the last batch of an epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Progress:
        """Restores the result of `state`. Raises ValueError for other counts: it would be another training."""
        if (counts := sorted(state)) != (known := sorted(field.name for field in fields(cls))):
            raise ValueError(f"progress has {', '.join(counts)}, not {', '.join(known)}")
        return cls(**state)


Name = Literal[
    "refuse", "start", "step", "epoch", "rewinding", "refused", "measured", "evaluated", "gallery", "saved",
    "save_failed", "interrupted", "end", "failed",
]  # fmt: skip


class Training(Protocol):
    """The training as a callback sees it, in `moment.trainer`.

    `learner` has the model (`learner.placed.named_parameters()`), `mesh` the ranks. `total_steps`: of the training.
    `early_end`: the reason given to `stop`, or None. `facts` describe how the training is made, as parts of a
    sentence; `differences` are sentences on differences from one process's training, `unknown` on questions that stayed
    open. These three are complete at `end`.
    """

    learner: Learner
    mesh: Mesh
    total_steps: int
    early_end: str | None
    facts: list[str]
    differences: list[str]
    unknown: list[str]

    @property
    def callbacks(self) -> Iterable[Callback]:
        """All callbacks of the training."""
        ...

    @property
    def plateau(self) -> object | None:
        """The schedule, if it evaluates by itself and waits for a score."""
        ...

    def stop(self, reason: str) -> None:
        """Ends the training after the current update; `end` is still called. Call it on every rank, after the same
        update: a rank that alone calls it waits for the others until the job is stopped as standing still."""

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample, and calls `evaluated` of all callbacks, once the training has begun.
        Collective."""
        ...

    def evaluation_names(self) -> set[str]:
        """The names that evaluations give numbers, from one held-out batch; none without held-out data. Collective."""
        ...

    def tell_gallery(self, gallery: Gallery) -> None:
        """Calls `gallery` of all callbacks of this rank."""

    def snapshot(self, memory: HostMemory | None = None) -> Snapshot:
        """Takes this rank's part of a checkpoint, copied into `memory` if given. Collective. Raises if weights are not
        finite, or differ between ranks."""
        ...

    def tell_saved(
        self, path: Path, progress: Progress | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        """Calls `saved` of all callbacks, after the checkpoint of `progress` (now, by default) was written to `path`.
        Call it on every rank."""

    def tell_save_failed(self, error: CheckpointError, progress: Progress | None = None) -> None:
        """Calls `save_failed` of all callbacks, after the checkpoint of `progress` could not be written. Call it on
        every rank."""


class StepMeasurement(Protocol):
    """Where the time of some steps went, on every rank (docs/why-slow.md)."""

    @property
    def is_shown(self) -> bool:
        """Whether the user asked to see the report (`train --why`)."""
        ...

    def report(self) -> list[str]:
        """The lines of the report, in 80 columns."""
        ...

    def starvation(self) -> str:
        """A sentence, if the training waits for data and further workers would help; else ""."""
        ...

    def as_fields(self) -> dict[str, Any]:
        """The fields of a line of metrics.jsonl."""
        ...


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An event of a training. `name` is the callback's method that is called.

    `numbers` is filled for `step`; for `saved` it has the seconds for which training stood still (`seconds_stalled`, of
    these `seconds_waiting` for the previous checkpoint) and the seconds of the write (`seconds_writing`). `together`:
    whether all ranks are at this moment. It is False only for `step` of an asynchronous training (train/rounds.py),
    where ranks do not wait for each other: leave collective work to the next time.
    """

    name: Name
    progress: Progress
    trainer: Training
    numbers: Mapping[str, float] = field(default_factory=dict)
    together: bool = True


class Callback:
    """Reacts to moments of a training. Override the methods you need; the others cost nothing.

    Each method gets a Moment with the progress (`moment.progress`) and the training (`moment.trainer`, a `Training`);
    seven get a second argument. Every rank has the same callbacks and calls them in the same order, so a callback may
    do collective work if it does so on every rank (and `moment.together`); only the main rank should write to a screen
    or a file (`moment.trainer.mesh.is_main`). An exception ends the training on all ranks; then `failed` of all
    callbacks is called.

    `every` limits `step` and `epoch`; None: each of them. `reads`: whether `step` needs `moment.numbers`: the loss, its
    scores, `lr`, `gradient_norm` and the speed since the last reading, at the cost of one small gather. `step` is
    then called after the last update, too, regardless of `every`; where ranks do not wait for each other, once this
    rank knows a loss.

    `weights`: whether `step` may read the model's parameters. Set it to False if not: with sharding on accelerators the
    gather of new parameters then overlaps the next forward.

    `needs_job`: whether it works only in a job, among several ranks or with what the launcher makes, so that
    `paddle-dp check`, which tries a recipe on one process, does so without it. A part with a Config says so there.

    `evaluates_at_end`, `saves_at_end`: whether `end` does: of the callbacks that do not read, those that save are
    called right before the first that evaluates, so that the last updates are there, whatever the evaluation comes to.

    At a step, callbacks that read are called before the others (they evaluate, save or profile; their time does not
    count as training); at an epoch and at the end, after them. Of the readers, and of the others, a step calls the last
    one of the recipe first, an epoch and the end the first one.
    """

    every: Every | None = None
    reads: bool = True
    weights: bool = True
    needs_job: bool = False
    evaluates_at_end: bool = False
    saves_at_end: bool = False

    def refuse(self, moment: Moment) -> None:
        """Called before anything is written. Raise UsageError for a training in which this callback cannot work."""

    def start(self, moment: Moment) -> None:
        """Called before the first update, after a resume."""

    def step(self, moment: Moment) -> None:
        """Called after an update, as `every` says, and after the last one if the callback reads.

        `numbers["loss"]` is finite, or NaN where no target of the batch counted. A loss that is NaN for another reason
        ends the training before this call (`failed`, with a NotFiniteError), or a guard refuses the update (`refused`).
        """

    def epoch(self, moment: Moment) -> None:
        """Called after the last update of an epoch, as `every` says; progress.epoch counts the complete ones."""

    def rewinding(self, moment: Moment) -> None:
        """Called before the training goes back to a checkpoint: wait for background work."""

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        """Called after an update that the guard refused: skipped, and counted in the progress, or undone with others by
        going back to a checkpoint, from which `moment.progress` counts. `step` of callbacks that read is not called
        then."""

    def measured(self, moment: Moment, measured: StepMeasurement) -> None:
        """Called after a measurement of where the time of some steps went, on every rank (docs/why-slow.md)."""

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        """Called after every evaluation from `start` on, until another training begins in the run's folder, with the
        same `evaluation` on every rank."""

    def gallery(self, moment: Moment, gallery: Gallery) -> None:
        """Called on the main rank after some held-out samples were computed with the model's answers (the callback
        `samples`). Do no collective work here."""

    def saved(self, moment: Moment, path: Path) -> None:
        """Called after a checkpoint was completely written to the folder `path`. After a background write its step is
        earlier than the training's: `moment.progress` is the checkpoint's."""

    def save_failed(self, moment: Moment, error: CheckpointError) -> None:
        """Called after the checkpoint of `moment.progress` could not be written; the training continues."""

    def interrupted(self, moment: Moment) -> None:
        """Called when a signal, train.max_time or a failed metric stops the training early, after the same update on
        all ranks. Save the state for a resume and no more, since time is short. `failed` follows, not `end`."""

    def end(self, moment: Moment) -> None:
        """Called after the last update."""

    def failed(self, moment: Moment, error: BaseException) -> None:
        """Called when `error` ends the training. Do no collective work here: other ranks may be gone."""

    def due_at_step(self, step: int) -> bool:
        """Whether `step` is called after update `step` (from 1). The same on every rank."""
        return self.every is None or self.every.due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        """Whether `epoch` is called after `epochs` complete epochs. The same on every rank."""
        return self.every is None or self.every.unit == "steps" or self.every.due_at_epoch(epochs)
