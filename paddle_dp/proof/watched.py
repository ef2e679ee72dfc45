"""One run of a proof: builds a learner in the recipe's initial state, trains the first batches, and records them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paddle_dp.assembly.assemble import TrainerBuilder
from paddle_dp.batch import Batch
from paddle_dp.checkpoint import TensorShard
from paddle_dp.learner import Learner
from paddle_dp.learner.memory import MemoryMeter
from paddle_dp.mesh import Mesh
from paddle_dp.proof import noise
from paddle_dp.proof.layer_state import LayerStateChanges
from paddle_dp.proof.record import OutputHooks, ProofRecorder, Put
from paddle_dp.proof.replay import meet_bound, set_gradients
from paddle_dp.proof.samples import RecordedSubset, reads_global_batches, take_first
from paddle_dp.proof.trace_files import SCORE, Trace, key_of, number_key, numbers_of
from paddle_dp.recipe import Precision
from paddle_dp.train.evaluate import NoTargetError, evaluate

SHORTEST, LONGEST = 0.02, 2.0  # seconds


def make_late(learner: Learner, seed: int) -> None:
    """From now on one rank sleeps in each step, before forward or update. `seed`, equal on all ranks, decides both.

    It sleeps for as long as its shortest step took, so that even on a busy machine the others reach values that they
    must not read yet. (The last step may have been long because another rank slept.)
    """
    mesh, draws = learner.mesh, np.random.default_rng(seed)
    train_batch, update = learner.train_batch, learner.optimizer.step
    late, slept, steps = "", 0.0, [LONGEST]  # seconds of this rank in each, without its sleep

    def sleep(moment: str) -> None:
        nonlocal slept
        if late == moment:
            slept = max(min(steps), SHORTEST)
            time.sleep(slept)

    def trained(*batch: Any, **options: Any) -> Any:
        nonlocal late, slept
        rank, moment = draws.integers(mesh.ranks), ("forward", "update")[draws.integers(2)]
        late, slept = moment if rank == mesh.rank and len(steps) > 1 else "", 0.0
        begun = time.perf_counter()
        sleep("forward")
        metrics = train_batch(*batch, **options)
        steps.append(time.perf_counter() - begun - slept)
        return metrics

    def updated() -> None:
        sleep("update")
        update()

    if mesh.ranks > 1:
        learner.train_batch = trained  # type: ignore[method-assign]
        learner.optimizer.step = updated  # after the exchange of a clip, where all ranks wait for each other


RunResults = dict[str, Any]
PROBES = 3  # batches with gradients recorded at the initial weights, in the recipe's precision


@dataclass(frozen=True)
class RunSettings:
    """The precision of a run, and its noise. `follows`: the run makes its updates with the gradients in this trace of
    ranks, so that it begins each step with their weights."""

    precision: Precision
    noise: noise.Noise | None = None
    follows: Trace | None = None


class WatchedSide(Protocol):
    """The side that a run belongs to: `trace.RecordedSide`, which runs it."""

    run_settings: RunSettings
    subset: RecordedSubset
    alone: bool
    options: dict[str, Any]
    facts: dict[str, Any]
    mesh: Mesh
    assembly: TrainerBuilder

    def learner(self) -> Learner: ...

    def batches(self, wide: bool) -> Iterator[Batch]: ...


class WatchedRun:
    """One run of a side with a new learner, in float64 if `wide`; it passes its quantities to `put`."""

    def __init__(self, side: WatchedSide, wide: bool, put: Put):
        self.side, self.mesh, self.wide, self.put = side, side.mesh, wide, put
        self.noise = side.run_settings.noise
        self.order_of = self.noise.order if self.noise is not None else None
        self.learner = side.learner()
        if not wide:
            make_late(self.learner, side.assembly.setup.seed)
        rounds_to, follows = self.learner.exchange.rounds_to, side.run_settings.follows
        self.every = wide or rounds_to is not None or follows is not None
        self.recorder = ProofRecorder(self.learner, put, self.noise is None, self._before_update)
        self.hooks = OutputHooks(self.learner) if wide or self.noise is None else None
        # By step: loss, gradient norm and scores, None where they were not read; shares.
        self.rows: list[dict[str, Any]] = []
        self.positions: dict[int, list[int]] = {}  # by step: this rank's, in the global batch
        self.outputs: dict[str, np.ndarray] = {}
        self.broken: dict[int, str] = {}  # by step: the first layer with an output that is not finite
        self.evaluated = 0  # held-out samples
        measures_memory = side.options.get("measure_memory") and not wide
        self.memory_meter = MemoryMeter(self.learner) if measures_memory else None
        self.layer_state: LayerStateChanges | None = None
        self._reads: list[list[int]] = []  # by step: the samples that this rank read

    def run(self, steps: int | None = None) -> RunResults:
        """Evaluates, trains the first `steps` batches, or all, and records the end. Returns facts, and this rank's
        "outputs" and "copies" by key. Collective."""
        self._evaluate(0)
        if self.noise is None:
            self.recorder.initial()
            self.learner.runner.draws.watch_on()
            self.layer_state = LayerStateChanges(self.learner)
        if not self.wide:
            self._probe()
        self.side.subset.read.clear()
        with self.learner.training():
            for step, batch in enumerate(self.side.batches(self.wide), start=1):
                self._learn(step, batch)
                if step == steps:
                    break
        self._gather_reads()
        divergence = None
        if self.wide:
            divergence = self.recorder.final(len(self.rows))
            self._evaluate(len(self.rows))
        else:
            self.recorder.weights(len(self.rows))
        if self.mesh.is_main:
            self._put_numbers()
        if self.hooks is not None:
            self.hooks.remove()
        if self.memory_meter is not None:
            self.side.facts["held"] = self.mesh.gather(self.memory_meter.read())
        self.learner.runner.draws.gather_later()
        recorder, layer_state = self.recorder, self.layer_state
        return {
            "rows": self.rows, "positions": self.positions, "outputs": self.outputs, "broken": self.broken,
            "order": [] if self.hooks is None else self.hooks.order, "evaluated": self.evaluated,
            "divergence": divergence, "recorded": recorder.recorded, "rounded": recorder.rounded,
            "copies": recorder.copies, "copy_groups": recorder.copy_groups,
            "layer_state": {} if layer_state is None else layer_state.by_step,
            "rounds_to": self.learner.exchange.rounds_to, "differences": self.learner.differences(),
        }  # fmt: skip

    def _evaluate(self, step: int) -> None:
        """Passes on the numbers of some held-out samples after `step` updates. Collective.

        There are none if no target of these samples counts: one process has none either, or it is a difference.
        """
        loader = self.side.assembly.test_loader
        if loader is None:
            return
        try:
            evaluation = evaluate(self.learner, loader, self.mesh)
        except NoTargetError:  # on all ranks
            return
        self.evaluated = evaluation.samples
        for name, value in evaluation.numbers.items() if self.mesh.is_main else ():
            self._put_number(key_of("evaluation", step, name), value)

    def _probe(self) -> None:
        """Records the gradients of further batches with the initial weights; the first batch is step 1's."""
        for step, batch in itertools.islice(enumerate(self.side.batches(False), start=1), 1, PROBES):
            with self.recorder.probing(step):
                self.learner.train_batch(self._in_order(batch), collect_metrics=self.side.alone)

    def _put_numbers(self) -> None:
        """Passes on the losses, gradient norms and scores of the steps that were read."""
        for step, row in enumerate(self.rows, start=1):
            for name in numbers_of(row):
                self._put_number(number_key(name, step), row[name])

    def _put_number(self, key: str, number: float) -> None:
        self.put(key, TensorShard.full(key, np.array([number], "float64")))

    def _before_update(self, step: int) -> None:
        """Changes the gradients between backward and an update, if the run has to."""
        if self.wide:
            meet_bound(self.learner, step)
        if self.side.run_settings.follows is not None:
            set_gradients(self.learner, self.side.run_settings.follows, step)

    def _learn(self, step: int, batch: Batch) -> None:
        """Does one step. Records every step in float64 or if ranks round, else only the first one with an update."""
        rows = [m.rows for m in batch.micro_batches]
        counted = [m.samples for m in batch.micro_batches]
        sampler = self.side.assembly.train_loader.sampler
        cuts, before = sampler.cuts(batch.samples), int(sampler.with_previous)
        if reads_global_batches(self.side.assembly.setup, self.mesh):
            every = take_first(self.side.subset.read, batch.samples)
            read = [number for start, stop in cuts for number in every[start:stop]]
        else:
            numbers = take_first(self.side.subset.read, sum(n + before for n in rows))
            read = _counting(numbers, rows, counted, before)
        self.recorder.watch(step if self.every or not self.recorder.recorded else 0)
        # The numbers of most updates of a training are not read; one process reads all, for the comparison.
        reads = self.side.alone or self.wide or step % 2 == 1 or not self.recorder.recorded
        with self.hooks or nullcontext():
            metrics = self.learner.train_batch(self._in_order(batch), collect_metrics=reads) or {}
        if self.layer_state is not None:
            self.layer_state.record(step)
        self.positions[step] = [position for start, stop in cuts for position in range(start, stop)]
        if self.hooks is not None:
            self._take_outputs(step, self.hooks, rows, counted)
        self._reads.append(read)
        self.rows.append({
            "loss": metrics.pop("loss", None), "gradient_norm": metrics.pop("gradient_norm", None),
            "collected": reads, "samples": batch.samples, "empty": self.learner.empty,
            **{f"{SCORE}{name}": value for name, value in metrics.items()},
        })  # fmt: skip

    def _gather_reads(self) -> None:
        """Adds to each row the samples of all ranks. Collective: between steps it would hide one that does not wait."""
        ranks = self.mesh.gather([self.mesh.dp_rank, self.mesh.is_loss_rank, self._reads])
        for step, row in enumerate(self.rows):
            row["shares"] = [len(reads[step]) for _, speaks, reads in ranks if speaks]
            row["read"] = [[dp_rank, reads[step]] for dp_rank, _, reads in ranks]

    def _in_order(self, batch: Batch) -> Batch:
        return batch if self.order_of is None else noise.permute(batch, self.order_of)

    def _take_outputs(self, step: int, hooks: OutputHooks, rows: list[int], counted: list[int]) -> None:
        outputs, back = hooks.take(rows, counted), _back(counted, self.order_of)
        bad = {name.rpartition("#")[0] for name, sums in outputs.items() if not np.isfinite(sums).all()}
        if bad:
            self.broken[step] = min(bad, key=hooks.order.index)
        if self.wide:
            for name, sums in outputs.items():
                self.outputs[key_of("output", step, name)] = sums[back]


def _counting(read: list[int], rows: list[int], counted: list[int], before: int) -> list[int]:
    """The samples that count, without dummies' samples, and without those `before` each micro-batch."""
    counting, start = [], 0
    for n, counts in zip(rows, counted, strict=True):
        start += before
        counting += read[start : start + n] if counts else []
        start += n
    return counting


def _back(counted: list[int], order: Callable[[int], np.ndarray] | None) -> np.ndarray:
    """The inverse permutation of a batch with reordered micro-batches."""
    permutations, start = [], 0
    for samples in counted:
        inverse = np.argsort(order(samples)) if order is not None else np.arange(samples)
        permutations.append(start + inverse)
        start += samples
    return np.concatenate(permutations) if permutations else np.zeros(0, int)
