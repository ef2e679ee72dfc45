"""Who has come to an exchange, and who has not: so that the late rank is named, and not the one that waits for it.

Each rank counts the exchanges that it has come to, group by group. Nothing is sent while all goes well. A rank whose
count has stood still for a while writes its counts into the job's store, from a thread: one that waits, and one that
computes for long or sleeps. Whoever waits longer than `notice` reads the others' counts there; those that are behind
its own are late. A rank that is stopped altogether writes nothing, and is behind with what it wrote before.
"""

from __future__ import annotations

import atexit
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import JobError

Counts = dict[str, int]
# What a rank that waits leaves in its log; the launcher looks for it when the wait has ended the process in C++.
WAITED = re.compile(r"^rank \d+ has waited \d+ s in .+ for ranks? [\d, ]+$", re.MULTILINE)


@dataclass
class Wait:
    """An exchange that this rank has come to: of which group, what it is, since when, and who was found to be late."""

    group: str
    members: Sequence[int]
    what: str
    since: float
    late: tuple[int, ...] = ()
    told: float = 0.0  # for how long this rank had waited when it last said so


class Roll:
    """One rank's counts, and the thread that compares them with the others' while something takes long.

    `store` opens a connection for the thread alone. Times are in seconds.
    """

    notice = 20.0  # after so long a wait the late ranks are named
    still = 4.0  # after so long without an exchange a rank writes down where it is
    look = 1.0

    def __init__(self, rank: int, store: Callable[[], Any], patience: float = 600.0):
        self.rank, self.patience, self._open = rank, patience, store
        self.counts: Counts = {}
        self._waits: list[Wait] = []
        self._moved, self._written = time.monotonic(), {"": -1}
        self._stop = threading.Event()

    def start(self, store: Any) -> None:
        """Begins to look, once `store` has this rank's first counts."""
        store.set(self._key(self.rank), json.dumps(self.counts))
        thread = threading.Thread(target=self._watch, daemon=True, name="roll")
        thread.start()
        atexit.register(self._end, thread)

    @contextmanager
    def waiting(self, group: str, members: Sequence[int], what: str) -> Iterator[None]:
        """Around an exchange among `members`. Raises JobError, naming who is late, where it ended by its time limit."""
        self.counts[group] = self.counts.get(group, 0) + 1
        wait = Wait(group, members, what, time.monotonic())
        self._moved = wait.since
        self._waits.append(wait)
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            waited = time.monotonic() - wait.since
            if not wait.late or waited < 0.9 * self.patience:
                raise
            raise JobError(
                f"rank {self.rank} has waited {waited:.0f} s for {_ranks(wait.late)} in {what}, and train.patience is "
                f"over. What is {_ranks(wait.late)} doing? See its log."
            ) from error
        finally:
            self._waits.pop()
            self._moved = time.monotonic()

    def late(self, wait: Wait, counts: dict[int, Counts]) -> tuple[int, ...]:
        """The members of an exchange whose counts are behind this rank's."""
        mine = self.counts.get(wait.group, 0)
        return tuple(r for r in wait.members if r != self.rank and counts[r].get(wait.group, 0) < mine)

    def _watch(self) -> None:
        store = None
        try:
            while not self._stop.wait(self.look):
                now = time.monotonic()
                if now - self._moved < self.still:
                    continue
                store = store or self._open()
                counts = dict(self.counts)
                if counts != self._written:
                    store.set(self._key(self.rank), json.dumps(counts))
                    self._written = counts
                wait = next(iter(self._waits[-1:]), None)
                if wait is not None and now - wait.since >= max(self.notice, 2 * wait.told):
                    self._look_for(wait, store, now - wait.since)
        except Exception:  # noqa: BLE001 - the job's store is gone: it ends, and has other things to say
            return

    def _look_for(self, wait: Wait, store: Any, waited: float) -> None:
        others = [rank for rank in wait.members if rank != self.rank]
        counts = {rank: json.loads(bytes(store.get(self._key(rank))).decode()) for rank in others}
        wait.late, wait.told = self.late(wait, counts), waited
        if wait.late:
            said = f"rank {self.rank} has waited {waited:.0f} s in {wait.what} for {_ranks(wait.late)}"
            print(said, file=sys.stderr, flush=True)

    def _end(self, thread: threading.Thread) -> None:
        self._stop.set()
        thread.join(timeout=1.0)

    @staticmethod
    def _key(rank: int) -> str:
        return f"paddle_dp/roll/{rank}"


_here: list[Roll] = []


def here() -> Roll | None:
    """This process's roll; None where there are no other ranks."""
    return _here[0] if _here else None


def start(rank: int, master: str, patience: float) -> None:
    """Opens this process's roll, once it has joined its job's store, which listens at `master` ("host:port")."""
    from paddle.base import core

    def connection() -> Any:
        host, _, port = master.rpartition(":")
        return core.TCPStore(host, int(port), False, 0)

    _here[:] = [Roll(rank, connection, patience)]
    _here[0].start(core.create_or_get_global_tcp_store())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
