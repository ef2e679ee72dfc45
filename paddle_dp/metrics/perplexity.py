"""Perplexity of a language model, e to the mean cross-entropy of a token; also bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.units import AboveZero


class Perplexity:
    """Computed from the evaluation's loss, which must be cross-entropy without smoothing. This is a mean over tokens if
    all texts have the same length, or if padding is an ignored class."""

    def __init__(self, bytes_per_token: float | None):
        self._bytes = bytes_per_token
        self.names = ("perplexity",) if bytes_per_token is None else ("perplexity", "bits_per_byte")

    def with_loss(self, loss: Any) -> Perplexity:
        """This metric. Raises UsageError for another loss."""
        if getattr(loss, "use", "") != "cross_entropy" or loss.smoothing:
            raise UsageError(
                "it is e to the mean cross-entropy of a token, and the loss of this recipe may be something else: "
                "set loss: {use: cross_entropy} without label_smoothing, or leave perplexity out."
            )
        return self

    def compute(self, numbers: Any) -> dict[str, float]:
        loss = numbers["loss"]
        scores = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self._bytes is not None:
            scores["bits_per_byte"] = loss / math.log(2) / self._bytes
        return scores


@dataclass(frozen=True, kw_only=True)
class Config:
    bytes_per_token: AboveZero | None = None
    """Mean number of bytes of a token in the held-out text; if set, bits_per_byte is given, too. 1 for a tokenizer of
    bytes."""

    def build(self) -> Perplexity:
        return Perplexity(self.bytes_per_token)
