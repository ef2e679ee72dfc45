"""One rank under audit: installs the hooks, then runs the script as `python script.py …` would.

Paddle's launcher runs this file with the script and its arguments behind it; what to watch comes by an environment
variable. The script sees its own sys.argv, sys.path, `__file__` and `__name__ == "__main__"`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # this file's folder heads the path, where the script's own belongs
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[1]))
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import faulthandler
import json
import runpy
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from paddle_dp.audit.events import Began, Ended, Journal
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.processes import alive, die_with_parent
from paddle_dp.launch.silence import import_paddle

VARIABLE = "PADDLE_DP_AUDIT"  # what to do, as JSON: folder, steps, patience, replay
TOGETHER = 20.0  # seconds in which ranks that are through wait for the others: rank 0 hosts what all meet at


def main() -> None:
    die_with_parent()
    supervisor = int(os.environ["PADDLE_DP_JOB"].partition("-")[0])
    if not alive(supervisor):
        sys.exit(1)
    told: dict[str, Any] = json.loads(os.environ[VARIABLE])
    rank, ranks = (
        int(os.environ.get("PADDLE_TRAINER_ID", "0")),
        int(os.environ.get("PADDLE_TRAINERS_NUM", "1")),
    )
    folder = Path(told["folder"])
    journal = Journal(folder, rank)
    journal.write(Began(rank=rank, ranks=ranks))
    import_paddle()
    faulthandler.enable()
    finish = install(journal, told)
    threading.Thread(target=guard, args=(journal, told["patience"]), daemon=True).start()
    status = run(sys.argv[1], sys.argv[2:], journal, finish)
    sys.stdout.flush()
    sys.stderr.flush()
    if not status:
        meet(folder, rank, ranks)
    os._exit(status)  # what the script left running in threads must not hold the audit up


def install(journal: Journal, told: dict[str, Any]) -> Any:
    """Puts the hooks in place; returns what is to be called when the script is over."""
    from paddle_dp.audit.hooks.collectives import let_fleet_run_alone, watch_collectives
    from paddle_dp.audit.hooks.data import Loaders
    from paddle_dp.audit.hooks.generators import watch_seeds
    from paddle_dp.audit.hooks.replay import Item, Replay
    from paddle_dp.audit.hooks.updates import Updates
    from paddle_dp.audit.hooks.watch import Watch

    watch = Watch(journal, journal.folder, journal.rank, told["steps"])
    loaders = Loaders(watch)
    loaders.install()
    again = told["replay"]
    replay = None
    if again is not None:
        items = [
            Item(item["step"], tuple(item["names"]), tuple(map(tuple, item["sizes"])))
            for item in again["items"]
        ]
        replay = Replay(watch, Path(again["source"]), again["loader"], items)
        replay.install(loaders)
        let_fleet_run_alone()
    updates = Updates(watch, None if replay is None else replay.on_step)
    updates.install()
    watch_collectives(journal, alone=replay is not None)
    watch_seeds(journal)
    return updates.finish


def run(script: str, arguments: Sequence[str], journal: Journal, finish: Any) -> int:
    """Runs the script to its end, or to ours; returns the exit status. A failure is written down in both places."""
    from paddle_dp.audit.hooks.watch import Enough

    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
        reason = "script"
    except Enough:
        reason = "limit"
    except SystemExit as leave:
        if leave.code not in (None, 0):
            return failed(leave, journal)
        reason = "script"
    except BaseException as error:  # noqa: BLE001 - the script's own, whatever it is: the audit tells of it
        return failed(error, journal)
    finish()
    journal.write(Ended(reason=reason))
    return 0


def failed(error: BaseException, journal: Journal) -> int:
    """The script's own failure, without our frames: for the supervisor, for the log, and for the report."""
    below = error.__traceback__
    while below and (
        below.tb_frame.f_code.co_filename == __file__ or "runpy" in below.tb_frame.f_code.co_filename
    ):
        below = below.tb_next
    words = "".join(traceback.format_exception(type(error), error, below or error.__traceback__))
    journal.write(Ended(reason="failed", message=words))
    Failure.of(error.with_traceback(below), journal.rank).write(journal.folder)
    print(words, file=sys.stderr, flush=True)
    return 1


def meet(folder: Path, rank: int, ranks: int) -> None:
    """Waits, by files, until all ranks are through: one that left early would break what the others still do."""
    (folder / f"through.{rank}").touch()
    deadline = time.monotonic() + TOGETHER
    while time.monotonic() < deadline and len(list(folder.glob("through.*"))) < ranks:
        time.sleep(0.02)


def guard(journal: Journal, patience: float) -> None:
    """Ends this rank when no hook has been met for `patience` seconds, and says where the script stood."""
    main_thread = threading.main_thread().ident
    seen, since = journal.written, time.monotonic()
    while True:
        time.sleep(0.5)
        if journal.written != seen:
            seen, since = journal.written, time.monotonic()
        elif time.monotonic() - since > patience:
            frame = sys._current_frames().get(main_thread or 0)
            journal.write(Ended(reason="silent", message=f"{patience:g} s", where=stands(frame)))
            os._exit(1)


def stands(frame: FrameType | None) -> str:
    from paddle_dp.audit.hooks.place import nearest

    return nearest(frame)


if __name__ == "__main__":
    main()
