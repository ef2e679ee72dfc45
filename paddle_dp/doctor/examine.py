"""Runs every check in order; prints each result at once, or all as JSON."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.doctor import exchange, machine, network
from paddle_dp.doctor.finding import DoctorCheck, as_json, is_well, summary
from paddle_dp.launch.command import Plan
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.plan import plan_of

WIDEST = 100  # columns


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job to run here: `ranks` on each of `nodes`, with its run folder in `folder`."""

    ranks: int = 2
    nodes: int = 1
    master: str | None = None
    node_rank: int | None = None
    folder: Path = Path("runs")


def examine(
    planned: PlannedJob, print_line: Callable[[str], object] | None = print, json: bool = False
) -> int:
    """Examines this machine and returns the exit status: 0, or 1 if something must be mended.

    Raises UsageError for a contradictory job, EndedError when a signal ended it.
    """
    findings: list[DoctorCheck] = []
    width = min(shutil.get_terminal_size().columns, WIDEST)
    here = Machine.here()
    plan = plan_for(planned, here)
    for finding in checks(planned, plan, os.environ):
        findings.append(finding)
        if print_line and not json:
            print_line("\n".join(finding.lines(width)))
    if print_line:
        print_line(as_json(findings) if json else summary(findings))
    return 0 if is_well(findings) else 1


def checks(planned: PlannedJob, plan: Plan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Yields all checks, quick ones first. Ranks are started only if nothing but the run folder is to be mended."""
    well = True
    for finding in _quick(planned, plan, variables):
        well = well and (finding.state != "mend" or finding.name == machine.FOLDER)
        yield finding
    if well:
        yield from exchange.run(plan)
    else:
        yield DoctorCheck(name="exchange", found="not tried", state="look", todo="Mend the others first.")


def _quick(planned: PlannedJob, plan: Plan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    here = plan.machine
    nodes = network.Nodes(nodes=plan.nodes, master=planned.master, node_rank=planned.node_rank)
    yield machine.paddle()
    yield machine.device(here, variables)
    yield machine.threads(here.cores, planned.ranks, variables)
    yield machine.memory(available_memory(), planned.ranks)
    yield machine.shared_memory(plan.kind == "gpu")
    yield machine.open_files(planned.ranks)
    yield from machine.disk(planned.folder)
    yield network.host_name(nodes.is_multi_node)
    yield network.interface(nodes, variables)
    yield network.ports()


def plan_for(planned: PlannedJob, here: Machine) -> Plan:
    """Returns the plan of the doctor's job: on devices if there are enough for all ranks, else on the CPU."""
    job = exchange.job(planned.ranks, planned.nodes, planned.master, planned.node_rank)
    return plan_of(job, here, "auto" if len(here.devices) >= planned.ranks else "cpu")
