"""Rehearses the training itself, to find faults that a comparison of the first steps cannot show.

Ranks train three epochs of three global batches, the last one short (the third epoch ends after two), with an
evaluation after the first step, a checkpoint after the second, and a resume from it in a new model. One process trains
without interruption. Differences show side effects of an evaluation or a checkpoint, wrong samples in later epochs,
wrong counts in an evaluation, and state that a checkpoint lacks (proof.rehearsed).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn

from paddle_dp.assembly.assemble import Split, TrainerBuilder, TrainerSpec
from paddle_dp.assembly.build import setup
from paddle_dp.assembly.initial import load_full
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.batch import Batch
from paddle_dp.checkpoint import save
from paddle_dp.errors import UsageError
from paddle_dp.learner import Learner, Task
from paddle_dp.mesh import Mesh, join
from paddle_dp.proof.noise import nudge
from paddle_dp.proof.record import ProofRecorder, digest
from paddle_dp.proof.rehearsed import EVALUATED, NUMBER_NAMES, READ, SAVED, STEPS
from paddle_dp.proof.replay import NAME, GradientFollower, recorded_gradients
from paddle_dp.proof.samples import RecordedSubset, reads_global_batches, short, spread, take_first
from paddle_dp.proof.trace_files import SCORE, Trace
from paddle_dp.proof.watched import make_late
from paddle_dp.recipe import LoaderSettings, Recipe
from paddle_dp.train import Callback, Moment, Run
from paddle_dp.train.evaluate import NoTargetError
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.units import Every, Length

TEST_SAMPLES_PER_RANK = 3  # times the ranks, and one more: no number of ranks shares them equally


class RehearsalMonitor(Callback):
    """Records each step's samples, learning rate and loss scale, and the loss, gradient norm and scores that are read.

    One process reads them in every step, ranks in every second step: most updates of a training are not read.
    """

    weights = False  # reading them would make ranks wait for each other after each step

    def __init__(self, read: list[int], run: Run, reads_global_batches: bool, seed: int, alone: bool):
        """`reads_global_batches`: every rank reads whole global batches. `seed`: selects the late rank of each step."""
        self.mesh, self._before = run.mesh, int(run.train_loader.sampler.with_previous)
        self.read, self.reads_global_batches, self.seed = read, reads_global_batches, seed
        self.every = None if alone else Every(READ, "steps")
        self.rows: list[dict[str, Any]] = []
        self._evaluation: dict[str, float] = {}
        self._reads: list[list[int]] = []  # by step: this rank's samples
        self._step = 0

    def watch(self, learner: Learner, recorder: ProofRecorder | None = None) -> None:
        """Records the learner's batches; the `recorder` records their gradients."""
        make_late(learner, self.seed)
        train_batch = learner.train_batch

        def watched(batch: Batch, *arguments: Any, **named: Any) -> Any:
            rows = sum(micro_batch.rows + self._before for micro_batch in batch.micro_batches)
            self._reads.append(take_first(self.read, batch.samples if self.reads_global_batches else rows))
            self._step += 1
            row = {"step": self._step, "samples": batch.samples, "lr": learner.optimizer.get_lr()}
            if recorder is not None:
                recorder.watch(len(self.rows) + 1)
            metrics = train_batch(batch, *arguments, **named)
            if (scale := learner.mixed.scale) is not None:
                row["loss_scale"] = scale.scale
            for name, value in (metrics or {}).items():
                row[name if name in NUMBER_NAMES else SCORE + name] = value
            self.rows.append(row)
            return metrics

        learner.train_batch = watched  # type: ignore[method-assign]

    def start(self, moment: Moment) -> None:
        self._step = moment.progress.step
        self.read.clear()  # some were read to compare the ranks' data sets

    def step(self, moment: Moment) -> None:
        """Does nothing: the method alone makes these updates have metrics."""

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        self._evaluation = {**evaluation.numbers, "samples": evaluation.samples}

    def test_numbers(self, trainer: Trainer) -> dict[str, float]:
        """Evaluates, and returns the numbers and `samples`. A metric that fails is NaN, and no number is there if no
        target counts: so few samples may be of one class, and the other side has to do the same. Collective."""
        self._evaluation = {}
        try:
            if trainer.run.test_loader is not None:
                trainer.evaluate()
        except NoTargetError:
            pass
        except UsageError:
            if not self._evaluation:
                raise
        return self._evaluation

    def gather_reads(self) -> None:
        """Adds to each row the samples of all ranks. Collective: between steps it would hide one that does not wait."""
        for row, *reads in zip(self.rows, *self.mesh.gather(self._reads), strict=True):
            row["read"] = sorted({n for rank_reads in reads for n in rank_reads})


def rehearse(recipe: Recipe, options: dict[str, Any]) -> None:
    """Rehearses this side, on every rank, and writes rehearsal.json to options["trace"].

    options["ranks"] is the larger side's number of ranks. One process, options["alone"], trains without interruption,
    and again with weights nudged by one unit in the last place, for its noise. For ranks that round their gradients
    (options["candidates"], [folder, ranks] each) it makes its updates with theirs, and writes to follow<number>.
    """
    joined = join(recipe.train.seed, recipe.train.device, servers=recipe.strategy.config.servers)
    folder = Path(options["trace"])
    spec = replace(setup(recipe), folder=folder / "run")
    rehearsal = Rehearsal(spec, joined, options["ranks"], options["alone"])
    dtype = recipe.train.precision.dtype
    if not rehearsal.is_alone:
        results = rehearsal.interrupted()
        if joined.is_main:
            _write(folder, results)
        return
    candidates = [Trace.read(Path(side), NAME, ranks) for side, ranks in options.get("candidates", ())]
    if not candidates or None in candidates:
        _write(folder, rehearsal.alone(dtype))
    for number, candidate in enumerate(candidates):
        if candidate is not None:
            _write(folder / f"follow{number}", rehearsal.alone(dtype, candidate))


