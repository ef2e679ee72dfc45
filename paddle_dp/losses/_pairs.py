"""The base of losses that compare the samples of a batch: sets of samples, and distances."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import LossError
from paddle_dp.losses._base import widened

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

Across = Literal["ranks", "rank"]
_NEAR = 1e-12  # lower bound of squared distances: the root has no gradient at 0


class Samples:
    """The samples that this rank's samples are compared with, here its own; `GatheredSamples` (core) has all ranks'."""

    def gather(self, *rows: paddle.Tensor) -> tuple[list[paddle.Tensor], int]:
        """Gathers each of `rows` [n, …] to [N, …], with exact gradients. Also returns the index of this rank's first
        row, or N for a dummy, which is not included."""
        return list(rows), 0


class ComparesSamples:
    """A total over this rank's samples of the micro-batch (the anchors), each compared with other samples.

    `across: ranks` compares with the global micro-batch, the same set on any number of ranks; `across: rank` compares
    with this rank's samples of it. Both samples of a pair belong to one micro-batch.
    """

    def __init__(self, across: Across):
        self.compares = across
        self.samples = Samples()

    def across(self, samples: Samples) -> Self:
        """A copy of the loss that compares with these samples."""
        other = copy(self)
        other.samples = samples
        return other

    def compared(
        self, outputs: object, targets: object, loss: str, normalize: bool
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """The anchors [n, d], their samples [N, d], and two masks bool [n, N]: samples of the anchor's class, and the
        anchor itself. Raises LossError for outputs or targets of another form."""
        anchors = embeddings(outputs, loss, normalize)
        classes = class_numbers(targets, len(anchors), loss)
        (samples, sample_classes), first = self.samples.gather(anchors, classes)
        same = classes.unsqueeze(-1) == sample_classes
        return anchors, samples, same, itself(len(anchors), len(samples), first)

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """Returns 0: outputs are no class scores."""
        return 0


def embeddings(outputs: object, loss: str, normalize: bool) -> paddle.Tensor:
    """Checks and widens outputs [n, d] to float32; `normalize` scales them to length 1. Raises LossError for another
    form."""
    import paddle

    if not isinstance(outputs, paddle.Tensor) or outputs.ndim != 2:
        got = list(outputs.shape) if isinstance(outputs, paddle.Tensor) else type(outputs).__name__
        raise LossError(f"{loss} takes one embedding for each sample as outputs, [n, d], and got {got}")
    wide = widened(outputs)
    return paddle.nn.functional.normalize(wide, axis=-1) if normalize else wide


def class_numbers(targets: object, rows: int, loss: str) -> paddle.Tensor:
    """Targets as int64 [n], which every backend gathers: gloo ends the process for int16. Raises LossError unless there
    is one class number for each of `rows` embeddings."""
    import paddle

    if not isinstance(targets, paddle.Tensor) or targets.is_floating_point() or targets.size != rows:
        got = f"{targets.dtype} {targets.shape}" if isinstance(targets, paddle.Tensor) else str(type(targets))
        raise LossError(f"{loss} takes one class number for each sample as targets, [n], and got {got}")
    return targets.reshape([-1]).astype("int64")


def squared_distances(anchors: paddle.Tensor, candidates: paddle.Tensor) -> paddle.Tensor:
    """|a|² + |b|² - 2ab of anchors [n, d] and candidates [N, d]: [n, N]. Rounding may make the distance of equals
    negative."""
    squares = anchors.square().sum(-1, keepdim=True), candidates.square().sum(-1)
    return squares[0] + squares[1] - 2 * anchors.matmul(candidates, transpose_y=True)


def itself(anchors: int, candidates: int, first: int) -> paddle.Tensor:
    """The mask bool [n, N] of the candidates that are the anchors themselves; the first anchor is candidate `first`."""
    import paddle

    return (paddle.arange(first, first + anchors).unsqueeze(-1) == paddle.arange(candidates)).astype("bool")


def margin_losses(squares: paddle.Tensor, same: paddle.Tensor, margin: float) -> paddle.Tensor:
    """d² where `same` is 1, max(0, margin - d)² where it is 0, from squared distances of the same shape.

    (Hadsell, Chopra and LeCun, CVPR 2006, eq. 4, without its factor ½.)
    """
    short = (margin - squares.clip(min=_NEAR).sqrt()).clip(min=0.0)
    return same * squares + (1 - same) * short.square()
