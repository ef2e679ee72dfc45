"""Starts ranks directly from this process, for jobs with servers.

Paddle's launcher gives a device to each rank, and ends all ranks when one has died. A server needs no device, and a
worker may be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from paddle_dp.launch.command import RECIPE_RANK, LaunchPlan, rank_arguments
from paddle_dp.launch.logs import rank_log
from paddle_dp.launch.machine import visible_in
from paddle_dp.launch.prepared_ranks import launched
from paddle_dp.launch.processes import alive, child_options, descendants, exit_of


class RankLauncher:
    """The starter of this node's ranks, for the supervisor, as `rank_monitor.Launcher` is Paddle's."""

    def __init__(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path):
        arguments = [sys.executable, "-u", str(RECIPE_RANK), *rank_arguments(plan)]
        self._ranks: dict[int, Popen[bytes]] = {}
        rank_variables = environments(plan, variables, attempt)
        for local_rank, (rank, rank_env) in enumerate(zip(plan.numbers, rank_variables, strict=True)):
            with rank_log(attempt, local_rank).open("ab") as log:
                self._ranks[rank] = Popen(
                    arguments, env=rank_env, stdin=DEVNULL, stdout=log, stderr=STDOUT, **child_options()
                )
        self.pid = next(iter(self._ranks.values())).pid

    def ranks(self) -> Mapping[int, int]:
        """Returns the pid of each rank."""
        return {rank: process.pid for rank, process in self._ranks.items()}

    def left(self) -> list[int]:
        """Returns the pids of living ranks and their living descendants."""
        pids = [process.pid for process in self._ranks.values()]
        return [each for pid in pids for each in (*descendants(pid), pid) if alive(each)]

    def poll(self) -> int | None:
        """Returns None while a rank lives, then 0: exit codes stay visible in /proc, as it waits for no rank."""
        return 0 if all(exit_of(process.pid)[0] for process in self._ranks.values()) else None

    def wait(self) -> None:
        """Waits for the ranks; the system then forgets their exit codes."""
        for process in self._ranks.values():
            process.wait()


def environments(plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> list[dict[str, str]]:
    """Returns the variables of each rank of this node, like Paddle's launcher; only workers get devices."""
    launched_envs = launched(plan.ranks, variables, attempt)
    rank_variables = []
    for local_rank, rank_env in enumerate(launched_envs):
        if plan.meeting is not None:
            endpoint = f"{plan.meeting.host}:{rank_env['PADDLE_CURRENT_ENDPOINT'].rpartition(':')[2]}"
            number, ranks = str(plan.numbers[local_rank]), str(plan.all_ranks)
            rank_env |= {"PADDLE_MASTER": plan.meeting.master, "PADDLE_NNODES": str(plan.nodes)}
            rank_env |= {"PADDLE_TRAINER_ID": number, "PADDLE_GLOBAL_RANK": number}
            rank_env |= {"PADDLE_TRAINERS_NUM": ranks, "PADDLE_GLOBAL_SIZE": ranks}
            rank_env |= {"PADDLE_CURRENT_ENDPOINT": endpoint, "PADDLE_TRAINER_ENDPOINTS": endpoint}
        rank_variables.append({**variables, **rank_env, **_device(plan, local_rank)})
    return rank_variables


def _device(plan: LaunchPlan, local_rank: int) -> dict[str, str]:
    """Returns the variables that select the device of a local rank: no device for a server."""
    if not plan.devices:
        return {}
    if local_rank < plan.servers_here:
        return {visible_in(plan.kind) if plan.kind in ("gpu", "xpu") else "CUSTOM_DEVICE_ROOT": ""}
    device = plan.devices[local_rank - plan.servers_here]
    return {f"FLAGS_selected_{plan.kind}s": str(plan.machine.devices.index(device))}
