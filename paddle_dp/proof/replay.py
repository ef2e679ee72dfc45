"""Repeats the updates of N ranks on one process, from the ranks' gradients.

The noise of an update does not follow from that of its gradient: Adam's first step is the learning rate times the sign
of the gradient, so an element within the noise of 0 is off by all of it, while SGD's is not off at all. But from equal
gradients every optimizer computes the same update on both sides, to the last places of its arithmetic. So gradients are
judged by themselves, and updates and optimizer states against what one process computes from the ranks' gradients,
whatever the optimizer, its clip, groups, decay and schedule.

A rehearsal beside ranks that round their gradients begins each step with the ranks' weights. Its own gradients may
differ from theirs by the noise of one process and what the ranks' rounding can have taken
(parallel.exchange.roundings), no more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_dp.checkpoint import TensorShard
from paddle_dp.parallel import Learner, gradients
from paddle_dp.parallel.clip import bound_of
from paddle_dp.proof.record import ProofRecorder, Put
from paddle_dp.proof.trace_files import REPLAYED, Key, Trace, Writer, key

NAME = "rehearsal"  # of the trace
Rows = list[dict[str, Any]]


@contextmanager
def recorded(learner: Learner, folder: Path) -> Iterator[ProofRecorder]:
    """Within it the gradients of the updates that the recorder watches are written to the folder. Collective."""
    with Writer(folder, NAME, learner.mesh.rank) as sheet:
        recorder = ProofRecorder(learner, sheet.put, updates=False)
        yield recorder
        sheet.finish({"rounded": recorder.rounded})


class Followed:
    """`candidate`: the gradients of the ranks. The first run is the one that the others, with noise, are compared
    with."""

    def __init__(self, candidate: Trace):
        self.candidate = candidate
        self._first_gradients: dict[str, np.ndarray] = {}  # the first run's gradients, by key
        self._squares: defaultdict[int, float] = defaultdict(float)  # of this run's distances, by step
        self._first = True

    def recorder(self, learner: Learner) -> ProofRecorder:
        """Of a run: updates that it watches are made with the ranks' gradients."""
        return ProofRecorder(
            learner, self._put, updates=False, before_update=lambda step: give(learner, step, self.candidate)
        )

    def _put(self, number: str, shard: TensorShard) -> None:
        gradient = shard.array.astype("float64")
        if self._first:
            self._first_gradients[number] = shard.array
            other = (
                self.candidate.array(number) if number in self.candidate.keys else np.zeros(gradient.shape)
            )
        else:
            other = self._first_gradients[number]
        square = np.square(gradient - other).sum() if gradient.shape == other.shape else np.inf
        self._squares[Key.read(number).step] += float(square)

    def tell(self, rows: Rows) -> None:
        """At the end of a run: adds to its rows how far its gradients are `apart`: from the ranks' in the first run,
        from the first run's in those with noise; to the first run's also what may be `rounded`. 2-norms of the model's.
        """
        if self._first:
            for number in self.candidate.keys - self._first_gradients.keys():
                self._squares[Key.read(number).step] += float(np.square(self.candidate.array(number)).sum())
        for row in rows:
            row["apart"] = self._squares[row["step"]] ** 0.5
            if self._first:
                row["rounded"] = self.candidate.rounded(key("gradient norm", row["step"], ""))
        self._squares.clear()
        self._first = False


NEAR = 2.0**-10  # relative: how near to the bound of a clip the norm of the gradients is brought


def replay(learner: Learner, candidate: Trace, put: Put, wide: bool = False) -> None:
    """Passes to `put`, by key, what `learner`, on one process and in its initial state, computes from the gradients of
    the trace `candidate`: its updates, and the optimizer states after the last one.

    `wide`: the trace is that of the steps in float64. There is no forward and no backward. A step whose update the
    ranks skipped or did not record only moves the schedule.
    """

    def put_replayed(number: str, shard: TensorShard) -> None:
        if Key.read(number).kind in REPLAYED:
            put(number, shard)

    recorder = ProofRecorder(learner, put_replayed)
    updates = set(candidate.facts["recorded"])
    states = {state_key.step for state_key in map(Key.read, candidate.keys) if state_key.kind == "state"}
    for step in range(1, max(updates, default=0) + 1):
        if step in updates:
            recorder.watch(step)
            give(learner, step, candidate)
            if wide:
                meet_bound(learner, step)
            learner.update()
            learner.optimizer.clear_grad(set_to_zero=False)
        learner.rate.step()
    for step in states:  # one: the last
        recorder.states(step)


def meet_bound(learner: Learner, step: int) -> None:
    """Multiplies the gradients of an update so that their norm is just above the bound of the optimizer's clip in odd
    steps and just below it in even ones: that it acts where it must, and only there, shows in the updates. Collective.
    """
    bound = bound_of(learner)
    if bound is None:
        return
    norm = float(learner.mode.norm.total())
    if norm > 0 and math.isfinite(norm):
        gradients.scale(learner.trainable, bound * (1 + NEAR if step % 2 else 1 - NEAR) / norm)


def give(learner: Learner, step: int, candidate: Trace) -> None:
    """Puts a step's gradients of the whole model into the parameters that have one on the ranks."""
    for name, parameter in learner.placed.named_parameters(trainable=True):
        number = key("gradient", step, name)
        if number not in candidate.keys:
            continue
        array = candidate.array(number)
        if list(array.shape) == list(parameter.shape):  # one of another shape is a difference by itself
            parameter.grad = paddle.to_tensor(array, dtype=parameter.dtype)
