"""Which sample was it? When numbers have gone bad, the inputs and targets that were just read are looked at again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np

from paddle_dp.data import Loader
from paddle_dp.data.randomness import globals_kept
from paddle_dp.data.sample import name, read_samples
from paddle_dp.errors import LossError, TargetError
from paddle_dp.mesh import Mesh

PATIENCE = 20.0  # seconds; more than a person wants to wait, and less than gloo does (30 s)
_BFLOAT16 = "bfloat16"


def bad_sample(loader: Loader, steps: Iterable[int], mesh: Mesh, what: str = "training") -> str:
    """A sentence about the first sample, read in one of `steps` (from 1), that is not finite; "" where there is none.

    Samples are read again under the same randomness, each rank its own, for `PATIENCE` seconds at most. Collective, and
    it never raises: it is asked when something has gone wrong already.
    """
    found_here: list[dict[str, Any]] = []

    def look() -> None:
        with suppress(Exception):  # what it was called for must be told, whatever happens here
            found_here.extend(_first(loader, steps))

    reader = Thread(target=look, daemon=True)  # a sample that never comes must not keep the message
    reader.start()
    reader.join(PATIENCE + 5.0)
    mine = found_here[0] if found_here else None
    mesh.wait("samples looked at")
    found = sorted((row for row in mesh.gather(mine) if row), key=lambda row: row["step"])
    if not found:
        return ""
    where = f"in step {found[0]['step']}" if what == "training" else "by the evaluation"
    who = found[0]["name"][:1].upper() + found[0]["name"][1:]
    part = found[0]["part"]
    return (
        f"{who} of the {what} data, read {where}, has {part} that are not finite: mend it, or leave it out."
    )


def of_target(
    loader: Loader, epoch: int, batch: int, error: TargetError, what: str = "training"
) -> LossError:
    """The same error, naming the sample whose target it is; this rank read it in global batch `batch`."""
    rows = [indices[error.row] for indices in loader.sampler.mine(epoch, batch) if error.row < len(indices)]
    for index in map(int, rows):
        with globals_kept():
            _, targets = read_samples(loader.dataset, np.array([index]), loader.sampler.seed, epoch)
        if (np.asarray(targets) == error.value).any():
            return LossError(f"{name(loader.dataset, index)} of the {what} data: {error}")
    return LossError(f"{what} data: {error}")


def _first(loader: Loader, steps: Iterable[int]) -> list[dict[str, Any]]:
    """This rank's first bad sample, if there is one."""
    end = time.monotonic() + PATIENCE
    for step, indices in _read_in(loader, steps):
        if time.monotonic() > end:
            return []
        with globals_kept():
            inputs, targets = read_samples(
                loader.dataset, indices, loader.sampler.seed, (step - 1) // loader.batches
            )
        for part, array in (("inputs", inputs), ("targets", targets)):
            row = _first_row(array)
            if row is not None:
                return [{"step": step, "name": name(loader.dataset, int(indices[row])), "part": part}]
    return []


def _read_in(loader: Loader, steps: Iterable[int]) -> Iterator[tuple[int, Any]]:
    for step in steps:
        epoch, batch = divmod(step - 1, loader.batches)
        for indices in loader.sampler.mine(epoch, batch):
            if len(indices):
                yield step, indices


def _first_row(array: Any) -> int | None:
    """The first of the rows [n, …] that is not all finite."""
    array = np.asarray(array)
    if array.dtype.name == _BFLOAT16:
        array = array.astype("float32")
    if array.dtype.kind not in "fc":
        return None
    bad = ~np.isfinite(array.reshape(len(array), -1)).all(1)
    return int(bad.argmax()) if bad.any() else None
