"""`paddle-dp doctor --prove`: runs this package's own verbs on a machine's cards, and writes their results to a file.

Each part runs in children of a bench: a crash or a standstill of one is a row, not the end.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paddle_dp.doctor.bench import ROOT, Bench, ChildResult, variables_for
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.doctor.proof_file import ProofFile, ProofRow, Scrubber
from paddle_dp.errors import EndedError, UsageError, message_of
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import check_ranks
from paddle_dp.launch.processes import handled_signals
from paddle_dp.launch.scratch import raise_ended, scratch_folder
from paddle_dp.text import plural

DEFAULT_FILE = Path("paddle-dp-proof.json")
MOST_RANKS, CPU_RANKS = 8, 2  # ranks without --ranks: a rank for each device up to 8; without devices, 2


class ProveStep(NamedTuple):
    """A step of the proof. `rows` runs it. `share`: its part of the time that is left for it and later ones, so that a
    slow step leaves time for those after it, and a quick one gives its own on."""

    rows: Callable[[Bench], Iterator[ProofRow]]
    share: int


def prove(
    steps: dict[str, ProveStep], ranks: int | None = None, minutes: float = 30.0, file: Path = DEFAULT_FILE,
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
    with handled_signals((signal.SIGINT,), raise_ended), scratch_folder("paddle-dp-prove-") as scratch:
        bench = Bench(ranks, kind, scratch, 0.0, variables_for(here.kind, kind, scratch))
        output = ProofFile(file, Scrubber.here(scratch, ROOT), ranks, minutes)
        try:
            for row in run_steps(steps, bench, 60 * minutes):
                _show(output.add(row), as_json)
        except EndedError as error:
            ended, rows = signal.Signals(error.exit_status - 128).name, plural(len(output.rows), "row")
            output.write(ended)
            print(f"Ended by {ended}: {file} has the {rows} so far.", file=sys.stderr)
            raise
        output.write("done")
    content = json.dumps(output.content("done"), indent=1, ensure_ascii=False)
    print(content if as_json else summary(output.rows, file))
    return int(any(row.state == "mend" for row in output.rows))


def run_steps(steps: dict[str, ProveStep], bench: Bench, seconds: float) -> Iterator[ProofRow]:
    """Yields the rows of all steps. A step that fails, or has no time left, yields a row with the reason."""
    deadline = time.monotonic() + seconds
    shares = sum(step.share for step in steps.values())
    for name, step in steps.items():
        now = time.monotonic()
        bench.deadline = now + step.share / shares * max(deadline - now, 0.0)
        shares -= step.share
        try:
            yield from step.rows(bench)
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
        ending = f"ended after {result.seconds:.0f} s"
        sentence = f"{ending}: the time of this step was up. Give more with --minutes."
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
        DoctorCheck(row.step, text, row.state).show()


def summary(rows: Sequence[ProofRow], file: Path) -> str:
    """Returns the last line of the screen."""
    compared = [row.agrees for row in rows if row.agrees is not None]
    wrong = [row.name for row in rows if row.state == "mend"]
    agree = f"{sum(compared)} of {plural(len(compared), 'comparison')} agree"
    return f"{agree}{'; to mend: ' if wrong else ''}{', '.join(wrong)}. The results are in {file}."
