"""The sentence: feed the learner batches, count the progress, tell the callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.checkpoint import Checkpoint, Checks, Snapshot
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import DivergenceError, NotFiniteError, PaddleDPError, TargetError, UsageError
from paddle_dp.parallel import Learner
from paddle_dp.train import blame, consistency, state
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.evaluate import evaluate
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import Meter
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run
from paddle_dp.train.script import FromPython
from paddle_dp.units import Every, Length


class Trainer(FromPython):
    """Trains a learner on a loader's batches.

        Trainer(learner, loader, callbacks).fit("3 epochs")

    `run` says where the run lives and what it is evaluated on; `check_every`, how often the ranks compare weights.
    No line here asks which layout it trains: that was decided when the learner was placed.
    """

    def __init__(
        self,
        learner: Learner,
        loader: Loader,
        callbacks: Sequence[Callback] = (),
        *,
        run: Run | None = None,
        check_every: Every | None = None,
    ):
        self.learner, self.loader, self.mesh = learner, loader, learner.mesh
        self.run = run or Run.plain(learner.mesh, loader)
        # An epoch and the end are told to those that work (evaluate, save) before those that write about it. A step,
        # the other way round: what a checkpoint holds must be written down when the process dies right behind it.
        self.callbacks, self.check_every = tuple(sorted(callbacks, key=lambda c: c.reads)), check_every
        self.progress, self.until, self.total_steps = Progress(), Length(0, "steps"), 0
        self.stopped: str | None = None
        self.differences: list[str] = []  # from what one process learns; known at the end
        self.empty_batches = 0  # of which nothing was learned, for nothing in them counted
        self.sound: int | None = None  # the last step after which the weights were looked at, and were good
        self.meter = Meter(self.mesh)
        self._steppers = [c for c in reversed(self.callbacks) if type(c).step is not Callback.step]

    def fit(self, until: Length | str | None = None) -> Progress:
        """Trains from where it is until `until`, counted from the very beginning, and returns the progress.

        `until` may be left out where the run was made with a length. Whatever ends it early is told to the callbacks
        as `failed` and raised.
        """
        if until is None and not self.run.total_steps:
            raise UsageError('fit: say how long, as in fit("3 epochs"), or give the run a length.')
        until = Length(self.run.total_steps, "steps") if until is None else until
        self.until = until if isinstance(until, Length) else Length.parse(until)
        self.total_steps = self.until.steps(self.loader.batches)
        try:
            consistency.compare_starts(self)
            self.tell("start")
            self.check("before the first update", states=True)
            self._train()
            self.check("at the end of the training")
            self.differences = self.learner.differences()
            self.tell("end")
        except BaseException as error:
            self._tell_failed(error)
            raise
        finally:
            self.loader.close()
        return self.progress

    def stop(self, reason: str) -> None:
        """Ends the training after the current update, in good order. To be called on every rank alike."""
        self.stopped = reason

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample and tells the callbacks. Collective.

        Raises UsageError when the run has nothing held out, NotFiniteError, once they have heard of it, when a number
        of the evaluation is NaN or infinite.
        """
        if self.run.test_loader is None:
            raise UsageError("this run has no held-out data to evaluate on: give Run(test_loader=…).")
        found = evaluate(self.learner, self.run.test_loader, self.mesh)
        self.tell("evaluated", found.numbers, found)
        if found.not_finite:
            self._explain_evaluation(found)
        return found

    def check(self, when: str, states: bool = False) -> None:
        """Raises NotFiniteError unless all weights are finite, DivergenceError unless ranks that hold the same weights
        hold the same bits; with `states`, so for the optimizer's states. Collective, and the same error on every rank.

        The message says which tensor, on which rank, until when all was good, and which checkpoint to go back to.
        """
        try:
            with self.learner.states_at_hand() if states else nullcontext():
                self.learner.check(when, state.optimizer_states(self.learner) if states else ())
        except (DivergenceError, NotFiniteError) as error:
            raise self._explained(error) from None
        self.sound = self.progress.step

    def snapshot(self) -> Snapshot:
        """What this rank brings to a checkpoint. Collective: running statistics meet first.

        Raises NotFiniteError or DivergenceError, as `check` does, instead of handing over what is not good.
        """
        self.learner.meet()
        step = self.progress.step
        self.check(f"before the checkpoint of step {step}, which was not written", states=True)
        checks = Checks(agreed=True, finite=True, step=step)
        return state.snapshot(self.learner, self.progress, self.run, self.loader, checks)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint: bitwise on as many ranks as saved it, exactly counted on any other number."""
        self.progress, self.sound = state.restore(checkpoint, self.learner), None

    def tell(self, name: str, numbers: Any = None, detail: Any = None) -> None:
        """Tells every callback of a moment."""
        moment = Moment(name=name, progress=self.progress, trainer=self, numbers=numbers or {}, detail=detail)
        for callback in self.callbacks:
            getattr(callback, name)(moment)

    def _train(self) -> None:
        self.meter.read()
        while self.progress.step < self.total_steps and not self.stopped:
            for batch in self.loader.read(self.progress.epoch, self.progress.batch):
                self._update(batch)
                if self.stopped or self.progress.step >= self.total_steps:
                    break
            if self.progress.batch >= self.loader.batches:
                self.progress = self.progress.next_epoch()
                self._tell_epoch()

    def _update(self, batch: Batch) -> None:
        step = self.progress.step + 1
        due = [callback for callback in self._steppers if callback.due_at_step(step)]
        observe = any(callback.reads for callback in due)
        rate = self.learner.optimizer.get_lr() if observe else 0.0
        self._learn(batch, observe)
        self.progress = self.progress.advance(batch.samples)
        if self.learner.empty:
            self._say_empty(batch)
        self.meter.add(batch.samples, batch.waited)
        if self.check_every is not None and self.check_every.due_at_step(step):
            self.check(f"after step {step}")
        if due:
            numbers = self._numbers(rate, batch) if observe else {}
            moment = Moment(name="step", progress=self.progress, trainer=self, numbers=numbers)
            for callback in due:
                with nullcontext() if callback.reads else self.meter.paused():
                    callback.step(moment)

    def _learn(self, batch: Batch, observe: bool) -> None:
        try:
            self.learner.train_batch(batch, observe)
        except NotFiniteError as error:
            raise self._explained(error) from None
        except TargetError as error:
            raise blame.of_target(self.loader, batch.epoch, batch.index, error) from None

    def _say_empty(self, batch: Batch) -> None:
        """A line for the first, the tenth, the hundredth batch of which nothing was learned: it may be a slip."""
        self.empty_batches += 1
        if self.mesh.is_first and self.empty_batches in (1, 10, 100, 1000):
            often = f" ({self.empty_batches} batches so far)" if self.empty_batches > 1 else ""
            print(
                f"step {self.progress.step}: not one target of this global batch of {batch.samples} samples counts, so "
                f"no update was made from it{often}. Look at the data, and at what the loss leaves out "
                "(loss.ignore_index).",
                file=sys.stderr,
                flush=True,
            )

    def _numbers(self, rate: float, batch: Batch) -> dict[str, float]:
        """The update just done, in global numbers. Collective. Raises NotFiniteError when the loss or a gradient is
        not finite; on every rank, whoever has seen it.
        """
        seen, scale = dict(self.learner.observed), self.learner.mixed.scale
        norm = seen.pop("gradient_norm")
        overflow = not math.isfinite(norm) and scale is None  # with a loss scale, that update was left out
        *sums, overflows = self.mesh.sum([*seen.values(), overflow])
        numbers = dict(zip(seen, sums, strict=True))
        if not math.isfinite(numbers["loss"]) and not self.learner.empty:
            self._refuse(f"the loss is {numbers['loss']} at step {self.progress.step}")
        if overflows:
            norms, faulty = zip(*self.mesh.gather([str(norm), self.learner.faulty_gradients]), strict=True)
            first = next(((rank, *row) for rank, rows in enumerate(faulty) for row in rows.items()), None)
            who = f": that of '{first[1]}' has {first[2]} on rank {first[0]}" if first else ""
            worst = next((word for word in norms if not math.isfinite(float(word))), norms[0])
            self._refuse(f"the gradient norm is {worst} at step {self.progress.step}{who}")
        numbers |= {"lr": rate, "gradient_norm": norm, **self.meter.read(batch)}
        return numbers | ({"loss_scale": scale.scale} if scale else {})

    def _refuse(self, what: str) -> NoReturn:
        """Ends the training for a number that is none; the error says what may help. Collective."""
        raise self._explained(
            NotFiniteError(
                f"{what}: training cannot go on from here. A lower schedule.peak, a longer schedule.warmup or "
                "optimizer.clip usually helps."
            )
        )

    def _explain_evaluation(self, found: Evaluation) -> NoReturn:
        """Raises NotFiniteError for an evaluation with numbers that are none: by the weights, or by its data."""
        self.check(f"by the evaluation after step {self.progress.step}")
        loader = self.run.test_loader
        assert loader is not None
        why = blame.bad_sample(loader, range(1, loader.batches + 1), self.mesh, "held-out")
        numbers = ", ".join(f"{name} {found.numbers[name]}" for name in found.not_finite)
        raise NotFiniteError(
            f"the evaluation after step {self.progress.step} gives {numbers}, though all weights are finite. "
            f"{why or 'Look at the loss, its scores and the held-out data.'} {self._last_good()}"
        )

    def _explained(self, error: PaddleDPError) -> PaddleDPError:
        """The same error, saying too until when all was good, which sample may have done it, and what to go back to.

        Collective.
        """
        step, words = self.progress.step, [str(error)]
        if self.sound is not None and self.sound < step:
            words.append(f"All was good after step {self.sound}, when it was last looked at.")
        if isinstance(error, NotFiniteError):
            self.loader.close()
            first = step if self.sound is None or self.sound >= step else self.sound + 1
            words.append(blame.bad_sample(self.loader, range(max(first, 1), step + 1), self.mesh))
        return type(error)(" ".join(filter(None, [*words, self._last_good()])))

    def _last_good(self) -> str:
        """Which checkpoint to go back to, as the first rank sees the folder. Collective."""
        folder, said = self.run.folder / "checkpoints", ""
        if self.mesh.is_first:
            again = "--resume" if self.run.recipe is not None else "resume=True"
            if good := checkpoints.newest_good(folder):
                said = f"The newest checkpoint that was found good is {good}: {again} goes on from it."
            elif checkpoints.checkpoints(folder):
                said = f"No checkpoint in {folder} was found good when it was saved."
            else:
                said = f"There is no checkpoint in {folder} to go back to."
        self.mesh.wait("newest good checkpoint")
        return str(self.mesh.gather(said)[0])

    def _tell_epoch(self) -> None:
        moment = Moment(name="epoch", progress=self.progress, trainer=self)
        with self.meter.paused():
            for callback in self.callbacks:
                if callback.due_at_epoch(self.progress.epoch):
                    callback.epoch(moment)

    def _tell_failed(self, error: BaseException) -> None:
        """Lets callbacks close their files; a second failure there must not hide the first."""
        moment = Moment(name="failed", progress=self.progress, trainer=self, detail=error)
        for callback in self.callbacks:
            try:
                callback.failed(moment)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if hasattr(error, "add_note"):  # Python 3.11 on
                    error.add_note(f"({type(callback).__name__} failed too: {second})")
