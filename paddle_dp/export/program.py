"""Writes a model as a program that Paddle runs without its Python code, and compares the program with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.errors import ExportError
from paddle_dp.parallel.compiled import layer_by_layer

Array = np.ndarray[Any, Any]
Call = Callable[[Array], list[Array]]
INPUT = "inputs"  # the name of the program's input


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The largest difference of a program's outputs from the model's, over `samples` samples in several batch shapes.

    `largest` is the model's largest output in absolute value; a difference of `tolerance` × `largest` is allowed.
    """

    samples: int
    difference: float
    largest: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance * self.largest  # False for a NaN, too

    def __str__(self) -> str:
        allowed = self.tolerance * self.largest
        return (
            f"largest difference {self.difference:.1e} over {self.samples} real samples "
            f"(allowed: {allowed:.1e}, which is {self.tolerance:g} of the largest output, {self.largest:.3g})"
        )


def outputs(model: nn.Layer, inputs: Array) -> list[Array]:
    """The output tensors of a model, or of a loaded program, for a batch of inputs."""
    with paddle.no_grad():
        returned = model(paddle.to_tensor(inputs))
    return [np.asarray(t.numpy()) for t in paddle.utils.flatten(returned) if isinstance(t, paddle.Tensor)]


def check_finite(outputs_of_batches: Sequence[list[Array]]) -> None:
    """Raises ExportError when the model's own outputs are not finite: they could not be compared."""
    for arrays in outputs_of_batches:
        for array in arrays:
            if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
                sample = int(np.argwhere(~finite)[0][0]) if array.ndim else 0
                raise ExportError(
                    f"the model's outputs are not finite (held-out sample {sample} is the first), so nothing was "
                    "written: export another checkpoint, or look at the data."
                )


def batches(samples: Array, call: Call) -> list[Array]:
    """The samples as one batch, one sample alone, and, where the model accepts it, texts of half the length."""
    shapes = [samples, samples[:1]]
    is_text = samples.ndim == 2 and samples.dtype.kind in "iu" and samples.shape[1] > 1
    half = samples[:, : samples.shape[1] // 2] if is_text else None
    if half is not None and _accepts(call, half):
        shapes.append(half)
    return shapes


def _accepts(call: Call, inputs: Array) -> bool:
    try:
        call(inputs)
    except Exception:  # noqa: BLE001 - a model may refuse by any error
        return False
    return True


def compare(
    program: Call, inputs: Sequence[Array], expected: Sequence[list[Array]], tolerance: float
) -> Parity:
    """Runs the program on every batch and compares its outputs with those `expected`, the model's.

    Raises ExportError where the shapes differ.
    """
    difference = largest = 0.0
    for batch, model_outputs in zip(inputs, expected, strict=True):
        program_outputs = program(batch)
        shapes = [[array.shape for array in arrays] for arrays in (program_outputs, model_outputs)]
        if shapes[0] != shapes[1]:
            raise ExportError(f"the program gives outputs of {shapes[0]}, the model of {shapes[1]}.")
        for ours, models in zip(program_outputs, model_outputs, strict=True):
            differences = np.abs(ours.astype("float64") - models.astype("float64"))
            difference = float(np.maximum(difference, differences.max(initial=0.0)))  # keeps NaN
            largest = max(largest, float(np.abs(models).max(initial=0.0)))
    return Parity(samples=len(inputs[0]), difference=difference, largest=largest, tolerance=tolerance)


def write(model: nn.Layer, inputs: Sequence[Array], folder: Path) -> list[int | None]:
    """Writes model.json and model.pdiparams; returns the shape of the input, None for a dim of any size.

    The number of samples may be any, and so may every dim in which the batches differ.
    Raises ExportError, with Paddle's own message, for a model that cannot be written as a program.
    """
    first = inputs[0]
    sizes = [{batch.shape[dim] for batch in inputs} for dim in range(first.ndim)]
    shape = [None if dim == 0 or len(size) > 1 else first.shape[dim] for dim, size in enumerate(sizes)]
    # A copy of the shape: InputSpec changes the list that it is given.
    spec = paddle.static.InputSpec(list(shape), str(first.dtype), name=INPUT)
    try:
        with layer_by_layer(model):
            paddle.jit.save(model, str(folder / "model"), input_spec=[spec])
    except Exception as error:
        raise ExportError(
            f"this model cannot be written as a program: paddle.jit.save says {type(error).__name__}: {error}"
        ) from error
    return shape


def load(folder: Path) -> Call:
    """The program in a folder, loaded as plain Paddle loads it."""
    program = paddle.jit.load(str(folder / "model"))
    program.eval()
    return lambda inputs: outputs(program, inputs)
