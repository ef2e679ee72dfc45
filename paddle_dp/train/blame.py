"""Names the sample that causes a number that is not finite, or a bad target.

Before the training ends, the samples just read are read again; for a skipped update, its batch is searched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.data import Loader
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import name, read_samples
from paddle_dp.errors import LossError, TargetError
from paddle_dp.mesh import Mesh
from paddle_dp.structure import leaves, named_leaves

PATIENCE = 20.0  # seconds; less than gloo's time limit of 30 s, or the ranks that wait would fail first
_BFLOAT16 = "bfloat16"


def bad_sample(loader: Loader, steps: Iterable[int], mesh: Mesh, data_name: str = "training") -> str:
    """A sentence about the first sample, read in one of `steps` (from 1), that is not finite; "" without one.

    Every rank reads its samples again, with the same random numbers, for `PATIENCE` seconds at most. Collective. Never
    raises, since an error is being reported.
    """
    bad_rows: list[dict[str, Any]] = []

    def search() -> None:
        with suppress(Exception):  # an error here must not hide the reported one
            bad_rows.extend(_first_bad(loader, steps))

    reader = Thread(target=search, daemon=True)  # a data set that hangs must not hold the report back
    reader.start()
    reader.join(PATIENCE + 5.0)
    mesh.wait("samples looked at")
    rank_rows = mesh.gather(bad_rows[0] if bad_rows else None)
    first = min((row for row in rank_rows if row), key=lambda row: row["step"], default=None)
    if first is None:
        return ""
    where = f"in step {first['step']}" if data_name == "training" else "by the evaluation"
    sample = first["name"][:1].upper() + first["name"][1:]
    bad = f"{sample} of the {data_name} data, read {where}, has {first['part']} that are not finite"
    return f"{bad}: mend it, or leave it out."


def in_batch(loader: Loader, batch: Batch, mesh: Mesh) -> str:
    """Names the first bad sample of the global batch: «sample 17 has inputs that are not finite»; "" without one.
    Collective.

    Nothing is read again: the training continues, and the data set may draw random numbers.
    """
    rows = mesh.gather(_bad_row(batch))
    first = min((row for row in rows if row), key=lambda row: row["place"], default=None)
    if first is None:
        return ""
    index = int(loader.sampler.global_batch(batch.epoch, batch.index)[first["place"]])
    return f"{name(loader.dataset, index)} has {first['part']} that are not finite"


def _bad_row(batch: Batch) -> dict[str, Any] | None:
    """This rank's first bad sample, by its position in the global batch; None without one."""
    for micro_batch in batch.micro_batches:
        for array_name, tensor in _named_arrays(micro_batch.inputs, micro_batch.targets):
            if not tensor.is_floating_point() or micro_batch.is_dummy:
                continue
            rows = tensor[: micro_batch.samples]
            row = _first_row((rows.astype("float32") if rows.dtype == paddle.bfloat16 else rows).numpy())
            if row is not None:
                return {"place": micro_batch.first + row, "part": array_name}
    return None


def bad_target(
    loader: Loader, epoch: int, batch: int, error: TargetError, data_name: str = "training"
) -> LossError:
    """The error with the name of its sample, which this rank read in global batch `batch`."""
    rows = [
        indices[error.row] for indices in loader.sampler.local_batch(epoch, batch) if error.row < len(indices)
    ]
    for index in map(int, rows):
        with restoring_globals():
            if loader.reads is None:
                return LossError(
                    f"{_describe_rows(rows)} of the {data_name} data, which rank 0 has read: {error}"
                )
            _, targets = read_samples(loader.dataset, np.array([index]), loader.sampler.seed, epoch)
        if any((np.asarray(leaf) == error.value).any() for leaf in leaves(targets)):
            return LossError(f"{name(loader.dataset, index)} of the {data_name} data: {error}")
    return LossError(f"{data_name} data: {error}")


def _describe_rows(rows: list[int]) -> str:
    phrase = f"sample {rows[0]}"
    return phrase if len(rows) == 1 else f"one of the samples {', '.join(map(str, rows[:8]))}"


def _first_bad(loader: Loader, steps: Iterable[int]) -> list[dict[str, Any]]:
    """This rank's first bad sample; empty without one."""
    end = time.monotonic() + PATIENCE
    for step, indices in _read_in(loader, steps):
        if time.monotonic() > end:
            return []
        with restoring_globals():
            inputs, targets = read_samples(
                loader.dataset, indices, loader.sampler.seed, (step - 1) // loader.batches
            )
        for array_name, array in _named_arrays(inputs, targets):
            row = _first_row(array)
            if row is not None:
                return [{"step": step, "name": name(loader.dataset, int(indices[row])), "part": array_name}]
    return []


def _named_arrays(inputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
    """Yields («inputs», array), or («inputs (image)», array) for each of several."""
    for array_name, values in (("inputs", inputs), ("targets", targets)):
        for where, leaf in named_leaves(values):
            yield f"{array_name} ({where})" if where else array_name, leaf


def _read_in(loader: Loader, steps: Iterable[int]) -> Iterator[tuple[int, Any]]:
    if loader.reads is None:
        return
    for step in steps:
        epoch, batch = divmod(step - 1, loader.batches)
        for indices in loader.reads.local_batch(epoch, batch):
            if len(indices):
                yield step, indices


def _first_row(array: Any) -> int | None:
    """The index of the first row of [n, …] that is not finite; None without one."""
    array = np.asarray(array)
    if array.dtype.name == _BFLOAT16:
        array = array.astype("float32")
    if array.dtype.kind not in "fc":
        return None
    bad = ~np.isfinite(array.reshape(len(array), -1)).all(1)
    return int(bad.argmax()) if bad.any() else None
