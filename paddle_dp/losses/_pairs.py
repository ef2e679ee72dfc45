"""Losses that compare the samples of a batch: which samples, on which ranks, and how far they are apart."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Literal, Protocol

from paddle_dp.errors import LossError
from paddle_dp.losses._base import widened

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

Across = Literal["ranks", "rank"]
_NEAR = 1e-12  # the smallest squared distance whose root has a gradient


class Samples(Protocol):
    """The samples with which those of this rank are compared; `parallel.GatheredSamples` has those of all ranks."""

    def gather(self, *rows: paddle.Tensor) -> tuple[list[paddle.Tensor], int]:
        """Each of `rows` [n, …] of all samples, [N, …], with exact gradients; and where this rank's n begin among
        them, or N where they are not among them (a dummy's)."""
        ...


class LocalSamples:
    """The samples of this rank, or of one process."""

    def gather(self, *rows: paddle.Tensor) -> tuple[list[paddle.Tensor], int]:
        return list(rows), 0


class ComparesSamples:
    """A total over this rank's samples of the micro-batch (the anchors), each compared with all of its samples.

    The samples are those of the global micro-batch, which is the same set on any number of ranks, under `across:
    ranks`, and those that this rank has of it under `across: rank`. A pair never reaches into another micro-batch.
    """

    def __init__(self, across: Across):
        self.compares = across
        self.samples: Samples = LocalSamples()

    def across(self, samples: Samples) -> Self:
        """The same loss, which compares with these samples."""
        other = copy(self)
        other.samples = samples
        return other

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """0: outputs are no scores of classes."""
        return 0


def embeddings(outputs: object, loss: str, normalize: bool) -> paddle.Tensor:
    """Outputs [n, d] in float32 at least, of length 1 where asked. Raises LossError for outputs of another form."""
    import paddle

    if not isinstance(outputs, paddle.Tensor) or outputs.ndim != 2:
        got = list(outputs.shape) if isinstance(outputs, paddle.Tensor) else type(outputs).__name__
        raise LossError(f"{loss} takes one embedding for each sample as outputs, [n, d], and got {got}")
    wide = widened(outputs)
    return paddle.nn.functional.normalize(wide, axis=-1) if normalize else wide


def class_numbers(targets: object, rows: int, loss: str) -> paddle.Tensor:
    """Targets as [n], of a dtype that any backend gathers: gloo has no int16, and ends the process there. Raises
    LossError unless there is one class number for each of `rows` embeddings."""
    import paddle

    if not isinstance(targets, paddle.Tensor) or targets.is_floating_point() or targets.size != rows:
        got = f"{targets.dtype} {targets.shape}" if isinstance(targets, paddle.Tensor) else str(type(targets))
        raise LossError(f"{loss} takes one class number for each sample as targets, [n], and got {got}")
    return targets.reshape([-1]).astype("int64")


def squared_distances(anchors: paddle.Tensor, candidates: paddle.Tensor) -> paddle.Tensor:
    """|a|² + |b|² - 2ab of anchors [n, d] and others [N, d]: [n, N]. Two that are equal may be below 0 by rounding."""
    squares = anchors.square().sum(-1, keepdim=True), candidates.square().sum(-1)
    return squares[0] + squares[1] - 2 * anchors.matmul(candidates, transpose_y=True)


def itself(anchors: int, candidates: int, first: int) -> paddle.Tensor:
    """Which of the others an anchor is itself, bool [n, N]; `first` of them is the first anchor."""
    import paddle

    return (paddle.arange(first, first + anchors).unsqueeze(-1) == paddle.arange(candidates)).astype("bool")


def margin_losses(squares: paddle.Tensor, same: paddle.Tensor, margin: float) -> paddle.Tensor:
    """d² where `same` is 1, max(0, margin - d)² where it is 0, for squared distances; all of one shape.

    (Hadsell, Chopra and LeCun, CVPR 2006, eq. 4, without its factor ½.)
    """
    short = (margin - squares.clip(min=_NEAR).sqrt()).clip(min=0.0)
    return same * squares + (1 - same) * short.square()
