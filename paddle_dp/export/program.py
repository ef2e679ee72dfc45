"""Writes a model as a program that Paddle runs without its Python code, and compares the program with the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import Structure, arguments, call, leaves, mapped, named_leaves, structure_of, unflatten
from paddle_dp.errors import ExportError
from paddle_dp.model.compiled import layer_by_layer, plain_forward

Array = np.ndarray[Any, Any]
Inputs = Any
"""The data set's inputs for n samples: an array [n, …], or a structure of them."""
Call = Callable[[Inputs], list[Array]]
INPUT = "inputs"  # the name of a program's input without a name


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The largest difference between a program's and the model's outputs, over `samples` samples in several batch
    shapes.

    `largest` is the model's largest absolute output; a difference of `tolerance` × `largest` is allowed.
    """

    samples: int
    difference: float
    largest: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance * self.largest  # False for NaN, too

    def __str__(self) -> str:
        allowed = self.tolerance * self.largest
        return (
            f"largest difference {self.difference:.1e} over {self.samples} real samples "
            f"(allowed: {allowed:.1e}, which is {self.tolerance:g} of the largest output, {self.largest:.3g})"
        )


def outputs(model: nn.Layer, inputs: Inputs) -> list[Array]:
    """Returns the output tensors of a model for a batch of inputs."""
    with paddle.no_grad():
        return _arrays(call(model, mapped(paddle.to_tensor, inputs), plain_forward(model)))


def names(inputs: Inputs) -> list[str]:
    """Returns a program's names of its inputs: "ids", "text_ids", "inputs_0"; "inputs" for a single array."""
    input_names = []
    for name, _ in named_leaves(inputs):
        path = name.replace("[", "_").replace("]", "").replace(".", "_")
        input_names.append(f"{INPUT}{path}" if path.startswith("_") else path or INPUT)
    return input_names


def _arrays(returned: Any) -> list[Array]:
    return [np.asarray(t.numpy()) for t in paddle.utils.flatten(returned) if isinstance(t, paddle.Tensor)]


def check_finite(outputs_of_batches: Sequence[list[Array]]) -> None:
    """Raises ExportError when the model's outputs are NaN, or a tensor of them has no finite number: they could not be
    compared. Single infinities may be a mask's."""
    for arrays in outputs_of_batches:
        for array in arrays:
            if array.dtype.kind != "f":
                continue
            bad = np.isnan(array) if np.isfinite(array).any() else ~np.isfinite(array)
            if bad.any():
                sample = int(np.argwhere(bad)[0][0]) if array.ndim else 0
                raise ExportError(
                    f"the model's outputs are not finite (held-out sample {sample} is the first), so nothing was "
                    "written: export another checkpoint, or look at the data."
                )


