"""Tries a task in another process before its training (`checks.samplewise`), never in a rank that trains.

On CPUs the process is a fork of one rank, with its model and samples; each run within it is another fork, so that all
begin with one state. Forks hold none of the rank's sockets and write nothing. Accelerators' drivers survive no fork:
for ranks with accelerators a process without them builds the recipe's model once more.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_dp import errors
from paddle_dp.batch import MicroBatch, mapped
from paddle_dp.checks.samplewise import Findings, findings
from paddle_dp.core.memory_error import memory_error
from paddle_dp.core.process_runner import Result
from paddle_dp.data.mix import Mixture, mixed
from paddle_dp.data.sample import read_samples
from paddle_dp.data.worker import Answer, Progress, Worker, WorkerEndedError, WorkerHungError
from paddle_dp.errors import DataError
from paddle_dp.identity.user_frames import location, user_frames
from paddle_dp.learner import Task
from paddle_dp.mesh.heartbeat import STARTED

SECONDS = 60.0  # for the whole trial
RECORD = "trial.json"  # in an attempt's folder
_MEAN = (
    "A mean over the ranks is one process's only if all have equally many samples: let a loss return (total, count), "
    "or several terms by across: docs/add-a-part.md#several-terms-each-with-its-own-count"
)
_REFUSALS = ("LossError", "UsageError")
_LEFT_OUT = ("PADDLE_", "FLAGS_selected_")  # variables that would make the process a rank


class TrialError(Exception):
    """A run in another process failed; the text says how."""


class ForkRunner:
    """Runs functions in forks of this process, for `seconds` in all: a `core.process_runner.ProcessRunner`.

    Raises LossError and UsageError as the function does, and TrialError for any other failure of the fork.
    """

    def __init__(self, seconds: float):
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def __call__(self, function: Callable[[], Result]) -> Result:
        return _result(self.answer(function))

    def answer(self, function: Callable[[], Result]) -> Result:
        """The function's result, or an error in its place (`answer_of`)."""
        left, too_long = (
            self._until - time.monotonic(),
            {"failed": f"it takes longer than {self._seconds:g} s"},
        )
        if left <= 0:
            return too_long
        worker = Worker(partial(_serve, function))
        try:
            result: Result = worker.receive(left)
            return result
        except WorkerHungError:
            return too_long
        except WorkerEndedError as ended:
            return {"failed": f"the process that tried it {ended}"}
        finally:
            worker.end()


def _result(result: Result) -> Result:
    """Returns the result, or raises the error that was sent in its place."""
    if "refused" in result:
        kind, message = result["refused"]
        raise getattr(errors, kind)(message)
    if "failed" in result:
        raise TrialError(result["failed"])
    return result


def _serve(function: Callable[[], Result], commands: Any, answer: Answer, progress: Progress) -> None:
    """Runs in the fork: closes the rank's sockets, prints nothing, and answers with the function's result."""
    for descriptor in map(int, os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
    _refuse_exchanges()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    answer(answer_of(function))


def _refuse_exchanges() -> None:
    """Lets every message to other ranks raise TrialError: gloo would abort the process without its sockets."""
    group = getattr(paddle.base.core, "ProcessGroupGloo", None)  # Paddle may be built without it

    def refuse(name: str) -> Callable[..., Any]:
        def exchange(*_: Any, **__: Any) -> Any:
            caller = next(user_frames(traceback.walk_stack(None)), None)
            line = f" ({location(*caller)[0]})" if caller else ""
            raise TrialError(
                f"the model or the loss exchanges with other ranks, by {name}{line}, and a trial has none. {_MEAN}"
            )

        return exchange

    for name in dir(group):
        if not name.startswith("_") and name not in ("name", "rank", "size"):
            setattr(group, name, refuse(name.removesuffix("_on_calc_stream")))


def answer_of(function: Callable[[], Result]) -> Result:
    """A function's result, or its error in the form that `_result` raises."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - it goes to the rank
        if type(error).__name__ in _REFUSALS:
            return {"refused": [type(error).__name__, str(error)]}
        if isinstance(error, TrialError):
            return {"failed": str(error)}
        cause = memory_error(error) or error  # not the SystemError around it
        return {"failed": f"{type(cause).__name__}: {cause}"}


def once_a_job(inputs: Any, run: Callable[[], Result]) -> Result:
    """The result of `run`, or of an earlier attempt of this job that tried the same `inputs` (JSON values).

    A trial is most of the time until a later attempt's first update, and is a function of the recipe, the code, the
    first samples and the versions. `inputs` describe all of these; the attempts of a job share one machine and one
    environment, and each keeps its result next to its logs. Neither an error nor a failed trial is kept.
    """
    job, folder = os.environ.get(STARTED), os.environ.get("PADDLE_LOG_DIR")
    if not job or not folder:
        return run()
    supervisor = os.environ.get("PADDLE_DP_JOB", "").partition("-")[0]
    text = json.dumps([supervisor, job, inputs], sort_keys=True, default=str)
    for record in sorted(Path(folder).parent.glob(f"attempt-*/{RECORD}"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            earlier = json.loads(record.read_bytes())
            if earlier["inputs"] == text:
                result: Result = earlier["result"]
                return result
    result = run()
    if not {"refused", "failed"} & result.keys():
        with contextlib.suppress(OSError):  # the next attempt tries again
            (Path(folder) / RECORD).write_text(json.dumps({"inputs": text, "result": result}))
    return result


def in_fork(task: Task, first: MicroBatch, divided: bool, chained: str) -> Result:
    """The findings on a task, as JSON values, or the error that refuses it."""
    return ForkRunner(SECONDS + 10).answer(partial(findings_of, task, first, divided, chained))


def findings_of(task: Task, first: MicroBatch, divided: bool, chained: str) -> Result:
    """The findings on a task, by runs in forks of this process, as JSON values."""
    return asdict(findings(task, first, ForkRunner(SECONDS), divided, chained))


def in_process(recipe: Path, divided: bool, chained: str) -> Result:
    """Does the same as `in_fork` for the recipe in a file, in a new process that sees no accelerator."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "CUSTOM_DEVICE_ROOT": ""}
    command = [sys.executable, "-c", "from paddle_dp.assembly.entry_points import try_recipe; try_recipe()"]
    request = json.dumps([str(recipe), divided, chained])
    try:
        done = subprocess.run(
            [*command, request],
            env=variables,
            capture_output=True,
            text=True,
            timeout=2 * SECONDS,
            stdin=subprocess.DEVNULL,
        )
        last: Result = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"failed": f"the process that tried it failed ({type(error).__name__})"}
    return last


def first_samples(dataset: Any, indices: Sequence[int], seed: int, mixes: bool = False) -> MicroBatch:
    """These samples of a data set, read as in epoch 0. `mixes`: each is blended with the one before it."""
    read = read_samples(dataset, np.asarray(indices), seed, 0)
    if mixes:
        before_first = [-1, *range(len(indices))]
        with contextlib.suppress(DataError):  # the first batch reports it
            inputs, targets = (mapped(lambda array: array[before_first], each) for each in read)
            read = mixed(inputs, targets, Mixture(0.7))
    inputs, targets = (mapped(paddle.to_tensor, arrays) for arrays in read)
    return MicroBatch(inputs, targets, len(indices))


def understood(result: Result) -> Findings:
    """The findings of a trial's process. Raises LossError or UsageError if it refuses the task."""
    try:
        return Findings(**_result(result))
    except TrialError as error:
        return Findings(unknown=[f"whether the model and its loss treat each sample alone: {error}"])
