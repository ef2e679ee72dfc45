"""The exchange of compressed gradients: rounded numbers or factors of matrices, after first updates without."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from paddle_dp.core.extra_state import ExtraState, SavedExtraState
from paddle_dp.core.loss import Count, number
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.low_rank import LowRankGradients
from paddle_dp.exchange.residuals import (
    Residuals,
    factors_of,
    residuals_of,
    restore_factors,
    restore_residuals,
)
from paddle_dp.mesh import Mesh
from paddle_dp.text import and_more
from paddle_dp.units import Compress

_CLIPPED = (
    "step {}, or before it: the gradient of '{}'{} has numbers above 65504, which float16 has not (strategy.compress). "
    "65504 was sent for them, and the rest comes with the next updates, late: compress=bfloat16 has room for them. "
    "This is said once."
)


class CompressedExchange(GradientExchange):
    """Exchanges by `uncompressed` in the first `compress.after` updates of a training, then by `compressed`. A rank
    keeps its compression error in `residuals` and adds it to its next gradients.

    `names`: of the parameters, in the order of the residuals. With `counted_late` the loss's count is known only after
    the forward: gradients are then of totals / samples, and residuals are scaled to match.
    """

    def __init__(  # noqa: PLR0913 - two exchanges, and the residuals with their units
        self,
        compress: Compress,
        uncompressed: GradientExchange,
        compressed: GradientExchange,
        residuals: Residuals,
        names: Sequence[str],
        mesh: Mesh,
        counted_late: bool,
    ):
        self._compress, self._uncompressed, self._compressed = compress, uncompressed, compressed
        self._residuals, self._names, self._mesh, self._counted_late = residuals, names, mesh, counted_late
        self._low_rank = compressed if isinstance(compressed, LowRankGradients) else None
        self._active = uncompressed
        self._scale, self._divisor = 1.0, 1.0
        self._warned_clipped = False

    @property
    def description(self) -> str:
        return "gradients compressed in their exchange"

    def begin_update(self, number: int, loss_scale: float, divisor: float) -> None:
        self._active = self._uncompressed if number <= self._compress.after else self._compressed
        self._scale, self._divisor = loss_scale, divisor
        self._residuals.begin(1.0 if self._counted_late else loss_scale)

    def backward(self, last: bool, counted: Count = 0) -> AbstractContextManager[Any]:
        if last and self._counted_late:
            # From mean to sum units: otherwise a batch with few targets would be swamped by the residuals of others.
            count = self._mesh.sum([number(counted)])[0]
            if count > 0:  # otherwise there is no update
                self._residuals.begin(self._scale * count / self._divisor)
        return self._active.backward(last, counted)

    def finish(self) -> list[int]:
        return self._active.finish()

    def before_metrics(self, update: int) -> None:
        """Warns once, on the first rank, of gradients whose numbers float16 cannot hold."""
        if self._compress.kind != "float16" or self._warned_clipped:
            return
        rows = self._mesh.gather([self._names[index] for index in self._residuals.take_clipped()])
        names = list(dict.fromkeys(name for row in rows for name in row))
        self._warned_clipped = bool(names)
        if names and self._mesh.is_main:
            more = and_more(names, phrase=" and of {} more")
            print(_CLIPPED.format(update, names[0], more), file=sys.stderr, flush=True)

    def commit(self) -> None:
        self._residuals.keep()
        if self._low_rank is not None:
            self._low_rank.keep()

    def extra_state(self) -> ExtraState:
        factors = {} if self._low_rank is None else factors_of(self._low_rank.right, self._names)
        return ExtraState(shared=factors, local=residuals_of(self._residuals, self._names))

    def load_extra_state(self, saved: SavedExtraState) -> None:
        restore_residuals(self._residuals, self._names, self._mesh.ranks, saved)
        if self._low_rank is not None:
            restore_factors(self._low_rank.right, self._names, saved)
