"""Makes the command line and the environment of a job's processes, as pure functions of a Job and a Machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.launch.machine import Machine, spoken
from paddle_dp.mesh import secret
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.text import plural

if TYPE_CHECKING:
    from paddle_dp.recipe.schema import WatchSettings

MODULE = "paddle.distributed.launch"  # Paddle's launcher
RECIPE_RANK = Path(__file__).with_name("recipe_rank.py")
SCRIPT_RANK = Path(__file__).with_name("script_rank.py")
# Variables that other jobs and shells may have left: Paddle's launcher prefers each of them to its arguments.
LEFTOVERS = (
    "PADDLE_", "FLAGS_selected_", "MASTER_ADDR", "MASTER_PORT", "POD_IP", "DISTRIBUTED_TRAINER_ENDPOINTS",
)  # fmt: skip
# On CPUs glibc returns every tensor of 128 KiB and more to the kernel, and gets the next one page by page: half of
# ResNet-18's page faults. With these variables it keeps them: 0.97 of a step's time, 0.93 of an MLP's, and 2 % more
# memory, or a third more with large_classifier on two ranks (2-core EPYC, Paddle 3.3.1). 32 MiB is glibc's largest
# threshold on 64 bits; larger tensors are still returned.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
# Variables for a job's ranks, and secrets between the nodes' processes, that a job within it must not inherit.
PRIVATE_VARIABLES = ("PADDLE_DP_TTY", secret.SECRET, secret.SECRET_FILE, secret.VARIABLE, MEMORY)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A requested job: an entry point, its recipe, and the processes that call it.

    `script` replaces both: the words after `python`. `ranks` counts processes on each node; None: one per given or
    visible GPU, or one on the CPU. `least_ranks` and `least_nodes` suffice when others are lost; None: all are needed.
    `output_dir` replaces the recipe's run folder. `resume` is None, "newest", "best", a step or a path. `extra` has
    more options for the entry point. `quiet` shows only failures. `spares`: processes wait for restarts.
    `ends_process`: this process ends with the job's status.
    """

    recipe: Path = Path()
    script: tuple[str, ...] = ()
    entry_point: str = "train"
    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    devices: tuple[int, ...] | None = None
    nodes: int | None = None
    master: str | None = None
    node_rank: int | None = None
    output_dir: Path | str | None = None
    resume: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False
    restarts: int = 0
    spares: bool = False
    ends_process: bool = field(default=False, compare=False)
    least_ranks: int | None = None
    least_nodes: int | None = None

    @property
    def elastic(self) -> bool:
        """True if the number of ranks may change."""
        return self.least_ranks is not None or self.least_nodes is not None

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """The overrides, and `output_dir` quoted so that YAML reads any path as a string."""
        if self.output_dir is None:
            return self.overrides
        return (*self.overrides, f"output_dir={json.dumps(str(self.output_dir), ensure_ascii=False)}")

    @property
    def options(self) -> dict[str, Any]:
        """The entry point's options, in addition to its recipe; JSON."""
        output_dir = None if self.output_dir is None else str(self.output_dir)
        return {"resume": self.resume, "output_dir": output_dir, **self.extra}


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The nodes' rendezvous: `master` is "IP:PORT", `host` this node's address.

    `key` is the secret of an attempt's ranks; with `seals` each message carries a code made with it.
    """

    master: str
    host: str
    interface: str | None = None
    key: bytes = field(default=b"", repr=False)
    seals: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank may make no progress: the recipe's `watch`, and the loader's seconds for one sample."""

    watch: WatchSettings
    sample_seconds: float


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A job that this machine can run: `ranks` processes on each of `nodes`, on `devices` or on the CPU.

    The first `servers` of all ranks need no device. `began` is its start, by the clock of the run folder's disk.
    `limits` define a standstill; None turns that watch off. `node` is this node's index; the nodes' launchers meet at
    `meeting`. `memory`: the folder in memory of the job's checkpoints, if the recipe keeps some there.
    """

    job: Job
    machine: Machine
    ranks: int
    nodes: int = 1
    devices: tuple[str, ...] = ()
    began: float = 0.0
    limits: Limits | None = None
    node: int = 0
    servers: int = 0
    meeting: Meeting | None = None
    memory: Path | None = None

    @property
    def numbers(self) -> range:
        """The ranks of this node."""
        return range(self.node * self.ranks, (self.node + 1) * self.ranks)

    @property
    def all_ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.ranks * self.nodes

    @property
    def kind(self) -> str:
        """The kind of device on which its ranks compute."""
        return self.machine.kind if self.devices else "cpu"

    @property
    def servers_here(self) -> int:
        """The number of servers among this node's ranks."""
        return min(max(self.servers - self.node * self.ranks, 0), self.ranks)

    @property
    def launches_ranks(self) -> bool:
        """True if this process starts each rank itself: Paddle's launcher gives all of them devices, and ends them when
        one has died. A server has no device, and a worker may die."""
        return self.servers > 0

    @property
    def alone(self) -> bool:
        """True if its one rank can be this process.

        A rank that may restart cannot, nor one with several devices: this process may see only the first of them.
        """
        job = self.job
        more = job.restarts or job.elastic or job.script or len(self.devices) > 1
        return self.all_ranks == 1 and not more

    @property
    def threads(self) -> int:
        return max(1, self.machine.cores // self.ranks)


def argv(plan: LaunchPlan, logs: Path) -> list[str]:
    """Returns the command that starts the plan's ranks on this node through Paddle's launcher."""
    begin = launcher(plan, logs)
    if plan.job.script:
        return [*begin, str(SCRIPT_RANK), *plan.job.script]
    return [*begin, str(RECIPE_RANK), *rank_arguments(plan)]


def rank_arguments(plan: LaunchPlan) -> list[str]:
    """Returns the arguments of each rank of a recipe."""
    arguments = ["-c", typed(plan.job.recipe), "--entry-point", plan.job.entry_point]
    for override in plan.job.all_overrides:
        arguments += ["-o", override]
    return arguments


def launcher(plan: LaunchPlan, logs: Path) -> list[str]:
    """Returns the launcher's part of that command, to be followed by a script and its arguments."""
    meeting = plan.meeting
    arguments = [sys.executable, "-u", "-m", MODULE, "--nproc_per_node", str(plan.ranks)]
    # All nodes need the same job id, and may count their log folders differently. Another job has another one: both may
    # have chosen one port, where launchers of both then meet.
    job_id = logs.name if meeting is None else secret.code_of(meeting.key, b"job id").hex()[:8]
    arguments += ["--log_dir", str(logs), "--job_id", job_id]
    if plan.devices:
        arguments += ["--devices", ",".join(plan.devices)]
    if meeting is not None:
        arguments += ["--nnodes", str(plan.nodes), "--master", meeting.master, "--rank", str(plan.node)]
        arguments += ["--host", meeting.host]
    else:  # other machines need no address of this one
        arguments += ["--host", "127.0.0.1"]
    return arguments


def typed(path: Path | str) -> str:
    """Writes a path so that the command line takes it neither for an option nor for KEY=VALUE."""
    argument = str(path)
    return f"./{argument}" if argument.startswith("-") or "=" in argument.split("/")[0] else argument


def settings(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a rank needs and `inherited` lacks; set them before importing paddle."""
    variables = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore"}
    if plan.nodes == 1:
        # Otherwise gloo would resolve the host's name, which may have no address.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if not plan.devices:
        variables["OMP_NUM_THREADS"] = str(plan.threads)
        variables |= MALLOC
    unwanted = inherited.get("PADDLE_DP_MKL", "").lower() in ("off", "0", "no", "false")
    if plan.machine.mkl_type and not unwanted:
        variables["MKL_DEBUG_CPU_TYPE"] = plan.machine.mkl_type
    return {name: value for name, value in variables.items() if name not in inherited}


def environment(plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the plan's processes: `inherited` without leftovers of other jobs, with `settings`."""
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in PRIVATE_VARIABLES and (name.startswith("PADDLE_DP_") or not name.startswith(LEFTOVERS))
    }
    variables |= settings(plan, variables)
    variables["PADDLE_DP_OPTIONS"] = json.dumps(plan.job.options)
    if plan.memory is not None:
        variables[MEMORY] = str(plan.memory)
    if plan.meeting is not None and plan.meeting.interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", plan.meeting.interface)
        # NCCL takes a name without "=" for a prefix.
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={plan.meeting.interface}")
    if plan.kind != "gpu":  # the launcher counts its words as devices, even on a CPU or an XPU, even ""
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    if not plan.devices:
        if plan.machine.kind == "gpu":
            # "all" hides every GPU from CUDA, and is the only word that the launcher does not count.
            variables["CUDA_VISIBLE_DEVICES"] = "" if plan.alone else "all"
        elif plan.machine.kind not in ("cpu", "xpu"):
            variables["CUSTOM_DEVICE_ROOT"] = ""  # Paddle loads no plugin then
    elif plan.alone and plan.kind == "gpu":
        variables["CUDA_VISIBLE_DEVICES"] = plan.devices[0]
    elif plan.alone:  # its index among the visible devices, as the launcher passes it
        variables[f"FLAGS_selected_{plan.kind}s"] = str(plan.machine.devices.index(plan.devices[0]))
    return variables


def headline(plan: LaunchPlan, variables: Mapping[str, str], folder: Path) -> str:
    """Returns the line printed at the start: ranks, threads and `folder`, the run folder."""
    ranks = plural(plan.ranks, "rank")
    if plan.nodes > 1:
        ranks = f"node {plan.job.node_rank} of {plan.nodes}, {ranks} here"
    threads = variables.get("OMP_NUM_THREADS")
    where = " ".join([spoken(plan.kind), *filter(None, [",".join(plan.devices)])])
    if plan.devices and plan.servers_here:
        ranks += f" ({plural(plan.servers_here, 'server')}, without a device)"
    items = [f"{ranks} on {where}"]
    if threads:
        items.append(f"{threads} thread{'s' * (threads != '1')}{' each' * (plan.ranks > 1)}")
    if plan.ranks > plan.machine.cores:
        items.append(f"they share {plural(plan.machine.cores, 'core')}, and take turns")
    return " · ".join([*items, str(folder)])
