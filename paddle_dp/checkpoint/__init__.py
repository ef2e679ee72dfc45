"""What survives: snapshots saved whole or not at all, under whole-model names, and loaded in any other layout.

Never here: what a training run consists of (train), or how a model is cut (parallel). For the words of a checkpoint's
state see `train.progress`; for who saves how often, the `checkpoint` callback.
"""

from __future__ import annotations

from paddle_dp.checkpoint.folder import (
    best,
    best_numbers,
    checkpoints,
    clean,
    newest,
    prune,
    set_best,
    step_name,
    step_of,
)
from paddle_dp.checkpoint.opened import Checkpoint, load
from paddle_dp.checkpoint.pieces import Box, Piece
from paddle_dp.checkpoint.snapshot import Snapshot, save

__all__ = [
    "Box", "Checkpoint", "Piece", "Snapshot", "best", "best_numbers", "checkpoints", "clean", "load", "newest",
    "prune", "save", "set_best", "step_name", "step_of",
]  # fmt: skip
