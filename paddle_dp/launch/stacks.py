"""What every rank is doing, line by line: each writes its Python stacks to a file of its own when a signal asks for it.

faulthandler does it in the signal's handler itself, in C: also where Python has been waiting inside a collective for
an hour, which no handler of Python's would survive. `kill -QUIT PID` asks any rank by hand.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from paddle_dp.launch.processes import descendants, send

SIGNAL = signal.SIGQUIT
FRAMES = 12  # of a stack that are shown on the screen
_WAIT, _QUIET = 3.0, 0.3  # seconds: for all stacks, and for the last one to be whole
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)


def stack_file(attempt: Path, rank: int) -> Path:
    """Where a rank's stacks are, and those of its data workers."""
    return attempt / f"stacks.rank-{rank}"


def offer(attempt: Path, rank: int) -> None:
    """This process answers SIGNAL with its stacks from now on; its forks, too. Nothing where no file can be made."""
    try:
        file = os.open(stack_file(attempt, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def collect(attempt: Path, ranks: Mapping[int, int]) -> dict[int, str]:
    """Asks these ranks (their pids), then what they have forked, for their stacks. Returns of each rank that answered
    the stack that it stands in, the innermost frame first.

    A rank that somebody has stopped answers when it goes on: it is told to.
    """
    send(ranks.values(), SIGNAL)
    send(ranks.values(), signal.SIGCONT)
    _settle(attempt, ranks)
    stack_of = {rank: standing_in(_read(attempt, rank)) for rank in ranks}
    for rank, pid in ranks.items():
        for child in _forks(pid):
            _note(attempt, rank, f"\nprocess {child}, which rank {rank} has started:\n")
            send([child], SIGNAL)
            _settle(attempt, [rank])
    return {rank: stack for rank, stack in stack_of.items() if stack}


def standing_in(text: str) -> str:
    """Of what faulthandler wrote, the last thread's frames: the main one's. Where that waits for the other threads to
    end, theirs, one below the other."""
    *others, main = [stack.strip() for stack in _THREAD.split(text)[1:]] or [""]
    leaving = re.match(r'File ".*threading\.py", line \d+ in _shutdown', main)
    return "\n".join(filter(None, others)) if leaving and others else main


def innermost(stack: str) -> str:
    """«File "train.py", line 12 in forward»."""
    return stack.splitlines()[0].strip() if stack else ""


def shown(stack: str) -> str:
    """As much of a stack as a screen takes."""
    lines = stack.splitlines()
    more = [f"  … {len(lines) - FRAMES} more"] if len(lines) > FRAMES else []
    return "\n".join([*(f"  {line.strip()}" for line in lines[:FRAMES]), *more])


def _forks(pid: int) -> list[int]:
    """The processes below `pid` that answer SIGNAL as it does: another program would be ended by it."""
    return [child for child in descendants(pid) if _catches(child)]


def _catches(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def _settle(attempt: Path, ranks: Mapping[int, int] | list[int]) -> None:
    """Returns when the files of these ranks have something in them and grow no more, or after a while."""
    end, last_sizes, since = time.monotonic() + _WAIT, [-1], time.monotonic()
    while time.monotonic() < end:
        sizes = [len(_read(attempt, rank)) for rank in ranks]
        if sizes != last_sizes:
            last_sizes, since = sizes, time.monotonic()
        elif all(sizes) and time.monotonic() - since > _QUIET:
            return
        time.sleep(0.02)


def _read(attempt: Path, rank: int) -> str:
    try:
        return stack_file(attempt, rank).read_text(errors="replace")
    except OSError:
        return ""


def _note(attempt: Path, rank: int, line: str) -> None:
    try:
        with stack_file(attempt, rank).open("a") as file:
            file.write(line)
    except OSError:
        return
