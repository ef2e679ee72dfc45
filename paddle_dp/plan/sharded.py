"""Refuses what sharding cannot do, before any process starts."""

from __future__ import annotations


def unshardable(sharding: int, pipeline: int, offload: bool, tied: bool, device: str) -> str | None:
    """The reason in one sentence, with what to do about it, or None.

    `tied`: the model's head uses the embedding's weights; `device`: "cpu" or "gpu".
    """
    if offload and device == "cpu":
        return (
            "strategy.offload moves optimizer states from a GPU's memory to the host's, and there is no GPU here: "
            "set strategy.offload=false."
        )
    if offload and sharding == 1:
        return "strategy.offload belongs to sharding: set strategy.sharding to 2 or more, or strategy.offload=false."
    if tied and sharding > 1 and pipeline > 1:
        return (
            "strategy: tied weights lie on two stages of a pipeline, and sharding would give each its own owner. "
            "Set model.tied=false, strategy.sharding=1 or strategy.pipeline=1."
        )
    return None
