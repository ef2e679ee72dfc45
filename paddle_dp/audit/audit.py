"""Audits a script: runs it on N ranks and on one process, judges the recorded events, and reports.

Each run is a supervised job. The one process gets the N ranks' batches.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paddle_dp.audit.events import ModelSplit
from paddle_dp.audit.finding import ORDER, AuditFinding, ReportSection
from paddle_dp.audit.judges.evaluation import evaluation
from paddle_dp.audit.judges.gradients import distance, gradients, recorded_updates
from paddle_dp.audit.judges.norms import norms
from paddle_dp.audit.judges.randomness import randomness
from paddle_dp.audit.judges.samples import samples
from paddle_dp.audit.judges.weights import weights
from paddle_dp.audit.records import EventTrace
from paddle_dp.audit.runner import VARIABLE
from paddle_dp.errors import UsageError
from paddle_dp.launch.attempts import run_command
from paddle_dp.launch.command import Job, environment, launcher
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.launch.supervisor import JobEnd
from paddle_dp.text import plural

RUNNER = Path(__file__).with_name("runner.py")
GRACE = 30.0  # seconds beyond its patience, for a rank with a guard that cannot run
STARTUP = 60.0  # seconds for Python, paddle and the launcher to start, before the first event


@dataclass(frozen=True)
class Script:
    """A script with its arguments. `steps`: updates to record in each of two passes. `patience`: seconds without an
    event that end a rank."""

    path: Path
    arguments: tuple[str, ...]
    steps: int
    patience: float

    def run(self, ranks: int, folder: Path, replay: Mapping[str, Any] | None = None) -> JobEnd:
        """Runs the script on `ranks` ranks, which write their events to `folder`. Raises EndedError on a signal.

        `replay`: the updates that one process is to repeat (see hooks/replay.py).
        """
        folder.mkdir(mode=0o700)
        plan = plan_of(Job(script=(str(self.path), *self.arguments), ranks=ranks, quiet=True), Machine.here())
        options = {"folder": str(folder), "steps": self.steps, "patience": self.patience, "replay": replay}
        variables = environment(plan, os.environ) | {VARIABLE: json.dumps(options)}
        command = [*launcher(plan, folder), str(RUNNER), str(self.path), *self.arguments]
        return run_command(plan, folder, command, variables, self._stalled(folder))

    def _stalled(self, folder: Path) -> Callable[[], bool]:
        """A function for the supervisor: whether all ranks were silent for longer than their guards allow."""
        began = time.time()

        def stalled() -> bool:
            times = [path.stat().st_mtime for path in folder.glob("rank-*.jsonl")]
            newest = max(times, default=began + STARTUP)
            return time.time() - max(newest, began) > self.patience + GRACE

        return stalled


WIDTH = 110


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit. `failure`: a message on the script's own failure; "" if it ran as far as needed."""

    script: str
    ranks: int
    steps: int
    sections: tuple[ReportSection, ...]
    failure: str = ""

    @property
    def findings(self) -> list[AuditFinding]:
        """All findings, the worst first; notes come last and do not count."""
        findings = [finding for section in self.sections for finding in section.findings]
        return sorted(findings, key=lambda finding: ORDER.index(finding.severity))

    @property
    def counted(self) -> list[AuditFinding]:
        return [finding for finding in self.findings if finding.severity != "note"]

    @property
    def exit_status(self) -> int:
        """0: no findings. 1: findings. 3: the script failed, or did nothing that can be audited."""
        if self.counted:
            return 1
        return 3 if self.failure else 0

    def as_json(self) -> str:
        return json.dumps(
            {
                "script": self.script, "ranks": self.ranks, "steps": self.steps, "failure": self.failure,
                "exit_status": self.exit_status, "findings": [asdict(finding) for finding in self.findings],
                "looked_at": {section.subject: section.coverage for section in self.sections},
            },
            indent=1, ensure_ascii=False,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The report, line by line."""
        for finding in self.findings:
            yield f"{finding.severity.upper()} · {finding.where or self.script} · {finding.rule}"
            yield from _filled("  ", finding.what)
            yield from _filled("  seen: ", finding.evidence)
            yield from _filled("  do:   ", finding.remedy)
            yield ""
        if self.sections:
            yield "looked at:"
            for section in self.sections:
                yield from _filled(f"  {section.subject + ':':<13}", section.coverage)
            yield ""
        if self.failure:
            yield from self.failure.rstrip().splitlines()
        yield self._conclusion()

    def _conclusion(self) -> str:
        """The last line of the report."""
        extent = f"{plural(self.steps, 'step')} on {plural(self.ranks, 'rank')}"
        if self.counted:
            counts = Counter(finding.severity for finding in self.counted)
            faults, differences = plural(counts["fault"], "fault"), plural(counts["difference"], "difference")
            return f"{self.script}: {faults} and {differences} found in {extent}."
        if self.failure:
            return f"{self.script}: could not be audited: {extent}."
        return f"{self.script}: nothing found in {extent}."


def _filled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False
    ) or [label]


def audit(script: Script, ranks: int, as_json: bool) -> int:
    """Audits a script, prints the report and returns the exit status (see AuditResult.exit_status).

    The script runs twice, with all its side effects. Raises UsageError for a missing script or impossible options,
    EndedError when a signal ended it.
    """
    path = script.path
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(
            f"audit {path}: give a Python script (.py) that paddle.distributed.launch could run."
        )
    if ranks < 2 or script.steps < 1 or script.patience <= 0:
        raise UsageError(
            "audit takes --ranks 2 or more, --steps 1 or more and a --patience above 0, "
            f"not --ranks {ranks} --steps {script.steps} --patience {script.patience:g}."
        )
    note = f"{path} is really run, with all that it writes: on {ranks} ranks, then on one process"
    print(note, file=sys.stderr, flush=True)
    with scratch_folder("paddle-dp-audit-") as scratch:
        result = examine(script, ranks, scratch)
    print(result.as_json() if as_json else "\n".join(result.lines()))
    return result.exit_status


def examine(script: Script, ranks: int, scratch: Path) -> AuditResult:
    """Runs the script on `ranks` ranks and on one process, in folders of `scratch`, and judges the events."""
    job_end = script.run(ranks, scratch / "many")
    trace = EventTrace.read(scratch / "many", ranks)
    failure = _failure(trace, job_end, ranks)
    splits = [event.degrees.items() for rank in trace.ranks for event in rank.events_of(ModelSplit)]
    if degrees := sorted(set().union(*splits)):
        axes = ", ".join(f"{axis} {degree}" for axis, degree in degrees)
        reason = f"The script splits the model ({axes}); an audit can judge ranks that all hold the whole model only."
        return AuditResult(str(script.path), ranks, trace.steps, (), reason)
    alone, (replay, why_not) = None, replay_of(trace)
    if replay is not None:
        repeated = script.run(1, scratch / "one", replay)
        alone = EventTrace.read(scratch / "one", 1)
        why_not = _why_it_failed(alone, repeated)
    updates = list(recorded_updates(trace, alone if not why_not else None))
    norm_section = norms(trace, next((distance(update) for update in updates), None))
    sections: tuple[ReportSection, ...] = (
        samples(trace), weights(trace), gradients(updates, bool(norm_section.findings), why_not), norm_section,
        randomness(trace, alone), evaluation(trace),
    )  # fmt: skip
    if not trace.steps and not failure:
        failure = "The script did no update with a paddle.optimizer, so there is nothing to audit."
    return AuditResult(str(script.path), ranks, trace.steps, sections, failure)


def replay_of(trace: EventTrace) -> tuple[dict[str, Any] | None, str]:
    """The updates that one process can repeat (see hooks/replay.py), and ""; or None, and the reason against it."""
    steps = [step for step in range(1, trace.equal_until + 1) if all(u.arrays for u in trace.together(step))]
    if not steps:
        return None, "no update was recorded before which all ranks held equal weights"
    if not trace.training:
        return None, "no DataLoader was seen"
    if len(trace.training) > 1:
        return None, "batches of several DataLoaders go into an update"
    if any(update.optimizer for rank in trace.ranks for update in rank.updates):
        return None, "the script has several optimizers"
    items = [item for step in steps if (item := _item(trace, step))]
    if not items:
        return None, "the ranks read different numbers of batches, or too large ones, for an update"
    return {"source": str(trace.folder), "loader": next(iter(trace.training)), "items": items}, ""


def _item(trace: EventTrace, step: int) -> dict[str, Any] | None:
    updates = trace.together(step)
    sizes = [rank.sizes(update) for rank, update in zip(trace.ranks, updates, strict=True)]
    complete = all((trace.folder / f"{update.arrays}.batches.npz").exists() for update in updates)
    if not complete or len({len(each) for each in sizes}) > 1 or not sizes[0]:
        return None
    return {"step": step, "names": [update.arrays for update in updates], "sizes": sizes}


def _why_it_failed(alone: EventTrace, job_end: JobEnd) -> str:
    """The reason why the run on one process gave no gradients; "" if it did."""
    if alone.ranks[0].ended is not None and alone.ranks[0].ended.reason == "limit":
        return ""
    if (cause := job_end.cause) is not None:
        return f"on one process the script fails: {cause.kind}: {cause.message}".splitlines()[0][:300]
    return "on one process the script ended before its first update"


def _failure(trace: EventTrace, job_end: JobEnd, ranks: int) -> str:
    """The message for the script's own failure on N ranks; "" without one."""
    ends = {rank.number: rank.ended for rank in trace.ranks if rank.ended is not None}
    silent = {number: end for number, end in ends.items() if end.reason == "silent"}
    if silent:
        stood = "; ".join(f"rank {number} in {end.where or 'a library'}" for number, end in silent.items())
        return f"The script stood still for {next(iter(silent.values())).message}: {stood}."
    unfinished = [rank.number for rank in trace.ranks if rank.ended is None]
    finished = [number for number, end in ends.items() if end.reason != "failed"]
    numbers = ", ".join(map(str, unfinished))
    if unfinished and finished:
        return (
            f"The script ended on rank {', '.join(map(str, finished))} and waited for ever on rank {numbers}: the "
            "ranks do not do the same number of collectives."
        )
    if (cause := job_end.cause) is not None:
        text = cause.traceback.rstrip() or cause.message
        return f"The script itself failed, on rank {cause.rank} of {ranks}:\n{text}"
    if unfinished:
        return f"The script ended without a message on {plural(len(unfinished), 'rank')}: {numbers}."
    return ""
