"""Text files as windows of tokens, each to be foretold from those before it; by default Python's own sources."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.datasets._windows import TextConfig, Windows


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    """`path`: a folder, a file or a glob; `limit`: no more text than that, in the order of the files' names.
    `tokenizer`: bytes, or the path of a tokenizer.json (package tokenizers) or of a sentencepiece model.
    `held_out` of the files is kept for the test split, chosen by their names; a single file is cut, its end held out.
    `cache`: the folder for the tokens, so that they are made once; by default ~/.cache/paddle_dp."""

    def build(self, split: str) -> Windows:
        """Inputs and targets int64 [length]. No two splits share a file, or a byte of a single file."""
        return self.windows(split)
