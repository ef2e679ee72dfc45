"""Runs any script for paddle.distributed.launch as a supervised job: `paddle-dp launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.launch import attempts, logs
from paddle_dp.launch.command import Job, Limits, Plan
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.network import check_loopback
from paddle_dp.launch.plan import check_memory, plan_of
from paddle_dp.launch.sizes import equal

SAMPLE = 120.0  # seconds that one sample may take, the default of a recipe's loader.timeout


def run(job: Job, machine: Machine, inherited: Mapping[str, str]) -> int:
    """Runs the job's script on all its ranks; returns the exit status. Raises UsageError if it cannot run."""
    from paddle_dp.recipe.schema import WatchSettings

    name = _name(job.script)
    plan = plan_of(job, machine)
    plan = replace(plan, limits=Limits(watch=WatchSettings(), sample=SAMPLE, nodes=plan.nodes))
    check_memory(plan, available_memory())
    if plan.nodes == 1:
        check_loopback()
    # Not runs/<script>: a Trainer in the script may have its run there, and move an older one aside.
    folder = Path(job.output_dir or Path("runs") / f"{name}.launch")
    if plan.nodes > 1:
        return _on_nodes(plan, folder, inherited)
    opened, attempt = _opened(plan, folder)
    return attempts.run(lambda history: opened, attempt, inherited)


def _name(arguments: tuple[str, ...]) -> str:
    """Returns the name of the run's folder. Raises UsageError if there is no such script or module."""
    if arguments[0] != "-m":
        path = Path(arguments[0])
        if not path.is_file():
            raise UsageError(f"{path}: there is no such script.")
        if path.suffix in (".yaml", ".yml"):
            raise UsageError(f"{path} is a recipe, not a script: paddle-dp train {path}")
        return path.stem
    top, *_, last = [*arguments[1].split("."), arguments[1].rpartition(".")[2]]
    if find_spec(top) is None and not Path(top).is_dir() and not Path(f"{top}.py").is_file():
        raise UsageError(f"-m {arguments[1]}: there is no module '{top}' here, and none is installed.")
    return last


def _opened(plan: Plan, folder: Path) -> tuple[Plan, Path]:
    """Returns the plan with the time of its start, and a new folder for its first attempt's logs."""
    node = plan.job.node_rank
    attempt = logs.fresh(folder.with_name(f"{folder.name}.node-{node}") if node else folder)
    return replace(plan, began=attempt.stat().st_mtime), attempt


def _on_nodes(plan: Plan, folder: Path, inherited: Mapping[str, str]) -> int:
    from paddle_dp.launch.nodes import job as nodes
    from paddle_dp.launch.nodes.rendezvous import NodeLimits

    assert plan.limits is not None
    node_job = nodes.NodeJob(
        plan=plan, limits=NodeLimits.from_watch(plan.limits.watch, plan.nodes, plan.nodes), sizes=equal,
        open=lambda goes_on: _opened(plan, folder), offered=lambda: plan, inherited=inherited,
    )  # fmt: skip
    return nodes.run(node_job)
