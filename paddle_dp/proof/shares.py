"""The size of a global batch that ranks cannot share equally."""

from __future__ import annotations


def short(batch: int, ranks: int) -> int:
    """The largest size below `batch` that is no multiple of `ranks`, so that some rank gets more than another."""
    return next((size for size in range(batch - 1, 0, -1) if size % ranks), max(batch - 1, 1))
