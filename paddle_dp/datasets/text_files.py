"""Text, .jsonl or .parquet files as windows of tokens, to predict the next; by default Python's standard library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._texts import documents
from paddle_dp.datasets._tokenizers import tokenizer
from paddle_dp.datasets._windows import TextConfig, Windows
from paddle_dp.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    def build(self, split: str) -> Windows:
        """Inputs and targets int64 [length]. No two splits share a file, or a byte of a single file."""
        return self.windows(split)

    def read_file(self, path: Path) -> Iterator[tuple[Array, Array]]:
        """Yields the windows of each document of a file as held-out samples, input and target int64 [up to `length`];
        the last one may be shorter. Raises DataError for a document without a token to predict, or a file that is no
        text."""
        by = tokenizer(self.tokenizer)
        try:
            texts = list(documents(path, self.field))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        for text in texts:
            tokens = by.encode(text).astype(np.int64)
            if len(tokens) < 2:
                raise DataError(f"{path} has {len(tokens)} tokens: there is nothing to predict in it")
            for start in range(0, len(tokens) - 1, self.length):
                window = tokens[start : start + self.length + 1]
                yield window[:-1], window[1:]
