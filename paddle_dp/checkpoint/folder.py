"""The folder of a run's checkpoints: which there are, which is newest and whole, which is best, which may go."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint import plain
from paddle_dp.checkpoint.disk import flush_folder, replace
from paddle_dp.checkpoint.manifest import read_manifest
from paddle_dp.errors import CheckpointError

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh

_STEP = re.compile(r"step-([0-9]{8,})")
_LEFTOVER = re.compile(r"\.(step-[0-9]{8,})\.(partial|replaced|deleted)-.+")
_BEST = "best.json"


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _STEP.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path} is not a checkpoint: its name is not like {step_name(123)}.")
    return int(match[1])


def checkpoints(folder: Path) -> list[Path]:
    """The folders named like checkpoints, oldest first; whatever else lies there is left alone."""
    try:
        found = [p for p in Path(folder).iterdir() if _STEP.fullmatch(p.name) and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=step_of)


def place(partial: Path, final: Path) -> None:
    """Gives a finished folder its name, in the place of an earlier one of the same name."""
    replaced = None
    if final.exists():
        # Two renames cannot be one; `clean` puts the earlier one back if the process dies in between.
        replaced = final.with_name(f".{final.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
        final.rename(replaced)
    partial.rename(final)
    flush_folder(final.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def clean(folder: Path) -> list[Path]:
    """Removes what killed jobs left behind; says what was removed. Call it on one rank, while nobody saves."""
    if not Path(folder).is_dir():
        return []
    removed = []
    for path in sorted(Path(folder).iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "replaced" and not (path.parent / match[1]).exists():
            path.rename(path.parent / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def check(path: Path) -> None:
    """Returns when every byte of a checkpoint is as it was written; CheckpointError otherwise."""
    read_manifest(path).verify(path)


def _stderr(line: str) -> None:
    print(line, file=sys.stderr)


def newest(folder: Path, mesh: Mesh | None = None, say: Callable[[str], Any] = _stderr) -> Path | None:
    """The newest checkpoint that is whole, or None; `say` is told which were skipped and why.

    With a mesh (collective) the first rank looks, and all ranks get its answer.
    """
    if mesh is None or mesh.ranks == 1:
        return _newest(Path(folder), say)
    found = _newest(Path(folder), say) if mesh.is_first else None
    mesh.wait("newest checkpoint")
    answer = mesh.gather(found.name if found else None)[0]
    return Path(folder) / answer if answer else None


def _newest(folder: Path, say: Callable[[str], Any]) -> Path | None:
    for path in reversed(checkpoints(folder)):
        try:
            check(path)
            return path
        except CheckpointError as error:
            say(f"Skipped: {error}")
    return None


def set_best(folder: Path, checkpoint: Path, numbers: Mapping[str, Any]) -> None:
    """Points best.json at a checkpoint of this folder, with the numbers that made it the best."""
    step_of(checkpoint)
    replace(Path(folder) / _BEST, plain.encode({"checkpoint": checkpoint.name, "numbers": dict(numbers)}))


def best(folder: Path) -> Path | None:
    """The checkpoint that best.json points at, or None if there is none (any more)."""
    content = _best(Path(folder))
    path = Path(folder) / content["checkpoint"] if content else None
    return path if path and path.is_dir() else None


def best_numbers(folder: Path) -> dict[str, Any]:
    """The numbers that made the best checkpoint the best; empty if there is none."""
    content = _best(Path(folder))
    return dict(content["numbers"]) if content else {}


def _best(folder: Path) -> dict[str, Any] | None:
    try:
        content = plain.decode((folder / _BEST).read_bytes())
        # A name from a file is never followed out of the folder.
        return content if _STEP.fullmatch(content["checkpoint"]) and isinstance(content["numbers"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prune(folder: Path, keep: int, spare: Iterable[Path] = (), trusted: Path | None = None) -> list[Path]:
    """Deletes all but the newest `keep` checkpoints, the best one, those in `spare`, and the newest whole one.

    `trusted` is known to be whole (it was just saved): without it, the newest ones are read to find one that is.
    """
    found = checkpoints(folder)
    if keep < 1:
        raise ValueError(f"keep must be 1 or more, not {keep}")
    if len(found) <= keep:
        return []
    whole = trusted or _newest(Path(folder), lambda line: None)
    kept = {path.name for path in (*found[-keep:], *spare, best(folder), whole) if path is not None}
    gone = [path for path in found if path.name not in kept]
    for path in gone:
        # A kill while files are removed must not leave half a checkpoint under a good name.
        hidden = path.with_name(f".{path.name}.deleted-{os.getpid()}-{os.urandom(4).hex()}")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return gone
