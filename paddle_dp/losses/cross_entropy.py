"""Softmax cross-entropy against class numbers, optionally with label smoothing and an ignored class."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Union

from paddle_dp.errors import LossError
from paddle_dp.losses._base import full_precision, single_tensor, widened
from paddle_dp.losses._classes import NEVER, AllClasses, Classes, check_range, margin_over_mean
from paddle_dp.units import Probability

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

Count = Union[int, "paddle.Tensor"]


class CrossEntropy:
    """Total over samples: outputs [n, c] or [n, t, c], targets [n] or [n, t] of class numbers.

    The t targets of a sample are averaged. So the count is the number of samples, known without reading the device.
    """

    counts_samples = True
    use = "cross_entropy"  # its name in a recipe, for messages

    def __init__(self, smoothing: float = 0.0, ignored: int = NEVER):
        self.smoothing, self.ignored = smoothing, ignored
        self.classes: Classes = AllClasses()

    def parallel(self, classes: Classes) -> Self:
        """A copy for outputs that hold only some of the classes; `classes` computes over all of them."""
        other = copy(self)
        other.classes = classes
        return other

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, count); the total is float32 even under autocast."""
        outputs = single_tensor(outputs, self.use)
        numbers = _class_numbers(targets, outputs)
        if not self.classes.refuses:
            check_range(numbers, self.num_classes(outputs), self.ignored)
        try:
            total = self._total(self._logits(widened(outputs), numbers), numbers)
        except IndexError:  # it does not name the target
            check_range(numbers, self.num_classes(outputs), self.ignored)
            raise
        return self._per_sample(total, targets), self._count(targets)

    @full_precision  # a sum in bfloat16 stops growing at 256
    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The number of targets that are the highest output (acc1) and, with more than 5 classes, among the 5 highest
        (acc5)."""
        outputs, numbers = widened(outputs), _class_numbers(targets, outputs)
        hits = {"acc1": self.classes.highest(outputs) == numbers}
        if self.num_classes(outputs) > 5:
            hits["acc5"] = self.classes.best(outputs, 5) == numbers.unsqueeze(-1)
        return {name: self._per_sample(self._hits(hit, numbers), targets) for name, hit in hits.items()}

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """The number of classes."""
        return self.classes.local_range(outputs.shape[-1])[1]

    def predictions(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The class of the highest output."""
        return self.classes.highest(outputs)

    def _logits(self, outputs: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return outputs

    def _total(self, logits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        total = self.classes.total(logits, numbers, self.ignored)
        # Paddle's label_smoothing needs one-hot targets, as large as the outputs, and cannot ignore a class.
        return total + self.smoothing * self._margin(logits, numbers).sum() if self.smoothing else total

    def _margin(self, logits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return margin_over_mean(logits, numbers, self.classes)

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return hits.sum()

    def _per_sample(self, totals: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        targets_per_sample = prod(targets.shape[1:])
        return totals if targets_per_sample == 1 else totals / targets_per_sample

    def _count(self, targets: paddle.Tensor) -> Count:
        return targets.shape[0]


class CrossEntropyIgnoring(CrossEntropy):
    """Total over all targets that do not equal `ignored`; only these count."""

    counts_samples = False

    def count(self, targets: paddle.Tensor) -> paddle.Tensor:
        """The number of targets that count, as a 0-d tensor, so that nothing waits for the device."""
        return (targets != self.ignored).sum()

    def _margin(self, logits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return super()._margin(logits, numbers) * (numbers != self.ignored).astype(logits.dtype)

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        counts = numbers != self.ignored  # the model can predict the ignored class if it is among the outputs
        return hits.logical_and(counts if hits.ndim == counts.ndim else counts.unsqueeze(-1)).sum()

    def _per_sample(self, totals: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return totals

    def _count(self, targets: paddle.Tensor) -> Count:
        return self.count(targets)


def _class_numbers(targets: paddle.Tensor, outputs: paddle.Tensor) -> paddle.Tensor:
    """`targets` as int64 in the shape of `outputs` without the last dim.

    Raises LossError for floating-point targets: Paddle would silently truncate them.
    """
    import paddle

    if targets.ndim == outputs.ndim:
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
