"""Merges a checkpoint of any layout into one file of weights, for plain Paddle or another program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from paddle_dp.checkpoint.loading import Checkpoint, load
from paddle_dp.checkpoint.tensor_file import Forms, stream_tensors
from paddle_dp.errors import CheckpointError
from paddle_dp.files import replacing

_MODEL, _EMA = "model/", "ema/"


def merge(checkpoint: Path, out: Path, *, ema: bool = False) -> int:
    """Writes the whole model's tensors, under its state dict's names, into one safetensors file. Returns their number.

    With `ema`, averages replace the weights that have one. One tensor at a time is in memory.
    `safetensors.paddle.load_file(out)` returns a state dict for `model.set_state_dict`. The file appears atomically.
    Raises CheckpointError for a checkpoint that is damaged or holds NaN, or if the file cannot be written.
    """
    saved = load(checkpoint)
    if saved.checks is None:
        saved.without_nan()
    averaged = averages_in(saved) if ema else frozenset()
    keys = [name.removeprefix(_MODEL) for name in saved.names if name.startswith(_MODEL)]
    names = {key: (_EMA if key in averaged else _MODEL) + key for key in keys}
    forms = {key: (saved.dtype(name), saved.shape(name)) for key, name in names.items()}
    write_merged(out, forms, lambda key: saved.read(names[key]))
    return len(names)


def write_merged(out: Path, forms: Forms, read: Callable[[str], np.ndarray]) -> None:
    """Streams whole tensors into the file `out`, which appears atomically and says that Linear is Paddle's. Raises
    CheckpointError if it cannot be written."""
    if not out.parent.is_dir():
        raise CheckpointError(f"{out} was not written: there is no folder {out.parent}.")
    try:
        with replacing(out) as partial:
            stream_tensors(partial, forms, read, {"format": "pd"})
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error.strerror}.") from error


def averages_in(saved: Checkpoint) -> frozenset[str]:
    """The names of the weights with an average in the checkpoint. Raises CheckpointError if there are none."""
    names = frozenset(name.removeprefix(_EMA) for name in saved.names if name.startswith(_EMA))
    if not names:
        raise CheckpointError(f"{saved.folder} holds no averages of weights: it was trained without `ema:`.")
    return names


def is_adapter(checkpoint: Path) -> bool:
    """True if a checkpoint holds only an adapter, without the weights that it adapts."""
    return "base" in load(checkpoint, verify=False).state
