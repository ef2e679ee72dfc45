"""How checkpoints are called, and the words for one that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path

from paddle_dp.errors import CheckpointError

STEP = re.compile(r"step-([0-9]{8,})")
# What a job that was killed leaves behind: a save, a replacement or a removal that did not end.
LEFTOVER = re.compile(r"\.(step-[0-9]{8,})\.(partial|replaced|deleted)-.+")


def step_name(step: int) -> str:
    """The name of the checkpoint of this step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = STEP.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path} is not a checkpoint: its name is not like {step_name(123)}.")
    return int(match[1])


def checkpoints(folder: Path) -> list[Path]:
    """The folders named like checkpoints, oldest first; whatever else lies there is left alone."""
    try:
        found = [path for path in Path(folder).iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
    return sorted(found, key=step_of)


class UnusableError(CheckpointError):
    """A checkpoint that is there but cannot be loaded: `why`, and in the message what to do about it."""

    def __init__(self, folder: Path, why: str):
        self.folder, self.why = folder, why
        super().__init__(f"The checkpoint {folder} cannot be used: {why}. {_instead_of(folder)}")


def _instead_of(folder: Path) -> str:
    if not STEP.fullmatch(folder.name):
        return "Give another one."
    older = [path for path in checkpoints(folder.parent) if step_of(path) < step_of(folder)]
    return f"Use the next older one: {older[-1]}" if older else "There is no older one beside it."
