"""The folder of a run's checkpoints: publishes one, finds one, prunes old ones, sets later ones aside, cleans up."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import flush_folder, replace
from paddle_dp.checkpoint.loading import load
from paddle_dp.checkpoint.manifest import (
    LEFTOVER,
    MANIFEST,
    STEP,
    UnusableError,
    checkpoints,
    read_manifest,
    step_name,
    step_of,
)
from paddle_dp.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh

_BEST = "best.json"


class NoSuchCheckpointError(UsageError, CheckpointError):
    """The checkpoint that was asked for does not exist."""


def publish(partial: Path, final: Path) -> None:
    """Renames a finished folder to `final`, replacing an earlier one of that name."""
    replaced = None
    if final.exists():
        # Two renames are not atomic: `clean` restores the earlier one if the process dies in between.
        replaced = final.with_name(f".{final.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced:
            replaced.rename(final)
        raise
    flush_folder(final.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def clean(folder: Path) -> list[Path]:
    """Removes the unfinished folders of killed jobs and returns them. Call it on one rank, while no rank saves.

    A checkpoint that was being replaced is restored. On a shared disk a folder stays if it has files that another
    machine wrote and this one does not see yet: a later call removes it.
    """
    if not Path(folder).is_dir():
        return []
    removed = []
    for path in sorted(Path(folder).iterdir()):
        match = LEFTOVER.fullmatch(path.name)
        if match and match[2] == "replaced" and not (path.parent / match[1]).exists():
            path.rename(path.parent / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def check(checkpoint: Path) -> None:
    """Raises UnusableError unless every byte of a checkpoint is as written and its checks passed when it was saved.

    If the manifest has no checks (none were made), the tensors are searched for NaN now.
    """
    manifest = read_manifest(checkpoint)
    manifest.verify(checkpoint)
    opened = load(checkpoint, verify=False)  # raises if its checks found a fault
    if manifest.checks is None and (name := opened.first_nan()):
        raise UnusableError(checkpoint, f"'{name}' in it holds NaN")


def newest(
    folder: Path,
    mesh: Mesh | None = None,
    until: int | None = None,
    but: Collection[Path] = (),
) -> Path | None:
    """The newest checkpoint that is whole, equal on all ranks and finite, or None.

    A line on the screen names each skipped checkpoint. `until` is the latest step allowed; `but` lists checkpoints to
    ignore. With a mesh (collective) rank 0 searches, and all ranks get its answer.
    """
    if mesh is None or mesh.ranks == 1:
        return _newest(Path(folder), until, but)
    try:
        answer = str(_newest(Path(folder), until, but) or "") if mesh.is_main else ""
        error = ""
    except CheckpointError as failure:
        answer, error = "", str(failure)
    mesh.wait("newest checkpoint")
    answer, error = mesh.gather([answer, error])[0]
    if error:
        raise CheckpointError(error)
    return Path(answer) if answer else None


def _newest(folder: Path, until: int | None, but: Collection[Path]) -> Path | None:
    for checkpoint in reversed(checkpoints(folder)):
        if checkpoint in but or (until is not None and step_of(checkpoint) > until):
            continue
        try:
            check(checkpoint)
            return checkpoint
        except UnusableError as error:
            print(f"Skipped the checkpoint {checkpoint}: {error.why}.", file=sys.stderr)
    return None


def find(spec: str | Path, folder: Path, mesh: Mesh | None = None) -> Path:
    """Finds a checkpoint by `spec`: "newest", "best", a step ("123"), or the path of a checkpoint or of a run.

    `folder` holds the run's checkpoints. Collective if a mesh is given. Raises CheckpointError.
    """
    if str(spec) == "newest":
        checkpoint = newest(folder, mesh)
    elif str(spec) == "best":
        checkpoint = best(folder)
    elif str(spec).isdecimal():
        checkpoint = Path(folder) / step_name(int(str(spec)))
    else:
        return find_at(Path(spec), mesh)
    if checkpoint is None or not checkpoint.is_dir():
        text = _missing_message(str(spec), Path(folder))
        raise CheckpointError(text) if str(spec) == "newest" else NoSuchCheckpointError(text)
    return checkpoint


def _missing_message(spec: str, folder: Path) -> str:
    """The error text: why a run's folder has no such checkpoint, and which steps it has."""
    there = [path.name for path in checkpoints(folder)]
    if not there:
        return f"There is no checkpoint in {folder}."
    if spec == "newest":
        return (
            f"None of the checkpoints in {folder} can be used, for the reasons above ({', '.join(there)}). Start a "
            "new run, or name a checkpoint of another one by its path."
        )
    steps = ", ".join(str(step_of(folder / name)) for name in there)
    hint = f"Saved: step {steps}. Give newest, a step or a path."
    if spec != "best":
        return f"There is no checkpoint of step {spec} in {folder}. {hint}"
    if (folder / _BEST).exists():
        return f"The best checkpoint of {folder}, which {_BEST} names, is not there any more. {hint}"
    return (
        f"No best checkpoint was kept in {folder}: the training must have callbacks.checkpoint.best (acc1, loss: a "
        f"number of the evaluations) and evaluate. {hint}"
    )


