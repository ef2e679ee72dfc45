"""Softmax cross-entropy of cosines with a margin by which the target must beat the others (ArcFace, CosFace)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from paddle_dp.errors import LossError
from paddle_dp.losses._base import widened
from paddle_dp.losses._classes import NEVER, Exact, Weights, gather_target
from paddle_dp.losses.cross_entropy import CrossEntropy, CrossEntropyIgnoring
from paddle_dp.units import AboveZero, Probability

if TYPE_CHECKING:
    import paddle

FLAT = 1e-6  # lower bound of sin²: the angle has no gradient at 0


class MarginSoftmax(CrossEntropy):
    """Total over samples of -log softmax(scale · c'). c' is cos(a + angle) - cosine for the target's angle a, and the
    plain cosine for every other class. Outputs are the cosines.

    `angle` alone is ArcFace (Deng et al., arXiv:1801.07698, eq. 3), `cosine` alone CosFace (Wang et al.,
    arXiv:1801.09414, eq. 4), both together eq. 4 of the former. Paddle's margin_cross_entropy gives the same total, but
    on GPUs only, and without smoothing or an ignored class; this formula serves every device and every split.
    The loss of a target that is no class is NaN.
    """

    use = "margin_softmax"

    def __init__(self, config: Config):
        ignored = NEVER if config.ignore_index is None else config.ignore_index
        super().__init__(config.label_smoothing, ignored)
        self.angle, self.cosine, self.scale = config.angle, config.cosine, config.scale
        self.classes = Exact()  # a scale of 64 makes losses above 64
        self._checked = False

    def probabilities(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The probability of each class, without a margin."""
        logits = outputs * self.scale
        return (logits - logits.logsumexp(-1, keepdim=True)).exp()

    def _total(self, outputs: paddle.Tensor, numbers: paddle.Tensor, weights: Weights) -> paddle.Tensor:
        return super()._total(self._logits(widened(outputs), numbers), numbers, weights)

    def _logits(self, outputs: paddle.Tensor, numbers: paddle.Tensor) -> paddle.Tensor:
        import paddle

        self._check(outputs)
        first, _ = self.classes.local_range(outputs.shape[-1])
        cosines, column, here = gather_target(outputs, numbers, first)
        sines = (1 - cosines * cosines).clip(min=FLAT).sqrt()
        with_margin = cosines * cos(self.angle) - sines * sin(self.angle) - self.cosine
        replaced = paddle.where(here, with_margin, cosines).unsqueeze(-1)
        return outputs.put_along_axis(column, replaced, -1, broadcast=False) * self.scale

    def _check(self, outputs: paddle.Tensor) -> None:
        """Raises LossError if the first outputs are no cosines. Later checks would wait for the device in every
        step."""
        if self._checked or not outputs.size:
            return
        largest = float(outputs.abs().max())
        if largest > 1.01:
            raise LossError(
                f"margin_softmax takes cosines as outputs, from -1 to 1, and these reach {largest:.3g}: normalise in "
                "the model (model large_classifier does with cosines: true), or use cross_entropy"
            )
        self._checked = True


class MarginSoftmaxIgnoring(MarginSoftmax, CrossEntropyIgnoring):
    """`MarginSoftmax` over the targets that do not equal `ignored`; only these count."""


@dataclass(frozen=True, kw_only=True)
class Config:
    angle: Annotated[float, Ge(0), Le(pi / 2)] = 0.5
    """ArcFace's margin in radians, added to the target's angle."""

    cosine: Annotated[float, Ge(0), Le(1)] = 0.0
    """CosFace's margin, subtracted from the target's cosine."""

    scale: AboveZero = 64.0
    """Factor of all cosines."""

    label_smoothing: Probability = 0.0
    """Share of each target that is spread evenly over all classes."""

    ignore_index: int | None = None
    """Class number of targets that do not count."""

    def build(self) -> MarginSoftmax:
        return MarginSoftmax(self) if self.ignore_index is None else MarginSoftmaxIgnoring(self)
