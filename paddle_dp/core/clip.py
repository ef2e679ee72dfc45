"""Removes global-norm clips from an optimizer with only a part of the model, where it would compute that part's
norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.nn import ClipGradByGlobalNorm, ClipGradByValue

from paddle_dp.core.optimizer_checks import groups_of, parameters_of
from paddle_dp.errors import UsageError


@dataclass(frozen=True)
class Clip:
    """The gradients of `parameters` (this rank's share of them) are clipped together to a 2-norm of `bound`."""

    bound: float
    parameters: Sequence[paddle.Tensor]


def take_clips(optimizer: Any) -> list[Clip]:
    """Removes the global-norm clips from an optimizer and returns them: one, or one per parameter group.

    As in Paddle, each group has a separate norm, without parameters that have need_clip=False or that the optimizer
    does not update. All ranks have the same clips, some of which may have no parameter here. Raises UsageError for
    another kind of clip.
    """
    groups = groups_of(optimizer)
    tables = optimizer._param_groups if groups is not None else [{"grad_clip": optimizer._grad_clip}]
    group_parameters = [parameters_of(optimizer)] if groups is None else groups
    optimizer._grad_clip = _remaining_clip(optimizer._grad_clip)
    clips = []
    for table, parameters in zip(tables, group_parameters, strict=True):
        clip = table.get("grad_clip")
        table["grad_clip"] = _remaining_clip(clip)
        if clip is not None and table["grad_clip"] is None:
            clips.append(
                Clip(
                    float(clip.clip_norm),
                    [p for p in parameters if getattr(p, "need_clip", True) is not False],
                )
            )
    return clips


def bound_of(learner: Any) -> float | None:
    """The bound of a placed learner's clip by the norm of all gradients; None without one, or with one per parameter
    group."""
    bounds = [clip.bound for clip in learner.mode.norm.clips]
    left = getattr(learner.optimizer, "_grad_clip", None)
    if left is not None and type(left) is ClipGradByGlobalNorm:
        bounds.append(float(left.clip_norm))
    return bounds[0] if len(bounds) == 1 else None


def _remaining_clip(clip: Any) -> Any:
    """The clip that stays in the optimizer: one by value, which does not depend on other parameters; else None.

    The type must match exactly, because a subclass may do anything.
    """
    if clip is None or type(clip) is ClipGradByValue:
        return clip
    if type(clip) is not ClipGradByGlobalNorm:
        raise UsageError(
            "this strategy takes ClipGradByGlobalNorm (clip) and ClipGradByValue (clip_value), not "
            f"{type(clip).__name__}."
        )
    return None
