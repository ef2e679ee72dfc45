"""One rank under audit: installs the hooks, then runs the script as `python script.py …` would.

Paddle's launcher runs this file with the script and its arguments; options are in an environment variable. The script
sees its sys.argv, sys.path, `__file__` and `__name__ == "__main__"`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # Python has put this file's folder first; the script's own belongs there
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[1]))
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import faulthandler
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddle_dp.audit.events import Ended, EventJournal
from paddle_dp.audit.hooks.source_line import nearest
from paddle_dp.audit.hooks.watch import EnoughRecorded, ScriptMonitor
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.rank_process import become_rank, is_well
from paddle_dp.launch.script_rank import execute
from paddle_dp.launch.silence import import_paddle
from paddle_dp.mesh.environment import Environment

VARIABLE = "PADDLE_DP_AUDIT"  # the options as JSON: folder, steps, patience, replay
WAIT = 20.0  # seconds for which a rank that is done waits for the others: rank 0 hosts the TCPStore of all


def main() -> None:
    become_rank()
    options: dict[str, Any] = json.loads(os.environ[VARIABLE])
    here = Environment.read()
    folder = Path(options["folder"])
    journal = EventJournal(folder, here.rank)
    import_paddle()
    faulthandler.enable()
    finish = install(journal, options)
    threading.Thread(target=guard, args=(journal, options["patience"]), daemon=True).start()
    status = run(sys.argv[1], sys.argv[2:], journal, finish)
    sys.stdout.flush()
    sys.stderr.flush()
    if not status:
        wait_for_ranks(folder, here.rank, here.ranks)
    os._exit(status)  # threads that the script left running must not delay the audit


def install(journal: EventJournal, options: dict[str, Any]) -> Callable[[], None]:
    """Installs the hooks; returns a function to call after the script."""
    from paddle_dp.audit.hooks.collectives import let_fleet_run_alone, watch_collectives
    from paddle_dp.audit.hooks.data import Loaders
    from paddle_dp.audit.hooks.generators import watch_seeds
    from paddle_dp.audit.hooks.replay import RepeatedUpdate, Replay
    from paddle_dp.audit.hooks.updates import Updates

    watch = ScriptMonitor(journal, journal.folder, journal.rank, options["steps"])
    loaders = Loaders(watch)
    loaders.install()
    replay = None
    if (replay_options := options["replay"]) is not None:
        repeated = [RepeatedUpdate(**item) for item in replay_options["items"]]
        replay = Replay(watch, Path(replay_options["source"]), replay_options["loader"], repeated)
        replay.install(loaders)
        let_fleet_run_alone()
    updates = Updates(watch, None if replay is None else replay.on_step)
    updates.install()
    watch_collectives(journal, alone=replay is not None)
    watch_seeds(journal)
    return updates.finish


def run(script: str, arguments: Sequence[str], journal: EventJournal, finish: Callable[[], None]) -> int:
    """Runs the script until it ends or the audit has enough; returns the exit status. Records a failure."""
    error = execute([script, *arguments])
    if error is not None and not is_well(error):
        return record_failure(error, journal)
    finish()
    journal.write(Ended(reason="limit" if isinstance(error, EnoughRecorded) else "script"))
    return 0


def record_failure(error: BaseException, journal: EventJournal) -> int:
    """Records the script's own failure for the supervisor, the log and the report."""
    failure = Failure.from_error(error, journal.rank)
    journal.write(Ended(reason="failed", message=failure.traceback))
    failure.write(journal.folder)
    print(failure.traceback, file=sys.stderr, flush=True)
    return 1


def wait_for_ranks(folder: Path, rank: int, ranks: int) -> None:
    """Waits, by files, until all ranks are done: a rank that ended early would break the others' collectives."""
    (folder / f"done.{rank}").touch()
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline and len(list(folder.glob("done.*"))) < ranks:
        time.sleep(0.02)


def guard(journal: EventJournal, patience: float) -> None:
    """Ends this rank when no event was recorded for `patience` seconds, and records where the script stands."""
    main_thread = threading.main_thread().ident
    written, since = journal.written, time.monotonic()
    while True:
        time.sleep(0.5)
        if journal.written != written:
            written, since = journal.written, time.monotonic()
        elif time.monotonic() - since > patience:
            frame = sys._current_frames().get(main_thread or 0)
            journal.write(Ended(reason="silent", message=f"{patience:g} s", where=nearest(frame)))
            os._exit(1)


if __name__ == "__main__":
    main()
