"""The base of the metrics: class scores and numbers as rows, and scores by column."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.errors import InstallError, UsageError

if TYPE_CHECKING:
    import paddle


def class_rows(
    outputs: Any, targets: Any, ignored: int | None, metric: str
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Class scores [m, c] and class numbers [m] of outputs [..., c] and integer targets [...] that are not `ignored`.

    Raises UsageError for outputs or targets of another form.
    """
    import paddle

    if not isinstance(outputs, paddle.Tensor) or not isinstance(targets, paddle.Tensor):
        raise UsageError(f"metrics.{metric} takes one tensor of outputs and one of targets, not several.")
    if targets.ndim == outputs.ndim and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise UsageError(
            f"metrics.{metric} takes outputs [n, classes] and class numbers [n], or [n, t, classes] and [n, t]; these "
            f"are {list(outputs.shape)} and {targets.dtype} {list(targets.shape)}."
        )
    rows, numbers = outputs.reshape([-1, outputs.shape[-1]]), targets.reshape([-1]).astype("int64")
    if ignored is None:
        return rows, numbers
    counted = (numbers != ignored).nonzero().reshape([-1])
    return rows.index_select(counted), numbers.index_select(counted)


def is_multi_label(outputs: Any, targets: Any) -> bool:
    """Whether targets are yes-or-no labels in the shape of the outputs."""
    return (
        hasattr(outputs, "shape")
        and hasattr(targets, "shape")
        and [*outputs.shape] == [*targets.shape]
        and "float" in str(targets.dtype)
    )


def columns(outputs: np.ndarray, targets: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores float64 [n, columns] and truths bool [n, columns], for scores that rank samples.

    Labels [n, labels] have a column each; of two classes [n, 2] the second has one, its score's difference from the
    first's; more classes have one each, of their softmax. Raises UsageError for other forms.
    """
    if isinstance(outputs, np.ndarray) and isinstance(targets, np.ndarray):
        scores = outputs.astype("float64").reshape(len(outputs), -1)
        if targets.size == scores.size:
            return scores, targets.reshape(scores.shape) > 0.5
        if targets.size == len(scores) and np.issubdtype(targets.dtype, np.integer):
            numbers = targets.reshape(-1)
            if scores.shape[1] == 2:
                return scores[:, 1:] - scores[:, :1], numbers[:, None] == 1
            exponents = np.exp(scores - scores.max(1, keepdims=True))
            chances = exponents / exponents.sum(1, keepdims=True)
            return chances, numbers[:, None] == np.arange(scores.shape[1])
    raise UsageError(
        f"metrics.{metric} takes outputs [n, classes] with class numbers [n], or outputs and labels [n, labels]."
    )


def mean_over_columns(
    outputs: Any, targets: Any, score: Callable[..., Any], metric: str, needs_negatives: bool
) -> float:
    """The mean of `score(truth, scores)` over the columns that have a positive sample, and a negative one if needed.

    Raises UsageError if there is none.
    """
    scores, truth = columns(outputs, targets, metric)
    positives = truth.sum(0)
    known = (positives > 0) & ((positives < len(truth)) if needs_negatives else True)
    if not known.any():
        raise UsageError("no class has both a held-out sample and one of another class.")
    return float(np.mean([score(truth[:, i], scores[:, i]) for i in np.flatnonzero(known)]))


def scikit_learn(function: str) -> Any:
    """A function of `sklearn.metrics`. Raises InstallError if scikit-learn is missing."""
    try:
        return getattr(import_module("sklearn.metrics"), function)
    except ModuleNotFoundError as error:
        raise InstallError("this metric is scikit-learn's: pip install scikit-learn") from error
