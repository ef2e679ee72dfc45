"""Turns a Job into a LaunchPlan for this machine, or refuses it with one sentence before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job, LaunchPlan
from paddle_dp.launch.machine import Machine, spoken
from paddle_dp.text import gigabytes, plural

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

# Private bytes of a process that has imported Paddle 3.3.1 (135 MB, by smaps_rollup).
RANK = 128 << 20


@dataclass(frozen=True)
class RankDevices:
    """The number of `devices` of each rank; `fewer` ends the message for too few visible ones.

    The job's first `servers` ranks need no device. `known` is false before the recipe has been read: any number of
    devices suffices then.
    """

    devices: int = 1
    fewer: str = "each rank takes one"
    servers: int = 0
    known: bool = True


def plan_of(
    job: Job, machine: Machine, device: str = "auto", each: RankDevices = RankDevices()
) -> LaunchPlan:
    """Returns the plan of the job on this machine; `device` is the recipe's train.device.

    A strategy with several devices for `each` rank has one rank by default. Raises UsageError if the job contradicts
    itself or asks for missing devices.
    """
    _check_least("--ranks", job.least_ranks, job.ranks)
    _check_least("--nodes", job.least_nodes, job.nodes)
    nodes = _nodes(job)
    check_ranks(job.ranks)
    if each.devices > 1 and job.elastic:
        raise UsageError(
            f"--ranks MIN:MAX lets ranks come and go, and {each.fewer}. Leave out MIN: in --ranks and --nodes."
        )
    if job.restarts < 0:
        raise UsageError(f"--restarts {job.restarts}: give the number of restarts, 0 or more.")
    ranks, node = job.ranks or 1, job.node_rank or 0
    plan = LaunchPlan(job=job, machine=machine, ranks=ranks, nodes=nodes, node=node, servers=each.servers)
    if job.devices is not None:
        devices = _devices(plan, job.devices, device, each)
        ranks = job.ranks or _local_ranks(plan, len(devices) // each.devices)
        return replace(plan, ranks=ranks, devices=devices)
    if device not in ("auto", "cpu") and not (device == machine.kind and machine.devices):
        raise UsageError(_not_here(device, machine))
    if device == "cpu" or not machine.devices:
        return plan
    ranks = job.ranks or (_local_ranks(plan, len(machine.devices)) if each.devices == 1 else 1)
    plan = replace(plan, ranks=ranks)
    workers = (job.least_ranks or ranks) - plan.servers_here
    if each.known and workers * each.devices > len(machine.devices):
        available = plural(len(machine.devices), spoken(machine.kind))
        raise UsageError(
            f"--ranks {ranks}: only {available} can be seen here ({','.join(machine.devices)}), and {each.fewer}. "
            "Set train.device=cpu to use the processor instead."
        )
    return replace(plan, devices=machine.devices[: (ranks - plan.servers_here) * each.devices])


def recipe_plan(job: Job, machine: Machine, recipe: Recipe) -> LaunchPlan:
    """Returns the plan of a recipe's job, with devices for its strategy. Raises UsageError as `plan_of`."""
    strategy = recipe.strategy.config
    each = RankDevices(strategy.accelerators, strategy.with_fewer, strategy.servers)
    return plan_of(job, machine, recipe.train.device, each)


def _local_ranks(plan: LaunchPlan, computing: int) -> int:
    """Returns the number of this node's ranks, of which `computing` have devices: all servers are on node 0."""
    return computing + (plan.servers if plan.node == 0 else 0)


def _check_least(option: str, least: int | None, most: int | None) -> None:
    if least is not None and not 1 <= least <= (most or 0):
        raise UsageError(f"{option} {least}:{most}: give MIN:MAX, with MIN from 1 to MAX.")


def _not_here(device: str, machine: Machine) -> str:
    name = spoken(device)
    if machine.kind == device:
        reason = f"sees no {name} here"
    elif machine.kind == "cpu":
        reason = f"has no {name} support (it is the CPU package)"
    else:
        reason = f"computes on {spoken(machine.kind)} {','.join(machine.devices)}".rstrip()
    return f"train.device is {device}, but the installed paddle {reason}. Set train.device=cpu or auto."


