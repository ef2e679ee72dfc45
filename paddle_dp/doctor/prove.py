"""`paddle-dp doctor --prove`: runs this package's own verbs on a machine's cards, and writes their results to a file.

Each part runs in a child process, under a time limit: a crash or a standstill of one is a row, not the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.doctor.examine import MAX_COLUMNS
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.doctor.proof_file import ProofFile, ProofRow, Scrubber
from paddle_dp.errors import EndedError, UsageError, message_of
from paddle_dp.launch.machine import Machine, mkl_type, visible_in
from paddle_dp.launch.plan import check_ranks
from paddle_dp.launch.processes import alive, child_options, descendants, handled_signals, kill_all
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.text import plural

DEFAULT_FILE = Path("paddle-dp-proof.json")
MOST_RANKS, CPU_RANKS = 8, 2  # ranks without --ranks: a rank for each device up to 8; without devices, 2
CHILD_SECONDS = 300.0  # a child that runs longer has failed
LEAST_SECONDS = 2.0  # with less time left, a child is not started
LAST_LINES = 12  # of a failed child's output, in the file
_EXCEPTION = re.compile(r"\w*(Error|Exception|Interrupt)\b.*:")
PATIENCE = 15.0  # seconds for a child to end its ranks
# Shares of the time that is left, so that a slow step leaves time for those after it, and a quick one gives its own on.
SHARES = {
    "machine": 2, "exchange": 4, "layouts": 52, "precision": 14, "speed": 14, "memory": 2, "resume": 12,
}  # fmt: skip


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
        texts = [file.read_text("utf-8", "replace") for file in (out, err)]
        seconds = time.monotonic() - began
        return ChildResult(
            child.returncode, texts[0], texts[1], seconds, late, late and limit < CHILD_SECONDS
        )


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


Step = Callable[[Bench], Iterator[ProofRow]]


def prove(
    steps: dict[str, Step], ranks: int | None = None, minutes: float = 30.0, file: Path = DEFAULT_FILE,
    as_json: bool = False,
) -> int:  # fmt: skip
    """Runs the steps, writes `file` after each row, prints a line for each. Returns 0, or 1 if a row is to be mended.

    Raises UsageError for a file that cannot be written or a wrong number, EndedError on a signal; the file then has the
    rows so far.
    """
    if minutes <= 0:
        raise UsageError(f"--minutes {minutes:g}: give a time above 0, such as --minutes 30.")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(
            f"--out {file}: with --prove give a file in a folder that exists, such as {DEFAULT_FILE}."
        )
    here = Machine.here()
    ranks = ranks or min(len(here.devices), MOST_RANKS) or CPU_RANKS
    check_ranks(ranks)
    kind = here.kind if len(here.devices) >= ranks else "cpu"
    with (
        handled_signals((signal.SIGINT,), _raise_ended),
        scratch_folder("paddle-dp-prove-") as scratch,
    ):
        bench = Bench(ranks, kind, scratch, 0.0, variables_for(here.kind, kind, scratch))
        output = ProofFile(file, Scrubber.here(scratch, Path(__file__).resolve().parents[2]), ranks, minutes)
        try:
            for row in run_steps(steps, bench, 60 * minutes):
                _show(output.add(row), as_json)
        except EndedError as error:
            ended = signal.Signals(error.exit_status - 128).name
            output.write(ended)
            print(
                f"Ended by {ended}: {file} has the {plural(len(output.rows), 'row')} so far.", file=sys.stderr
            )
            raise
        output.write("done")
    print(
        json.dumps(output.content("done"), indent=1, ensure_ascii=False)
        if as_json
        else summary(output.rows, file)
    )
    return int(any(row.state == "mend" for row in output.rows))


def variables_for(installed_kind: str, kind: str, scratch: Path) -> dict[str, str]:
    """Returns the environment of children: this one's, with temporary files in `scratch`.

    With more ranks than devices all of them compute on the CPU, so the devices are hidden.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": path, "GLOG_minloglevel": "2"}
    if kind == "cpu" and installed_kind != "cpu":
        variables[visible_in(installed_kind)] = ""
    if kind == "cpu" and (fast := mkl_type()):
        variables.setdefault("MKL_DEBUG_CPU_TYPE", fast)
    return variables


def run_steps(steps: dict[str, Step], bench: Bench, seconds: float) -> Iterator[ProofRow]:
    """Yields the rows of all steps. A step that fails, or has no time left, yields a row with the reason."""
    deadline = time.monotonic() + seconds
    names = list(steps)
    for number, name in enumerate(names):
        now = time.monotonic()
        share = SHARES[name] / sum(SHARES[later] for later in names[number:])
        bench.deadline = now + share * max(deadline - now, 0.0)
        try:
            yield from steps[name](bench)
        except EndedError:
            raise  # a signal ends the whole proof
        except TimeoutError as error:
            yield ProofRow(step=name, name=name, sentence=message_of(error), state="look")
        except Exception as error:  # noqa: BLE001 - the other steps do not depend on this one
            sentence = f"{type(error).__name__}: {message_of(error)}"
            yield ProofRow(step=name, name=name, sentence=sentence, state="mend")


def failed_row(step: str, name: str, result: ChildResult) -> ProofRow:
    """Returns the row of a child that did not end well."""
    if result.is_cut:
        sentence = (
            f"ended after {result.seconds:.0f} s: the time of this step was up. Give more with --minutes."
        )
        return ProofRow(step=step, name=name, sentence=sentence, state="look", seconds=result.seconds)
    status = f"exit status {result.status}" if result.status >= 0 else signal.Signals(-result.status).name
    ending = f"did not end in {result.seconds:.0f} s" if result.late else f"ended with {status}"
    return ProofRow(
        step=step, name=name, sentence=f"{ending}: {result.cause}", state="mend", seconds=result.seconds,
        values={"status": result.status, "output": result.last_lines},
    )  # fmt: skip


def _show(row: ProofRow, as_json: bool) -> None:
    if not as_json:
        text = row.sentence if row.name == row.step else f"{row.name}: {row.sentence}"
        width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        print("\n".join(DoctorCheck(row.step, text, row.state).lines(width)), flush=True)


def summary(rows: Sequence[ProofRow], file: Path) -> str:
    """Returns the last line of the screen."""
    compared = [row.agrees for row in rows if row.agrees is not None]
    wrong = [row.name for row in rows if row.state == "mend"]
    agree = f"{sum(compared)} of {plural(len(compared), 'comparison')} agree"
    return f"{agree}{'; to mend: ' if wrong else ''}{', '.join(wrong)}. The results are in {file}."


def _raise_ended(number: int, frame: Any) -> None:
    raise EndedError(number)
