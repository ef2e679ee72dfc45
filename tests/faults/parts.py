"""Parts of a recipe that go wrong wherever the environment says: FAULT="WHERE RANK STEP DEED"; RANK may be "all"."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.checkpoint import saving
from paddle_dp.train import Callback, Moment, Run

WHERE, _RANK, _STEP, _DEED = (os.environ.get("FAULT", "nowhere -1 0") + " stand_still").split()[:4]
HERE = _RANK in ("all", os.environ.get("PADDLE_TRAINER_ID", "0"))
STEP = int(_STEP)
begun: list[int] = []  # not empty once the training has begun: samples are looked at before
# The how manieth sample that a rank reads, once the training has begun.
STANDS_AT = {"train": 120, "test": 37}


def stand_still() -> None:
    while True:
        time.sleep(1)


def _raise() -> None:
    raise ValueError("the culprit's own words")


def _hold_the_interpreter() -> None:
    """Waits for ever in C that never gives Python back to another thread: a lock that it has itself."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _take_too_much() -> None:
    """More memory than this machine can address."""
    np.ones(1 << 50)


DEEDS: dict[str, Callable[[], None]] = {
    "stand_still": stand_still,
    "raise": _raise,
    "hold_gil": _hold_the_interpreter,
    "memory": _take_too_much,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0) and None,
    "abort": os.abort,
    "exit_0": lambda: sys.exit(0),
    "exit_3": lambda: sys.exit(3),
    "leave_0": lambda: os._exit(0),
    "leave_3": lambda: os._exit(3),
    "leave_5": lambda: os._exit(5),
}


def do(*_: Any) -> None:
    print("the fault is at", time.time(), flush=True)
    DEEDS[_DEED]()


if WHERE == "import" and HERE and "PADDLE_TRAINER_ID" in os.environ:
    do()


class Samples:
    """200 samples, of which one is never read to its end."""

    def __init__(self, stands_at: int):
        self.stands_at, self.read = stands_at, 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += bool(begun)
        if self.read == self.stands_at:
            do()
        return np.full([64], index / 200, "float32"), np.array(index % 10)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`use: tests.faults.parts.Dataset`."""

    def build(self, split: str) -> Any:
        stands = HERE and {"train": "data", "test": "evaluate"}[split] == WHERE
        return Samples(STANDS_AT[split] if stands else -1)


class StopsAlone(Callback):
    """Ends the training after two steps, on rank 1 alone."""

    def step(self, moment: Moment) -> None:
        if moment.progress.step == 2 and moment.trainer.mesh.rank == 1:
            moment.trainer.stop("enough")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """`use: tests.faults.parts.Hang`: makes what the trainer is made of stand still, and stands still itself."""

    def build(self, run: Run) -> Callback:
        return Hanging()


class Hanging(Callback):
    reads = False

    def start(self, moment: Moment) -> None:
        begun.append(moment.progress.step)
        self._is_now("callback start")
        if not HERE:
            return
        learner = moment.trainer.learner
        if WHERE == "forward":
            for layer in learner.model.sublayers():  # a pipeline's stage calls its own layers alone
                layer.register_forward_pre_hook(_from_step(moment))
        if WHERE == "backward":
            learner.trainable[0].register_hook(_from_step(moment))
        for where, part, name in (
            ("exchange", learner.exchange, "finish"),
            ("pull", learner.async_rank, "_pull"),
            ("update", learner, "update"),
        ):
            if where == WHERE:
                setattr(part, name, _from_step(moment, getattr(part, name)))
        if WHERE == "checkpoint":
            saving.write_rank = do
        if WHERE == "writing":
            saving.write_tensors = _from_step(moment, saving.write_tensors, half=True)
        if WHERE == "renaming":
            saving.publish = _from_step(moment, saving.publish)

    def step(self, moment: Moment) -> None:
        if moment.progress.step == STEP:
            self._is_now("callback step")

    def epoch(self, moment: Moment) -> None:
        self._is_now("callback epoch")

    def end(self, moment: Moment) -> None:
        self._is_now("callback end")
        if HERE and WHERE == "atexit":
            atexit.register(do)
        if HERE and WHERE == "thread":
            threading.Thread(target=do, name="left running").start()

    def _is_now(self, where: str) -> None:
        if HERE and where.replace(" ", "-") == WHERE:
            do()


@dataclass(frozen=True, kw_only=True)
class Slow:
    """`use: tests.faults.parts.Slow`: steps of SLOW seconds at least, in which somebody can interfere; no more of them
    from when there is a file HURRY."""

    def build(self, run: Run) -> Callback:
        return Sleeping()


class Sleeping(Callback):
    reads = False

    def step(self, moment: Moment) -> None:
        if not os.path.exists(os.environ.get("HURRY", "")):
            time.sleep(float(os.environ.get("SLOW", "0.05")))


def _from_step(moment: Moment, until_then: Callable[..., Any] = lambda *_: None, half: bool = False) -> Any:
    """`until_then` up to a step, and from then on the deed; with `half`, after half of the file was written."""
    trainer = moment.trainer

    def stand(*given: Any) -> Any:
        if trainer.progress.step >= STEP:  # type: ignore[attr-defined]
            if half:
                until_then(*given)
                os.truncate(given[0], os.path.getsize(given[0]) // 2)
            do()
        return until_then(*given)

    return stand


class NoisySamples:
    """200 samples, drawn anew in each epoch from the seed that the loader sets, a millisecond each."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.001)
        return np.random.standard_normal(64).astype("float32"), np.array(index % 10)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """`use: tests.faults.parts.Noise`."""

    def build(self, split: str) -> Any:
        return NoisySamples()
