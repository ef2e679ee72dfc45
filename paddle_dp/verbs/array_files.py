"""Reads samples from files of arrays, in the shapes and dtypes that a model reads.

| file | one input | several inputs |
|---|---|---|
| .npy | one sample, or n of them | |
| .npz | its only array, or `inputs` | an array for each, by its name |
| .csv | a row for each sample; a header is skipped | a header with the names: `age`, `point[0]`, `point[1]` |
| .jsonl | a list of numbers on each line | an object, or a list of them, on each line; padded as the run pads |
"""

from __future__ import annotations

import csv
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from paddle_dp.assembly.inputs import InputArray, Inputs
from paddle_dp.batch import leaves, named_leaves, structure_of, unflatten
from paddle_dp.data.arrays import Array, Arrays, as_arrays, describe
from paddle_dp.data.prepared import Pads, pad
from paddle_dp.errors import DataError

SUFFIXES = (".npy", ".npz", ".csv", ".jsonl")


def samples_of(file: Path, inputs: Inputs, pads: Pads) -> Iterator[Arrays]:
    """Yields the samples of a file of arrays, in the structure, shapes and dtypes that the model reads.

    Raises DataError, with the file and the line or array, for data that does not fit.
    """
    kind = file.suffix.lower()
    if kind == ".jsonl":
        yield from _lines(file, inputs, pads)
        return
    if inputs.structure is None:
        yield from rows_of(file, inputs.arrays[0], _single_array(file, kind))
        return
    if kind == ".npy":
        raise DataError(
            f"{file} is one array, and the model reads {inputs}: give .npz, .csv or .jsonl with names."
        )
    named = _archive(file) if kind == ".npz" else _table(file)
    arrays = [rows_of(file, spec, _column(file, spec, named, inputs)) for spec in inputs.arrays]
    if len({len(array) for array in arrays}) > 1:
        pairs = zip(inputs.arrays, arrays, strict=True)
        counts = ", ".join(f"{spec.name} {len(array)}" for spec, array in pairs)
        raise DataError(f"{file} has unequal numbers of samples: {counts}.")
    for row in zip(*arrays, strict=True):
        yield unflatten(inputs.structure, list(row))


def rows_of(file: Path, spec: InputArray, array: Array) -> Array:
    """The samples [n, …] of an array, in the shape and dtype that the model reads. Raises DataError otherwise."""
    name = str(file) if spec.name == "inputs" else f"{file}: {spec.name}"
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name} is of type {array.dtype}, and the model reads numbers ({spec.dtype}).")
    shape, dims = spec.shape, [dim for dim in spec.shape if dim is not None]
    is_flat = len(dims) == len(shape) != 1 and array.ndim == 2 and array.shape[1] == math.prod(dims)
    if _fits(array.shape, shape):
        array = array[None]
    elif is_flat:
        array = array.reshape(len(array), *dims)
    elif not _fits(array.shape[1:], shape) or not array.ndim:
        n_dims = ", ".join("any" if dim is None else str(dim) for dim in ("n", *shape))
        raise DataError(
            f"{name} is {describe(array)}, and the model reads samples of {spec}: give one, or n of them as [{n_dims}]."
        )
    return _cast(name, array, spec.dtype)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(w in (None, f) for f, w in zip(shape, expected, strict=True))


def _cast(name: str, array: Array, dtype: str) -> Array:
    """Converts to `dtype`. Raises DataError for fractions and numbers that it cannot hold."""
    with np.errstate(all="ignore"):
        cast: Array = array.astype(dtype)
    is_integer = cast.dtype.kind in "biu"
    if is_integer and array.dtype.kind == "f" and not np.array_equal(array, np.floor(array)):
        raise DataError(f"{name} has fractions, and the model reads whole numbers ({dtype}).")
    lost = (array != cast) if is_integer else (np.isfinite(array) & ~np.isfinite(cast))
    if lost.any():
        raise DataError(f"{name} has {array[lost][0]:g}, which does not fit the model's dtype, {dtype}.")
    return cast


