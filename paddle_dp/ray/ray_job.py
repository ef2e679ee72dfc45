"""A training on several machines of a Ray cluster: a placement group, an actor a node, and the job's end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.launch import console
from paddle_dp.launch.batch_numbers import batch_numbers
from paddle_dp.launch.command import typed
from paddle_dp.launch.memory import refuse_memory
from paddle_dp.launch.network import free_port
from paddle_dp.launch.nodes.rendezvous import LOST_STATUS
from paddle_dp.launch.processes import Signals, child_options, recorded_signals
from paddle_dp.mesh.allocation import meeting_port
from paddle_dp.mesh.secret import SECRET
from paddle_dp.recipe import read_recipe
from paddle_dp.report.run_record import read_run

_LOOK = 1.0  # seconds between looks at the job and at signals
_SOON = 5.0  # seconds without room until a line reports it
_LINES = 30  # of a node's screen, kept for the cause of its end


@dataclass(frozen=True, kw_only=True)
class RayResult:
    """The end of a job.

    `status`: as of `paddle-dp train`, 0 done, 75 stopped with a checkpoint. `cause`: the first cause of a failure, ""
    without one. `replaced`: the nodes whose actors or processes were started again.
    """

    status: int
    cause: str
    folder: Path
    replaced: tuple[int, ...]


@dataclass(kw_only=True)
class _Reply:
    """How a node's process ended. `lost`: it was killed, or its actor was lost, for good."""

    status: int
    cause: str
    replaced: bool = False
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A recipe on `nodes` machines of a Ray cluster, with `ranks` processes on each.

    The recipe, its code and `output_dir` must have the same path on all machines. `cpus` and `gpus` are each
    node's; by default as many processors as ranks, and no GPU. Without `ranks` there is one for each GPU, or one.
    `restarts`: how often the ranks, each actor, and its process may start again. `spread` demands different machines.
    `wait`: seconds until the cluster must have room for all nodes, and as many until the first actor must have started.
    """

    recipe: str | Path = field(kw_only=False)
    settings: Sequence[str] = ()
    nodes: int = 2
    ranks: int = 0
    cpus: int = 0
    gpus: int = 0
    output_dir: str | Path | None = None
    restarts: int = 3
    resume: bool = False
    spread: bool = True
    wait: float = 300.0
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("ranks", 0), ("cpus", 0), ("gpus", 0), ("restarts", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"RayJob({name}={getattr(self, name)}): give {least} or more.")

    @property
    def ranks_of_node(self) -> int:
        return self.ranks or self.gpus or 1

    @property
    def resources(self) -> dict[str, float]:
        """The resources of each node, in Ray's words."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": float(self.cpus or self.ranks_of_node), **gpus}

    def arguments(self, node: int, master: str, folder: Path) -> list[str]:
        """The arguments of `paddle-dp` on a node. `master`: "HOST:PORT" of node 0."""
        arguments = ["train", typed(Path(self.recipe).resolve()), *self.settings]
        arguments += ["--ranks", str(self.ranks_of_node), "--output-dir", str(folder)]
        # One node, too: `srun`, if it has started the cluster, has left its variables, by which this is several tasks.
        arguments += ["--restarts", str(self.restarts), "--nodes", str(self.nodes)]
        if self.nodes > 1:
            arguments += ["--master", master, "--node-rank", str(node)]
        return [*arguments, "--resume=newest"] if self.resume else arguments

    def run(self) -> RayResult:
        """Runs the job to its end. SIGINT or SIGTERM stops it with a checkpoint.

        Raises UsageError for a recipe with mistakes, a layout that does not fit the ranks, or a cluster without room;
        InstallError without Ray.
        """
        ray = imported("RayJob")
        kind = "gpu" if self.gpus else "cpu"
        numbers = batch_numbers(Path(self.recipe), self.settings, self.ranks_of_node, self.nodes, kind)
        recipe = read_recipe(self.recipe, [*self.settings, *numbers.overrides])
        total = self.nodes * self.ranks_of_node
        recipe.strategy.refuse(recipe, total, kind)
        refuse_memory(recipe, self.restarts, self.nodes, "Give restarts=3, or leave it out.")
        folder = Path(self.output_dir or recipe.folder).expanduser().absolute()
        connect(ray)
        from ray.util import placement_group, remove_placement_group

        group = placement_group(
            [self.resources] * self.nodes, strategy="STRICT_SPREAD" if self.spread else "PACK"
        )
        try:
            with recorded_signals() as signals:
                if self._has_room(group, signals):
                    return self._on(ray, group, folder, signals)
                return _ended(signals, "room in the Ray cluster", folder)
        finally:
            remove_placement_group(group)  # ends its actors, too

    def _has_room(self, group: Any, signals: Signals) -> bool:
        """Waits for room; False if a signal ends the wait. Raises UsageError if the cluster has none within `wait`
        seconds; soon a line tells of the wait."""
        need = f"room for {self.nodes} nodes with {self.resources} each"
        advice = " spread=False puts several nodes on one machine." if self.spread else ""
        begun, is_reported = time.monotonic(), False
        while not group.wait(_LOOK):
            waited = time.monotonic() - begun
            if signals.number:
                return False
            if waited >= self.wait:
                raise UsageError(f"The Ray cluster has no {need} after {self.wait:.0f} s.{advice}")
            if waited >= _SOON and not is_reported:
                is_reported = True
                console.write(f"waiting for {need}, for {self.wait:.0f} s at most: see `ray status`.{advice}")
        return True

    def _on(self, ray: Any, group: Any, folder: Path, signals: Signals) -> RayResult:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        variables = {
            SECRET: secrets.token_hex(32),  # of the nodes' messages
            "OMP_NUM_THREADS": str(max(1, (self.cpus or self.ranks_of_node) // self.ranks_of_node)),
            **self.variables,
        }
        options = {
            "num_cpus": self.resources["CPU"], "num_gpus": self.gpus, "max_restarts": self.restarts,
            "max_task_retries": self.restarts,
            "max_concurrency": 3,  # `run` blocks until the training is over, and `stop` must be heard
        }  # fmt: skip
        older = _newest_time(folder)
        actor = ray.remote(RayNode)
        nodes = []
        for number in range(self.nodes):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            started = actor.options(scheduling_strategy=bundle, **options)
            nodes.append(started.remote(number, os.getcwd(), variables, self.restarts))
        try:
            address, begun = nodes[0].address.remote(), time.monotonic()
            while not ray.wait([address], timeout=_LOOK)[0]:
                if signals.number:
                    return _ended(signals, "its first actor", folder)
                if time.monotonic() - begun >= self.wait:
                    raise UsageError(
                        f"The first actor has not started after {self.wait:.0f} s: see `ray status`."
                    )
            master = ray.get(address)
            runs = [
                node.run.remote(self.arguments(number, master, folder), str(folder), older)
                for number, node in enumerate(nodes)
            ]
            return self._await_nodes(ray, nodes, runs, folder, signals)
        finally:
            for node in nodes:
                with suppress(Exception):  # it is dead already
                    ray.kill(node)

    def _await_nodes(
        self, ray: Any, nodes: Sequence[Any], runs: Sequence[Any], folder: Path, signals: Signals
    ) -> RayResult:
        """Waits for all nodes. They end with the same first cause; but for one that is lost for good, for which the
        others would wait in vain: they are asked to stop."""
        replies: dict[int, _Reply] = {}
        requests = 0
        while len(replies) < len(runs):
            waiting = [run for number, run in enumerate(runs) if number not in replies]
            done, _ = ray.wait(waiting, timeout=_LOOK)
            for run in done:
                number = runs.index(run)
                replies[number] = _reply_of(ray, run, number)
            reasons = signals.times + sum(reply.lost for reply in replies.values())
            if reasons > requests:
                requests = reasons
                for number, node in enumerate(nodes):
                    if number not in replies:
                        node.stop.remote()
        failed = sorted((r for r in replies.values() if r.status), key=lambda reply: not reply.lost)
        return RayResult(
            status=failed[0].status if failed else 0, cause=failed[0].cause if failed else "", folder=folder,
            replaced=tuple(number for number, reply in sorted(replies.items()) if reply.replaced),
        )  # fmt: skip


def _ended(signals: Signals, awaited: str, folder: Path) -> RayResult:
    """The result, and the sentence on the screen, where a signal has ended the wait for what a job needs first."""
    cause = f"ended by {signals.name} while the job waited for {awaited}: nothing was trained."
    console.write(cause)
    return RayResult(status=128 + signals.number, cause=cause, folder=folder, replaced=())


def _reply_of(ray: Any, run: Any, number: int) -> _Reply:
    try:
        status, cause, replaced = ray.get(run)
    except ray.exceptions.RayError as error:
        message = f"node {number} is lost, and Ray cannot replace its actor: {reason_of(error)}"
        console.write(message)
        return _Reply(status=LOST_STATUS, cause=message, lost=True)
    if status < 0:
        console.write(cause)
        return _Reply(status=128 - status, cause=cause, replaced=replaced, lost=True)
    return _Reply(status=status, cause=cause, replaced=replaced)


def reason_of(error: Exception) -> str:
    """The first line of an error of Ray, or its kind where it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def imported(user: str) -> Any:
    """The package ray. Raises InstallError, with the name of its `user`, if it is not installed."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # Ray leaves out lines that several nodes print
    try:
        import ray
    except ModuleNotFoundError:
        raise InstallError(f"{user} needs Ray: pip install 'paddle_dp[ray]', or pip install ray.") from None
    return ray


def connect(ray: Any) -> None:
    """Connects this process to the cluster of this machine. Raises UsageError if there is none."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        raise UsageError(
            "No Ray cluster is running here: `ray start --head` starts one, `ray start --address HOST:PORT` "
            "on another machine joins it."
        ) from None


class RayNode:
    """An actor: one node of a job, as a process that ends with it. Ray starts it again where it, its worker or its
    machine dies, and calls `run` again; it starts a process that was killed up to `restarts` times again. The other
    nodes wait for it (`watch.rejoin`)."""

    def __init__(self, number: int, folder: str, variables: Mapping[str, str], restarts: int = 0):
        self.number, self.folder, self.variables, self.restarts = number, folder, dict(variables), restarts
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False

    def address(self) -> str:
        """ "HOST:PORT" at which the nodes meet."""
        import ray

        host = ray.util.get_node_ip_address()
        return f"{host}:{free_port(meeting_port(os.getpid()))}"

    def run(self, arguments: Sequence[str], run_folder: str, older: float = 0.0) -> tuple[int, str, bool]:
        """Trains to the end; returns the exit status, the cause of a failure, and whether the actor was replaced.

        `older`: when the newest checkpoint was written that was there before the job. The status is negative, as of
        `subprocess`, if the process itself was killed by that signal for good.
        """
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray 2.60's property reads a deprecated one of Ray's
            replaced = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if replaced:
            print(f"node {self.number}: its actor was lost, and is started again", flush=True)
        with suppress(OSError):
            os.chdir(self.folder)
        for restart in range(self.restarts + 1):
            starts_anew = "--master" not in arguments and "--resume=newest" not in arguments
            if replaced and starts_anew and _newest_time(Path(run_folder)) > older:
                arguments = [*arguments, "--resume=newest"]  # no other node is there to say it
            began, lines = time.time(), deque[str](maxlen=_LINES)
            status = self._process(arguments, lines)
            if status >= 0:
                return status, _cause(status, Path(run_folder), lines, began), replaced
            cause = f"node {self.number}: its paddle-dp was killed by {signal.Signals(-status).name}"
            if self.stopped and -status == signal.SIGTERM:  # nobody's kill: it did not listen to signals yet
                cause = (
                    f"node {self.number}: asked to stop while its paddle-dp started. If there is a checkpoint, "
                    "resume=True goes on from it."
                )
            if self.stopped or restart == self.restarts:
                break
            print(f"{cause}, and is started again (restart {restart + 1} of {self.restarts})", flush=True)
            replaced = True
        # One that was asked to stop is not lost: the others were asked, too, and a second request ends them at once.
        return 128 - status if self.stopped else status, cause, replaced

    def _process(self, arguments: Sequence[str], lines: deque[str]) -> int:
        """Runs `paddle-dp` to its end, and returns its status; the last lines of its screen are put into `lines`."""
        with subprocess.Popen(
            [sys.executable, "-m", "paddle_dp", *arguments], env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **child_options(),
        ) as process:  # fmt: skip
            self.process = process
            if self.stopped:
                process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                print(line, end="", flush=True)  # Ray brings it to the driver
            status = process.wait()
        # Else it is deleted while Ray ends the actor, by an exception in the middle of it.
        self.process = None
        return status

    def stop(self) -> None:
        """Asks the training to save a checkpoint and end."""
        self.stopped = True
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)


def _newest_time(run: Path) -> float:
    """When the newest checkpoint of a run was written, by its disk; 0 without one."""
    times = [0.0]
    for checkpoint in (run / "checkpoints").glob("step-*"):
        with suppress(FileNotFoundError):  # a process that is not dead yet deletes it
            times.append(checkpoint.stat().st_mtime)
    return max(times)


def _cause(status: int, run: Path, lines: Sequence[str], began: float) -> str:
    """The first cause as the run's folder has it, unless it is an older run's; else the last line of the screen, or all
    of it for a mistake in the command."""
    if not status:
        return ""
    if status == UsageError.exit_status:
        return "\n".join(lines)
    with suppress(UsageError, OSError):
        if (run / "certificate.json").stat().st_mtime >= began:
            return read_run(run).ending[1]
    return next((line for line in reversed(lines) if line.strip()), f"exit status {status}")
