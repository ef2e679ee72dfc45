"""Runs the sides of a comparison, each in separate processes and in a separate folder, and reads their results.

A side may fail in float64, because a model's code may be written for float32 only. If all ranks fail, they continue
without float64; if some fail, such as one stage of a pipeline, the others wait in an exchange, and the job ends with
the error. Therefore each rank that fails leaves a note, and waits for the other ranks' notes for a while.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_dp.errors import EndedError, JobError, gist
from paddle_dp.files import replacing
from paddle_dp.launch.command import RECIPE_RANK, Job, environment, rank_arguments
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.prepared_ranks import WaitingRanks
from paddle_dp.launch.processes import END_SIGNALS, tied_to
from paddle_dp.launch.start import run
from paddle_dp.launch.supervisor import MARK
from paddle_dp.proof.trace_files import Trace
from paddle_dp.text import numbered

WAIT = 10.0  # seconds for the other ranks, which fail at the same place of the same forward
_NAME = "failed.{}.txt"


def common_failure(
    error: Exception, folder: Path, rank: int, ranks: int, *, line: str = "", wait: float = WAIT
) -> str:
    """Returns the error as a sentence, with the user's `line`, if every rank leaves a note within `wait` seconds; else
    raises it."""
    message = f"{type(error).__name__}: {gist(error).rstrip('.')}{f' ({line})' if line else ''}"
    note = folder / _NAME.format(rank)
    with replacing(note) as partial:
        partial.write_text(message)
    end = time.monotonic() + wait
    while not all((folder / _NAME.format(other)).exists() for other in range(ranks)):
        if time.monotonic() > end:
            raise error
        time.sleep(0.05)
    return message


def partial_failure(folder: Path) -> str | None:
    """A sentence with the first note in `folder` and the ranks with notes; None without."""
    notes = sorted(folder.glob(_NAME.format("*")), key=lambda note: note.stat().st_mtime_ns)
    if not notes:
        return None
    ranks = sorted(int(note.name.split(".")[1]) for note in notes)
    return f"{notes[0].read_text()} (on {numbered('rank', ranks)} only)"


NOT_RUN = 4  # exit status of a side that stopped before its end
REFUSED = 2  # exit status of a usage error


@dataclass(eq=False)
class Side:
    """The result of one layout: traces by name ("wide": in float64, "own": in the recipe's precision), and facts."""

    folder: Path
    ranks: int

    def __post_init__(self) -> None:
        self.facts: dict[str, Any] = json.loads((self.folder / "side.json").read_text())
        self.failed: str | None = self.facts["failed"]  # the reason if there is no trace in float64
        # The causes of a difference from one process: a sentence each, with the remedy.
        self.differences: list[str] = self.facts["differences"]
        self.axes: dict[str, int] = self.facts["axes"]
        # The dtype to which its ranks round their gradients.
        self.rounds_to: str | None = self.facts["rounds_to"]
        self.parameters: int = self.facts["parameters"]  # of the whole model
        self.memory: int = self.facts["memory"]  # peak bytes of its largest process
        # By rank: bytes of parameters, gradients and optimizer states, if the comparison measured them.
        self.bytes_by_rank: list[dict[str, int]] = self.facts.get("held", [])
        self.candidates: tuple[Side, ...] = ()  # the sides with updates that it repeated

    def trace(self, name: str) -> Trace | None:
        """The side's trace of this name, or None."""
        return Trace.read(self.folder, name, self.ranks)

    def replayed(self, candidate: Side, name: str) -> Trace | None:
        """The updates and optimizer states that this one process computed from the gradients in a trace of `candidate`;
        None if it has no such trace. Raises ValueError for a side that `run_reference` was not given."""
        return Trace.read(self.folder / f"replay{self._number(candidate)}", name, 1)

    def followed(self, candidate: Side, name: str) -> Trace | None:
        """The trace of this one process, trained with the rounded gradients in a trace of `candidate`; None if its
        ranks do not round. Raises ValueError as `replayed` does."""
        return Trace.read(self.folder / f"follow{self._number(candidate)}", name, 1)

    def rehearsed(self, candidate: Side) -> Path:
        """The folder of this one process's rehearsal for the comparison with `candidate`."""
        return self.folder / ("" if candidate.rounds_to is None else f"follow{self._number(candidate)}")

    def _number(self, candidate: Side) -> int:
        if candidate not in self.candidates:
            raise ValueError(f"{candidate.folder} is not among the sides that run_reference repeats")
        return self.candidates.index(candidate)


@dataclass(frozen=True)
class SideRunner:
    """Runs the sides of one comparison: the first `steps` steps of a recipe.

    `ranks`: the larger side's number; so many ranks cannot share the last global batch equally. `scratch`: the folder
    of the sides' folders.
    """

    recipe: Path
    overrides: tuple[str, ...]
    steps: int
    ranks: int
    scratch: Path
    wide: bool = True  # in float64, too
    measure_memory: bool = False  # measure each rank's memory, too (slow for many parameters)
    rehearse: bool = False  # rehearse the training, too: proof.rehearsal
    start: Path | None = None  # a checkpoint from which the sides begin, instead of the initial state
    waiting: WaitingRanks | None = None  # if possible, the sides' ranks are forks of these

    def first_forward(self) -> None:
        """Computes the first batch on one process. Raises JobError if that fails, EndedError on a signal."""
        job = self._job(self._alone_overrides, 1, self.scratch / "first", alone=True, wide=False)
        if status := run(replace(job, entry_point="first_forward"), self.waiting):
            raise job_error(status, "nothing was compared.")

    @property
    def _alone_overrides(self) -> list[str]:
        overrides = [override for override in self.overrides if not override.startswith("strategy")]
        return [*overrides, "strategy.use=single"]

    def run_reference(self, candidates: Sequence[Side]) -> Side:
        """Runs one process, with strategy single in place of the recipe's. Raises JobError, EndedError.

        `candidates`: the sides that it will be compared with; it repeats their updates from their gradients.
        """
        extra = {"alone": True, "candidates": [[str(side.folder), side.ranks] for side in candidates]}
        extra["tensor"] = max((side.axes["tensor"] for side in candidates), default=1)
        job = self._job(self._alone_overrides, 1, self.scratch / "one", **extra)
        reference = self._side(run_alone(job), job)
        reference.candidates = tuple(candidates)
        return reference

    def run_candidate(
        self, ranks: int, more_overrides: Sequence[str] = (), name: str = "many", patch: str | None = None
    ) -> Side:
        """Runs `ranks` ranks, with `more_overrides`, such as a layout. Raises JobError, EndedError.

        `patch`: "module:function", which every rank calls first, without arguments; tests inject faults with it. The
        module is searched from the current folder.
        """
        overrides, extra = [*self.overrides, *more_overrides], dict[str, Any](alone=False, patch=patch)
        job = self._job(overrides, ranks, self.scratch / name, **extra)
        status = run(job, self.waiting)
        if status and (reason := partial_failure(self.scratch / name / "trace")):
            print("that was in float64: once more without it", file=sys.stderr, flush=True)
            extra |= {"wide": False, "failed": reason}
            job = self._job(overrides, ranks, self.scratch / f"{name}-again", **extra)
            status = run(job, self.waiting)
        return self._side(status, job)

    def _side(self, status: int, job: Job) -> Side:
        """The side of a job that ended with this status. Raises JobError, EndedError if it is not 0."""
        if status:
            subject = f"{job.ranks} ranks" if (job.ranks or 1) > 1 else "one process"
            raise job_error(
                status, f"the side of {subject} did not run: {ending(status)}.", "nothing was compared."
            )
        return Side(Path(str(job.output_dir)) / "trace", job.ranks or 1)

    def _job(self, overrides: Sequence[str], ranks: int, folder: Path, **options: Any) -> Job:
        extra = {"steps": self.steps, "ranks": self.ranks, "trace": str(folder / "trace"), "claimed": True}
        extra |= {} if self.start is None else {"start": str(self.start.resolve())}
        extra |= {"wide": self.wide, "measure_memory": self.measure_memory, "rehearse": self.rehearse}
        extra |= options
        return Job(
            entry_point="trace", recipe=self.recipe, overrides=tuple(overrides), ranks=ranks, output_dir=folder,
            extra=extra, quiet=True,
        )  # fmt: skip


def ending(status: int) -> str:
    """How processes with this exit status ended, as part of a sentence."""
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return (
            "a process was killed, by hand or because the machine has too little memory: a process takes some 40 to 60 "
            "bytes for each parameter that it holds, and its layers' outputs (docs/proof.md)"
        )
    number = -status if status < 0 else status - 128
    if number in {each.value for each in signal.Signals}:
        return f"a process was ended by {signal.Signals(number).name}, see above"
    return f"exit status {status}, see above"


def job_error(status: int, message: str, refused: str = "") -> JobError:
    """The error for processes that ended with this status and have printed why; `refused`: for a refused recipe."""
    if status - 128 in END_SIGNALS:
        return EndedError(status - 128)
    error = JobError(refused or message if status == REFUSED else message)
    error.exit_status = REFUSED if status == REFUSED else NOT_RUN
    return error


def run_alone(job: Job, variables: Mapping[str, str] | None = None) -> int:
    """Runs a job of one rank in a new process: in this one Paddle's threads and settings are already fixed.

    `variables` replace the variables of this process's environment.
    """
    plan = plan_of(job, Machine.here())
    command = [sys.executable, "-u", str(RECIPE_RANK), *rank_arguments(plan)]
    inside = environment(plan, {**os.environ, **(variables or {})}) | {MARK: f"{os.getpid()}-verify"}
    done = subprocess.run(
        command, env=inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=tied_to(os.getpid())
    )  # fmt: skip
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode
