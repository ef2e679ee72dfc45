"""The marks of models that a training has split among the ranks, with which no other training can begin."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from paddle import nn

from paddle_dp.errors import UsageError

_SPLIT_KEY = "split"  # in a parameter's optimize_attr, which slices and copies of it inherit
_SPLIT: WeakSet[nn.Layer] = WeakSet()  # their layers: a user's rate factors may replace optimize_attr


def mark_split(model: nn.Layer) -> None:
    """Marks the parameters of a model that a strategy is about to split: each rank will have the weights of a part, or
    the forward of one. Call it before anything is split, because a refusal may leave the model half split."""
    _SPLIT.update(model.sublayers(include_self=True))
    for parameter in model.parameters():
        parameter.optimize_attr = {**parameter.optimize_attr, _SPLIT_KEY: True}


def check_unsplit(model: Any) -> None:
    """Raises UsageError if an earlier training has split a parameter of the model (`mark_split`), also within another
    model that shares a layer with it."""
    if not isinstance(model, nn.Layer):
        return
    layers = [layer for layer in model.sublayers(include_self=True) if layer in _SPLIT]
    split = {id(p) for layer in layers for p in layer.parameters(include_sublayers=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) in split or _SPLIT_KEY in getattr(parameter, "optimize_attr", {}):
            raise UsageError(
                f"Trainer.of.model: an earlier Trainer.of has split it among the ranks, with its parameter '{name}'. "
                "Build the model and all its layers anew, after paddle.seed(0) for equal weights on all ranks, and "
                "load that run's weights: load=FOLDER."
            )
