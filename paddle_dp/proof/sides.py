"""The sides of a comparison, each run by real processes in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.errors import EndedError, RunError
from paddle_dp.launch.command import WORKER, Job, environment
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.processes import tied_to
from paddle_dp.launch.signals import ASKED_TO_END
from paddle_dp.launch.supervise import run
from paddle_dp.launch.supervision import MARK
from paddle_dp.proof.compare import Side


@dataclass(frozen=True)
class Comparison:
    """The first `steps` steps of a recipe, on global batches that `ranks` ranks cannot all share equally."""

    recipe: Path
    overrides: tuple[str, ...]
    steps: int
    ranks: int
    scratch: Path

    def one(self) -> Side:
        """One process: whatever the recipe's strategy is, the truth is strategy single. Raises RunError, EndedError."""
        words = [word for word in self.overrides if not word.startswith("strategy")]
        job = self._job([*words, "strategy.use=single"], 1, self.scratch / "one")
        return self._side(run_alone(job), job)

    def many(
        self, ranks: int, words: Sequence[str] = (), name: str = "many", patch: str | None = None
    ) -> Side:
        """`ranks` ranks, with more overrides: a layout, say. Raises RunError, EndedError.

        `patch` is "module:function" of a function without arguments that every rank calls before anything is built:
        so an examination puts a fault into a run. The module is found from the current folder.
        """
        job = self._job([*self.overrides, *words], ranks, self.scratch / name, patch)
        return self._side(run(job), job)

    def _side(self, status: int, job: Job) -> Side:
        if status - 128 in ASKED_TO_END:
            raise EndedError(status - 128)
        if status:
            raise RunError(f"the side of {job.ranks} rank(s) did not run: exit status {status}, said above.")
        return Side.read(Path(str(job.out)) / "trace", job.ranks or 1)

    def _job(self, words: Sequence[str], ranks: int, folder: Path, patch: str | None = None) -> Job:
        what = {"steps": self.steps, "ranks": self.ranks, "trace": str(folder / "trace"), "claimed": True}
        if patch is not None:
            what["patch"] = patch
        return Job(
            task="trace", recipe=self.recipe, overrides=tuple(words), ranks=ranks, out=folder, extra=what, quiet=True
        )  # fmt: skip


def run_alone(job: Job) -> int:
    """Runs a job of one rank in a process of its own: this one has Paddle's threads and settings already fixed."""
    plan = plan_of(job, Machine.here())
    command = [sys.executable, "-u", str(WORKER), "-c", str(job.recipe), "--task", job.task]
    command += [word for override in job.all_overrides for word in ("-o", override)]
    variables = environment(plan, os.environ) | {MARK: f"{os.getpid()}-verify"}
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=tied_to(os.getpid()),
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode
