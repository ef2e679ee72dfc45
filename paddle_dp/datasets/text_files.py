"""Text files as windows of tokens, for next-token prediction; by default Python's own sources."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.datasets._windows import TextConfig, Windows


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    def build(self, split: str) -> Windows:
        """Inputs and targets int64 [length]. No two splits share a file, or a byte of a single file."""
        return self.windows(split)
