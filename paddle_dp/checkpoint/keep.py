"""Which checkpoints stay: the newest few, the best one, and always one that is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import replace
from paddle_dp.checkpoint.manifest import read_manifest
from paddle_dp.checkpoint.naming import STEP, UnusableError, checkpoints, step_of
from paddle_dp.errors import CheckpointError

_BEST = "best.json"


def set_best(folder: Path, checkpoint: Path, numbers: Mapping[str, Any]) -> None:
    """Points best.json at a checkpoint of this folder, with the numbers that made it the best."""
    step_of(checkpoint)
    content = json_codec.encode({"checkpoint": checkpoint.name, "numbers": dict(numbers)}, _BEST)
    try:
        replace(Path(folder) / _BEST, content)
    except OSError as error:
        raise CheckpointError(f"{Path(folder) / _BEST} was not written: {error.strerror}.") from None


def best(folder: Path) -> Path | None:
    """The checkpoint that best.json points at, or None if there is none (any more)."""
    content = _read_best(Path(folder))
    path = Path(folder) / content["checkpoint"] if content else None
    return path if path and path.is_dir() else None


def best_numbers(folder: Path) -> dict[str, Any]:
    """The numbers that made the best checkpoint the best; empty if there is none."""
    content = _read_best(Path(folder))
    return dict(content["numbers"]) if content else {}


def _read_best(folder: Path) -> dict[str, Any] | None:
    try:
        content = json_codec.decode((folder / _BEST).read_bytes())
        # A name from a file is never followed out of the folder.
        named = STEP.fullmatch(content["checkpoint"]) and isinstance(content["numbers"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if named else None


def prune(folder: Path, keep: int, spare: Iterable[Path] = (), trusted: Path | None = None) -> list[Path]:
    """Deletes all but the newest `keep` checkpoints, the best one, those in `spare`, the newest whole one, and the
    newest whole one that was found agreed and finite.

    Returns what it deleted. `trusted` is known to be all that, because it was checked and saved just now: without it
    the newest ones are read to find one that is. For one rank.
    """
    if keep < 1:
        raise ValueError(f"keep is 1 or more, not {keep}")
    found = checkpoints(folder)
    if len(found) <= keep:
        return []
    whole = trusted or next(filter(_is_whole, reversed(found)), None)
    good = trusted or newest_good(folder)
    stay = {path.name for path in (*found[-keep:], *spare, best(folder), whole, good) if path is not None}
    # A link is somebody's own arrangement.
    gone = [path for path in found if path.name not in stay and not path.is_symlink()]
    for path in gone:
        # A kill while files are removed must not leave half a checkpoint under a good name.
        hidden = path.with_name(f".{path.name}.deleted-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            path.rename(hidden)
        except OSError as error:
            raise CheckpointError(f"The old checkpoint {path} was not removed: {error.strerror}.") from None
        shutil.rmtree(hidden, ignore_errors=True)
    return gone


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint that is whole and was found agreed and finite before it was written, or None."""
    return next((path for path in reversed(checkpoints(folder)) if _is_good(path) and _is_whole(path)), None)


def _is_good(checkpoint: Path) -> bool:
    try:
        checks = read_manifest(checkpoint).checks
    except UnusableError:
        return False
    return checks is not None and checks.fault is None


def _is_whole(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint).verify(checkpoint)
    except UnusableError:
        return False
    return True
