"""Claims a run's folder before anything starts; an older run in it is moved aside, never overwritten."""

from __future__ import annotations

import os
from pathlib import Path

from paddle_dp.errors import UsageError

SIGNS = ("recipe.yaml", "metrics.jsonl", "checkpoints", "visualdl")


def claim(folder: Path, resume: str | None) -> Path | None:
    """Makes `folder` ready for a run and returns where an older run went, if there was one.

    A new run never mixes with an old one: what stood in `folder` becomes `<folder>.1`, `.2`, … With `resume` it stays,
    and unless that is a path ("newest", "best", a step are none), a run must be there. Raises UsageError when none is,
    or when the folder cannot be made or written.
    """
    older = any((folder / sign).exists() for sign in SIGNS)
    if resume and not older and (resume in ("newest", "best") or resume.isdecimal()):
        raise UsageError(
            f"{folder} holds no run to resume. Leave --resume out to start one, or name the run's folder: "
            "--output-dir DIR."
        )
    try:
        moved = _move_aside(folder) if older and not resume else None
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}): choose another one with --output-dir DIR."
        ) from error
    return moved


def _move_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
