"""The base of the metrics: class scores and labels as rows, and scores by column. Messages begin with the metric."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.errors import InstallError, UsageError

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self


class OfClasses:
    """A metric of class numbers, of which one does not count: `ignored`, by default the loss's."""

    def __init__(self, ignored: int | None):
        self.ignored = ignored

    def with_loss(self, loss: Any) -> Self:
        """This metric, without the targets that the loss ignores. Raises UsageError for a loss whose targets are shares
        of classes, of which a metric would take one-hot ones for labels."""
        if _learns_shares(loss):
            raise UsageError(
                "targets of this loss (soft_label) are shares of classes, and these scores are of class numbers or "
                "labels. Write a metric of (outputs, targets.argmax(-1)), or learn from class numbers."
            )
        number = getattr(loss, "ignore_index", None)
        if self.ignored is not None or type(number) is not int:  # True is no class
            return self
        other = copy(self)
        other.ignored = number
        return other


def _learns_shares(loss: Any) -> bool:
    """Whether the targets of a loss are shares of classes: of Paddle's cross-entropy with soft_label alone, as another
    loss may call anything so."""
    from paddle.nn import CrossEntropyLoss, functional

    if isinstance(loss, partial):
        entropies = (functional.cross_entropy, functional.softmax_with_cross_entropy)
        return loss.func in entropies and loss.keywords.get("soft_label") is True
    is_paddles = getattr(type(loss), "forward", None) is CrossEntropyLoss.forward
    return is_paddles and loss.soft_label is True


def class_rows(outputs: Any, targets: Any, ignored: int | None) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Class scores float32 or float64 [m, c] and class numbers int64 [m], of outputs [..., c] and integer targets [...]
    that are not `ignored`.

    Raises UsageError for outputs or targets of another form, and for a number that is no class.
    """
    import paddle

    if not isinstance(outputs, paddle.Tensor) or not isinstance(targets, paddle.Tensor):
        raise UsageError("it takes one tensor of outputs and one of targets, not several.")
    if targets.ndim == outputs.ndim and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
        raise UsageError(
            "it takes outputs [n, classes] and class numbers [n], or [n, t, classes] and [n, t], and these are "
            f"{list(outputs.shape)} and {targets.dtype} {list(targets.shape)}."
        )
    wide = outputs if outputs.dtype in (paddle.float32, paddle.float64) else outputs.astype("float32")
    rows, numbers = wide.reshape([-1, outputs.shape[-1]]), targets.reshape([-1]).astype("int64")
    if ignored is not None:
        counted = (numbers != ignored).nonzero().reshape([-1])
        rows, numbers = rows.index_select(counted), numbers.index_select(counted)
    check_numbers(numbers.numpy(), outputs.shape[-1])
    return rows, numbers


def check_numbers(numbers: np.ndarray, classes: int) -> None:
    """Raises UsageError for a number that is no class."""
    wrong = numbers[(numbers < 0) | (numbers >= classes)]
    if wrong.size:
        raise UsageError(
            f"target {wrong[0]} is no class: the {classes} classes are 0 to {classes - 1}. If such targets do not "
            f"count, set ignore_index: {wrong[0]}, here or of the loss."
        )


def are_labels(outputs: Any, targets: Any) -> bool:
    """Whether targets are yes-or-no labels, one for each output [n] or [n, labels]."""
    if not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
        return False
    return len(outputs.shape) <= 2 and bool(np.prod(outputs.shape) == np.prod(targets.shape))


def check_labels(targets: np.ndarray) -> None:
    """Raises UsageError for targets that are neither 0 nor 1."""
    wrong = targets[~((targets == 0) | (targets == 1))]
    if wrong.size:
        raise UsageError(f"labels are 0 or 1, and one of these targets is {wrong[0]:g}.")


def mean_over_columns(
    outputs: Any, targets: Any, ignored: int | None, score: Callable[..., Any], needs_negatives: bool
) -> float:
    """The mean of `score(truth, scores)` over the columns that have a positive sample, and a negative one if needed;
    NaN if an output is.

    Raises UsageError if there is no such column.
    """
    scores, truth = _columns(outputs, targets, ignored)
    if np.isnan(scores).any():
        return np.nan
    positives = truth.sum(0)
    known = (positives > 0) & ((positives < len(truth)) if needs_negatives else True)
    if not known.any():
        raise UsageError("no class has both a held-out sample and one of another class.")
    return float(np.mean([score(truth[:, i], scores[:, i]) for i in np.flatnonzero(known)]))


def _columns(outputs: Any, targets: Any, ignored: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Scores float64 [n, columns] and truths bool [n, columns], for scores that rank samples.

    Labels [n] or [n, labels] have a column each; of two classes [n, 2] the second has one, its score's difference from
    the first's; more classes have one each, of their softmax. Raises UsageError for other forms.
    """
    if isinstance(outputs, np.ndarray) and isinstance(targets, np.ndarray) and outputs.ndim <= 2:
        scores = outputs.astype("float64").reshape(len(outputs), -1)
        if are_labels(outputs, targets):
            check_labels(targets)
            return scores, targets.reshape(scores.shape) == 1
        if targets.size == len(scores) and np.issubdtype(targets.dtype, np.integer):
            counted = targets.reshape(-1) != ignored if ignored is not None else slice(None)
            numbers, scores = targets.reshape(-1)[counted], scores[counted]
            check_numbers(numbers, scores.shape[1])
            if scores.shape[1] == 2:
                return scores[:, 1:] - scores[:, :1], numbers[:, None] == 1
            exponents = np.exp(scores - scores.max(1, keepdims=True))
            chances = exponents / exponents.sum(1, keepdims=True)
            return chances, numbers[:, None] == np.arange(scores.shape[1])
    raise UsageError(
        "it takes outputs [n, classes] with class numbers [n], or outputs and labels [n, labels]."
    )


def scikit_learn(function: str) -> Any:
    """A function of `sklearn.metrics`. Raises InstallError if scikit-learn is missing."""
    try:
        return getattr(import_module("sklearn.metrics"), function)
    except ModuleNotFoundError as error:
        raise InstallError("it is scikit-learn's: pip install scikit-learn") from error
