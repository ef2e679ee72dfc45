"""What a run's model reads, kept in the run's folder: so that files can be given to it where its data set is not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.data.randomness import globals_kept
from paddle_dp.data.sample import class_names, read_sample
from paddle_dp.errors import UsageError

FILE = "inputs.json"  # its name in a run's folder


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One sample's input: `shape` (no batch), `dtype`; and the data set's class names, or ()."""

    shape: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, dataset: Any) -> Inputs | None:
        """As the first sample of a data set has them; None for samples of several inputs."""
        with globals_kept():  # only one rank reads it
            first, _ = read_sample(dataset, 0)
        if isinstance(first, (dict, tuple)):
            return None
        return cls(shape=first.shape, dtype=str(first.dtype), classes=class_names(dataset))

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), ensure_ascii=False)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Inputs | None:
        """Those of the run in `folder`; None for a run of an older version. Raises UsageError for a damaged file."""
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            shape, dtype, classes = found["shape"], np.dtype(found["dtype"]).name, found["classes"]
            return cls(shape=tuple(map(int, shape)), dtype=dtype, classes=tuple(map(str, classes)))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder / FILE} is damaged ({error}): remove it, and the data set is asked."
            ) from None
