"""Runs every check in order; prints each result at once, or all as JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paddle_dp.doctor import exchange, machine
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.launch.command import Job, Plan
from paddle_dp.launch.machine import Machine, available_memory
from paddle_dp.launch.plan import plan_of

WIDEST = 100  # columns


def examine(job: Job, as_json: bool = False) -> int:
    """Examines this machine for `job`, of which only ranks, nodes and folder count; returns the exit status.

    0, or 1 if something must be mended. Raises UsageError for a contradictory job, EndedError when a signal ended it.
    """
    findings: list[DoctorCheck] = []
    width = min(shutil.get_terminal_size().columns, WIDEST)
    for finding in checks(plan_for(job, Machine.here()), os.environ):
        findings.append(finding)
        if not as_json:
            print("\n".join(finding.lines(width)))
    well = is_well(findings)
    if as_json:
        print(json.dumps({"ok": well, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(summary(findings))
    return 0 if well else 1


def plan_for(job: Job, here: Machine) -> Plan:
    """Returns the plan of the doctor's job: on devices if there are enough for all ranks, else on the CPU."""
    ranks = job.ranks or 1
    if (job.nodes or 1) <= 1:
        job = replace(job, nodes=None, master=None, node_rank=None)
    return plan_of(job, here, "auto" if len(here.devices) >= ranks else "cpu")


def checks(plan: Plan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Yields all checks, quick ones first. Ranks are started only if nothing but the run folder is to be mended."""
    well = True
    for finding in _quick(plan, variables):
        well = well and (finding.state != "mend" or finding.name == machine.FOLDER)
        yield finding
    if well:
        yield from exchange.run(plan)
    else:
        yield DoctorCheck("exchange", "not tried", "look", "Mend the others first.")


def _quick(plan: Plan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    yield machine.paddle()
    yield machine.device(plan.machine, variables)
    yield machine.threads(plan.machine.cores, plan.ranks, variables)
    yield machine.memory(available_memory(), plan.ranks)
    yield machine.shared_memory(plan.kind == "gpu")
    yield machine.open_files(plan.ranks)
    yield from machine.disk(Path(plan.job.output_dir or "runs"))
    yield machine.host_name(plan.nodes > 1)
    yield machine.interface(plan.job, variables)
    yield machine.ports()


def summary(findings: Sequence[DoctorCheck]) -> str:
    """Returns the last line of the screen."""
    wrong = [finding.name for finding in findings if finding.state == "mend"]
    odd = [finding.name for finding in findings if finding.state == "look"]
    if wrong:
        return f"{len(wrong)} to mend before a training starts here: {', '.join(wrong)}"
    return "ready" + (f"; look at {', '.join(odd)}" if odd else "")


def is_well(findings: Sequence[DoctorCheck]) -> bool:
    return not any(finding.state == "mend" for finding in findings)
