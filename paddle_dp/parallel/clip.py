"""Clips by a global norm, taken out of an optimizer that holds a part of the model: their norm would be that part's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.nn import ClipGradByGlobalNorm, ClipGradByValue

from paddle_dp.errors import UsageError
from paddle_dp.parallel.finished import groups_of, parameters_of


@dataclass(frozen=True)
class Clip:
    """The gradients of `parameters`, those of them that lie here, together have a 2-norm of at most `bound`."""

    bound: float
    parameters: Sequence[paddle.Tensor]


def take_clips(optimizer: Any) -> list[Clip]:
    """Takes the clips by a global norm out of an optimizer and returns them: one, or one for each of its groups.

    As Paddle clips: each group by a norm of its own, without parameters that have need_clip=False, and what the
    optimizer does not update counts nowhere. All ranks have the same clips, of which some may hold no parameter.
    Raises UsageError for a clip of another kind.
    """
    groups = groups_of(optimizer)
    tables = optimizer._param_groups if groups is not None else [{"grad_clip": optimizer._grad_clip}]
    held = [parameters_of(optimizer)] if groups is None else groups
    optimizer._grad_clip = _kept(optimizer._grad_clip)
    clips = []
    for table, parameters in zip(tables, held, strict=True):
        clip = table.get("grad_clip")
        table["grad_clip"] = _kept(clip)
        if clip is not None and table["grad_clip"] is None:
            clips.append(
                Clip(
                    float(clip.clip_norm),
                    [p for p in parameters if getattr(p, "need_clip", True) is not False],
                )
            )
    return clips


def _kept(clip: Any) -> Any:
    """What of a clip stays with the optimizer: one by value, which is alike in every part. By exact type: a class of
    the user's own may do anything."""
    if clip is None or type(clip) is ClipGradByValue:
        return clip
    if type(clip) is not ClipGradByGlobalNorm:
        raise UsageError(
            "strategy hybrid takes ClipGradByGlobalNorm (clip) and ClipGradByValue (clip_value), not "
            f"{type(clip).__name__}."
        )
    return None
