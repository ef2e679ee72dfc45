"""The folder that an export is written to: it appears whole, and only an older export is replaced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_dp.errors import ExportError, UsageError
from paddle_dp.files import replacing

INFO = "export.json"  # describes the export; a folder with this file is an export, and may be replaced


def check_target(folder: Path) -> None:
    """Raises UsageError for a folder that is neither new, nor empty, nor an older export, and for one that holds the
    working folder: an export replaces its folder."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{folder} is the working folder, or holds it, and would be replaced: name another folder."
        )
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / INFO).exists())):
        raise UsageError(f"{folder} holds something else already: name another folder.")


@contextmanager
def new_export(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, which replaces `folder` at the block's end. Raises ExportError if it cannot."""
    folder = folder.resolve()
    old = folder.with_name(f".{folder.name}.old")
    try:
        with replacing(folder) as partial:
            partial.mkdir(parents=True)
            yield partial
            shutil.rmtree(old, ignore_errors=True)
            if (folder / INFO).exists():
                folder.replace(old)  # an empty folder is replaced, too
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ExportError(f"{folder} was not written: {error.strerror}.") from error
