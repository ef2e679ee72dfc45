"""The nodes of a job as a cluster's engine states them in the environment of its tasks, for `--nodes auto`.

| engine                 | nodes                    | this node's number   | node 0                         |
|------------------------|--------------------------|----------------------|--------------------------------|
| Slurm (srun)           | SLURM_STEP_NUM_NODES     | SLURM_NODEID         | the first of SLURM_STEP_NODELIST |
| Open MPI               | OMPI_COMM_WORLD_SIZE     | OMPI_COMM_WORLD_RANK | –                              |
| MPICH, Intel MPI       | PMI_SIZE                 | PMI_RANK             | –                              |
| Volcano (svc, env)     | VC_<TASK>_HOSTS          | VC_TASK_INDEX        | the first of VC_<TASK>_HOSTS   |
| Kubernetes Indexed Job | PADDLE_DP_NODES          | JOB_COMPLETION_INDEX | –                              |
| Kubeflow's PaddleJob   | PADDLE_NNODES            | end of HOSTNAME      | PADDLE_MASTER                  |

–: `--master` is needed. PADDLE_* variables may be leftovers of another job, so they count with `--nodes auto` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paddle_dp.errors import UsageError
from paddle_dp.text import plural

PORT = 29500  # where each node has another address
FIRST_PORT, PORTS = 20_000, 10_000  # below the ports that Linux gives to outgoing connections (from 32768)
_SHELLS = 0xFFFFFFF0  # Slurm's steps from here on are shells: salloc's on the first node is 0xFFFFFFFA


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes that an engine gives to a job. `master`: node 0's "HOST:PORT"; None if the engine does not say it.

    `tasks`: the number of tasks that it has started on these nodes together.
    """

    engine: str
    nodes: int
    node_rank: int
    master: str | None = None
    tasks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < max(self.nodes, self.tasks):  # several tasks on a node are refused later
            raise ValueError(f"number {self.node_rank} of {self.nodes} nodes")


_TASK_OPTION = {"Slurm": "--ntasks-per-node=1", "Open MPI": "--map-by ppr:1:node", "MPI": "-ppn 1"}


def allocation(variables: Mapping[str, str], leftovers: bool = False) -> Allocation | None:
    """Returns an engine's allocation, or None without an engine. `leftovers`: PADDLE_* variables count, too.

    Raises UsageError for variables that say nothing clear.
    """
    try:
        return _stated(variables, leftovers)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"the cluster's variables cannot be understood ({type(error).__name__}: {error}): give --nodes, "
            "--node-rank and --master."
        ) from error


