"""Text, .jsonl or .parquet files as full windows of documents, which attention does not cross; for gpt and llama."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paddle_dp.datasets._packing import Consecutive, Documents, Packed
from paddle_dp.datasets._tokenizers import tokenizer
from paddle_dp.datasets._windows import TextConfig


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    """The documents are in another order in each epoch, one after another. One that does not fit into a window is
    continued in the next, as if it began there."""

    masks_documents: ClassVar[bool] = True  # a model's attention gets a mask

    def build(self, split: str) -> Packed:
        """Inputs {"tokens", "positions"} int64 [length] each, targets int64 [length]. Every token but the first of a
        document is a target once in an epoch; an incomplete window at the end is not read."""
        by = tokenizer(self.tokenizer)
        files, (tokens, ends) = self.texts(split, by, arrays=2)
        documents = Documents.until(ends, tokens)
        arrange = Consecutive(documents.inputs, self.length)
        data = Packed(documents, arrange, self.length, by, split == "test")
        return self.filled(data, split, len(tokens), files)
