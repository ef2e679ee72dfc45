"""The inputs of a run's model, kept in the run's folder so that it can predict files without its data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.batch import Structure, leaves, named_leaves, structure_of
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import class_names, read_sample
from paddle_dp.errors import UsageError

FILE = "inputs.json"  # its name in a run's folder
SAMPLES = 8  # samples that are examined if their shapes may vary


@dataclass(frozen=True, kw_only=True)
class InputArray:
    """One array of a sample. `name`: "ids", "text.ids", "[0]", or "inputs" for a single array. `shape`: without the
    batch, None for a dim of any size."""

    shape: tuple[int | None, ...]
    dtype: str
    name: str = "inputs"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('any' if dim is None else str(dim) for dim in self.shape)}]"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arrays of a sample in the order of their structure (None: a single array), and the data set's class names,
    or ()."""

    arrays: tuple[InputArray, ...]
    structure: Structure = None
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(
            str(spec) if self.structure is None else f"{spec.name} {spec}" for spec in self.arrays
        )

    @classmethod
    def from_dataset(cls, dataset: Any, varies: bool = False) -> Inputs:
        """The inputs of a data set's first sample; if shapes vary, of the first `SAMPLES` together."""
        with restoring_globals():  # only one rank reads, and its generators must stay as the others'
            count = min(SAMPLES if varies else 1, len(dataset))
            samples = [read_sample(dataset, index)[0] for index in range(count)]
        arrays = tuple(
            InputArray(name=name or "inputs", shape=_shape(each), dtype=str(first.dtype))
            for (name, first), each in zip(
                named_leaves(samples[0]), zip(*map(leaves, samples), strict=True), strict=True
            )
        )
        return cls(arrays=arrays, structure=structure_of(samples[0]), classes=class_names(dataset))

    def write(self, folder: Path) -> None:
        if self.structure is None:
            (only,) = self.arrays
            fields: dict[str, Any] = {"shape": only.shape, "dtype": only.dtype}
        else:
            fields = {"structure": self.structure, "arrays": [asdict(array) for array in self.arrays]}
        text = json.dumps({**fields, "classes": self.classes}, ensure_ascii=False)
        (folder / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Inputs | None:
        """The inputs of the run in `folder`; None without the file. Raises UsageError for a damaged one."""
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(text)
            structure = fields.get("structure")
            arrays = tuple(map(_input, [fields] if structure is None else fields["arrays"]))
            if len(leaves(structure)) != len(arrays):
                raise ValueError("another number of arrays")
            return cls(arrays=arrays, structure=structure, classes=tuple(map(str, fields["classes"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{folder / FILE} is damaged ({error}): remove it, and the data set is read instead."
            ) from None


def _shape(arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[int | None, ...]:
    sizes = zip(*(array.shape for array in arrays), strict=False)
    return tuple(size[0] if len(set(size)) == 1 else None for size in sizes)


def _input(fields: dict[str, Any]) -> InputArray:
    shape = tuple(None if dim is None else int(dim) for dim in fields["shape"])
    return InputArray(
        name=str(fields.get("name", "inputs")), shape=shape, dtype=np.dtype(fields["dtype"]).name
    )
