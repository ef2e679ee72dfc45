"""Decides if a job stands still, and which rank the others wait for, only from the ranks' heartbeats.

A job of one rank, which has no supervisor, is watched from a thread of the rank's process.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paddle_dp.launch import stacks
from paddle_dp.launch.command import Limits
from paddle_dp.launch.failures import Failure
from paddle_dp.mesh.heartbeat import PHASES, RankStatus, StatusTable, heartbeat
from paddle_dp.text import numbered

STATUS = 124  # the exit status of a job that stood still, as of timeout(1)
LEAST = 60.0  # seconds: a machine may be busy for a while, even if steps are short
STEPS = 10  # median steps that may pass without a sign of life
MAX_GAP = 2.0  # seconds that a gap between two looks counts at most: the machine may have been suspended
CALLED = ("evaluate", "checkpoint", "callbacks")  # phases with separate limits
INTERVAL = 0.5  # seconds between two looks of a single rank's thread
DEBUGGERS = {"bdb", "pdb", "pudb", "ipdb", "IPython", "code", "debugpy", "pydevd", "_pydevd_bundle"}
BEYOND = 5.0  # seconds added to a data worker's time limit, so that its error, which names the sample, is raised first

_WATCHING = re.compile(
    r"^Current thread .*?(?=^Thread |\Z)", re.MULTILINE | re.DOTALL
)  # of the watch, in its dump

Beats = Mapping[int, RankStatus | None]
"""The last status of each rank of this node that has not ended; None if it has not begun."""


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """No rank of `beats` has given a sign of life for `seconds`; `setting` allows `limit` seconds.

    `since`: seconds of each rank in its status. `stopped`: ranks that a signal has stopped.
    """

    beats: Beats
    seconds: float
    limit: float
    setting: str
    since: Mapping[int, float]
    stopped: Sequence[int] = ()

    @property
    def blocking_ranks(self) -> list[int]:
        """The ranks that the others wait for, the longest standing first: stopped ranks, else ranks that do not wait.

        A rank that is done counts only if none works. If each waits, these are the ranks in the earliest exchange.
        """
        if self.stopped:
            return list(self.stopped)
        waiting = self._waiting
        free = [rank for rank in self.beats if rank not in waiting]
        working = [rank for rank in free if (beat := self.beats[rank]) is None or beat.phase != "done"]
        if late := working or ([] if waiting else free):
            return sorted(late, key=lambda rank: -self.since[rank])
        progress = {rank: (b.step, PHASES.index(b.phase), b.activity) for rank, b in waiting.items()}
        return [rank for rank in waiting if progress[rank] == min(progress.values())]

    @property
    def _waiting(self) -> dict[int, RankStatus]:
        """The ranks that wait for others."""
        return {rank: beat for rank, beat in self.beats.items() if beat is not None and beat.waits}

    def __str__(self) -> str:
        late = self.blocking_ranks
        all_wait = bool(late) and self._waiting.keys() >= set(late) and not self.stopped
        first = [self._sentence(rank) for rank in late]
        rest: dict[str, list[int]] = {}
        for rank in self.beats:
            if rank not in late:
                rest.setdefault(self._state(rank), []).append(rank)
        others = [f"{numbered('rank', ranks)} {_verb(state, ranks)}" for state, ranks in rest.items()]
        sentences = [*first, *others]
        if all_wait and len(late) == len(self.beats):
            sentences.append("each waits for another rank, and none of this node is late")
        seconds = f"{self.seconds:.0f} s (allowed are {self.limit:.0f} s: {self.setting})"
        return f"no rank has made progress for {seconds}: {'; '.join(sentences)}.{self._skipped(all_wait)}"

    def _skipped(self, all_wait: bool) -> str:
        """Returns a hint if ranks wait for each other in different phases of one step, some of them in forward."""
        phases = {(beat.step, beat.phase) for beat in self.beats.values() if beat is not None}
        steps, names = {step for step, _ in phases}, {phase for _, phase in phases}
        if not all_wait or len(steps) != 1 or len(names) == 1 or "forward" not in names:
            return ""
        return (
            " Did some ranks skip a layer that exchanges in forward, as experts or layers left out at random do? "
            "BatchNorm over all ranks does, unless strategy.sync_batch_norm=false (docs/same.md)."
        )

    def _sentence(self, rank: int) -> str:
        beat, since = self.beats[rank], f"for {self.since[rank]:.0f} s"
        if rank in self.stopped:
            location = "before it began" if beat is None else f"in {location_of(beat)}"
            return f"rank {rank} is stopped (by SIGSTOP, a terminal or a debugger) {since}, {location}"
        if beat is None:
            return (
                f"rank {rank} has not begun {since}: its process exists, and its Python has not begun to work"
            )
        if beat.phase == "done":
            return f"rank {rank} is done, and its process has not ended {since}"
        if beat.waits:
            return f"rank {rank} has waited in {location_of(beat)} {since}"
        return f"rank {rank} has been in {location_of(beat)} {since}"

    def _state(self, rank: int) -> str:
        beat = self.beats[rank]
        if beat is None:
            return "has not begun"
        if beat.phase == "done":
            return "is done"
        return f"waits in {location_of(beat)}" if beat.waits else f"is in {location_of(beat)}"


class StandstillDetector:
    """Finds a standstill in repeated looks at the ranks' heartbeats.

    With several `nodes`, a rank may wait for a rank whose heartbeat is on another node's board.
    """

    def __init__(self, limits: Limits, nodes: int = 1):
        self.watch, self.sample_seconds, self.nodes = limits.watch, limits.sample_seconds, nodes
        self._counts: dict[int, int] = {}
        self._since: dict[int, float] = {}  # seconds that each rank has stood, summed over the looks
        self._stopped: dict[int, float] = {}  # seconds for which a signal has stopped each stopped rank
        self._looked: float | None = None
        self._step: tuple[int, float] | None = None
        self._begun = False  # the first steps are done
        self._steps: deque[float] = deque(maxlen=101)  # seconds of each step

    def look(self, beats: Beats, now: float, stopped: Sequence[int] = ()) -> Standstill | None:
        """Returns the standstill at `now` (monotonic clock), or None. `stopped`: ranks that a signal has stopped.

        A stopped rank does nothing in any phase, so neither it nor ranks that wait have the longer limits of phases.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, MAX_GAP)
        self._looked = now
        for rank, beat in beats.items():
            count = 0 if beat is None else beat.count
            stands = self._counts.get(rank) == count
            self._since[rank] = self._since.get(rank, 0.0) + passed if stands else 0.0
            self._counts[rank] = count
        # From 0 at the first look: a profiler stops a rank for an instant.
        self._stopped = {rank: self._stopped.get(rank, -passed) + passed for rank in stopped}
        self._time_steps(beats)
        if not beats:
            return None
        seconds = min(self._since[rank] for rank in beats)
        limit, setting = max(self._limits(beats))
        if seconds < limit:
            return None
        return Standstill(
            beats=beats, seconds=seconds, limit=limit, setting=setting, stopped=stopped,
            since={rank: self._since[rank] for rank in beats},
        )  # fmt: skip

    def patience(self) -> float:
        """Returns how many seconds may pass within a step without a sign of life."""
        if self.watch.patience is not None:
            return self.watch.patience.seconds
        return max(LEAST, STEPS * median(self._steps)) if self._steps else LEAST

    def _limits(self, beats: Beats) -> list[tuple[float, str]]:
        """Returns how many seconds each rank may stay in its status, and the setting with that limit."""
        waiting = {rank for rank, beat in beats.items() if beat is not None and beat.waits}
        within = (self.patience(), "watch.patience")
        held = {rank for rank, seconds in self._stopped.items() if seconds >= within[0]}
        if held:
            return [within, *(self._limit(beats[rank]) for rank in beats.keys() - held - waiting)]
        limits = [self._limit(beat) for beat in beats.values()]
        if self.nodes > 1 and len(waiting) == len(beats):
            limits += [self._limit_in(phase) for phase in ("data", *CALLED)]  # of a rank on another node
        return limits

    def _limit(self, beat: RankStatus | None) -> tuple[float, str]:
        """Returns how many seconds a rank may stay in its status, and the setting with that limit."""
        if beat is None or beat.phase == "start":
            return self.watch.start.seconds, "watch.start"
        if beat.phase == "unwatched":
            return math.inf, ""
        return self._limit_in(beat.phase)

    def _limit_in(self, phase: str) -> tuple[float, str]:
        """Returns how many seconds a rank that has begun to train may stay in a phase, and the setting."""
        if phase in CALLED:
            return getattr(self.watch, phase).seconds, f"watch.{phase}"
        within = (self.patience(), "watch.patience")
        if phase in ("end", "done"):
            return within
        if not self._begun:  # a first step compiles, allocates, connects
            return max(within, (self.watch.start.seconds, "watch.start, until the first steps are done"))
        if phase == "data":
            return max(within, (self.sample_seconds + BEYOND, "loader.timeout"))
        return within

    def _time_steps(self, beats: Beats) -> None:
        latest = max((beat for beat in beats.values() if beat), key=lambda beat: beat.step, default=None)
        if latest is None or latest.phase == "start":
            return
        self._begun = self._begun or latest.step - latest.first > 1
        if self._step is None:
            self._step = latest.step, latest.time
        elif latest.step > self._step[0]:
            self._steps.append((latest.time - self._step[1]) / (latest.step - self._step[0]))
            self._step = latest.step, latest.time