def _write(folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rehearsal.json").write_text(json.dumps(results))


class Rehearsal:
    """The rehearsal of one side: its recipe, reduced to a few samples, on its ranks."""

    def __init__(self, setup: TrainerSpec, mesh: Mesh, ranks: int, is_alone: bool):
        self.setup, self.mesh, self.is_alone = setup, mesh, is_alone
        self.test_samples = TEST_SAMPLES_PER_RANK * ranks + 1
        self.train_samples = 2 * setup.batch + short(setup.batch, ranks)

    def alone(self, dtype: str, candidate: Trace | None = None) -> dict[str, Any]:
        """Trains one process without and with noise, with the gradients of `candidate` if given."""
        follower = None if candidate is None else GradientFollower(candidate)
        plain = self._uninterrupted(None, follower)
        noise = [self._uninterrupted(partial(nudge, dtype=dtype, seed=seed), follower) for seed in (1, 2)]
        return {"plain": plain, "noise": noise, "dtype": dtype}

    def _uninterrupted(
        self, change: Callable[[nn.Layer], None] | None, follower: GradientFollower | None
    ) -> dict[str, Any]:
        """Trains one process from the first step to the last, then evaluates."""
        trainer, monitor = self._trainer(change=change)
        monitor.watch(trainer.learner, None if follower is None else follower.recorder(trainer.learner))
        trainer.fit(Length(STEPS, "steps"))
        if follower is not None:
            follower.add_distances(monitor.rows)
        return self._results(trainer, monitor)

    def interrupted(self) -> dict[str, Any]:
        """Trains the ranks with an evaluation, a checkpoint and a resume; writes gradients that they round."""
        trainer, monitor = self._trainer()
        recording: AbstractContextManager[ProofRecorder | None] = nullcontext()
        if trainer.learner.exchange.rounds_to is not None:
            recording = recorded_gradients(trainer.learner, self.setup.folder.parent)
        with recording as recorder:
            monitor.watch(trainer.learner, recorder)
            trainer.fit(Length(EVALUATED, "steps"))
            monitor.test_numbers(trainer)
            trainer.fit(Length(SAVED, "steps"))
            save(trainer.snapshot(), self.setup.folder / "checkpoints", trainer.mesh)
            trainer.fit(Length(STEPS, "steps"))
        final = digests(trainer)
        results = self._results(trainer, monitor)
        resumed, monitor = self._trainer(resume="newest")
        monitor.watch(resumed.learner)
        resumed.fit(Length(STEPS, "steps"))
        again = digests(resumed)
        changed = sorted(name for name in final.keys() | again.keys() if final.get(name) != again.get(name))
        names = sorted({name for names in trainer.mesh.gather(changed) for name in names})
        return results | {"resumed": {**self._results(resumed, monitor), "changed": names}}

    def _trainer(
        self, resume: str | None = None, change: Callable[[nn.Layer], None] | None = None
    ) -> tuple[Trainer, RehearsalMonitor]:
        read: list[int] = []
        scattered = self.setup.scatters and self.mesh.ranks > 1

        def dataset(split: Split) -> Any:
            full = self.setup.dataset(split)
            if full is None:
                return None
            if split == "train":
                return RecordedSubset(full, np.arange(min(self.train_samples, len(full))), scattered, read)
            return RecordedSubset(full, spread(full, self.test_samples))

        def delivered(split: Split, indices: Any) -> None:
            if split == "train":
                read.extend(map(int, indices))

        def task(steps: int, steps_per_epoch: int) -> Task:
            placed_task = self.setup.task(steps, steps_per_epoch)
            if change is not None:
                if self.setup.load is not None:
                    load_full(self.setup.load, placed_task, self.mesh)
                change(placed_task.model)
            return placed_task

        loader = LoaderSettings(collate=self.setup.loader.collate)
        monitors: list[RehearsalMonitor] = []

        def callbacks(run: Any) -> list[Callback]:
            every = reads_global_batches(self.setup, self.mesh)
            monitors.append(RehearsalMonitor(read, run, every, self.setup.seed, self.is_alone))
            return [*monitors]

        settings = replace(
            self.setup, dataset=dataset, delivered=delivered, task=task, callbacks=callbacks, loader=loader,
            drop_last=False, length=Length(STEPS, "steps"), load=self.setup.load if change is None else None,
        )  # fmt: skip
        return TrainerBuilder(settings, self.mesh).trainer(Trainer, resume), monitors[0]

    def _results(self, trainer: Trainer, monitor: RehearsalMonitor) -> dict[str, Any]:
        monitor.gather_reads()
        return {"rows": monitor.rows, "evaluation": monitor.test_numbers(trainer)}


def digests(trainer: Trainer) -> dict[str, str]:
    """Digests of this rank's part of a checkpoint by name: weights, buffers, optimizer states. Collective."""
    return {name: digest(shard.array) for name, shard in trainer.snapshot().tensors.items()}
