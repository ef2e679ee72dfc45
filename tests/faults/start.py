"""A supervisor as a process of its own; its argument is a Job as JSON: '{"entry_point": "…", "ranks": 2, …}'."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = os.getcwd()

from paddle_dp.launch import memory, supervisor
from paddle_dp.launch.command import Job
from paddle_dp.launch.processes import send
from paddle_dp.launch.start import run


def begin(words: dict[str, Any], waiting: Any = None) -> int:
    # A shell's background job, and nohup, have these ignored from birth, which a supervisor respects.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    supervisor.GRACE = float(os.environ.get("GRACE", supervisor.GRACE))
    memory.FOLDER = Path(
        os.environ.get("MEMORY_FOLDER", memory.FOLDER)
    )  # a node's own, where two share a machine
    if pause := float(os.environ.get("PAUSE_AFTER_SEND", "0")):  # another signal may come in it

        def send_and_pause(pids: Iterable[int], sign: int) -> None:
            send(pids, sign)
            time.sleep(pause)

        supervisor.send = send_and_pause  # type: ignore[attr-defined]
    return run(Job(**{**words, "recipe": Path(words["recipe"])}), waiting)


if __name__ == "__main__":
    sys.exit(begin(json.loads(sys.argv[1])))
