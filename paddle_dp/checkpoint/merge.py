"""Merges a checkpoint of any layout into one file of weights, for plain Paddle or another program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paddle_dp.checkpoint.loading import Checkpoint, load
from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.errors import CheckpointError

_MODEL, _EMA = "model/", "ema/"


def merge(checkpoint: Path, out: Path, *, ema: bool = False) -> int:
    """Writes the whole model's tensors, under its own names, into one safetensors file; returns their number. With
    `ema`, the averages in place of the weights that have one.

    `safetensors.paddle.load_file(out)` gives a state dict for `model.set_state_dict`. The file appears whole or not at
    all. Raises CheckpointError for a checkpoint that is damaged or holds NaN, or if the file cannot be written.
    """
    saved = load(checkpoint)
    if saved.checks is None and (bad := saved.first_nan()):
        raise CheckpointError(
            f"'{bad}' in {checkpoint} holds NaN, so {out} was not written: name an earlier one."
        )
    averaged = averages_in(saved) if ema else frozenset()
    names = [name for name in saved.names if name.startswith(_MODEL)]
    shards = {}
    for name in names:
        key = name.removeprefix(_MODEL)
        name = _EMA + key if key in averaged else name
        shards[key] = TensorShard.whole(key, saved.read(name), saved.dtype(name))
    write_merged(out, shards)
    return len(shards)


def write_merged(out: Path, shards: Mapping[str, TensorShard]) -> None:
    """Writes whole tensors into the file `out`, which appears whole or not at all. Raises CheckpointError if it cannot
    be written."""
    if not out.parent.is_dir():
        raise CheckpointError(f"{out} was not written: there is no folder {out.parent}.")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write_tensors(partial, shards)
        partial.replace(out)
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)


def averages_in(saved: Checkpoint) -> frozenset[str]:
    """The names of the weights of which a checkpoint holds averages. Raises CheckpointError if there are none."""
    names = frozenset(name.removeprefix(_EMA) for name in saved.names if name.startswith(_EMA))
    if not names:
        raise CheckpointError(f"{saved.folder} holds no averages of weights: it was trained without `ema:`.")
    return names


def is_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint holds an adapter alone, without the weights that it stands on."""
    return "base" in load(checkpoint, verify=False).state
