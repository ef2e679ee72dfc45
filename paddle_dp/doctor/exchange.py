"""Runs a real exchange between real ranks, started by Paddle's launcher like a training."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.doctor.rank import first_sum
from paddle_dp.errors import EndedError
from paddle_dp.launch import logs
from paddle_dp.launch.attempts import watched
from paddle_dp.launch.command import Limits, Plan, environment, launcher
from paddle_dp.launch.failures import Failure, in_a_line
from paddle_dp.launch.network import meet
from paddle_dp.launch.processes import recorded_signals
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.launch.supervisor import ExternalEvents
from paddle_dp.mesh.secret import proof, users_secret
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration

RANK = Path(__file__).with_name("rank.py")
NAME = "exchange"
ALONE, TOGETHER = 60.0, 300.0  # seconds for all ranks to start and finish: on one node, on several
WIDEST = 1.0  # seconds between two nodes' clocks


def run(plan: Plan) -> list[DoctorCheck]:
    """Starts the plan's ranks, lets them sum numbers, and reports the result. Raises EndedError on a signal."""
    if plan.ranks * plan.nodes == 1:
        return [DoctorCheck(NAME, "1 rank has no other to exchange with")]
    with scratch_folder("paddle-dp-doctor-") as folder:
        began = time.perf_counter()
        outcome = _start(plan, folder)
        seconds = time.perf_counter() - began
        report = folder / "report.json"
        if outcome == 0 and report.exists():
            return judged(json.loads(report.read_text()), plan, seconds)
        return [_failed(plan, outcome, folder)]


def _start(plan: Plan, folder: Path) -> Failure | int:
    watch = WatchSettings(start=Duration(TOGETHER if plan.nodes > 1 else ALONE))
    plan = replace(plan, limits=Limits(watch=watch, sample=0.0))
    if plan.nodes > 1:
        meeting = meet(str(plan.job.master), plan.node == 0)
        key = proof(users_secret(os.environ), meeting.master.encode())
        plan = replace(plan, meeting=replace(meeting, key=key))
    device = "auto" if plan.devices else "cpu"
    command = [*launcher(plan, folder), str(RANK), device, str(folder / "report.json")]
    with recorded_signals() as signals:
        outside = ExternalEvents(signals=signals)
        outcome, _ = watched(plan, folder, command, environment(plan, os.environ), outside)
    if signals.number:
        raise EndedError(signals.number)
    return outcome


def judged(report: dict[str, Any], plan: Plan, seconds: float) -> list[DoctorCheck]:
    """Returns the checks for a rank's report (rank.py)."""
    ranks_text = f"{report['ranks']} ranks" + (f" on {plan.nodes} nodes" if plan.nodes > 1 else "")
    speed = f"1 MB summed in {1e3 * report['seconds']:.1f} ms"
    detail = (
        f"{ranks_text} by {report['library']} on {report['device']}: {speed}, after {seconds:.1f} s in all"
    )
    findings = [DoctorCheck(NAME, detail)]
    if report["wrong"]:
        wrong = ", ".join(f"{rank} ({report['hosts'][rank]})" for rank in report["wrong"])
        todo = "Memory or network of that machine give wrong numbers: test both before you train on it."
        findings = [DoctorCheck(NAME, f"wrong sums on rank {wrong}", "mend", todo)]
    return [*findings, _clocks(report, plan.ranks)] if plan.nodes > 1 else findings


def _clocks(report: dict[str, Any], each: int) -> DoctorCheck:
    """Checks how far the nodes' clocks differ; a node has `each` ranks."""
    rank, skew = max(enumerate(report["skews"]), key=lambda pair: abs(pair[1]))
    farthest, first = (f"node {n // each} ({report['hosts'][n]})" for n in (rank, 0))
    detail = f"{farthest} is {skew:+.3f} s from {first}, the farthest" if skew else "all nodes agree"
    if abs(skew) > WIDEST:
        todo = "Logs and the first cause of a failure are ordered by the clock: let all nodes follow a time server."
        return DoctorCheck("clocks", detail, "look", todo)
    return DoctorCheck("clocks", detail)


def _failed(plan: Plan, outcome: Failure | int, folder: Path) -> DoctorCheck:
    ranks = plan.ranks * plan.nodes
    if isinstance(outcome, Failure):
        ended_from_outside = outcome.kind.startswith(("SIG", "signal", "left"))
        first, output = in_a_line(outcome, ranks), outcome.traceback if ended_from_outside else ""
    else:
        first, output = f"the launcher ended with {outcome}", logs.tail(folder / "launcher.log", 6)
    lines = [line for line in output.splitlines() if line.strip()][-6:]
    detail = f"{ranks} ranks could not exchange anything"
    if first_sum(folder).exists():
        detail = f"{ranks} ranks added up numbers, and failed later"
    return DoctorCheck(NAME, detail, "mend", "\n".join([first, *lines]))
