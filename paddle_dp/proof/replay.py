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
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from paddle_dp.checkpoint import TensorShard
from paddle_dp.core import gradients
from paddle_dp.core.optimizer import bound_of
from paddle_dp.learner import Learner
from paddle_dp.proof.record import ProofRecorder, Put
from paddle_dp.proof.trace_files import REPLAYED, Key, Row, SheetWriter, Trace, key_of

NAME = "rehearsal"  # of the trace


@contextmanager
def recorded_gradients(learner: Learner, folder: Path) -> Iterator[ProofRecorder]:
    """Context that writes the gradients of the recorder's watched updates to the folder. Collective."""
    with SheetWriter(folder, NAME, learner.mesh.rank) as sheet:
        recorder = ProofRecorder(learner, sheet.put, updates=False)
        yield recorder
        sheet.finish({"rounded": recorder.rounded})


class GradientFollower:
    """Makes the updates of one process's runs with the gradients in `candidate`, a trace of ranks.

    It measures the distance of the run's own gradients: for the first run, which has no noise, from the ranks'; for a
    run with noise, from the first run's.
    """

    def __init__(self, candidate: Trace):
        self.candidate = candidate
        self._first_gradients: dict[str, np.ndarray] = {}  # the first run's gradients, by key
        # By step: the square of this run's distance.
        self._squares: defaultdict[int, float] = defaultdict(float)
        self._is_first = True

    def recorder(self, learner: Learner) -> ProofRecorder:
        """A recorder for one run; the updates that it watches are made with the ranks' gradients."""
        before_update = partial(set_gradients, learner, self.candidate)
        return ProofRecorder(learner, self._put, updates=False, before_update=before_update)

    def _put(self, key: str, shard: TensorShard) -> None:
        gradient = shard.array.astype("float64")
        if self._is_first:
            self._first_gradients[key] = shard.array
            other = self.candidate.array(key) if key in self.candidate.keys else np.zeros(gradient.shape)
        else:
            other = self._first_gradients[key]
        square = np.square(gradient - other).sum() if gradient.shape == other.shape else np.inf
        self._squares[Key.read(key).step] += float(square)

    def add_distances(self, rows: list[Row]) -> None:
        """Adds to a finished run's rows `apart`, the distance of its gradients, and to the first run's rows `rounded`,
        the bound of the ranks' rounding. Both are 2-norms over the model."""
        if self._is_first:
            for key in self.candidate.keys - self._first_gradients.keys():
                self._squares[Key.read(key).step] += float(np.square(self.candidate.array(key)).sum())
        for row in rows:
            row["apart"] = self._squares[row["step"]] ** 0.5
            if self._is_first:
                row["rounded"] = self.candidate.rounded(key_of("gradient norm", row["step"], ""))
        self._squares.clear()
        self._is_first = False


CLIP_DISTANCE = 2.0**-10  # relative distance of the gradients' norm from the bound of a clip


def replay(learner: Learner, candidate: Trace, put: Put, wide: bool = False) -> None:
    """Passes to `put` the updates of `learner` from the gradients in `candidate`, and its last optimizer states.

    `learner` is on one process, in its initial state; it does no forward and no backward. `wide`: the trace is in
    float64. Without a recorded update, a step only moves the schedule.
    """

    def put_replayed(key: str, shard: TensorShard) -> None:
        if Key.read(key).kind in REPLAYED:
            put(key, shard)

    recorder = ProofRecorder(learner, put_replayed)
    updates = set(candidate.facts["recorded"])
    states = {state_key.step for state_key in map(Key.read, candidate.keys) if state_key.kind == "state"}
    for step in range(1, max(updates, default=0) + 1):
        if step in updates:
            recorder.watch(step)
            set_gradients(learner, candidate, step)
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
    norm = float(learner.mode.norm.global_norm())
    if norm > 0 and math.isfinite(norm):
        gradients.scale(
            learner.trainable, bound * (1 + CLIP_DISTANCE if step % 2 else 1 - CLIP_DISTANCE) / norm
        )


def set_gradients(learner: Learner, candidate: Trace, step: int) -> None:
    """Puts a step's whole-model gradients into the parameters that have one on the ranks."""
    for name, parameter in learner.placed.named_parameters(trainable=True):
        key = key_of("gradient", step, name)
        if key not in candidate.keys:
            continue
        array = candidate.array(key)
        if list(array.shape) == list(parameter.shape):  # another shape is a difference by itself
            parameter.grad = paddle.to_tensor(array, dtype=parameter.dtype)
