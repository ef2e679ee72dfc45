"""Requests to stop a training before its end: signals, a time limit, a lost folder. All ranks agree on the step.

A rank cannot stop by itself: the others would wait for it in the next exchange. So every two seconds or so, after the
same update on every rank, one small all-reduce shares whether a rank was asked to stop, and after how many updates the
ranks meet for this again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from paddle_dp.errors import JobError, LostFolderError, StoppedError
from paddle_dp.mesh.heartbeat import heartbeat

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh
    from paddle_dp.train.callback import Callback

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EVERY = 2.0  # seconds between two agreements, and between two looks at the run's folder
_RUN_FILES = frozenset({"recipe.yaml", "metrics.jsonl"})  # a run makes each once, and needs it to its end
LOST_FOLDER = "the loss of the run's folder"
MAX_STEPS_BETWEEN = 1000  # updates between them


@contextmanager
def end_interrupted(step: int, callbacks: Iterable[Callback]) -> Iterator[list[Callback]]:
    """Wraps the callbacks' `end`; the caller adds each callback that has ended to the list.

    All updates are made by then. A KeyboardInterrupt reports this, and which callbacks have ended. It becomes a
    JobError if a callback has raised it itself, without a SIGINT.
    """
    ended: list[Callback] = []
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if callable(before):
            before(number, frame)

    hears = threading.current_thread() is threading.main_thread() and callable(before)
    if hears:
        signal.signal(signal.SIGINT, note)
    try:
        yield ended
    except KeyboardInterrupt as error:
        late = [type(c).__name__ for c in callbacks if not any(c is other for other in ended)]
        written = (
            f"the output of {', '.join(type(c).__name__ for c in ended)} is whole, and " if ended else ""
        )
        done = f"All updates are made, up to step {step}; {written}{', '.join(late)} did not end."
        if came:
            raise KeyboardInterrupt(f"interrupted at the end. {done}") from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"raise KeyboardInterrupt at {frame.filename}:{frame.lineno}: no signal has interrupted it. {done}"
        ) from error
    finally:
        if hears:
            signal.signal(signal.SIGINT, before)


class RunFolder:
    """Compares the folder at `path` with the run's original folder, and with the files seen there."""

    def __init__(self, path: Path):
        self.path, self._folder = path, -1
        self._known_files: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Takes the present folder as the run's: an older run has been moved out of its way."""
        self._close()
        self._folder, self._looked, self._is_lost, self._known_files = -1, -EVERY, False, set()
        self.is_lost(now=True)

    def is_lost(self, now: bool = False) -> bool:
        """True if another folder, or none, is at the path, or a file of the run or all files (`rm -r RUN/*` leaves the
        lock) have disappeared. Checked every two seconds, or `now`."""
        if self._is_lost or (not now and time.monotonic() < self._looked + EVERY):
            return self._is_lost
        self._looked = time.monotonic()
        try:
            if self._folder < 0:  # a script's folder is made by its first writer
                self._folder = os.open(
                    self.path, os.O_RDONLY | os.O_DIRECTORY
                )  # while it is open, its inode is not reused
            there = {name for name in os.listdir(self.path) if not name.startswith(".")}
            is_other = not os.path.samestat(os.fstat(self._folder), os.stat(self.path))
            is_emptied = bool(self._known_files) and not there
            self._is_lost = is_other or is_emptied or bool(_RUN_FILES & self._known_files - there)
            self._known_files |= there
        except (FileNotFoundError, NotADirectoryError):
            self._is_lost = self._folder >= 0
        except OSError:  # a network disk that does not answer for a moment
            pass
        return self._is_lost

    def _close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)

    __del__ = _close


def lost(path: Path, step: int) -> LostFolderError:
    """The error for a run's folder that is lost after update `step`."""
    return LostFolderError(
        f"{path} was deleted, renamed, replaced or emptied while the training ran: its recipe, metrics, logs or "
        f"earlier checkpoints are no longer there. The training ends after step {step}; a recipe with `checkpoint` has "
        "saved that step in the folder that has this name now. If the old one has another name, move that checkpoint "
        "into it."
    )


class SlowRanks(Protocol):
    """Compares the ranks' times, which travel in the all-reduce of an agreement."""

    def bring(self, seconds: float) -> list[float]:
        """This rank's numbers for the sum over all ranks; `seconds`: since the last agreement."""
        ...

    def hear(self, numbers: Sequence[float], step: int) -> list[str]:
        """Takes the sum; returns sentences for the screen."""
        ...


