"""What gradients lost when they were compressed: each rank adds its own loss to its next gradients (error feedback).

Karimireddy et al., arXiv:1901.09847: without it a biased compression stops at another point than the optimum, or never
stops; with it every part of a gradient is sent in the end, only later.

A checkpoint holds each rank's errors, and PowerSGD's factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddle_dp.parallel.extra_state import SavedExtraState

Tensors = dict[str, paddle.Tensor]


def residuals_of(memory: Residuals, names: Sequence[str]) -> Tensors:
    """This rank's errors; `names` are those of the memory's places."""
    return {f"error/{name}": memory.saved(index) for index, name in enumerate(names)}


def factors_of(factors: Mapping[int, paddle.Tensor], names: Sequence[str]) -> Tensors:
    """The factors Q, the same on every rank."""
    return {_factor(names[index], factor): factor for index, factor in factors.items()}


def restore_residuals(memory: Residuals, names: Sequence[str], ranks: int, saved: SavedExtraState) -> None:
    """On as many ranks as saved them each gets its own; on others, all that is owed is shared equally: what counts is
    its sum."""
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
    """Of as many columns as now; others stay as they were drawn."""
    for index, factor in factors.items():
        key = _factor(names[index], factor)
        if key in saved.shared:
            factors[index] = paddle.zeros_like(factor)
            saved.shared_into(key, factors[index])


def _factor(name: str, factor: paddle.Tensor) -> str:
    return f"factor{factor.shape[0]}/{name}"


class Residuals:
    """The errors of one rank, in the dtype of the sums, by the place of a parameter.

    A step's errors are `pending` until the update is made (`keep`): one that is left out, because a guard refuses it or
    a gradient overflowed, changes nothing, here as in the optimizer. What matters is the sum of all ranks' errors,
    which is what is owed to the weights; so any rank may keep what any other lost, as the one does that rounds a sum.
    Errors are of gradients times `scale`: the loss scale, and what makes gradients of sums of those of means.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor]):
        self.parameters = parameters
        self.scale = 1.0
        self._residuals: dict[int, paddle.Tensor] = {}
        self._pending: dict[int, paddle.Tensor] = {}
        # Memory of errors that are no more, for who asks for some: new memory costs as much as what is computed in it.
        self._spare: dict[int, paddle.Tensor] = {}
        self._reuses = False
        self.clipped: set[int] = set()  # places of numbers that were too large for the dtype that travels
        # By places: on a device, not read yet.
        self._may_be_clipped: dict[tuple[int, ...], paddle.Tensor] = {}

    def may_be_clipped(self, indices: Sequence[int], flag: paddle.Tensor) -> None:
        """Some of the numbers at these places were too large, if `flag` is true, bool on a device."""
        key = tuple(indices)
        before = self._may_be_clipped.get(key)
        self._may_be_clipped[key] = flag if before is None else before.logical_or(flag)

    def take_clipped(self) -> list[int]:
        """The places of numbers that were too large since it was asked last. Waits for the device."""
        for indices, flag in self._may_be_clipped.items():
            self.clipped.update(indices if flag.item() else ())
        too_large, self.clipped, self._may_be_clipped = sorted(self.clipped), set(), {}
        return too_large

    def begin(self, scale: float) -> None:
        """Before an update's backward: forgets what an update that was left out has lost."""
        self._free(self._pending)
        self._pending = {}
        if scale != self.scale:
            self._residuals = {
                index: error * (scale / self.scale) for index, error in self._residuals.items()
            }
            self.scale = scale

    def keep(self) -> None:
        """The update was made."""
        self._free({index: self._residuals[index] for index in self._pending if index in self._residuals})
        self._residuals |= self._pending
        self._pending = {}

    def _free(self, residuals: dict[int, paddle.Tensor]) -> None:
        if self._reuses:
            self._spare |= residuals

    def room(self, index: int) -> paddle.Tensor:
        """Memory for an error that is about to be lost, with any numbers in it."""
        self._reuses = True
        parameter = self.parameters[index]
        spare = self._spare.pop(index, None)
        return paddle.empty(parameter.shape, wide(parameter)) if spare is None else spare

    def get(self, index: int) -> paddle.Tensor | None:
        """The error that is to be added to a gradient; None: none."""
        return self._pending.get(index, self._residuals.get(index))

    def lose(self, index: int, error: paddle.Tensor) -> None:
        """What is now lost of a gradient to which `get` was added, in its shape."""
        self._pending[index] = error

    def take_back(self, index: int) -> None:
        """What was lost was not used: no rank had a gradient."""
        self._pending.pop(index, None)

    def opened(self, index: int) -> paddle.Tensor:
        """The pending error, to be changed in place."""
        if index not in self._pending:
            residual = self._residuals.get(index)
            parameter = self.parameters[index]
            self._pending[index] = (
                paddle.zeros(parameter.shape, wide(parameter)) if residual is None else residual.clone()
            )
        return self._pending[index]

    def saved(self, index: int) -> paddle.Tensor:
        """The kept error of a gradient without loss scale; zeros where nothing was lost."""
        error = self._residuals.get(index)
        if error is None:
            return paddle.zeros(self.parameters[index].shape, wide(self.parameters[index]))
        return (
            error * (1.0 / self.scale) if self.scale != 1.0 else error
        )  # as `begin` does: a resume has its bits

    def restore(self, index: int, error: paddle.Tensor) -> None:
        """The other way."""
        self._residuals[index] = error * self.scale if self.scale != 1.0 else error
        self._pending.pop(index, None)


def wide(parameter: paddle.Tensor) -> str:
    """The dtype in which gradients of a parameter are added up, and errors kept: float32, or float64 for that."""
    return "float64" if parameter.dtype == paddle.float64 else "float32"
