"""The folder that an export is written to: it appears whole, and only an older export is replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paddle_dp.errors import ExportError, UsageError
from paddle_dp.files import replacing

INFO = "export.json"  # describes the export, and names its files: a folder of these alone may be replaced


def check_target(folder: Path) -> None:
    """Raises UsageError for a folder that is neither new, nor empty, nor an older export, and for one that holds the
    working folder: an export replaces its folder."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} is the working folder, or holds it, and would be replaced: name another folder."
        )
    if folder.exists() and (other := _other_file(folder)):
        raise UsageError(f"{folder} holds something else already ({other}): name another folder.")


def _other_file(folder: Path) -> str:
    """A file that no export has written, in a folder that one would replace; "" if there is none. Tools leave hidden
    files in an export, such as .DS_Store and _opt_cache; a repository's are somebody's."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    with suppress(OSError, ValueError, AttributeError, TypeError):
        written = {INFO, *json.loads((folder / INFO).read_text("utf-8")).get("files", names)}
        names = {n for n in names - written if n[0] not in "._" or n.startswith(".git")}
    return min(names, default="")


@contextmanager
def new_export(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, which replaces `folder` at the block's end. Raises ExportError if it cannot."""
    folder = folder.resolve()
    old = folder.with_name(f".{folder.name}.old")
    try:
        with replacing(folder) as partial:
            partial.mkdir(parents=True)
            yield partial
            info = json.loads((partial / INFO).read_text("utf-8"))
            info["files"] = sorted(path.name for path in partial.iterdir())
            (partial / INFO).write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", "utf-8")
            shutil.rmtree(old, ignore_errors=True)
            if (folder / INFO).exists():
                folder.replace(old)  # an empty folder is replaced, too
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ExportError(f"{folder} was not written: {error.strerror}.") from error
