"""The folder that an export is written to: it appears whole, and only an older export is replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

from paddle_dp.errors import UsageError

INFO = "export.json"  # describes the export; a folder with this file is an export, and may be replaced


def check_target(folder: Path) -> None:
    """Raises UsageError for a folder that is neither new, nor empty, nor an older export."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / INFO).exists())):
        raise UsageError(f"{folder} holds something else already: name another folder.")


def replace(folder: Path, partial: Path) -> None:
    """Moves the finished folder `partial` to `folder`, and removes an older export there."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if (folder / INFO).exists():
        folder.replace(old)
    partial.replace(folder)  # replaces an empty folder, too
    shutil.rmtree(old, ignore_errors=True)
