"""One file of weights from a checkpoint of any layout: what plain Paddle, or another program, loads."""

from __future__ import annotations

import os
from pathlib import Path

from paddle_dp.checkpoint.loading import load
from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.errors import CheckpointError

_MODEL = "model/"


def merge(checkpoint: Path, out: Path) -> int:
    """Writes the whole model's tensors, under its own names, into one safetensors file; returns how many.

    `safetensors.paddle.load_file(out)` gives a state dict for `model.set_state_dict`. The file is there whole or not
    at all. Raises CheckpointError for a checkpoint that is damaged or holds NaN, or when the file cannot be written.
    """
    saved = load(checkpoint)
    if saved.checks is None and (bad := saved.not_a_number()):
        raise CheckpointError(
            f"'{bad}' in {checkpoint} holds NaN, so {out} was not written: name an earlier one."
        )
    names = [name for name in saved.names if name.startswith(_MODEL)]
    shards = {}
    for name in names:
        array, word = saved.read(name), name.removeprefix(_MODEL)
        shards[word] = TensorShard(word, array.shape, (0,) * array.ndim, array, saved.dtype(name))
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        write_tensors(partial, shards)
        partial.replace(out)
    except OSError as error:
        raise CheckpointError(f"{out} was not written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(shards)
