"""Runs every check in order, at last an exchange between real ranks; prints each result at once, or all as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paddle_dp.doctor import machine
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.doctor.rank import first_sum
from paddle_dp.launch import logs
from paddle_dp.launch.attempts import run_command
from paddle_dp.launch.command import Job, LaunchPlan, Limits, environment, launcher
from paddle_dp.launch.failures import in_a_line
from paddle_dp.launch.machine import Machine, available_memory
from paddle_dp.launch.network import meet
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.launch.supervisor import JobEnd
from paddle_dp.mesh.secret import code_of, users_secret
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration

RANK = Path(__file__).with_name("rank.py")
ALONE, TOGETHER = 60.0, 300.0  # seconds for all ranks to start and finish: on one node, on several
MAX_SKEW = 1.0  # seconds between two nodes' clocks


def examine(job: Job, as_json: bool = False) -> int:
    """Examines this machine for `job`, of which only ranks, nodes and folder count; returns the exit status.

    0, or 1 if something must be mended. Raises UsageError for a contradictory job, EndedError when a signal ended it.
    """
    findings: list[DoctorCheck] = []
    for finding in checks(plan_for(job, Machine.here()), os.environ):
        findings.append(finding)
        if not as_json:
            finding.show()
    well = is_well(findings)
    if as_json:
        print(json.dumps({"ok": well, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(summary(findings))
    return 0 if well else 1


def plan_for(job: Job, here: Machine) -> LaunchPlan:
    """Returns the plan of the doctor's job: on devices if there are enough for all ranks, else on the CPU."""
    ranks = job.ranks or 1
    if (job.nodes or 1) <= 1:
        job = replace(job, nodes=None, master=None, node_rank=None)
    return plan_of(job, here, "auto" if len(here.devices) >= ranks else "cpu")


def checks(plan: LaunchPlan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Yields all checks, quick ones first. Ranks are started only if nothing but the run folder is to be mended."""
    well = True
    for finding in _quick(plan, variables):
        well = well and (finding.state != "mend" or finding.name == machine.FOLDER)
        yield finding
    if well:
        yield from exchange(plan)
    else:
        yield DoctorCheck("exchange", "not tried", "look", "Mend the others first.")


def _quick(plan: LaunchPlan, variables: Mapping[str, str]) -> Iterator[DoctorCheck]:
    yield machine.paddle()
    yield machine.device(plan.machine, variables)
    yield machine.threads(plan.machine.cores, plan.ranks, variables)
    yield machine.memory(available_memory(), plan.ranks)
    yield machine.shared_memory(plan.kind == "gpu")
    yield machine.open_files(plan.ranks)
    yield from machine.disk(Path(plan.job.output_dir or "runs"))
    yield machine.host_name(plan.nodes > 1)
    yield machine.interface(plan.job, variables)
    if plan.nodes > 1:
        yield machine.congestion_control()
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


def exchange(plan: LaunchPlan) -> list[DoctorCheck]:
    """Starts the plan's ranks, lets them sum numbers, and reports the result. Raises EndedError on a signal."""
    if plan.all_ranks == 1:
        return [DoctorCheck("exchange", "1 rank has no other to exchange with")]
    with scratch_folder("paddle-dp-doctor-") as folder:
        began = time.perf_counter()
        job_end = _start(plan, folder)
        seconds = time.perf_counter() - began
        report = folder / "report.json"
        if job_end == JobEnd() and report.exists():
            return judged(json.loads(report.read_text()), plan, seconds)
        return [_failed(plan, job_end, folder)]


def _start(plan: LaunchPlan, folder: Path) -> JobEnd:
    watch = WatchSettings(start=Duration(TOGETHER if plan.nodes > 1 else ALONE))
    plan = replace(plan, limits=Limits(watch=watch, sample_seconds=0.0))
    if plan.nodes > 1:
        meeting = meet(str(plan.job.master), plan.node == 0)
        key = code_of(users_secret(os.environ), meeting.master.encode())
        plan = replace(plan, meeting=replace(meeting, key=key))
    device = "auto" if plan.devices else "cpu"
    command = [*launcher(plan, folder), str(RANK), device, str(folder / "report.json")]
    return run_command(plan, folder, command, environment(plan, os.environ))


def judged(report: dict[str, Any], plan: LaunchPlan, seconds: float) -> list[DoctorCheck]:
    """Returns the checks for a rank's report (rank.py)."""
    ranks_text = f"{report['ranks']} ranks" + (f" on {plan.nodes} nodes" if plan.nodes > 1 else "")
    speed = f"1 MB summed in {1e3 * report['seconds']:.1f} ms"
    detail = (
        f"{ranks_text} by {report['library']} on {report['device']}: {speed}, after {seconds:.1f} s in all"
    )
    findings = [DoctorCheck("exchange", detail)]
    if report["wrong"]:
        wrong = ", ".join(f"{rank} ({report['hosts'][rank]})" for rank in report["wrong"])
        todo = "Memory or network of that machine give wrong numbers: test both before you train on it."
        findings = [DoctorCheck("exchange", f"wrong sums on rank {wrong}", "mend", todo)]
    return [*findings, _clocks(report, plan.ranks)] if plan.nodes > 1 else findings


def _clocks(report: dict[str, Any], each: int) -> DoctorCheck:
    """Checks how far the nodes' clocks differ; a node has `each` ranks."""
    rank, skew = max(enumerate(report["skews"]), key=lambda pair: abs(pair[1]))
    farthest, first = (f"node {n // each} ({report['hosts'][n]})" for n in (rank, 0))
    apart = f"{farthest} is {skew:+.3f} s from {first}, the farthest"
    detail = apart if round(skew, 3) else "all nodes agree"
    if abs(skew) > MAX_SKEW:
        todo = "Logs and the first cause of a failure are ordered by the clock: let all nodes follow a time server."
        return DoctorCheck("clocks", detail, "look", todo)
    return DoctorCheck("clocks", detail)


def _failed(plan: LaunchPlan, job_end: JobEnd, folder: Path) -> DoctorCheck:
    ranks = plan.all_ranks
    if (cause := job_end.cause) is not None:
        first, output = in_a_line(cause, ranks), cause.traceback if cause.ended_without_error else ""
    else:
        first, output = f"the launcher ended with {job_end.status}", logs.tail(folder / "launcher.log", 6)
    lines = [line for line in output.splitlines() if line.strip()][-6:]
    detail = f"{ranks} ranks could not exchange anything"
    if first_sum(folder).exists():
        detail = f"{ranks} ranks added up numbers, and failed later"
    return DoctorCheck("exchange", detail, "mend", "\n".join([first, *lines]))