def find_at(path: Path, mesh: Mesh | None = None) -> Path:
    """The checkpoint at a path, or the newest one of the run there. Raises CheckpointError."""
    if (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        if checkpoints(folder):
            return find("newest", folder, mesh)
    raise NoSuchCheckpointError(
        f"{path} is neither a checkpoint nor a folder of checkpoints (such as '{step_name(123)}')."
    )


def set_best(folder: Path, checkpoint: Path, numbers: Mapping[str, Any]) -> None:
    """Records a checkpoint of this folder in best.json, with the numbers that made it the best. Raises
    CheckpointError if the file cannot be written."""
    step_of(checkpoint)
    content = json_codec.encode({"checkpoint": checkpoint.name, "numbers": dict(numbers)}, _BEST)
    try:
        replace(Path(folder) / _BEST, content)
    except OSError as error:
        raise CheckpointError(f"{Path(folder) / _BEST} was not written: {error.strerror}.") from None


def best(folder: Path) -> Path | None:
    """The checkpoint that best.json names; None without one, or if it was deleted."""
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
        # Only a plain checkpoint name is accepted: it cannot lead out of the folder.
        named = STEP.fullmatch(content["checkpoint"]) and isinstance(content["numbers"], dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if named else None


def prune(folder: Path, keep: int, trusted: Path | None = None) -> list[Path]:
    """Deletes old checkpoints and returns them. Call it on one rank.

    Keeps the newest `keep`, the best, the newest whole one, and the newest whole one that was equal on
    all ranks and finite. `trusted`: a whole and good checkpoint, saved just now; without it, checkpoints are read to
    find one.
    """
    if keep < 1:
        raise ValueError(f"keep is 1 or more, not {keep}")
    saved = checkpoints(folder)
    if len(saved) <= keep:
        return []
    complete = trusted or next(filter(_is_complete, reversed(saved)), None)
    good = trusted or newest_good(folder)
    stay = {path.name for path in (*saved[-keep:], best(folder), complete, good) if path is not None}
    # The user made a link, so it stays.
    deleted = [path for path in saved if path.name not in stay and not path.is_symlink()]
    for path in deleted:
        # Renaming comes first: a kill during removal must not leave half a checkpoint under a valid name.
        hidden = path.with_name(f".{path.name}.deleted-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            path.rename(hidden)
        except OSError as error:
            raise CheckpointError(f"The old checkpoint {path} was not removed: {error.strerror}.") from None
        shutil.rmtree(hidden, ignore_errors=True)
    return deleted


def set_aside(folder: Path, step: int) -> tuple[list[Path], Path] | None:
    """Moves the checkpoints of steps after `step` to a folder next to them, in which no reader of `folder` looks, with
    the best.json that names one of them. Returns where they were, oldest first, and that folder; None without such
    checkpoints. Call it on one rank, while no rank saves. Raises CheckpointError."""
    folder = Path(folder)
    later = [path for path in checkpoints(folder) if step_of(path) > step]
    if not later:
        return None
    names = (folder / f"abandoned-{number}" for number in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    content = _read_best(folder)
    try:
        aside.mkdir()
        if content is not None and step_of(folder / content["checkpoint"]) > step:
            (folder / _BEST).rename(aside / _BEST)
        for path in reversed(later):
            if path.is_symlink():  # a relative one would lead elsewhere
                (aside / path.name).symlink_to(path.resolve())
                path.unlink()
            else:
                path.rename(aside / path.name)
        flush_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoints after step {step} in {folder} were not moved aside: {error.strerror}."
        ) from None
    return later, aside


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, and was equal on all ranks and finite when it was saved, or None."""
    return next(
        (path for path in reversed(checkpoints(folder)) if _is_good(path) and _is_complete(path)), None
    )


def _is_good(checkpoint: Path) -> bool:
    try:
        checks = read_manifest(checkpoint).checks
    except UnusableError:
        return False
    return checks is not None and checks.fault is None


def _is_complete(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint).verify(checkpoint)
    except UnusableError:
        return False
    return True
