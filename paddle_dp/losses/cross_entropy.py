"""Softmax cross-entropy against class numbers, optionally with label smoothing and an ignored class."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import reduce
from math import nan, prod
from operator import add
from typing import TYPE_CHECKING, Any, Union

from paddle_dp.errors import LossError
from paddle_dp.losses._base import full_precision, single_tensor, widened
from paddle_dp.losses._classes import NEVER, Classes, Weights, check_range, margin_over_mean
from paddle_dp.tensors import has_counted_nan, holds_nan
from paddle_dp.units import Probability

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

Count = Union[int, "paddle.Tensor"]
Weighted = list[tuple["paddle.Tensor", Union["paddle.Tensor", None]]]
"""Class numbers [...], and the weight of each; None: 1."""


class CrossEntropy:
    """Total over samples: outputs [n, c] or [n, t, c], targets [n] or [n, t] of class numbers.

    The t targets of a sample are averaged. So the count is the number of samples, known without reading the device.
    Targets of mixed samples (recipe: `mix`) are {"first": numbers [n], "second": numbers of the samples mixed in [n],
    "share" [n]}: the loss is share × CE(first) + (1 - share) × CE(second).
    """

    counts_samples = True
    use = "cross_entropy"  # its name in a recipe, for messages

    def __init__(self, smoothing: float = 0.0, ignored: int = NEVER):
        self.smoothing, self.ignored = smoothing, ignored
        self.classes = Classes()

    @property
    def ignore_index(self) -> int:
        """The class number of targets that do not count, by Paddle's name."""
        return self.ignored

    def parallel(self, classes: Classes) -> Self:
        """A copy for outputs that hold only some of the classes; `classes` computes over all of them."""
        other = copy(self)
        other.classes = classes
        return other

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: Any) -> tuple[paddle.Tensor, Count]:
        """(total, count); the total is float32 even under autocast. It is NaN if a score is, for a number that counts,
        though Paddle's kernel hides it."""
        total, count = self.for_backward(outputs, targets)
        if self.classes.hides_nan and holds_nan(outputs):
            weighted = _weighted(targets, outputs)
            counted = any(has_counted_nan(outputs, numbers, self.ignored) for numbers, _ in weighted)
            total = total + nan if counted else total
        return total, count

    @full_precision
    def for_backward(self, outputs: paddle.Tensor, targets: Any) -> tuple[paddle.Tensor, Count]:
        """(total, count) for a backward of the total alone: the look for NaN, 9 µs of a step, would change no
        gradient."""
        outputs = single_tensor(outputs, self.use)
        weighted = _weighted(targets, outputs)
        # `sum` would add 0 to the only one, 4 µs.
        total = reduce(add, [self._total(outputs, numbers, weights) for numbers, weights in weighted])
        return self._per_sample(total, weighted[0][0]), self._count(weighted)

    @full_precision  # a sum in bfloat16 stops growing at 256
    def scores(self, outputs: paddle.Tensor, targets: Any) -> dict[str, paddle.Tensor]:
        """The number of targets that are the highest output (acc1) and, with more than 5 classes, among the 5 highest
        (acc5); of mixed samples the sum of the weights of such targets."""
        outputs, weighted = widened(outputs), _weighted(targets, outputs)

        def share(is_hit: Callable[[paddle.Tensor], paddle.Tensor]) -> paddle.Tensor:
            hits = [self._hits(is_hit(numbers), numbers, weights) for numbers, weights in weighted]
            return self._per_sample(reduce(add, hits), weighted[0][0])

        highest = self.classes.highest(outputs)
        scores = {"acc1": share(lambda numbers: highest == numbers)}
        if self.num_classes(outputs) > 5:
            best = self.classes.best(outputs, 5)
            scores["acc5"] = share(lambda numbers: (best == numbers.unsqueeze(-1)).any(-1))
        return scores

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """The number of classes."""
        return self.classes.local_range(outputs.shape[-1])[1]

    def predictions(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The class of the highest output."""
        return self.classes.highest(outputs)

    def _total(self, outputs: paddle.Tensor, numbers: paddle.Tensor, weights: Weights) -> paddle.Tensor:
        """The total for these class numbers. Raises TargetError for one that is no class."""
        if not self.classes.refuses:
            check_range(numbers, self.num_classes(outputs), self.ignored)
        logits = widened(outputs)
        try:
            total = self.classes.total(logits, numbers, self.ignored, weights)
        except IndexError:  # it does not name the target
            check_range(numbers, self.num_classes(outputs), self.ignored)
            raise
        if not self.smoothing:
            return total
        # Paddle's label_smoothing needs one-hot targets, as large as the outputs, and cannot ignore a class.
        margin = self._margin(logits, numbers)
        return total + self.smoothing * (margin if weights is None else margin * weights).sum()

    def _margin(self, logits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return margin_over_mean(logits, numbers, self.classes)

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor, weights: Weights) -> Any:
        return _sum(hits, weights)

    def _per_sample(self, totals: Any, numbers: paddle.Tensor) -> Any:
        targets_per_sample = prod(numbers.shape[1:])
        return totals if targets_per_sample == 1 else totals / targets_per_sample

    def _count(self, weighted: Weighted) -> Count:
        return int(weighted[0][0].shape[0])


class CrossEntropyIgnoring(CrossEntropy):
    """Total over all targets that do not equal `ignored`; only these count."""

    counts_samples = False
    for_backward = CrossEntropy.for_backward  # not inherited: see `Loss.for_backward`

    def count(self, targets: Any) -> paddle.Tensor:
        """The number of targets that count, of mixed samples the sum of their weights, as a 0-d tensor, so that nothing
        waits for the device."""
        return self._counted(_with_weights(targets))

    def _margin(self, logits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return super()._margin(logits, numbers) * (numbers != self.ignored).astype(logits.dtype)

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor, weights: Weights) -> Any:
        # The model can predict the ignored class if it is among the outputs.
        return _sum(hits.logical_and(numbers != self.ignored), weights)

    def _per_sample(self, totals: Any, numbers: paddle.Tensor) -> Any:
        return totals

    def _count(self, weighted: Weighted) -> Count:
        return self._counted(weighted)

    def _counted(self, weighted: Weighted) -> Any:
        return reduce(add, [_sum(numbers != self.ignored, weights) for numbers, weights in weighted])


def _sum(each: paddle.Tensor, weights: Weights) -> paddle.Tensor:
    """The sum of booleans [...], each times its weight."""
    return each.sum() if weights is None else (each.astype(weights.dtype) * weights).sum()


def _with_weights(targets: Any) -> Weighted:
    """Targets as they are, with weight 1; targets of mixed samples as two kinds of them with their weights. Raises
    LossError for other structures of targets."""
    if not isinstance(targets, dict | tuple | list):
        return [(targets, None)]
    if not isinstance(targets, dict) or targets.keys() != {"first", "second", "share"}:
        raise LossError(
            f"cross_entropy takes one array of class numbers as targets, and these are a {type(targets).__name__} of "
            f"{len(targets)}: give the model a method loss(outputs, targets), or write a loss of your own."
        )
    return [(targets["first"], targets["share"]), (targets["second"], 1 - targets["share"])]


def _weighted(targets: Any, outputs: paddle.Tensor) -> Weighted:
    return [(_class_numbers(numbers, outputs), weights) for numbers, weights in _with_weights(targets)]


def _class_numbers(targets: paddle.Tensor, outputs: paddle.Tensor) -> paddle.Tensor:
    """`targets` as int64 in the shape of `outputs` without the last dim.

    Raises LossError for floating-point targets: Paddle would silently truncate them.
    """
    import paddle

    if len(targets.shape) == len(outputs.shape):  # `ndim` is a function of Paddle's in Python
        targets = targets.squeeze(-1)
    if targets.dtype is paddle.int64:
        return targets
    if targets.is_floating_point():
        raise LossError(
            f"cross_entropy takes class numbers as targets, not {targets.dtype}: use mean_squared_error or "
            "binary_cross_entropy, or make the data set's targets int64"
        )
    return targets.astype("int64")


@dataclass(frozen=True, kw_only=True)
class Config:
    label_smoothing: Probability = 0.0
    """Share of each target that is spread evenly over all classes."""

    ignore_index: int | None = None
    """Class number of targets that do not count."""

    def build(self) -> CrossEntropy:
        if self.ignore_index is None:
            return CrossEntropy(self.label_smoothing)
        return CrossEntropyIgnoring(self.label_smoothing, self.ignore_index)
