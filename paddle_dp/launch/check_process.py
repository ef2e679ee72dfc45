"""Tries recipes in a separate process, for `paddle-dp check`; the first recipe starts the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.launch.processes import tied_to

_MODULE = "paddle_dp.assembly.first_forward"


class CheckProcess(AbstractContextManager["CheckProcess"]):
    """Sends recipes to that process, one after another; the end of its `with` ends the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, file: Path, overrides: Sequence[str]) -> list[str]:
        """Returns lines on checks that were not made. Raises UsageError if `train` would refuse the recipe or fail."""
        process = self._process = self._process or _started()
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps([str(file), list(overrides)]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.close()
            return ["not tried: the process that tries it ended"]
        reply = json.loads(answer)
        if "error" in reply:
            raise UsageError(f"{file}: {reply['error']}")
        return list(reply["lines"])

    def close(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    __exit__ = close


def _started() -> subprocess.Popen[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", _MODULE], env=variables, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only
    )  # fmt: skip
