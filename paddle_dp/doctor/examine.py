"""The examination: every check in order, on the screen as it is known, or as JSON."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.doctor import exchange, machine, network
from paddle_dp.doctor.finding import Finding, as_json, is_well, summary
from paddle_dp.launch.command import Plan
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.plan import plan_of

WIDEST = 100  # columns


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The job that is meant to run here: `ranks` on each of `nodes`, with its run folder in `folder`."""

    ranks: int = 2
    nodes: int = 1
    master: str | None = None
    node_rank: int | None = None
    folder: Path = Path("runs")


def examine(asked: Asked, say: Callable[[str], object] | None = print, json: bool = False) -> int:
    """Examines this machine and returns the exit status: 0, or 1 where something has to be mended.

    Raises UsageError where what is asked contradicts itself, EndedError when a signal ended it.
    """
    findings: list[Finding] = []
    width = min(shutil.get_terminal_size().columns, WIDEST)
    here = Machine.here()
    plan = plan_for(asked, here)
    for finding in checks(asked, plan, os.environ):
        findings.append(finding)
        if say and not json:
            say("\n".join(finding.lines(width)))
    if say:
        say(as_json(findings) if json else summary(findings))
    return 0 if is_well(findings) else 1


def checks(asked: Asked, plan: Plan, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is examined, the quick things first; ranks are started only where nothing is to be mended."""
    well = True
    for finding in _quick(asked, plan, variables):
        well = well and (finding.state != "mend" or finding.name == machine.FOLDER)
        yield finding
    if well:
        yield from exchange.run(plan)
    else:
        yield Finding(name="exchange", found="not tried", state="look", todo="Mend the others first.")


def _quick(asked: Asked, plan: Plan, variables: Mapping[str, str]) -> Iterator[Finding]:
    here = plan.machine
    nodes = network.Nodes(nodes=plan.nodes, master=asked.master, node_rank=asked.node_rank)
    yield machine.paddle()
    yield machine.device(here, variables)
    yield machine.threads(here.cores, asked.ranks, variables)
    yield machine.memory(available_memory(), asked.ranks)
    yield machine.shared_memory(plan.kind == "gpu")
    yield machine.open_files(asked.ranks)
    yield from machine.disk(asked.folder)
    yield network.host_name(nodes.several)
    yield network.interface(nodes, variables)
    yield network.ports()


def plan_for(asked: Asked, here: Machine) -> Plan:
    """The doctor's own job: on devices if there are as many as ranks, else on the CPU."""
    job = exchange.job(asked.ranks, asked.nodes, asked.master, asked.node_rank)
    return plan_of(job, here, "auto" if len(here.devices) >= asked.ranks else "cpu")
