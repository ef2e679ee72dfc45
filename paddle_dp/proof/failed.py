"""What failed in float64: on all ranks, which then go on without it, or on some, which end the job with their error.

A model's own code may be written for float32 only. On one stage of a pipeline it fails on that stage's ranks, and the
others wait for it in an exchange: they cannot go on together. So each rank that fails leaves a note, and waits for
those of the others for a while.
"""

from __future__ import annotations

import time
from pathlib import Path

from paddle_dp.errors import gist

WAIT = 10.0  # seconds for the other ranks, which fail at the same place of the same forward
_NAME = "failed.{}.txt"


def failed_together(error: Exception, folder: Path, rank: int, ranks: int, wait: float = WAIT) -> str:
    """The error as a sentence, where it, or another one, is on all ranks. Raises it where some rank has none."""
    said = f"{type(error).__name__}: {gist(error)}"
    note = folder / _NAME.format(rank)
    note.with_suffix(".part").write_text(said)
    note.with_suffix(".part").rename(note)
    end = time.monotonic() + wait
    while not all((folder / _NAME.format(other)).exists() for other in range(ranks)):
        if time.monotonic() > end:
            raise error
        time.sleep(0.05)
    return said


def failed_alone(folder: Path) -> str | None:
    """Which ranks left notes in `folder` and what the first of them said, as a sentence; None without notes."""
    notes = sorted(folder.glob(_NAME.format("*")), key=lambda note: note.stat().st_mtime_ns)
    if not notes:
        return None
    ranks = sorted(int(note.name.split(".")[1]) for note in notes)
    which = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{notes[0].read_text()} (on {which} only)"
