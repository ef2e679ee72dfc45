"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path next to `path` for a file or folder that replaces it at the block's end, or goes if that fails."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
