"""Error feedback: each rank adds the compression error of its gradients to its next gradients.

Karimireddy et al., arXiv:1901.09847: without it a biased compression converges to a point other than the optimum, or
never; with it every part of a gradient is sent eventually.

A checkpoint holds each rank's residuals, and PowerSGD's factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddle_dp.exchange.gradient_exchange import SavedExtraState
from paddle_dp.tensors import wide

Tensors = dict[str, paddle.Tensor]


def residuals_of(memory: Residuals, names: Sequence[str]) -> Tensors:
    """This rank's residuals; `names` are the parameters' names by index."""
    return {f"error/{name}": memory.saved(index) for index, name in enumerate(names)}


def factors_of(factors: Mapping[int, paddle.Tensor], names: Sequence[str]) -> Tensors:
    """The factors Q, the same on every rank."""
    return {_factor(names[index], factor): factor for index, factor in factors.items()}


def restore_residuals(memory: Residuals, names: Sequence[str], ranks: int, saved: SavedExtraState) -> None:
    """Restores each rank's residuals if as many ranks saved them; otherwise each rank gets an equal share of the sum,
    which is all that matters."""
    for index, name in enumerate(names):
        parameter, key = memory.parameters[index], f"error/{name}"
        error = paddle.zeros(parameter.shape, wide(parameter))
        if key in saved.local:
            saved.local_into(key, error)
        elif saved.sum_into(key, error):
            error = error / ranks
        else:
            continue
        memory.restore(index, error)


def restore_factors(factors: dict[int, paddle.Tensor], names: Sequence[str], saved: SavedExtraState) -> None:
    """Restores factors with the current number of columns; others keep their drawn values."""
    for index, factor in factors.items():
        key = _factor(names[index], factor)
        if key in saved.shared:
            factors[index] = paddle.zeros_like(factor)
            saved.shared_into(key, factors[index])


def _factor(name: str, factor: paddle.Tensor) -> str:
    return f"factor{factor.shape[0]}/{name}"


class Residuals:
    """One rank's residuals by parameter index, in the dtype of the sums.

    A step's residuals are `pending` until the update is made (`keep`): a skipped update, after a guard's refusal or an
    overflow, changes neither them nor the optimizer. Only the sum of all ranks' residuals matters; so any rank may keep
    another's error, as the rank does that rounds a sum. Residuals are stored multiplied by `scale` = loss scale × (mean
    → sum factor).
    """

    def __init__(self, parameters: Sequence[paddle.Tensor]):
        self.parameters = parameters
        self.scale = 1.0
        self._residuals: dict[int, paddle.Tensor] = {}
        self._pending: dict[int, paddle.Tensor] = {}
        # Memory of outdated residuals, for reuse: new memory costs as much as computing in it.
        self._spare: dict[int, paddle.Tensor] = {}
        self._reuses = False
        self.clipped: set[int] = set()  # indices of gradients with numbers too large for `reduce_dtype`
        # By indices: flags on a device, not read yet.
        self._may_be_clipped: dict[tuple[int, ...], paddle.Tensor] = {}

    def may_be_clipped(self, indices: Sequence[int], flag: paddle.Tensor) -> None:
        """Records that numbers of these gradients were too large if `flag`, a bool on a device, is true."""
        key = tuple(indices)
        before = self._may_be_clipped.get(key)
        self._may_be_clipped[key] = flag if before is None else before.logical_or(flag)

    def take_clipped(self) -> list[int]:
        """The indices of gradients with too large numbers since the last call. Waits for the device."""
        for indices, flag in self._may_be_clipped.items():
            self.clipped.update(indices if flag.item() else ())
        too_large, self.clipped, self._may_be_clipped = sorted(self.clipped), set(), {}
        return too_large

    def begin(self, scale: float) -> None:
        """Called before an update's backward: drops the pending errors of a skipped update."""
        self._free(self._pending)
        self._pending = {}
        if scale != self.scale:
            self._residuals = {
                index: error * (scale / self.scale) for index, error in self._residuals.items()
            }
            self.scale = scale

    def keep(self) -> None:
        """Confirms that the update was made."""
        self._free({index: self._residuals[index] for index in self._pending if index in self._residuals})
        self._residuals |= self._pending
        self._pending = {}

    def _free(self, residuals: dict[int, paddle.Tensor]) -> None:
        if self._reuses:
            self._spare |= residuals

    def room(self, index: int) -> paddle.Tensor:
        """Uninitialised memory for a residual that is about to be computed."""
        self._reuses = True
        parameter = self.parameters[index]
        spare = self._spare.pop(index, None)
        return paddle.empty(parameter.shape, wide(parameter)) if spare is None else spare

    def get(self, index: int) -> paddle.Tensor | None:
        """The residual to add to a gradient, or None."""
        return self._pending.get(index, self._residuals.get(index))

    def lose(self, index: int, error: paddle.Tensor) -> None:
        """Records the error of a gradient to which `get` was added, in its shape."""
        self._pending[index] = error

    def take_back(self, index: int) -> None:
        """Drops a pending error: no rank had a gradient."""
        self._pending.pop(index, None)

    def opened(self, index: int) -> paddle.Tensor:
        """The pending residual, to be changed in place."""
        if index not in self._pending:
            residual = self._residuals.get(index)
            parameter = self.parameters[index]
            self._pending[index] = (
                paddle.zeros(parameter.shape, wide(parameter)) if residual is None else residual.clone()
            )
        return self._pending[index]

    def saved(self, index: int) -> paddle.Tensor:
        """The kept residual without loss scale; zeros if there is none."""
        error = self._residuals.get(index)
        if error is None:
            return paddle.zeros(self.parameters[index].shape, wide(self.parameters[index]))
        return (
            error * (1.0 / self.scale) if self.scale != 1.0 else error
        )  # multiplied as in `begin`, so that a resume has the same bits

    def restore(self, index: int, error: paddle.Tensor) -> None:
        """The inverse of `saved`."""
        self._residuals[index] = error * self.scale if self.scale != 1.0 else error
        self._pending.pop(index, None)
