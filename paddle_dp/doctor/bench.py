"""A bench: the ranks, the folder and the time for children that run this package's verbs and programs.

A child runs under a time limit: its crash or standstill is a result, not the end of the program that started it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.errors import JobError, UsageError
from paddle_dp.launch.machine import Machine, mkl_type, visible_in
from paddle_dp.launch.processes import alive, child_options, descendants, kill_all
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.text import plural

MEASUREMENTS = "paddle_dp.doctor.probe_rank"
ROOT = Path(__file__).resolve().parents[2]  # the folder of this package
CHILD_SECONDS = 300.0  # a child that runs longer has failed
LEAST_SECONDS = 2.0  # with less time left, a child is not started
LAST_LINES = 12  # of a failed child's output, in the file
PATIENCE = 15.0  # seconds for a child to end its ranks
_EXCEPTION = re.compile(r"\w*(Error|Exception|Interrupt)\b.*:")


@dataclass(frozen=True)
class ChildResult:
    """The end of a child process: its exit status (negative for a signal), and its output.

    `late`: it was ended after `seconds`, the limit; `is_cut`: that limit was shorter than CHILD_SECONDS, because the
    time of its step was up.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    late: bool = False
    is_cut: bool = False

    @property
    def last_lines(self) -> list[str]:
        """The last LAST_LINES lines of the output and the error output that are not empty."""
        lines = [line.strip() for line in (*self.stdout.splitlines(), *self.stderr.splitlines())]
        return [line for line in lines if line][-LAST_LINES:]

    @property
    def cause(self) -> str:
        """The last line that names an exception, else the last line."""
        lines = self.last_lines or ["no output"]
        return next((line for line in reversed(lines) if _EXCEPTION.search(line)), lines[-1])


@dataclass
class Bench:
    """The ranks and the folder in which children run, and the time by which the current step should end."""

    ranks: int
    kind: str  # of the device on which ranks compute
    folder: Path
    deadline: float  # of the current step, by time.monotonic()
    variables: dict[str, str] = field(default_factory=dict)
    work_folder: Path | None = None  # in which children run, in place of `folder`

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def verb(self, *arguments: str, **variables: str) -> ChildResult:
        """Runs `paddle-dp WORDS…`. Raises EndedError on a signal, TimeoutError if no time is left."""
        return self.child("paddle_dp", *arguments, **variables)

    def launch(self, out: str, module: str, *arguments: str) -> ChildResult:
        """Runs `python -m module WORDS…` on all ranks, with logs in the folder `out`. Raises as `verb`."""
        return self.verb("launch", "--ranks", str(self.ranks), "--out", out, "-m", module, *arguments)

    def measured(self, subject: str, task: str, *arguments: str, advice: str = "") -> dict[str, Any]:
        """Runs a task of `probe_rank.py` on all ranks and returns its report.

        Raises JobError with the last words of a job that failed, in which `subject` names the measurement and `advice`
        follows the reason of one that took too long; raises as `verb`.
        """
        out = self.folder / f"{task}-{self.ranks}-{time.monotonic_ns()}"
        file = out.with_suffix(".json")
        result = self.launch(str(out), MEASUREMENTS, task, str(file), *arguments)
        if result.status or not file.exists():
            late = f"it was ended after {result.seconds:.0f} s{advice}"
            reason = late if result.late else f"status {result.status}"
            raise JobError("\n".join([f"{subject} failed ({reason}):", *result.last_lines]))
        report: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return report

    def child(self, module: str, *arguments: str, **variables: str) -> ChildResult:
        """Runs `python -m module WORDS…` in the folder. Raises as `verb`."""
        left = self.deadline - time.monotonic()
        if left < LEAST_SECONDS:
            raise TimeoutError("not run: the time of this step is up. Give more with --minutes.")
        limit, began = min(left, CHILD_SECONDS), time.monotonic()
        out, err = self.folder / "stdout.txt", self.folder / "stderr.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=self.work_folder or self.folder,
                env={**self.variables, **variables}, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                **child_options(),
            )  # fmt: skip
            late = False
            try:
                child.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end(child)
        output, errors = (file.read_text("utf-8", "replace") for file in (out, err))
        seconds, is_cut = time.monotonic() - began, late and limit < CHILD_SECONDS
        return ChildResult(child.returncode, output, errors, seconds, late, is_cut)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a child and its descendants, if they still run: first in order, then by SIGKILL."""
    if child.poll() is not None:
        return
    family = descendants(child.pid)
    try:
        child.terminate()
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after a second Ctrl-C
        kill_all(lambda: [pid for pid in {*family, *descendants(child.pid), child.pid} if alive(pid)])
        child.wait()


@contextmanager
def bench_for(ranks: int, device: str, minutes: float) -> Iterator[Bench]:
    """Yields a bench on this machine's devices, or without any on the CPU, where each rank has an equal share of the
    processors, alone as well as among all ranks. Raises UsageError for more ranks than devices."""
    here = Machine.here()
    kind = here.kind if device != "cpu" and here.devices else "cpu"
    if kind != "cpu" and ranks > len(here.devices):
        raise UsageError(
            f"--ranks {ranks}: {plural(len(here.devices), 'device')} can be seen here. Give as many ranks, or "
            "train.device=cpu to measure the processor."
        )
    with scratch_folder("paddle-dp-scale-") as scratch:
        variables = variables_for(here.kind, kind, scratch)
        if kind == "cpu":
            variables.setdefault("OMP_NUM_THREADS", str(max(1, here.cores // ranks)))
        yield Bench(ranks, kind, scratch, time.monotonic() + 60 * minutes, variables, Path.cwd())


def variables_for(installed_kind: str, kind: str, scratch: Path) -> dict[str, str]:
    """Returns the environment of children: this one's, with temporary files in `scratch`.

    With more ranks than devices all of them compute on the CPU, so the devices are hidden.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": path, "GLOG_minloglevel": "2"}
    if kind == "cpu" and installed_kind != "cpu":
        variables[visible_in(installed_kind)] = ""
    if kind == "cpu" and (fast := mkl_type()):
        variables.setdefault("MKL_DEBUG_CPU_TYPE", fast)
    return variables
