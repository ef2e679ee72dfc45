"""The folder of a run's checkpoints: giving one its place, finding one that is whole, clearing up after a kill."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint.disk import flush_folder
from paddle_dp.checkpoint.keep import best
from paddle_dp.checkpoint.loading import load
from paddle_dp.checkpoint.manifest import MANIFEST, read_manifest
from paddle_dp.checkpoint.naming import LEFTOVER, UnusableError, checkpoints, step_name
from paddle_dp.errors import CheckpointError

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh


def place(partial: Path, final: Path) -> None:
    """Gives a finished folder its name, in the place of an earlier one of the same name."""
    replaced = None
    if final.exists():
        # Two renames cannot be one; `clean` puts the earlier one back if the process dies in between.
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
    """Removes what killed jobs left behind; returns what it removed. For one rank, while nobody saves."""
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
    """Returns when every byte of a checkpoint is as it was written and what was written was good; UnusableError
    otherwise.

    Where the manifest does not say that somebody looked (saved by an older version), its numbers are looked at now.
    """
    manifest = read_manifest(checkpoint)
    manifest.verify(checkpoint)
    opened = load(checkpoint, verify=False)  # says so, too, if it was not good
    if manifest.checks is None and (name := opened.not_a_number()):
        raise UnusableError(checkpoint, f"'{name}' in it holds NaN")


def _stderr(line: str) -> None:
    print(line, file=sys.stderr)


def newest(folder: Path, mesh: Mesh | None = None, say: Callable[[str], Any] = _stderr) -> Path | None:
    """The newest checkpoint that is whole, agreed and finite, or None; `say` is told which were skipped and why.

    With a mesh (collective) the first rank looks, and all ranks get its answer.
    """
    if mesh is None or mesh.ranks == 1:
        return _newest(Path(folder), say)
    try:
        answer = str(_newest(Path(folder), say) or "") if mesh.is_main else ""
        error = ""
    except CheckpointError as found:
        answer, error = "", str(found)
    mesh.wait("newest checkpoint")
    answer, error = mesh.gather([answer, error])[0]
    if error:
        raise CheckpointError(error)
    return Path(answer) if answer else None


def _newest(folder: Path, say: Callable[[str], Any]) -> Path | None:
    for checkpoint in reversed(checkpoints(folder)):
        try:
            check(checkpoint)
            return checkpoint
        except UnusableError as error:
            say(f"Skipped the checkpoint {checkpoint}: {error.why}.")
    return None


def find(spec: str | Path, folder: Path, mesh: Mesh | None = None) -> Path:
    """The checkpoint that `spec` means: "newest", "best", a step ("123"), or the path of a checkpoint or of a run.

    `folder` is where the run keeps its checkpoints. Collective where a mesh is given. Raises CheckpointError.
    """
    if str(spec) == "newest":
        found = newest(folder, mesh)
    elif str(spec) == "best":
        found = best(folder)
    elif str(spec).isdecimal():
        found = Path(folder) / step_name(int(str(spec)))
    else:
        return _at(Path(spec), mesh)
    if found is None or not found.is_dir():
        there = ", ".join(path.name for path in checkpoints(folder)) or "none"
        if str(spec) == "newest" and there != "none":
            raise CheckpointError(
                f"None of the checkpoints in {folder} can be used, for the reasons above ({there}). Start a new run, "
                "or name a checkpoint of another one by its path."
            )
        raise CheckpointError(f"There is no checkpoint '{spec}' in {folder}. There: {there}.")
    return found


def _at(path: Path, mesh: Mesh | None) -> Path:
    if (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        if checkpoints(folder):
            return find("newest", folder, mesh)
    raise CheckpointError(
        f"{path} is neither a checkpoint nor a folder that holds some ('{step_name(123)}')."
    )
