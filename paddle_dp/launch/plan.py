"""Turns a Job into a Plan for this machine, or refuses it with one sentence before anything starts."""

from __future__ import annotations

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job, Plan
from paddle_dp.launch.machine import Machine


def plan_of(job: Job, machine: Machine, device: str = "auto") -> Plan:
    """The plan of the job on this machine; `device` is the recipe's train.device: auto, cpu or gpu.

    Raises UsageError if the job contradicts itself or asks for devices that are not here.
    """
    nodes = _nodes(job)
    check_ranks(job.ranks)
    if job.devices is not None:
        gpus = _devices(job, job.devices, machine, device)
        return Plan(job=job, machine=machine, ranks=len(gpus), nodes=nodes, gpus=gpus)
    if device == "gpu" and not machine.gpus:
        reason = "sees no GPU here" if machine.cuda else "has no GPU support (it is the CPU package)"
        raise UsageError(
            f"train.device is gpu, but the installed paddle {reason}. Set train.device=cpu or auto."
        )
    if device == "cpu" or not machine.gpus:
        return Plan(job=job, machine=machine, ranks=job.ranks or 1, nodes=nodes)
    ranks = job.ranks or len(machine.gpus)
    if ranks > len(machine.gpus):
        raise UsageError(
            f"--ranks {ranks}: only {len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)} can be seen here "
            f"({','.join(machine.gpus)}), and each rank takes one. Set train.device=cpu to use the processor instead."
        )
    return Plan(job=job, machine=machine, ranks=ranks, nodes=nodes, gpus=machine.gpus[:ranks])


def check_ranks(ranks: int | None) -> None:
    """Raises UsageError for fewer ranks than 1."""
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: a job has 1 rank or more.")


def _devices(job: Job, devices: tuple[int, ...], machine: Machine, device: str) -> tuple[str, ...]:
    names = tuple(map(str, devices))
    given = f"--devices {','.join(names)}"
    if not names or len(set(names)) < len(names):
        raise UsageError(f"{given}: name each GPU once, at least one.")
    if job.ranks not in (None, len(names)):
        raise UsageError(
            f"{given} means {len(names)} ranks, but --ranks says {job.ranks}. Leave one of the two out."
        )
    if device == "cpu":
        raise UsageError(
            f"{given} names GPUs, but train.device is cpu. Use --ranks N, or set train.device=auto."
        )
    if not machine.cuda:
        raise UsageError(
            f"{given} names GPUs, but the installed paddle has no GPU support (it is the CPU package). "
            f"For {len(names)} processes on the CPU: --ranks {len(names)}."
        )
    if missing := [name for name in names if name not in machine.gpus]:
        seen = ",".join(machine.gpus) or "none"
        raise UsageError(f"{given}: there is no GPU {','.join(missing)} here. Visible are: {seen}.")
    return names


def _nodes(job: Job) -> int:
    """The number of nodes. Raises UsageError where --nodes, --master and --node-rank do not fit together."""
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
        found = "is missing" if job.node_rank is None else f"is {job.node_rank}"
        raise UsageError(
            f"--node-rank {found}: with --nodes {nodes} it is 0 on the master, up to {nodes - 1}."
        )
    return nodes
