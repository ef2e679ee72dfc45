"""What a worker does, in its own process: look at one sample, or fill rows of the ring, as it is told."""

from __future__ import annotations

import struct
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from paddle_dp.data.child import Progress, Reply, Serve, Tell
from paddle_dp.data.randomness import seed_sample
from paddle_dp.data.ring import Layout, Ring, Slot
from paddle_dp.data.sample import Dataset, name, read_sample, read_samples, take
from paddle_dp.errors import DataError

_COMMAND = struct.Struct("<qqqq")


def command(epoch: int, slot: int, first: int, stop: int) -> bytes:
    """«Fill rows `first` to `stop` of `slot` with the samples whose indices stand there, as of `epoch`»."""
    return _COMMAND.pack(epoch, slot, first, stop)


def looking(dataset: Dataset, seed: int, index: int) -> Serve:
    """Answers any command with the layout of sample `index`."""

    def look(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        progress[:] = 1, index
        inputs, targets = read_samples(dataset, np.array([index]), seed, epoch)
        layout = Layout.of((inputs[0], targets[0]))
        parts = (layout.input, layout.target)
        return {"layout": [[part.dtype, part.shape] for part in parts]}

    return _answering(look)


def filling(dataset: Dataset, seed: int, ring: Ring) -> Serve:
    """Answers each command when the rows it names are filled."""
    fill_rows = _fill_taken if hasattr(dataset, "take") else _fill_one_by_one

    def fill(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        rows = Slot(*(array[first:stop] for array in ring.slots[slot]))
        fill_rows(dataset, (seed, epoch), rows, ring.layout, progress)
        return {}

    return _answering(fill)


def _fill_taken(
    dataset: Dataset, _key: tuple[int, int], rows: Slot, layout: Layout, progress: Progress
) -> None:
    progress[:] = progress[0] + 1, rows.indices[0]
    inputs, targets = take(dataset, rows.indices)
    _check(dataset, int(rows.indices[0]), layout, (inputs[0], targets[0]))
    rows.inputs[:], rows.targets[:] = inputs, targets


def _fill_one_by_one(
    dataset: Dataset, key: tuple[int, int], rows: Slot, layout: Layout, progress: Progress
) -> None:
    for row, index in enumerate(rows.indices.tolist()):
        progress[:] = progress[0] + 1, index
        seed_sample(*key, index)
        pair = read_sample(dataset, index)
        _check(dataset, index, layout, pair)
        rows.inputs[row], rows.targets[row] = pair


def _check(dataset: Dataset, index: int, layout: Layout, pair: tuple[np.ndarray, np.ndarray]) -> None:
    if difference := layout.difference(pair):
        raise DataError(f"{name(dataset, index)} is {difference} as others: they cannot be one batch")


def _answering(do: Callable[[int, int, int, int, Progress], Reply]) -> Serve:
    """Do each command as it comes; a failure is an answer too."""

    def serve(commands: BinaryIO, tell: Tell, progress: Progress) -> None:
        _stay_on_cpu()
        while len(words := commands.read(_COMMAND.size)) == _COMMAND.size:
            try:
                epoch, slot, first, stop = _COMMAND.unpack(words)
                reply = do(epoch, slot, first, stop, progress)
            except Exception as error:  # noqa: BLE001 - it is told to the parent, which raises it
                reply = {"error": str(error), "traceback": traceback.format_exc()}
            tell(reply)

    return serve


def _stay_on_cpu() -> None:
    """A forked process cannot use its parent's GPU: a tensor that a transform makes is to be made on the CPU."""
    if "paddle" in sys.modules:
        sys.modules["paddle"].set_device("cpu")
