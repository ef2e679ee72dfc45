"""Checks of a model's settings before anything is built; each error names the field."""

from __future__ import annotations

from typing import Any

LAYER_NORM_EPSILON = 1e-3  # the largest that Paddle's kernels accept (3.3.1)


def at_least_one(config: Any, *names: str) -> None:
    """Raises ValueError unless each of these fields is 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: {getattr(config, name)} is less than 1")


def divides(config: Any, part: str, whole: str) -> None:
    """Raises ValueError unless `part` divides `whole`."""
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(f"{part}: {getattr(config, part)} does not divide {whole} {getattr(config, whole)}")


def check_length(tokens: Any, length: int) -> None:
    """Raises ValueError for texts [n, t] longer than `length`."""
    if tokens.shape[1] > length:
        raise ValueError(
            f"length: {length} is less than the {tokens.shape[1]} tokens of a sample: set model.length, or a shorter "
            "dataset.length"
        )


def check_dropout(config: Any, name: str = "dropout") -> None:
    """Raises ValueError unless the probability is from 0 to below 1."""
    if not 0 <= getattr(config, name) < 1:
        raise ValueError(f"{name}: {getattr(config, name)} is not from 0 to below 1")


def check_widths(config: Any, name: str) -> None:
    """Raises ValueError unless every width in a list is 1 or more; the list may be empty."""
    if any(width < 1 for width in getattr(config, name)):
        raise ValueError(f"{name}: widths are 1 or more, not {list(getattr(config, name))}")


def check_hidden_and_epsilon(config: Any) -> None:
    """Raises ValueError unless `hidden` is None or 1 or more, and `epsilon` is above 0 and accepted by LayerNorm."""
    if config.hidden is not None:
        at_least_one(config, "hidden")
    check_epsilon(config)
    if config.epsilon > LAYER_NORM_EPSILON:
        raise ValueError(
            f"epsilon: {config.epsilon} is more than paddle.nn.LayerNorm takes, which is {LAYER_NORM_EPSILON}"
        )


def check_epsilon(config: Any) -> None:
    """Raises ValueError unless `epsilon` is above 0."""
    if not config.epsilon > 0:
        raise ValueError(f"epsilon: {config.epsilon} is not above 0")
