"""Mixup and CutMix: each sample is mixed with the one before it in the global batch, the first with the last.

The order of an epoch is random, so the sample before is a random one, as of a permuted batch. The share and the
rectangle are drawn from (seed, epoch, global batch). So samples are mixed equally on any number of ranks, micro-batches
and workers, and a rank reads one sample more for each of its micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from paddle_dp.data.arrays import Array, Arrays, describe
from paddle_dp.data.randomness import key
from paddle_dp.data.sample import BatchShare, BatchSource, MicroArrays
from paddle_dp.errors import DataError
from paddle_dp.recipe.schema import Mix

_DRAWS = 0x4D6978  # batch k and sample k draw different numbers


@dataclass(frozen=True)
class Mixture:
    """How a global batch is mixed. `share`: the weight of each sample itself, 0 to 1. `center`: of CutMix's rectangle,
    in shares of height and width; None for Mixup."""

    share: float
    center: tuple[float, float] | None = None

    def rectangle(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, bottom, left, right: 1 - `share` of the area around the center, cut off at the edges (Yun et al. 2019,
        arXiv:1905.04899, eq. 2)."""
        assert self.center is not None
        side = math.sqrt(1 - self.share)
        bounds = []
        for length, center in zip((height, width), self.center, strict=True):
            middle, half = int(center * length), int(side * length) // 2
            bounds += [max(middle - half, 0), min(middle + half, length)]
        return bounds[0], bounds[1], bounds[2], bounds[3]


def draw(mix: Mix, seed: int, epoch: int, k: int) -> Mixture:
    """The draw of global batch `k` of an epoch."""
    random = Random(key(key(seed, epoch, k), _DRAWS, 0))
    # Always as many numbers, so that another probability changes no other batch.
    mixes, cuts, *center = (random.random() for _ in range(4))
    if mixes >= mix.probability:
        return Mixture(1.0)
    if mix.cutmix and (not mix.mixup or cuts < mix.cutmix_probability):
        return Mixture(random.betavariate(mix.cutmix, mix.cutmix), (center[0], center[1]))
    assert mix.mixup
    return Mixture(random.betavariate(mix.mixup, mix.mixup))


class Mixing(BatchSource):
    """The batches of `source`, whose sampler reads `with_previous`, mixed as `mix` and `seed` say.

    Integer targets, a class number for each sample, become {"first": numbers, "second": numbers of the samples before,
    "share": the first one's}, each [n]. Targets of floats are mixed as the inputs are, with the same share.
    """

    def __init__(self, source: BatchSource, mix: Mix, seed: int):
        self._source, self._mix, self._seed = source, mix, seed

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        for (k, _), micro_batches in self._source.read_with_shares(epoch, shares):
            drawn = draw(self._mix, self._seed, epoch, k)
            if self._mix.cutmix:  # also if this batch is blended: the first batch shall tell
                for inputs, _, _ in micro_batches:
                    _check_images(inputs)
            yield [(*mixed(inputs, targets, drawn), count) for inputs, targets, count in micro_batches]

    def workers_busy(self) -> float:
        return self._source.workers_busy()

    def close(self) -> None:
        self._source.close()


def mixed(inputs: Arrays, targets: Arrays, drawn: Mixture) -> tuple[Arrays, Arrays]:
    """Inputs [n + 1, …] and targets [n + 1] as n samples, each mixed with the row before it. Raises DataError for
    inputs and targets of another form."""
    if not isinstance(inputs, np.ndarray) or inputs.dtype.kind != "f":
        raise DataError(
            f"mix needs one array of floats as inputs, such as images, and these are {describe(inputs)}"
        )
    if drawn.center is None:
        images, share = _blended(inputs, drawn.share), drawn.share
    else:
        images, share = _pasted(inputs, drawn)
    return images, _targets(targets, share)


def _check_images(inputs: Arrays) -> None:
    """Raises DataError for inputs that are no images, or have channels last: a cut would go through these."""
    if isinstance(inputs, np.ndarray) and (inputs.ndim < 4 or inputs.shape[-1] <= 4 < inputs.shape[1]):
        raise DataError(
            f"mix.cutmix needs images [channels, height, width], and inputs are {describe(inputs[0])}: leave "
            "mix.cutmix out, and set mix.mixup"
        )


def _blended(rows: Array, share: float) -> Array:
    """share · row + (1 - share) · the row before, in the dtype of rows."""
    if share == 1:
        return rows[1:]
    weight = rows.dtype.type(share)
    blended: Array = rows[1:] * weight + rows[:-1] * (1 - weight)
    return blended


def _pasted(rows: Array, drawn: Mixture) -> tuple[Array, float]:
    """Images with a rectangle of the image before, and the share of the area that is left."""
    height, width = rows.shape[-2:]
    top, bottom, left, right = drawn.rectangle(height, width)
    images = rows[1:].copy()
    images[..., top:bottom, left:right] = rows[:-1, ..., top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)


def _targets(targets: Arrays, share: float) -> Arrays:
    if isinstance(targets, np.ndarray) and targets.dtype.kind == "f":
        return _blended(targets, share)
    is_column = isinstance(targets, np.ndarray) and targets.shape[1:] == (1,)
    numbers = targets.squeeze(-1) if is_column else targets
    if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise DataError(
            f"mix needs a class number for each sample as target, or floats, and targets are {describe(targets)}"
        )
    shares = np.full(len(numbers) - 1, share, np.float32)
    return {"first": numbers[1:], "second": numbers[:-1], "share": shares}
