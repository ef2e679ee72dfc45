"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = re.compile(r"\..+\.partial-[0-9]+-[0-9a-f]{8}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path next to `path` for a file or folder that replaces it at the block's end, or goes if that fails."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Removes the half-written files in a folder that processes left when they were killed. Call it while none
    writes there."""
    for path in folder.glob(".*.partial-*"):
        if PARTIAL.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)
