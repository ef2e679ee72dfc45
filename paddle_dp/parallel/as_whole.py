"""Whether a model that was cut still gives what the whole one gave: compared on a few samples when it is placed.

A table that names the wrong way (whole heads where the parts of q, k and v lie beside each other) cuts without an
error, and what the ranks then learn is another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.precision.amp import cast, default_dtype, read_by
from paddle_dp.parallel.tensor import misfit

# Of the largest output: rounding of another order is far below, a head in another's place far above.
ALLOWED = {paddle.float64: 1e-9}
ROUNDING = 2e-4
DOCS = "docs/add-a-part.md"


class AsWhole:
    """What a whole model gives in evaluation for `samples()`; asked before the model is cut.

    Without samples nothing is compared, and only shapes are for a model that draws random numbers in evaluation, or
    without `values`: for who compares them anyway, and says where they part.
    """

    def __init__(self, model: nn.Layer, samples: Callable[[], Any] | None, values: bool = True):
        self._inputs = None if samples is None else cast(samples(), read_by(model))
        self._cut, self._flow, before = misfit.ways(model), misfit.Flow(), _drawn()
        self._outputs: list[paddle.Tensor] = []
        if samples is not None:
            self._outputs, self._flow = self._run(model)
        self._values = values and before == _drawn()

    def check(self, model: nn.Layer, setting: str, slices: list[tuple[int, Any]]) -> None:
        """Raises UsageError unless the model, cut by now, gives the same. Collective over the groups that cut it.

        `setting` is the word that cut it; `slices`: along which dim which group holds slices of the outputs.
        """
        if not self._outputs:
            return
        outputs, flow = self._run(model, setting)
        for whole, part in zip(self._outputs, outputs, strict=True):
            for dim, group in slices:
                if part.ndim > 1 and part.shape[dim] != whole.shape[dim]:
                    whole = paddle.split(whole, group.nranks, axis=dim)[group.rank]
            if part.shape != whole.shape:
                why = misfit.ended(self._cut, self._flow, flow, list(part.shape))
                said = f"its outputs are {list(part.shape)} and not {list(whole.shape)}"
                raise UsageError(f"{setting}: {why} ({DOCS}).") if why else _refused(model, setting, said)
            if not self._values or not whole.is_floating_point() or not whole.size:
                continue
            apart, largest = (float(x.abs().max()) for x in (part - whole, whole))
            if apart > ALLOWED.get(whole.dtype, ROUNDING) * largest:
                said = f"its outputs are up to {apart:.2g} apart, and the largest is {largest:.2g}"
                raise _refused(model, setting, said)

    def _run(self, model: nn.Layer, setting: str = "") -> tuple[list[paddle.Tensor], misfit.Flow]:
        """The outputs, and what went through the layers. Raises UsageError where what `setting` has cut stops it."""
        with (
            _in_evaluation(model),
            paddle.no_grad(),
            default_dtype(read_by(model)),
            misfit.watched(model) as flow,
        ):
            try:
                outputs = model(self._inputs)
            except PaddleDPError:
                raise
            except Exception as error:
                why = misfit.stopped(model, self._cut, self._flow, flow) if setting else None
                if why is None:
                    raise
                raise UsageError(f"{setting}: {why} ({DOCS}).") from error
        return [x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor)], flow


@contextmanager
def _in_evaluation(model: nn.Layer) -> Iterator[None]:
    layers = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    running = [*statistics(model).values(), *model.buffers()]
    kept = [(tensor, tensor.clone()) for tensor in running if tensor._is_initialized()]
    for layer, _ in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer, training in layers:
            layer.training = training
        for tensor, value in kept:
            tensor.set_value(value)


def _drawn() -> list[Any]:
    return [state.__getstate__() for state in paddle.get_rng_state()]


def _refused(model: nn.Layer, setting: str, said: str) -> UsageError:
    return UsageError(
        f"{setting}: cut as `cuts` and `attention_methods` say, {type(model).__name__} is another model: {said}. "
        "`heads` wants whole heads beside each other (q, k and v of one head together, or in layers of their own), "
        "`colwise` goes into `rowwise`, and tokens meet in `attention_methods` alone ({DOCS})."
    )
