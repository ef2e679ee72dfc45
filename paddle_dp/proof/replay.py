"""Repeats the updates of N ranks on one process, from the ranks' gradients.

An update's noise does not follow from its gradient's. Adam's first step is the learning rate times the sign of the
gradient, so an element within the noise of 0 is off by the whole step; SGD's is not. But from equal gradients every
optimizer computes the same update on both sides, to the last places of its arithmetic. So gradients are judged by
themselves, updates and optimizer states against one process's results from the ranks' gradients.

A rehearsal for ranks that round their gradients begins each step with the ranks' weights. Its gradients may differ from
theirs by one process's noise and the bound of the ranks' rounding (exchange.roundings), no more.
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
from paddle_dp.core import gradients
from paddle_dp.core.optimizer import bound_of
from paddle_dp.learner import Learner
from paddle_dp.proof.record import ProofRecorder, Put
from paddle_dp.proof.trace_files import REPLAYED, Key, Trace, Writer, key

NAME = "rehearsal"  # of the trace
Rows = list[dict[str, Any]]


@contextmanager
def recorded(learner: Learner, folder: Path) -> Iterator[ProofRecorder]:
    """Context that writes the gradients of the recorder's watched updates to the folder. Collective."""
    with Writer(folder, NAME, learner.mesh.rank) as sheet:
        recorder = ProofRecorder(learner, sheet.put, updates=False)
        yield recorder
        sheet.finish({"rounded": recorder.rounded})


class Followed:
    """Makes the updates of runs with the ranks' gradients (`candidate`). The first run has no noise; the others are
    compared with it."""

    def __init__(self, candidate: Trace):
        self.candidate = candidate
        self._first_gradients: dict[str, np.ndarray] = {}  # the first run's gradients, by key
        self._squares: defaultdict[int, float] = defaultdict(
            float
        )  # squares of this run's distances, by step
        self._first = True

    def recorder(self, learner: Learner) -> ProofRecorder:
        """A recorder for one run; the updates that it watches are made with the ranks' gradients."""
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
        """Adds to a finished run's rows `apart`, the distance of its gradients from the ranks' (runs with noise: from
        the first run's), and to the first run's `rounded`, the bound of the ranks' rounding. 2-norms over the model.
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


NEAR = 2.0**-10  # relative distance of the gradients' norm from the bound of a clip


def replay(learner: Learner, candidate: Trace, put: Put, wide: bool = False) -> None:
    """Passes to `put`, by key, the updates of `learner` from the gradients in `candidate`, and the optimizer states
    after the last one.

    `learner` is on one process, in its initial state; it does no forward and no backward. `wide`: the trace is in
    float64. Without a recorded update, a step only moves the schedule.
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
    """Scales an update's gradients to a norm just above the clip's bound in odd steps, just below it in even ones: the
    updates then show whether the clip acts where it must, and only there. Collective.
    """
    bound = bound_of(learner)
    if bound is None:
        return
    norm = float(learner.mode.norm.total())
    if norm > 0 and math.isfinite(norm):
        gradients.scale(learner.trainable, bound * (1 + NEAR if step % 2 else 1 - NEAR) / norm)


def give(learner: Learner, step: int, candidate: Trace) -> None:
    """Puts a step's whole-model gradients into the parameters that have one on the ranks."""
    for name, parameter in learner.placed.named_parameters(trainable=True):
        number = key("gradient", step, name)
        if number not in candidate.keys:
            continue
        array = candidate.array(number)
        if list(array.shape) == list(parameter.shape):  # another shape is a difference by itself
            parameter.grad = paddle.to_tensor(array, dtype=parameter.dtype)
