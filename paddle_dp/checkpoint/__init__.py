"""Checkpoints: saved whole or not at all, under whole-model names, and loaded in any layout.

`train.state` defines their content, `axes` split the model, and the `checkpoint` callback decides when to save.
"""

from __future__ import annotations

from paddle_dp.checkpoint.background import BackgroundSave
from paddle_dp.checkpoint.folder import (
    best,
    best_numbers,
    check,
    clean,
    find,
    newest,
    newest_good,
    prune,
    set_aside,
    set_best,
)
from paddle_dp.checkpoint.loading import Checkpoint, load
from paddle_dp.checkpoint.manifest import Checks, UnusableError, checkpoints, content_of, step_name, step_of
from paddle_dp.checkpoint.merge import is_adapter, merge
from paddle_dp.checkpoint.optimizer import load_optimizer, optimizer_tensors
from paddle_dp.checkpoint.rng import load_rng_state, rng_state
from paddle_dp.checkpoint.saving import NotWrittenError, Snapshot, save, still_not
from paddle_dp.checkpoint.shards import TensorShard
from paddle_dp.checkpoint.tensors import HostMemory, fill, put, tensor_shard

__all__ = [
    "BackgroundSave", "Checkpoint", "Checks", "HostMemory", "NotWrittenError", "Snapshot",
    "TensorShard", "UnusableError", "best", "best_numbers", "check", "checkpoints", "clean", "content_of",
    "fill", "find", "is_adapter", "load", "load_optimizer", "load_rng_state", "merge", "newest", "newest_good",
    "optimizer_tensors", "prune", "put", "rng_state", "save", "set_aside", "set_best",
    "step_name", "step_of", "still_not", "tensor_shard",
]  # fmt: skip