def batches(samples: Inputs, run: Call) -> list[Inputs]:
    """Returns the samples as one batch, the first sample alone, and, if the model accepts it, the batch at half length.

    Half length cuts each array [n, length] of the texts' length.
    """
    shapes = [samples, mapped(lambda array: array[:1], samples)]
    lengths = {a.shape[1] for a in leaves(samples) if a.ndim == 2 and a.dtype.kind in "iu" and a.shape[1] > 1}
    if len(lengths) == 1:
        (length,) = lengths
        half = mapped(lambda a: a[:, : length // 2] if a.ndim == 2 and a.shape[1] == length else a, samples)
        if _accepts(run, half):
            shapes.append(half)
    return shapes


def _accepts(run: Call, inputs: Inputs) -> bool:
    try:
        run(inputs)
    except Exception:  # noqa: BLE001 - a model may refuse by any error
        return False
    return True


def compare(
    program: Call, inputs: Sequence[Inputs], expected: Sequence[list[Array]], tolerance: float
) -> Parity:
    """Runs the program on every batch and compares its outputs with `expected`, the model's. Infinities are equal or
    infinitely apart.

    Raises ExportError if the shapes differ.
    """
    difference = largest = 0.0
    for batch, model_outputs in zip(inputs, expected, strict=True):
        program_outputs = program(batch)
        shapes = [[array.shape for array in arrays] for arrays in (program_outputs, model_outputs)]
        if shapes[0] != shapes[1]:
            raise ExportError(f"the program gives outputs of {shapes[0]}, the model of {shapes[1]}.")
        for ours, models in zip(program_outputs, model_outputs, strict=True):
            apart = (ours != models) | np.isnan(models)
            differences = np.abs(ours.astype("float64")[apart] - models.astype("float64")[apart])
            difference = float(np.maximum(difference, differences.max(initial=0.0)))  # keeps NaN
            largest = max(largest, float(np.abs(models[np.isfinite(models)]).max(initial=0.0)))
    return Parity(
        samples=len(leaves(inputs[0])[0]), difference=difference, largest=largest, tolerance=tolerance
    )


@dataclass(frozen=True, kw_only=True)
class ProgramInput:
    """One input of a program; a dim that is None may be of any size."""

    name: str
    dtype: str
    shape: list[int | None]

    def __str__(self) -> str:
        dims = ", ".join("any" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype} [{dims}]"


class MultiInputModel(nn.Layer):
    """A model of several inputs, given as one list; the program has one input for each entry."""

    def __init__(self, model: nn.Layer, structure: Structure):
        super().__init__()
        self.model, self.structure = model, structure

    def forward(self, tensors: list[paddle.Tensor]) -> Any:
        positional, named = self._arguments(tensors)
        return self.model(*positional, **named)

    @paddle.jit.not_to_static
    def _arguments(self, tensors: list[paddle.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(plain_forward(self.model), unflatten(self.structure, tensors))


def write(model: nn.Layer, inputs: Sequence[Inputs], folder: Path) -> list[ProgramInput]:
    """Writes model.json and model.pdiparams; returns the program's inputs, in their order.

    The number of samples may be any, and so may every dim in which the batches differ.
    Raises ExportError, with Paddle's message, for a model that cannot be written as a program, and OSError for a full
    disk.
    """
    program_inputs = [
        ProgramInput(name=name, dtype=str(arrays[0].dtype), shape=_shape(arrays))
        for name, arrays in zip(names(inputs[0]), zip(*map(leaves, inputs), strict=True), strict=True)
    ]
    # The shape is copied, as InputSpec changes the given list.
    specs = [
        paddle.static.InputSpec([*entry.shape], entry.dtype, name=entry.name) for entry in program_inputs
    ]
    is_single = isinstance(inputs[0], np.ndarray)
    saved = model if is_single else MultiInputModel(model, structure_of(inputs[0]))
    saved.eval()
    try:
        with layer_by_layer(model):
            paddle.jit.save(saved, str(folder / "model"), input_spec=specs if is_single else [specs])
    except Exception as error:
        if "is not involved in the target_vars" in str(error):
            raise ExportError(
                f"one of the inputs {', '.join(entry.name for entry in program_inputs)} does not matter to the "
                "model's outputs, and Paddle writes no program with such an input: remove it from forward and from the "
                "data set."
            ) from error
        raise ExportError(
            f"this model cannot be written as a program: paddle.jit.save raised {type(error).__name__}: {error}"
        ) from error
    for file in folder.glob("model.*"):
        _refuse_cut(file)
    return program_inputs


def _refuse_cut(file: Path) -> None:
    """Raises OSError if a file cannot grow: Paddle (3.3.1) does not look whether its writes fail, and reads numbers
    that nobody wrote for those that a full disk has cut off."""
    with file.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.write(bytes(1 << 16))  # more than what is left of a full disk's last block
        opened.flush()
        os.fsync(opened.fileno())
        opened.truncate(size)


def _shape(batches: Sequence[Array]) -> list[int | None]:
    sizes = [{batch.shape[dim] for batch in batches} for dim in range(batches[0].ndim)]
    return [None if dim == 0 or len(size) > 1 else size.pop() for dim, size in enumerate(sizes)]


def load(folder: Path) -> Call:
    """Loads the program in a folder with paddle.jit.load, as a function from inputs to outputs."""
    program = paddle.jit.load(str(folder / "model"))
    program.eval()

    def run(inputs: Inputs) -> list[Array]:
        with paddle.no_grad():
            return _arrays(program(*map(paddle.to_tensor, leaves(inputs))))

    return run
