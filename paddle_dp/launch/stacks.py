"""Collects the Python stacks of all ranks: each writes them to a separate file when it gets a signal.

faulthandler writes them in the signal handler, in C, which works even if Python waits within a collective. `kill -QUIT
PID` asks any rank by hand.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from paddle_dp.launch.processes import descendants, send, text_of

SIGNAL = signal.SIGQUIT
FRAMES = 12  # frames of a stack on the screen
_WAIT, _QUIET = 3.0, 0.3  # seconds: for all stacks, and for the last one to be complete
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)


def stack_file(attempt: Path, rank: int) -> Path:
    """Returns the file of the stacks of a rank and its data workers."""
    return attempt / f"stacks.rank-{rank}"


def offer(attempt: Path, rank: int) -> None:
    """Makes this process, and its later forks, answer SIGNAL with its stacks. Does nothing if no file can be made."""
    try:
        file = os.open(stack_file(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def collect(attempt: Path, ranks: Mapping[int, int]) -> dict[int, str]:
    """Asks `ranks` (rank → pid), then their forks, for their stacks; a stopped rank gets SIGCONT.

    Returns the current stack of each rank that answered, the innermost frame first.
    """
    send(ranks.values(), SIGNAL)
    send(ranks.values(), signal.SIGCONT)
    _settle(attempt, ranks)
    stack_of = {rank: standing_in(text_of(stack_file(attempt, rank))) for rank in ranks}
    for rank, pid in ranks.items():
        for child in filter(_catches, descendants(pid)):
            _note(attempt, rank, f"\nprocess {child}, which rank {rank} has started:\n")
            send([child], SIGNAL)
            _settle(attempt, [rank])
    return {rank: stack for rank, stack in stack_of.items() if stack}


def standing_in(text: str) -> str:
    """Returns the last thread's frames in faulthandler's output: the main thread's.

    If the main thread waits for the others to end, returns theirs, one below the other.
    """
    *threads, main = [stack.strip() for stack in _THREAD.split(text)[1:]] or [""]
    leaving = re.match(r'File ".*threading\.py", line \d+ in _shutdown', main)
    return "\n".join(filter(None, threads)) if leaving and threads else main


def innermost(stack: str) -> str:
    """Returns the innermost frame, "File "train.py", line 12 in forward"."""
    return stack.splitlines()[0].strip() if stack else ""


def shown(stack: str) -> str:
    """Returns the stack's first FRAMES frames, indented, and the number of others."""
    lines = stack.splitlines()
    more = [f"  … {len(lines) - FRAMES} more"] if len(lines) > FRAMES else []
    return "\n".join([*(f"  {line.strip()}" for line in lines[:FRAMES]), *more])


def _catches(pid: int) -> bool:
    """True if a process handles SIGNAL, as a rank's forks do: it would end other programs."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", text_of(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _settle(attempt: Path, ranks: Collection[int]) -> None:
    """Returns when the files of these ranks are not empty and have stopped growing, or after `_WAIT` seconds."""
    end, last_sizes, since = time.monotonic() + _WAIT, [-1], time.monotonic()
    while time.monotonic() < end:
        sizes = [len(text_of(stack_file(attempt, rank))) for rank in ranks]
        if sizes != last_sizes:
            last_sizes, since = sizes, time.monotonic()
        elif all(sizes) and time.monotonic() - since > _QUIET:
            return
        time.sleep(0.02)


def _note(attempt: Path, rank: int, line: str) -> None:
    with suppress(OSError), stack_file(attempt, rank).open("a") as file:
        file.write(line)
