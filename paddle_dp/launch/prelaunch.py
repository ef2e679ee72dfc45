"""Starts Paddle's launcher ahead of time, so that it and the command import Paddle concurrently."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType

from paddle_dp.launch.command import MODULE, Plan, argv, environment
from paddle_dp.launch.logs import worker_log
from paddle_dp.launch.privately import for_launcher, in_the_open
from paddle_dp.launch.processes import child_options
from paddle_dp.launch.waiting import JOB_VARIABLES
from paddle_dp.launch.watch import Launcher

PROGRAM = Path(__file__).with_name("prelaunch_process.py")


class PreparedLauncher:
    """Keeps a launcher for a job's first attempt ready within a `with`; ends an unused one at its exit.

    `plan` is the plan before the recipe is read. If the recipe changes the environment, which libraries read when
    loaded, `begin` returns None, and a new launcher must be started.
    """

    def __init__(self, plan: Plan, inherited: Mapping[str, str]):
        self._environment = {n: v for n, v in environment(plan, inherited).items() if in_the_open(n)}
        self._launcher: Launcher | None = None
        self._hidden = ExitStack()

    def __enter__(self) -> PreparedLauncher:
        self._launcher = Launcher(
            [sys.executable, "-u", str(PROGRAM), MODULE],  # MODULE is only shown in lists of processes
            env=self._environment, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, **child_options(),
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        self._hidden.close()

    def drop(self) -> None:
        """Ends the launcher if it has not begun."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None

    def begin(self, plan: Plan, variables: Mapping[str, str], attempt: Path) -> Launcher | None:
        """Lets the launcher start the plan and returns it; returns None if a new launcher must be started."""
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return None
        args, env = argv(plan, attempt), self._hidden.enter_context(for_launcher(variables))
        line = [args[args.index(MODULE) + 1 :], env, str(attempt / "launcher.log")]
        if launcher.poll() is None and _when_loaded(variables) == _when_loaded(self._environment):
            assert launcher.stdin is not None
            try:
                with launcher.stdin as file:
                    file.write((json.dumps(line) + "\n").encode())
                launcher.expected, launcher.first_log = plan.numbers, worker_log(attempt, 0)
                return launcher
            except BrokenPipeError:  # it has ended: the new launcher will report why
                pass
        launcher.kill()
        launcher.wait()
        return None


def _when_loaded(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that Python and Paddle's libraries read when loaded, without the job's variables."""
    return {n: v for n, v in variables.items() if in_the_open(n) and not n.startswith(JOB_VARIABLES)}
