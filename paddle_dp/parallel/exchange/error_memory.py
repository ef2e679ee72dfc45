"""What gradients lost when they were compressed: each rank adds its own loss to its next gradients (error feedback).

Karimireddy et al., arXiv:1901.09847: without it a biased compression stops at another point than the optimum, or never
stops; with it every part of a gradient is sent in the end, only later.

A checkpoint holds each rank's errors, and PowerSGD's factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddle_dp.parallel.beside import SavedBeside

Tensors = dict[str, paddle.Tensor]


def errors_of(memory: ErrorMemory, names: Sequence[str]) -> Tensors:
    """This rank's errors; `names` are those of the memory's places."""
    return {f"error/{name}": memory.saved(place) for place, name in enumerate(names)}


def factors_of(factors: Mapping[int, paddle.Tensor], names: Sequence[str]) -> Tensors:
    """The factors Q, the same on every rank."""
    return {_factor(names[place], factor): factor for place, factor in factors.items()}


def restore_errors(memory: ErrorMemory, names: Sequence[str], ranks: int, saved: SavedBeside) -> None:
    """On as many ranks as saved them each gets its own; on others, all that is owed is shared equally: what counts is
    its sum."""
    for place, name in enumerate(names):
        parameter, key = memory.parameters[place], f"error/{name}"
        error = paddle.zeros(parameter.shape, wide(parameter))
        if key in saved.own:
            saved.own_into(key, error)
        elif saved.sum_into(key, error):
            error = error / ranks
        else:
            continue
        memory.restore(place, error)


def restore_factors(factors: dict[int, paddle.Tensor], names: Sequence[str], saved: SavedBeside) -> None:
    """Of as many columns as now; others stay as they were drawn."""
    for place, factor in factors.items():
        key = _factor(names[place], factor)
        if key in saved.shared:
            factors[place] = paddle.zeros_like(factor)
            saved.shared_into(key, factors[place])


def _factor(name: str, factor: paddle.Tensor) -> str:
    return f"factor{factor.shape[0]}/{name}"


class ErrorMemory:
    """The errors of one rank, in the dtype of the sums, by the place of a parameter.

    A step's errors are `pending` until the update is made (`keep`): one that is left out, because a guard refuses it or
    a gradient overflowed, changes nothing, here as in the optimizer. What matters is the sum of all ranks' errors,
    which is what is owed to the weights; so any rank may keep what any other lost, as the one does that rounds a sum.
    Errors are of gradients times `scale`: the loss scale, and what makes gradients of sums of those of means.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor]):
        self.parameters = parameters
        self.scale = 1.0
        self._kept: dict[int, paddle.Tensor] = {}
        self._pending: dict[int, paddle.Tensor] = {}
        # Memory of errors that are no more, for who asks for some: new memory costs as much as what is computed in it.
        self._spare: dict[int, paddle.Tensor] = {}
        self._reuses = False
        self.clipped: set[int] = set()  # places of numbers that were too large for the dtype that travels
        # By places: on a device, not read yet.
        self._may_be_clipped: dict[tuple[int, ...], paddle.Tensor] = {}

    def may_be_clipped(self, places: Sequence[int], flag: paddle.Tensor) -> None:
        """Some of the numbers at these places were too large, if `flag` is true, bool on a device."""
        key = tuple(places)
        before = self._may_be_clipped.get(key)
        self._may_be_clipped[key] = flag if before is None else before.logical_or(flag)

    def take_clipped(self) -> list[int]:
        """The places of numbers that were too large since it was asked last. Waits for the device."""
        for places, flag in self._may_be_clipped.items():
            self.clipped.update(places if flag.item() else ())
        found, self.clipped, self._may_be_clipped = sorted(self.clipped), set(), {}
        return found

    def begin(self, scale: float) -> None:
        """Before an update's backward: forgets what an update that was left out has lost."""
        self._free(self._pending)
        self._pending = {}
        if scale != self.scale:
            self._kept = {place: error * (scale / self.scale) for place, error in self._kept.items()}
            self.scale = scale

    def keep(self) -> None:
        """The update was made."""
        self._free({place: self._kept[place] for place in self._pending if place in self._kept})
        self._kept |= self._pending
        self._pending = {}

    def _free(self, errors: dict[int, paddle.Tensor]) -> None:
        if self._reuses:
            self._spare |= errors

    def room(self, place: int) -> paddle.Tensor:
        """Memory for an error that is about to be lost, with any numbers in it."""
        self._reuses = True
        parameter = self.parameters[place]
        spare = self._spare.pop(place, None)
        return paddle.empty(parameter.shape, wide(parameter)) if spare is None else spare

    def of(self, place: int) -> paddle.Tensor | None:
        """The error that is to be added to a gradient; None: none."""
        return self._pending.get(place, self._kept.get(place))

    def lose(self, place: int, error: paddle.Tensor) -> None:
        """What is now lost of a gradient to which `of` was added, in its shape."""
        self._pending[place] = error

    def take_back(self, place: int) -> None:
        """What was lost was not used: no rank had a gradient."""
        self._pending.pop(place, None)

    def opened(self, place: int) -> paddle.Tensor:
        """The pending error, to be changed in place."""
        if place not in self._pending:
            kept = self._kept.get(place)
            parameter = self.parameters[place]
            self._pending[place] = (
                paddle.zeros(parameter.shape, wide(parameter)) if kept is None else kept.clone()
            )
        return self._pending[place]

    def saved(self, place: int) -> paddle.Tensor:
        """The kept error of a gradient without loss scale; zeros where nothing was lost."""
        error = self._kept.get(place)
        if error is None:
            return paddle.zeros(self.parameters[place].shape, wide(self.parameters[place]))
        return (
            error * (1.0 / self.scale) if self.scale != 1.0 else error
        )  # as `begin` does: a resume has its bits

    def restore(self, place: int, error: paddle.Tensor) -> None:
        """The other way."""
        self._kept[place] = error * self.scale if self.scale != 1.0 else error
        self._pending.pop(place, None)


def wide(parameter: paddle.Tensor) -> str:
    """The dtype in which gradients of a parameter are added up, and errors kept: float32, or float64 for that."""
    return "float64" if parameter.dtype == paddle.float64 else "float32"