def check_ranks(ranks: int | None) -> None:
    """Raises UsageError for fewer ranks than 1."""
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: a job has 1 rank or more.")


def check_memory(plan: LaunchPlan, available: int | None) -> None:
    """Raises UsageError if the machine's `available` memory (bytes; None: unknown) does not suffice to start the ranks,
    and the processes that wait for a restart with Paddle imported (prepared_ranks.py).

    The kernel would otherwise end one of them, or another program.
    """
    spares = max(plan.ranks, plan.job.ranks or 0) if plan.job.spares else 0
    waiting = spares or int(plan.job.restarts > 0)
    needed = (plan.ranks + waiting) * RANK
    if plan.devices or plan.ranks == 1 or available is None or needed <= available:
        return
    most = available // RANK // 2 if spares else available // RANK - waiting
    wait, advice = "", f"Set --ranks to {max(1, most)} at most"
    if waiting:
        others = f"do the {spares} that wait" if spares else "does the launcher that waits"
        wait = f", as {others} for a restart"
        advice += f", leave out --{'spares' if spares else 'restarts'}"
    raise UsageError(
        f"--ranks {plan.ranks}: each rank on a CPU is a process that takes {RANK >> 20} MB before there is a model"
        f"{wait}, {gigabytes(needed)} together, and {gigabytes(available)} are available here. {advice}, or spread "
        "them over --nodes."
    )


def _devices(plan: LaunchPlan, devices: tuple[int, ...], device: str, each: RankDevices) -> tuple[str, ...]:
    """Returns the names of `--devices`. Raises UsageError unless they are here and fit the recipe and --ranks."""
    names, machine, requested = tuple(map(str, devices)), plan.machine, plan.job.ranks
    option, kind = f"--devices {','.join(names)}", "GPU" if machine.kind == "cpu" else spoken(machine.kind)
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{option}: name each {kind} once, at least one.")
    if len(names) % each.devices:
        raise UsageError(f"{option} names {len(names)}, and {each.fewer}.")
    ranks = len(names) // each.devices
    total = ranks + plan.servers_here
    if each.known and requested not in (None, total):
        servers = f" and {plan.servers_here} without a device (servers)" if plan.servers_here else ""
        raise UsageError(
            f"{option} means {plural(ranks, 'rank')}{servers}, but --ranks is {requested}. Leave one of the "
            "two out."
        )
    if device == "cpu":
        raise UsageError(
            f"{option} names {kind}s, but train.device is cpu. Use --ranks N, or set train.device=auto."
        )
    if device not in ("auto", machine.kind):
        raise UsageError(_not_here(device, machine))
    if machine.kind == "cpu":
        raise UsageError(
            f"{option} names GPUs, but the installed paddle has no GPU support (it is the CPU package). "
            f"On the CPU: --ranks {len(names)}."
        )
    if missing := [name for name in names if name not in machine.devices]:
        visible = ",".join(machine.devices) or "none"
        raise UsageError(f"{option}: there is no {kind} {','.join(missing)} here. Visible are: {visible}.")
    return names


def _nodes(job: Job) -> int:
    """Returns the number of nodes. Raises UsageError if --nodes, --master and --node-rank do not fit together."""
    nodes = 1 if job.nodes is None else job.nodes
    if nodes < 1:
        raise UsageError(f"--nodes {nodes}: a job runs on 1 node or more.")
    if nodes == 1:
        if job.master is not None or job.node_rank not in (None, 0):
            raise UsageError(
                "--master and --node-rank belong to a job on several nodes: give --nodes N as well."
            )
        return 1
    if job.master is None:
        raise UsageError(
            f"--nodes {nodes} needs --master HOST:PORT: an address of node 0 that all nodes can reach."
        )
    host, _, port = job.master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--master {job.master}: give it as HOST:PORT, for example 192.168.0.16:9701.")
    if job.node_rank is None or not 0 <= job.node_rank < nodes:
        problem = "is missing" if job.node_rank is None else f"is {job.node_rank}"
        raise UsageError(
            f"--node-rank {problem}: with --nodes {nodes} it is 0 on the master, up to {nodes - 1}."
        )
    return nodes
