"""A model as a program that Paddle runs without its Python code, and the proof that the program is the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.errors import ExportError

Array = np.ndarray[Any, Any]
Call = Callable[[Array], list[Array]]
INPUT = "inputs"  # what the program calls its input


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far a program's outputs are from the model's, over so many samples, in batches of several shapes.

    `largest` is the largest number among the model's outputs: a difference of `tolerance` times that is allowed.
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
    """What a model, or a loaded program, gives for a batch of inputs: each tensor of its answer."""
    with paddle.no_grad():
        answer = model(paddle.to_tensor(inputs))
    return [np.asarray(t.numpy()) for t in paddle.utils.flatten(answer) if isinstance(t, paddle.Tensor)]


def insist_on_numbers(answers: Sequence[list[Array]]) -> None:
    """Raises ExportError when the model's own outputs are not finite: nothing can be shown to equal them."""
    for answer in answers:
        for array in answer:
            if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
                sample = int(np.argwhere(~finite)[0][0]) if array.ndim else 0
                raise ExportError(
                    f"the model's outputs are not finite (held-out sample {sample} is the first), so nothing was "
                    "written: export another checkpoint, or look at the data."
                )


def batches(samples: Array, call: Call) -> list[Array]:
    """Real samples as one batch, one sample alone, and, where the model takes it, texts of half the length."""
    found = [samples, samples[:1]]
    is_text = samples.ndim == 2 and samples.dtype.kind in "iu" and samples.shape[1] > 1
    half = samples[:, : samples.shape[1] // 2] if is_text else None
    if half is not None and _takes(call, half):
        found.append(half)
    return found


def _takes(call: Call, inputs: Array) -> bool:
    try:
        call(inputs)
    except Exception:  # noqa: BLE001 - a model says no in any way it likes
        return False
    return True


def compare(
    program: Call, inputs: Sequence[Array], wanted: Sequence[list[Array]], tolerance: float
) -> Parity:
    """Runs the program on every batch and holds its outputs against those that the model gave."""
    difference = largest = 0.0
    for batch, expected in zip(inputs, wanted, strict=True):
        given = program(batch)
        shapes = [[array.shape for array in answer] for answer in (given, expected)]
        if shapes[0] != shapes[1]:
            raise ExportError(f"the program gives outputs of {shapes[0]}, the model of {shapes[1]}.")
        for ours, theirs in zip(given, expected, strict=True):
            apart = np.abs(ours.astype("float64") - theirs.astype("float64"))
            difference = float(np.maximum(difference, apart.max(initial=0.0)))  # a NaN stays
            largest = max(largest, float(np.abs(theirs).max(initial=0.0)))
    return Parity(samples=len(inputs[0]), difference=difference, largest=largest, tolerance=tolerance)


def write(model: nn.Layer, inputs: Sequence[Array], folder: Path) -> list[int | None]:
    """Writes model.json and model.pdiparams, and returns the shape of its input; None where any size will do.

    Every dim in which the batches differ is free; the number of samples always is.
    Raises ExportError, with Paddle's own words, for a model that cannot be written as a program.
    """
    first = inputs[0]
    sizes = [{batch.shape[dim] for batch in inputs} for dim in range(first.ndim)]
    shape = [None if dim == 0 or len(size) > 1 else first.shape[dim] for dim, size in enumerate(sizes)]
    spec = paddle.static.InputSpec(
        list(shape), str(first.dtype), name=INPUT
    )  # it changes the list it is given
    try:
        paddle.jit.save(model, str(folder / "model"), input_spec=[spec])
    except Exception as error:
        raise ExportError(
            f"this model cannot be written as a program: paddle.jit.save says {type(error).__name__}: {error}"
        ) from error
    return shape


def load(folder: Path) -> Call:
    """The program in a folder, as Paddle alone loads it."""
    program = paddle.jit.load(str(folder / "model"))
    program.eval()
    return lambda inputs: outputs(program, inputs)


def place(partial: Path, folder: Path, sign: str) -> None:
    """Puts a finished folder where it belongs, in the place of an older one that has the file `sign` in it."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if (folder / sign).exists():
        folder.replace(old)
    partial.replace(folder)  # an empty folder gives way
    shutil.rmtree(old, ignore_errors=True)