def _single_array(file: Path, kind: str) -> Array:
    """The array of a file, for a model with one input."""
    if kind == ".csv":
        return _numbers(file)
    if kind == ".npz":
        named = _archive(file)
        if "inputs" not in named and len(named) != 1:
            raise DataError(f"{file} has {', '.join(named) or 'no array'}: call the one to read `inputs`.")
        return named["inputs"] if "inputs" in named else next(iter(named.values()))
    with _reading(file):
        array: Array = np.load(file, allow_pickle=False)
    return array


def _archive(file: Path) -> dict[str, Array]:
    with _reading(file):
        opened = np.load(file, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            return {"inputs": opened}
        with opened:
            return {name: opened[name] for name in opened.files}


def _numbers(file: Path) -> Array:
    """The rows of a table of numbers, without its header, if it has one."""
    with _reading(file), open(file, encoding="utf-8-sig") as stream:
        header = not all(map(_is_number, stream.readline().strip().split(",")))
        stream.seek(0)
        return np.loadtxt(stream, delimiter=",", ndmin=2, skiprows=int(header))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _table(file: Path) -> dict[str, Array]:
    """{name in the header: column}."""
    with _reading(file), open(file, encoding="utf-8-sig", newline="") as stream:
        header, *rows = [row for row in csv.reader(stream) if row]
        columns = np.array(rows, dtype="float64").reshape(len(rows), len(header)).T
    return {name.strip(): column for name, column in zip(header, columns, strict=True)}


def _column(file: Path, spec: InputArray, named: Mapping[str, Array], inputs: Inputs) -> Array:
    """The array called `spec.name`; for a vector in a table, the columns name[0], name[1], … stacked. Raises DataError
    if there is none."""
    if spec.name in named:
        return named[spec.name]
    columns = [name for name in named if name.startswith(f"{spec.name}[")]
    if columns and spec.shape == (len(columns),):
        in_order = [f"{spec.name}[{index}]" for index in range(len(columns))]
        if set(in_order) == set(columns):
            return np.stack([named[name] for name in in_order], axis=1)
    raise DataError(
        f"{file} has {', '.join(list(named)[:8]) or 'no array'}, and no {spec.name}: the model reads {inputs}."
    )


def _lines(file: Path, inputs: Inputs, pads: Pads) -> Iterator[Arrays]:
    with _reading(file):
        lines = file.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        location = f"{file}:{number}"
        try:
            sample = as_arrays(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{location} is no sample in JSON: {error}") from None
        yield _fitted(location, _padded(sample, pads, inputs), inputs)


def _padded(sample: Arrays, pads: Pads, inputs: Inputs) -> Arrays:
    """Pads a sample as the run pads its inputs, unless it has the padding's masks already."""
    if structure_of(sample) == inputs.structure and not pads:
        return sample
    names = {name or "inputs" for name, _ in named_leaves(sample)}
    masks = {padding.mask for padding in pads.values() if padding.mask}
    if masks and masks <= names:
        return sample
    sample_pads = {name: padding for name, padding in pads.items() if name.removeprefix("inputs.") in names}
    return pad((sample, 0), sample_pads)[0] if sample_pads else sample


def _fitted(location: str, sample: Arrays, inputs: Inputs) -> Arrays:
    if structure_of(sample) != inputs.structure:
        raise DataError(f"{location} is {describe(sample)}, and the model reads {inputs}.")
    fitted = []
    for array, spec in zip(leaves(sample), inputs.arrays, strict=True):
        if not _fits(array.shape, spec.shape):
            name = "" if inputs.structure is None else f" {spec.name} of"
            raise DataError(f"{location} is {describe(array)}, and the model reads{name} {spec}.")
        fitted.append(_cast(location, array, spec.dtype))
    return unflatten(inputs.structure, fitted)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Context in which a file that cannot be read as arrays raises DataError."""
    try:
        yield
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise DataError(f"{file} cannot be read as an array: {error}") from None
