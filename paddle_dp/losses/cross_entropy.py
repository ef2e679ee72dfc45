"""Softmax cross-entropy against class numbers, with label smoothing and an ignored class on request."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Union

from paddle_dp.errors import LossError
from paddle_dp.losses._base import full_precision, widened
from paddle_dp.units import Probability

if TYPE_CHECKING:
    import paddle

Count = Union[int, "paddle.Tensor"]
NEVER = -(2**31)  # no class is ignored; Paddle's own default, -100, would silently pass over targets of -100


class CrossEntropy:
    """Total over samples: outputs [n, c] or [n, t, c], targets [n] or [n, t] of class numbers.

    The t targets of a sample are averaged, so the count is the number of samples, known without asking the device.
    """

    def __init__(self, smoothing: float = 0.0, ignored: int = NEVER):
        self.smoothing = smoothing
        self.ignored = ignored

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, how many it is over); the total is float32 also under autocast."""
        total = self._total(widened(outputs), _class_numbers(targets, outputs))
        return self._per_sample(total, targets), self._over(targets)

    @full_precision  # a sum in bfloat16 stops counting at 256
    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """How many targets are the highest output (acc1), or one of the 5 highest of more than 5 (acc5)."""
        outputs, numbers = widened(outputs), _class_numbers(targets, outputs)
        hits = {"acc1": outputs.argmax(-1) == numbers}
        if outputs.shape[-1] > 5:
            hits["acc5"] = outputs.topk(5, axis=-1)[1] == numbers.unsqueeze(-1)
        return {name: self._per_sample(self._hits(hit, numbers), targets) for name, hit in hits.items()}

    def _total(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return self._cross_entropy(outputs, targets, self.smoothing)

    def _cross_entropy(
        self, outputs: paddle.Tensor, targets: paddle.Tensor, smoothing: float
    ) -> paddle.Tensor:
        from paddle.nn.functional import cross_entropy

        return cross_entropy(
            outputs, targets, ignore_index=self.ignored, reduction="sum", label_smoothing=smoothing
        )

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        return hits.sum()

    def _per_sample(self, totals: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        each = prod(targets.shape[1:])
        return totals if each == 1 else totals / each

    def _over(self, targets: paddle.Tensor) -> Count:
        return targets.shape[0]


class CrossEntropyOfSome(CrossEntropy):
    """Total over every target but those of one class number, which do not count."""

    def count(self, targets: paddle.Tensor) -> paddle.Tensor:
        """How many targets count, as a 0-d tensor: nobody waits for the device."""
        return (targets != self.ignored).sum()

    def _total(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        own = self._cross_entropy(outputs, targets, 0.0)
        if not self.smoothing:
            return own
        # Paddle's label_smoothing cannot leave a class out: it needs one-hot targets, and -1 has none.
        # F.nll_loss over F.log_softmax would be one pass, but corrupts memory (Paddle 3.3.1 on a CPU).
        from paddle.nn.functional import log_softmax

        every = -log_softmax(outputs).mean(-1) * (targets != self.ignored).astype(outputs.dtype)
        return (1 - self.smoothing) * own + self.smoothing * every.sum()

    def _hits(self, hits: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        kept = numbers != self.ignored  # an ignored class can be guessed when it is one of the outputs
        return hits.logical_and(kept if hits.ndim == kept.ndim else kept.unsqueeze(-1)).sum()

    def _per_sample(self, totals: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        return totals

    def _over(self, targets: paddle.Tensor) -> Count:
        return self.count(targets)


def _class_numbers(targets: paddle.Tensor, outputs: paddle.Tensor) -> paddle.Tensor:
    """`targets` as whole numbers in the shape of `outputs` without its classes.

    Paddle would silently cut off fractions, and with smoothing take class numbers [n, 1] for probabilities.
    """
    import paddle

    if targets.ndim == outputs.ndim:
        targets = targets.squeeze(-1)
    if targets.dtype in (paddle.int64, paddle.int32):
        return targets
    if targets.is_floating_point():
        raise LossError(
            f"cross_entropy takes class numbers as targets, not {targets.dtype}: use mean_squared_error or "
            "binary_cross_entropy, or make the data set's targets int64"
        )
    return targets.astype("int64")


@dataclass(frozen=True, kw_only=True)
class Config:
    """`label_smoothing` of each target goes to all classes alike; targets of `ignore_index` do not count."""

    label_smoothing: Probability = 0.0
    ignore_index: int | None = None

    def build(self) -> CrossEntropy:
        if self.ignore_index is None:
            return CrossEntropy(self.label_smoothing)
        return CrossEntropyOfSome(self.label_smoothing, self.ignore_index)
