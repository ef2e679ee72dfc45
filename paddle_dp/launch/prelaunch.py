"""Starts Paddle's launcher ahead of time, so that it and the command import Paddle beside each other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType

from paddle_dp.launch.command import MODULE, Plan, argv, environment
from paddle_dp.launch.logs import worker_log
from paddle_dp.launch.privately import for_launcher, in_the_open
from paddle_dp.launch.processes import tied_to
from paddle_dp.launch.waiting import JOB_VARIABLES
from paddle_dp.launch.watch import Launcher

PROGRAM = Path(__file__).with_name("prelaunch_process.py")


class PreparedLauncher:
    """Within a `with`, a launcher for a job's first attempt; one that nobody has begun with is ended at its end.

    `plan`: as it is known before the recipe is read. A recipe that asks for other devices has another environment,
    which libraries read when they are loaded: then the launcher is started as ever.
    """

    def __init__(self, plan: Plan, inherited: Mapping[str, str]):
        self._environment = {n: v for n, v in environment(plan, inherited).items() if in_the_open(n)}
        self._launcher: Launcher | None = None
        self._hidden = ExitStack()

    def __enter__(self) -> PreparedLauncher:
        self._launcher = Launcher(
            [
                sys.executable,
                "-u",
                str(PROGRAM),
                MODULE,
            ],  # the last word for those who read a list of processes
            env=self._environment,
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the ranks in order
            preexec_fn=tied_to(os.getpid()),  # prctl and getppid only; a kill -9 of us must end it
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        self._hidden.close()

    def drop(self) -> None:
        """It will not be needed."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None

    def begin(self, plan: Plan, variables: Mapping[str, str], attempt: Path) -> Launcher | None:
        """The launcher, at work on the plan; None where one must be started."""
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return None
        words, given = argv(plan, attempt, plan.meeting), self._hidden.enter_context(for_launcher(variables))
        line = [words[words.index(MODULE) + 1 :], given, str(attempt / "launcher.log")]
        if launcher.poll() is None and _when_loaded(variables) == _when_loaded(self._environment):
            assert launcher.stdin is not None
            try:
                with launcher.stdin as file:
                    file.write((json.dumps(line) + "\n").encode())
                launcher.expected, launcher.first_log = plan.numbers, worker_log(attempt, 0)
                return launcher
            except BrokenPipeError:  # it has ended: the one that is started will say why
                pass
        launcher.kill()
        launcher.wait()
        return None


def _when_loaded(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that Python and Paddle's libraries read when they are loaded, without those of one job."""
    return {n: v for n, v in variables.items() if in_the_open(n) and not n.startswith(JOB_VARIABLES)}
