"""Text, .jsonl or .parquet files as windows of tokens, to predict the next; by default Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._windows import TextConfig, Windows


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    def build(self, split: str) -> Windows:
        """Inputs and targets int64 [length]. No two splits share a file, or a byte of a single file."""
        return self.windows(split)

    def read_file(self, path: Path) -> Iterator[tuple[Array, Array]]:
        """Yields the file's windows as held-out samples; the last one may be shorter. Raises DataError for a file
        without a token to predict, or one that is no text."""
        return self.all_windows(path)
