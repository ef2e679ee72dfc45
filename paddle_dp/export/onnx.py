"""Writes ONNX with paddle2onnx (tried: 2.1.0) and runs it with onnxruntime (tried: 1.31.1)."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_dp.batch import leaves
from paddle_dp.errors import ExportError
from paddle_dp.export import program

OPSET = 17  # the first with LayerNormalization as one operator; onnxruntime reads it since 1.12
FILE = "model.onnx"


def write(model: nn.Layer, inputs: Sequence[program.Inputs], folder: Path) -> None:
    """Writes model.onnx into a folder. Raises ExportError with the last lines that paddle2onnx printed.

    paddle2onnx runs in its own process: it aborts on an operator it does not know.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        with gelu_decomposed():
            program.write(model, inputs, Path(name))
        command = [
            sys.executable, "-m", "paddle2onnx.command",
            "--model_dir", name, "--model_filename", "model.json", "--params_filename", "model.pdiparams",
            "--save_file", str(folder / FILE), "--opset_version", str(OPSET),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode or not (folder / FILE).exists():
        output = "\n".join((result.stdout + result.stderr).strip().splitlines()[-5:])
        raise ExportError(f"paddle2onnx could not write this model (status {result.returncode}):\n{output}")


@contextmanager
def gelu_decomposed() -> Iterator[None]:
    """Traces the approximate GELU as elementary operations, within the context.

    paddle2onnx 2.1.0 silently writes the exact GELU for both: a trained GPT's outputs were off by 3e-4.
    """
    original = F.gelu

    def gelu(x: paddle.Tensor, approximate: bool = False, name: str | None = None) -> paddle.Tensor:
        if not approximate:
            return original(x, False, name)
        return 0.5 * x * (1 + paddle.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    F.gelu = gelu
    try:
        yield
    finally:
        F.gelu = original


def load(folder: Path) -> program.Call:
    """Returns a function from inputs to the outputs of model.onnx, computed by onnxruntime on the CPU."""
    import onnxruntime

    try:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4  # fatal errors only; others are raised
        session = onnxruntime.InferenceSession(
            str(folder / FILE), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's errors have no common base
        raise ExportError(f"onnxruntime cannot read {FILE}: {error}") from error
    read = {each.name for each in session.get_inputs()}  # inputs that the model does not use are missing

    def run(inputs: program.Inputs) -> list[program.Array]:
        named_arrays = zip(program.names(inputs), leaves(inputs), strict=True)
        try:
            return list(session.run(None, {name: array for name, array in named_arrays if name in read}))
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run {FILE}: {error}") from error

    return run
