"""Checks that a cut model computes the same as the whole model: both run on a few samples when the model is placed.

A `cuts` table with the wrong way (`heads` for outputs that are not ordered head by head) raises no error, and the ranks
would train another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from paddle_dp.axes.tensor import misfit
from paddle_dp.core.precision.amp import cast, default_dtype, read_by
from paddle_dp.core.trial import random_state, trial
from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.structure import call

# Relative to the largest output: above rounding in another order, below the effect of a misplaced head.
TOLERANCE = {paddle.float64: 1e-9}
DEFAULT_TOLERANCE = 2e-4
DOCS = "docs/add-a-part.md"


class CutCheck:
    """The outputs of a whole model in evaluation for `samples()`; create it before the model is cut.

    Without samples nothing is compared. Only shapes are compared for a model that draws random numbers in evaluation,
    and unless `values`: then the caller compares values.
    """

    def __init__(self, model: nn.Layer, samples: Callable[[], Any] | None, values: bool = True):
        self._inputs = None if samples is None else cast(samples(), read_by(model))
        self._cuts, self._full_flow = misfit.cut_layers(model), misfit.Flow()
        self._outputs: list[paddle.Tensor] = []
        self._values = values
        if samples is not None:
            self._outputs, self._full_flow, drew = self._run(model)
            self._values = values and not drew

    def check(self, model: nn.Layer, setting: str, slices: list[tuple[int, Any]]) -> None:
        """Raises UsageError unless the model, now cut, gives the same outputs. Collective over the groups that cut it.

        `setting` is the recipe's key that cut it; `slices`: (dim, group) of outputs of which ranks hold slices.
        """
        if not self._outputs:
            return
        outputs, flow, _ = self._run(model, setting)
        for full, sliced in zip(self._outputs, outputs, strict=True):
            for dim, group in slices:
                if sliced.ndim > 1 and sliced.shape[dim] != full.shape[dim]:
                    full = paddle.split(full, group.nranks, axis=dim)[group.rank]
            if sliced.shape != full.shape:
                why = misfit.wrong_output(self._cuts, self._full_flow, flow, list(sliced.shape))
                if why:
                    raise UsageError(f"{setting}: {why} ({DOCS}).")
                raise _differs(
                    model, setting, f"its outputs are {list(sliced.shape)} instead of {list(full.shape)}"
                )
            if not self._values or not full.is_floating_point() or not full.size:
                continue
            difference, largest = (float(x.abs().max()) for x in (sliced - full, full))
            if difference > TOLERANCE.get(full.dtype, DEFAULT_TOLERANCE) * largest:
                why = f"its outputs differ by up to {difference:.2g}, and the largest is {largest:.2g}"
                raise _differs(model, setting, why)

    def _run(self, model: nn.Layer, setting: str = "") -> tuple[list[paddle.Tensor], misfit.Flow, bool]:
        """The outputs, the shapes at the layers, and whether random numbers were drawn.

        Raises UsageError if a layer that `setting` has cut fails.
        """
        with trial(model), default_dtype(read_by(model)), misfit.watched(model) as flow:
            for layer in model.sublayers(include_self=True):
                layer.training = False
            before = random_state()
            try:
                outputs = call(model, self._inputs, model.forward)
            except PaddleDPError:
                raise
            except Exception as error:
                why = misfit.failed_layer(model, self._cuts, self._full_flow, flow) if setting else None
                if why is None:
                    raise
                raise UsageError(f"{setting}: {why} ({DOCS}).") from error
            drew = random_state() != before
        tensors = [x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor)]
        return tensors, flow, drew


def _differs(model: nn.Layer, setting: str, how: str) -> UsageError:
    return UsageError(
        f"{setting}: cut by its `cuts` and `attention_methods`, {type(model).__name__} computes something else: {how}. "
        "`heads` needs outputs ordered by whole heads (q, k and v of one head together, or in separate layers), "
        f"`colwise` is followed by `rowwise`, and only `attention_methods` may mix tokens ({DOCS})."
    )