def _stated(env: Mapping[str, str], leftovers: bool) -> Allocation | None:
    if "OMPI_COMM_WORLD_SIZE" in env:  # first: mpirun's daemons may be tasks of Slurm
        tasks, local_tasks = int(env["OMPI_COMM_WORLD_SIZE"]), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
        rank = int(env["OMPI_COMM_WORLD_RANK"])
        return Allocation(engine="Open MPI", nodes=-(-tasks // local_tasks), node_rank=rank, tasks=tasks)
    if "SLURM_STEP_NODELIST" in env and "SLURM_NODEID" in env and int(env.get("SLURM_STEP_ID", 0)) < _SHELLS:
        number = int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", 0))
        return Allocation(
            engine="Slurm", nodes=int(env["SLURM_STEP_NUM_NODES"]), node_rank=int(env["SLURM_NODEID"]),
            master=f"{first_host(env['SLURM_STEP_NODELIST'])}:{meeting_port(number)}",
            tasks=int(env["SLURM_STEP_NUM_TASKS"]),
        )  # fmt: skip
    if "PMI_SIZE" in env and "PMI_RANK" in env:
        tasks, local_tasks = int(env["PMI_SIZE"]), int(env.get("MPI_LOCALNRANKS", 1))
        return Allocation(
            engine="MPI", nodes=-(-tasks // local_tasks), node_rank=int(env["PMI_RANK"]), tasks=tasks
        )
    if "VC_TASK_INDEX" in env:
        lists = {env[name] for name in env if re.fullmatch(r"VC_\w+_HOSTS", name)}
        if len(lists) != 1:
            raise ValueError(f"Volcano names {len(lists)} lists of hosts, VC_<TASK>_HOSTS")
        hosts = lists.pop().split(",")
        master = f"{hosts[0]}:{PORT}"
        return Allocation(
            engine="Volcano", nodes=len(hosts), node_rank=int(env["VC_TASK_INDEX"]), master=master
        )
    if "JOB_COMPLETION_INDEX" in env and "PADDLE_DP_NODES" in env:
        nodes, index = int(env["PADDLE_DP_NODES"]), int(env["JOB_COMPLETION_INDEX"])
        return Allocation(engine="Kubernetes", nodes=nodes, node_rank=index)
    if leftovers and "PADDLE_NNODES" in env and "PADDLE_MASTER" in env:
        index = int(env["HOSTNAME"].rpartition("-")[2])
        nodes, master = int(env["PADDLE_NNODES"]), env["PADDLE_MASTER"]
        return Allocation(engine="PaddleJob", nodes=nodes, node_rank=index, master=master)
    return None


def meeting_port(number: int) -> int:
    """Returns the port at which the nodes of job `number` meet: jobs on one machine have different ones."""
    return FIRST_PORT + number % PORTS


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: "gpu[07-09,12],login" → "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        raise ValueError(f"no host in '{hosts}'")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def allocated(env: Mapping[str, str], master: str | None, node_rank: int | None) -> Allocation:
    """Returns the nodes for `--nodes auto`. An option `--master` counts more than the engine's.

    Raises UsageError without an engine, for several tasks on a node, if it does not name node 0, and for another
    `--node-rank` than the engine's.
    """
    stated = allocation(env, leftovers=True)
    if stated is None:
        index = " (JOB_COMPLETION_INDEX is set: set PADDLE_DP_NODES in the pod, too)"
        raise UsageError(
            "--nodes auto: the environment tells of no task of Slurm, MPI, Kubernetes, Volcano or PaddleJob"
            f"{index * ('JOB_COMPLETION_INDEX' in env)}. Start it by srun or mpirun, or give --nodes N, --node-rank R "
            "and --master HOST:PORT."
        )
    if stated.tasks > stated.nodes:
        raise UsageError(
            f"{stated.engine} has started {stated.tasks} tasks on {plural(stated.nodes, 'node')}, and paddle-dp starts "
            "the ranks of a node itself (--ranks): ask for one task on each node "
            f"({_TASK_OPTION.get(stated.engine, 'as its manual says')}), or give --nodes 1 if each is a separate job."
        )
    if node_rank not in (None, stated.node_rank):
        raise UsageError(
            f"--node-rank {node_rank} contradicts {stated.engine}, which says {stated.node_rank}: leave it out."
        )
    if stated.nodes > 1 and master is None and stated.master is None:
        raise UsageError(
            f"--nodes auto: {stated.engine} does not say where node 0 is: give --master HOST:PORT, an address of the "
            "node with number 0."
        )
    return replace(stated, master=master or stated.master)


def binding(env: Mapping[str, str], cores: int, processors: int) -> str:
    """Returns a sentence if Open MPI has bound this task to `cores` of a machine's `processors`, or "".

    All ranks and data workers inherit it. Open MPI 4 binds each of two tasks to one core, and of more to a socket.
    """
    if env.get("OMPI_MCA_orte_bound_at_launch") != "1" or cores >= processors:
        return ""
    return (
        f"Open MPI has bound this task, with all its ranks, to {cores} of {processors} processors: "
        "mpirun --bind-to none leaves it all of them."
    )


def refuse_parallel_tasks(env: Mapping[str, str], remedy: str) -> None:
    """Raises UsageError if an engine has started this command several times, and it does not know of the others: each
    would train alone, and write the same files. `remedy`: the advice at the end of the message."""
    stated = allocation(env)
    if stated is not None and max(stated.tasks, stated.nodes) > 1:
        times = f"{stated.tasks} times " if stated.tasks > stated.nodes else ""
        raise UsageError(
            f"{stated.engine} has started this command {times}on {plural(stated.nodes, 'node')}, and each would work "
            f"alone: {remedy}"
        )


def unused_nodes(env: Mapping[str, str]) -> str:
    """Returns a sentence if this command works on one node, and the environment tells of several: in the shell of a
    Slurm job, where no `srun` has started it, or by PADDLE_NNODES, which paddle.distributed.launch reads; or ""."""
    if allocation(env) is not None:
        return ""
    if (nodes := env.get("SLURM_JOB_NUM_NODES", "")).isdecimal() and int(nodes) > 1:
        return f"Slurm has given this job {nodes} nodes, and this command works on one: srun paddle-dp … --nodes auto"
    if (nodes := env.get("PADDLE_NNODES", "").rpartition(":")[2]).isdecimal() and int(nodes) > 1:
        return (
            f"PADDLE_NNODES={env['PADDLE_NNODES']} is set, and this command works on one node: give --nodes auto "
            f"in pods of a PaddleJob, else --nodes {nodes}, --node-rank and --master; --nodes 1 if it is left over"
        )
    return ""
