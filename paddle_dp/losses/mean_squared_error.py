"""Squared error, averaged over the numbers of a sample, totalled over samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.losses._base import full_precision, paired

if TYPE_CHECKING:
    import paddle


class MeanSquaredError:
    """Total over samples: outputs [n, …] of any shape, targets of the same size."""

    counts_samples = True

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total, number of samples); the total is float32 even under autocast."""
        import paddle.nn.functional as F

        outputs, targets = paired(outputs, targets, "mean_squared_error")
        return F.mse_loss(outputs, targets) * outputs.shape[0], outputs.shape[0]

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """Returns 0: outputs are no class scores."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """This loss has no settings."""

    def build(self) -> MeanSquaredError:
        return MeanSquaredError()