def location_of(beat: RankStatus) -> str:
    """Returns "data of step 13 (sample 4711)" or "callbacks after step 12 (Evaluate.epoch)"."""
    detail = f"sample {beat.sample}" if beat.sample >= 0 and not beat.waits else beat.activity
    location = beat.phase
    if beat.phase in ("data", "forward", "backward", "exchange", "update"):
        location += f" of step {beat.step + 1}"
    elif beat.phase not in ("start", "done"):
        location += f" after step {beat.step}"
    return f"{location} ({detail})" if detail else location


def _verb(state: str, ranks: Sequence[int]) -> str:
    """Returns "waits in …" for one rank, "wait in …" for several."""
    if len(ranks) == 1:
        return state
    verb, _, rest = state.partition(" ")
    return f"{ {'waits': 'wait', 'is': 'are', 'has': 'have'}[verb] } {rest}"


@contextmanager
def watched_inside(
    limits: Limits | None, attempt: Path, show: Callable[[Failure], int], ends_process: bool = False
) -> Iterator[None]:
    """Ends a rank that stands still within the context: calls `show` with the failure, and exits with its result.

    With `ends_process` the watch goes on after the context, for the phase "done", which the process enters when only
    its threads and exit handlers are left. C code that holds the interpreter stops this thread, too, and is not found.
    A rank in a debugger may stand still.
    """
    board = None
    with suppress(OSError):  # not Linux
        board = None if limits is None else StatusTable(1)
    if limits is None or board is None:
        yield
        return
    board.give(heartbeat)
    over, rank = threading.Event(), threading.get_ident()

    def look() -> None:
        detector = StandstillDetector(limits)
        while not over.wait(INTERVAL):
            if in_debugger(rank):
                detector = StandstillDetector(limits)
            elif standstill := detector.look({0: board.read(0)}, time.monotonic()):
                os._exit(show(_failure(str(standstill), attempt)))

    thread = threading.Thread(target=look, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        heartbeat.detach()
        if ends_process:
            board.give(heartbeat)
            heartbeat.enter("unwatched")
        else:
            over.set()
            thread.join()
            board.close()


def in_debugger(thread: int) -> bool:
    """True if a thread of this process is in a debugger, as at its prompt."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _failure(message: str, attempt: Path) -> Failure:
    path = stacks.stack_file(attempt, 0)
    try:
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        stack = stacks.standing_in(_WATCHING.sub("", path.read_text(errors="replace")))
        message += f"\nthe innermost call first:\n{stacks.shown(stack)}\nstacks of all threads: {path}"
    except OSError as error:  # a full disk
        message += f"\n(its stacks could not be written to {path}: {error})"
    return Failure(rank=0, kind="stood still", message=message, exit_status=STATUS, expected=True)
