"""Asymmetric loss of yes-or-no labels: the many easy negative ones count less (Ben-Baruch et al., arXiv:2009.14119)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from paddle_dp.losses._base import full_precision, paired
from paddle_dp.losses.binary_cross_entropy import BinaryCrossEntropy
from paddle_dp.units import Probability

if TYPE_CHECKING:
    import paddle


Exponent = Annotated[float, Ge(0)]


class Asymmetric(BinaryCrossEntropy):
    """Total over samples: outputs [n] or [n, labels] before the sigmoid, targets y of 0 to 1.

    With p = sigmoid(output) and q = max(p - margin, 0), a label's loss is -y (1 - p)^gamma_positive log p
    - (1 - y) q^gamma_negative log(1 - q), the paper's asymmetric focusing and probability shifting.
    """

    use = "asymmetric"

    def __init__(self, gammas: tuple[float, float], margin: float, through_focus: bool, summed: bool):
        super().__init__(summed=summed)
        self.gammas, self.margin, self.through_focus = gammas, margin, through_focus

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total, number of samples); the total is float32 even under autocast."""
        import paddle.nn.functional as F

        outputs, targets = paired(outputs, targets, self.use)
        negative = F.sigmoid(-outputs)  # 1 - p, without its rounding
        shifted = (F.sigmoid(outputs) - self.margin).clip(min=0.0)
        log_negative = (
            (negative + self.margin).clip(max=1.0).log() if self.margin else F.log_sigmoid(-outputs)
        )
        losses = targets * self._focused(negative, self.gammas[0], F.log_sigmoid(outputs))
        losses += (1 - targets) * self._focused(shifted, self.gammas[1], log_negative)
        samples = outputs.shape[0]
        labels = 1 if self.summed else max(1, outputs.size // max(1, samples))
        return -losses.sum() / labels, samples

    def _focused(self, base: paddle.Tensor, gamma: float, logarithm: paddle.Tensor) -> paddle.Tensor:
        """base^gamma · logarithm; a gamma of 0 has no factor, whose gradient would be 0 / 0 at base 0."""
        if not gamma:
            return logarithm
        return (base if self.through_focus else base.detach()).pow(gamma) * logarithm


@dataclass(frozen=True, kw_only=True)
class Config:
    gamma_positive: Exponent = 0.0
    """The exponent of 1 - p for positive labels, 0 or from 1 on."""

    gamma_negative: Exponent = 4.0
    """The exponent of p for negative labels, likewise: the larger, the less the easy ones count."""

    margin: Probability = 0.05
    """Subtracted from p for negative labels: those below it count nothing."""

    through_focus: bool = False
    """Whether the gradient flows through the powers, too, and not through the logarithms alone."""

    over_labels: Literal["mean", "sum"] = "mean"
    """The loss of a sample: the mean, or the sum over its labels."""

    def __post_init__(self) -> None:
        for name in ("gamma_positive", "gamma_negative"):
            if 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: between 0 and 1 its gradient has no limit where the base is 0: 0, or 1 and more"
                )

    def build(self) -> Asymmetric:
        gammas = (self.gamma_positive, self.gamma_negative)
        return Asymmetric(gammas, self.margin, self.through_focus, self.over_labels == "sum")