class StopRequests:
    """Within `with StopRequests(mesh, max_time) as requests:` a signal is a request, and a second SIGINT ends at once.

    `max_time`: seconds after which this process is asked to stop; None: no limit. `stragglers`: its times travel in the
    same all-reduce. `folder`: its loss is a request, too; the main rank checks it. A training that has stopped answers
    signals until `close`, so that a repeated request does not end it while it is reported.
    """

    def __init__(
        self,
        mesh: Mesh,
        max_time: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        stragglers: SlowRanks | None = None,
        folder: RunFolder | None = None,
    ):
        self.folder, self.start = folder, 0.0  # seconds from the job's start to the first update here
        self.mesh, self.max_time, self._clock, self.stragglers = mesh, max_time, clock, stragglers
        self.signal_number, self.interrupts = 0, 0  # no signal yet, and no SIGINT
        self._before: dict[int, Any] = {}
        self._meets: int | None = None  # the step of the next agreement
        self._met = (0, 0.0)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            # SIGINT stays ignored in a shell's background, SIGHUP under nohup; the launcher lets ranks ignore SIGUSR1.
            ours = [n for n in SIGNALS if n == signal.SIGUSR1 or signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in ours}
            for number in ours if self.mesh.ranks > 1 else ():
                # Paddle's store gives up where a signal interrupts it (3.3.1: "TCP receive error. Interrupted system
                # call"). A rank alone has no store, and must answer a second Ctrl-C wherever it is.
                signal.siginterrupt(number, False)
        heartbeat.can_stop, heartbeat.will_stop = bool(self._before), False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        heartbeat.can_stop = False
        handled = bool(self._before)
        if not isinstance(error, StoppedError):
            self.close()
        if isinstance(error, KeyboardInterrupt) and handled and not self.interrupts:
            frame = traceback.extract_tb(trace)[-1]
            raise JobError(
                f"raise KeyboardInterrupt at {frame.filename}:{frame.lineno} ended this rank after step "
                f"{heartbeat.step}: no signal has interrupted it. A callback that wants to end a training early "
                "calls moment.trainer.stop(reason)."
            ) from error

    def close(self) -> None:
        """Gives the signals back to their former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def due(self, step: int) -> str | None:
        """The reason to stop after this update, the same on every rank; None to continue. Collective every `EVERY`
        seconds or so."""
        if self.mesh.ranks == 1:
            return self._reason([self.signal_number], self._main_reason(), self.start)
        if self._meets is None:
            self._meets, self._met = step + 1, (step, self._clock())
        if step < self._meets:
            return None
        now, (since, when) = self._clock(), self._met
        passed = max(step - since, 1)
        pace = (now - when) / passed
        # Twice as far at most: a few quick updates do not predict the evaluation that follows.
        wait = max(1, min(round(EVERY / max(pace, 1e-9)), 2 * passed, MAX_STEPS_BETWEEN))
        signal_flags = [float(self.signal_number == number) for number in SIGNALS]
        main = [float(wait), self._main_reason(), self.start] if self.mesh.is_main else [0.0] * 3
        times = [] if self.stragglers is None else self.stragglers.bring(now - when)
        summed = self.mesh.sum([*times, *signal_flags, *main])
        if self.stragglers is not None:
            report = self.stragglers.hear(summed[: len(times)], step)
            if self.mesh.is_main and report:
                print("\n".join(report), file=sys.stderr, flush=True)
        *signal_flags, wait_steps, over, start = summed[len(times) :]  # one clock decides
        self._meets, self._met = step + int(wait_steps), (step, now)
        return self._reason([n for n, count in zip(SIGNALS, signal_flags, strict=True) if count], over, start)

    @property
    def wants(self) -> bool:
        """True if this rank was asked to stop, without asking the others."""
        return bool(self.signal_number) or self._main_reason() > 0

    def agreed(self) -> str | None:
        """The reason to stop, the same on every rank, where all ranks meet anyway. Collective."""
        signal_flags = [float(self.signal_number == number) for number in SIGNALS]
        main = [self._main_reason(), self.start] if self.mesh.is_main else [0.0, 0.0]
        *counts, over, start = self.mesh.sum([*signal_flags, *main])
        return self._reason([n for n, count in zip(SIGNALS, counts, strict=True) if count], over, start)

    def went_back(self) -> None:
        """Call it when the training counts from an earlier step again: the ranks then agree anew on when they meet."""
        self._meets = None

    def _main_reason(self) -> float:
        """2 if the run's folder is lost, 1 if the time is over, else 0."""
        if self.folder is not None and self.folder.is_lost():
            return 2.0
        return float(self.max_time is not None and self._clock() - heartbeat.born >= self.max_time)

    def _reason(self, signals: list[int], over: float, start: float) -> str | None:
        heartbeat.will_stop = any(signals) or over > 0
        if not heartbeat.will_stop:
            return None
        if over > 1:
            return LOST_FOLDER
        for number in filter(None, signals):
            return signal.Signals(number).name
        began = f"; the updates began after {start:.1f} s" if 10 * start >= (self.max_time or 0) else ""
        return f"train.max_time ({self.max_time:g} s{began})"

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        if self.mesh.ranks == 1 and number == signal.SIGINT and self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = self.signal_number or number
        if self.mesh.ranks == 1 and heartbeat.can_stop:
            line = f"{signal.Signals(number).name}: stopping after this update, with a checkpoint (Ctrl-C: at once)\n"
            os.write(2, line.encode())
