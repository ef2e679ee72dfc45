"""The text of a test's recipe: a small network that learns digits, but for what the test has otherwise."""

from __future__ import annotations

DIGITS = {"model": "mlp", "dataset": "digits", "loss": "cross_entropy", "optimizer": "adamw"}
PARTS = {*DIGITS, "schedule", "strategy"}


def small_recipe(train: str, more: str = "", **keys: str) -> str:
    """`train`: the length and the batch. `keys`: further keys, and other parts than those of DIGITS; the value of a
    part stands with or without `{use: }`. `more`: lines behind these. The model is on the second line."""
    lines = {**DIGITS, **keys, "train": f"{{{train}}}"}
    parts = {key: f"{{use: {value}}}" for key, value in lines.items() if key in PARTS and value[0] != "{"}
    return "\n" + "".join(f"{key}: {value}\n" for key, value in {**lines, **parts}.items()) + more
