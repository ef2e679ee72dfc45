"""Some held-out samples with the model's answers, as data: pictures with their classes, texts with a continuation."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PredictedSample:
    """A held-out sample of a classifier: its number and name in the data set, its true class, the predicted class with
    its probability, and its loss. `picture`: a PNG of a sample that is a picture."""

    index: int
    name: str
    true: str
    predicted: str
    probability: float
    loss: float
    picture: bytes | None = None

    def __str__(self) -> str:
        shares = f"{self.predicted} ({self.probability:.2f})"
        return f"{self.name}: true {self.true}, predicted {shares}, loss {self.loss:.3f}"


@dataclass(frozen=True, kw_only=True)
class WrittenText:
    """The beginning of a held-out text, the model's continuation, and the text's own."""

    index: int
    prompt: str
    continuation: str
    reference: str

    def __str__(self) -> str:
        return (
            f"[{self.index}] {self.prompt}\n  the model: {self.continuation}\n  the text:  {self.reference}"
        )


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Samples of one step, with a sentence that says which samples they are. `grid`: their pictures, as one PNG."""

    sentence: str
    samples: Sequence[PredictedSample] = ()
    texts: Sequence[WrittenText] = ()
    grid: bytes | None = None

    def __str__(self) -> str:
        return "\n".join([self.sentence, *map(str, self.samples), *map(str, self.texts)])

    @property
    def content(self) -> dict[str, Any]:
        """The fields of samples.json; pictures in base 64, null for a number that is not finite."""
        samples = [
            vars(sample)
            | {
                "loss": sample.loss if math.isfinite(sample.loss) else None,
                "probability": sample.probability if math.isfinite(sample.probability) else None,
                "picture": sample.picture and base64.b64encode(sample.picture).decode(),
            }
            for sample in self.samples
        ]
        return {"sentence": self.sentence, "samples": samples, "texts": [vars(text) for text in self.texts]}
