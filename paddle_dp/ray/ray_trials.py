"""Trials of a sweep on a Ray cluster: an actor for each, wherever the cluster has room for its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.launch.nodes.rendezvous import LOST_STATUS
from paddle_dp.launch.processes import child_options
from paddle_dp.ray.ray_job import connect, imported, reason_of


class RayExecutor:
    """Starts trials as actors: `sweep.trial.Executor`, whose sweep's folder has the same path on all machines.

    Each takes as many processors as it has `ranks`, and `gpus` GPUs of the cluster if it has any.
    """

    def __init__(self, ranks: int, gpus: int) -> None:
        self.ray = imported("paddle-dp sweep --ray")
        connect(self.ray)
        total = self.ray.cluster_resources()
        self.gpus = gpus if total.get("GPU") else 0
        for needed, key, kind in ((self.gpus, "GPU", "GPUs"), (ranks, "CPU", "processors")):
            if needed > (has := total.get(key, 0)):
                raise UsageError(
                    f"--ranks {ranks} needs {needed} {kind}, and the Ray cluster has {has:g}; `ray status` shows them."
                )
        # Two calls at once: `run` blocks until the training is over, and `stop` must be heard.
        self.options = {"num_cpus": ranks, "num_gpus": self.gpus, "max_concurrency": 2}

    def start(self, arguments: Sequence[str], slot: int, screen: Path) -> RayTrial:
        """Starts `paddle-dp ARGUMENTS` on a machine that has room; until one has, the trial waits."""
        actor = self.ray.remote(TrialProcess).options(**self.options)
        variables = {} if self.gpus else {"OMP_NUM_THREADS": "1"}
        node = actor.remote(os.getcwd(), variables)
        alone = [*arguments, "--nodes", "1"]  # whatever `srun` says, if it has started the cluster
        return RayTrial(self.ray, node, node.run.remote(alone, str(screen.absolute())), screen)


class RayTrial:
    """A training in an actor: `sweep.trial.RunningTrial`."""

    def __init__(self, ray: Any, actor: Any, run: Any, screen: Path):
        self.ray, self.actor, self.run, self.screen = ray, actor, run, screen
        self.status: int | None = None

    def poll(self) -> int | None:
        if self.status is None and self.ray.wait([self.run], timeout=0)[0]:
            try:
                self.status = int(self.ray.get(self.run))
            except self.ray.exceptions.RayError as error:
                self.screen.parent.mkdir(exist_ok=True)
                with self.screen.open("a") as screen:
                    screen.write(f"the trial's actor is lost: {reason_of(error)}\n")
                self.status = LOST_STATUS
            self.kill()
        return self.status

    def stop(self) -> None:
        self.actor.stop.remote()

    def kill(self) -> None:
        """Ends the actor, also one that waits for room, and with it its process; the next trial gets its resources."""
        with suppress(Exception):  # it is dead already
            self.ray.kill(self.actor)


class TrialProcess:
    """An actor: `paddle-dp` as a process, whose screen is a file of the sweep."""

    def __init__(self, folder: str, variables: Mapping[str, str]):
        self.folder, self.variables = folder, dict(variables)
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def run(self, arguments: Sequence[str], screen: str) -> int:
        """Trains to the end; returns the exit status."""
        Path(screen).parent.mkdir(parents=True, exist_ok=True)
        with Path(screen).open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paddle_dp", *arguments], env={**os.environ, **self.variables},
                cwd=self.folder if Path(self.folder).is_dir() else None,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **child_options(),
            )  # fmt: skip
        if self.stopped:  # before the process began
            self.stop()
        return self.process.wait()

    def stop(self) -> None:
        """Asks the training to save a checkpoint and end."""
        self.stopped, process = True, self.process
        if process is not None:
            process.send_signal(signal.SIGTERM)
