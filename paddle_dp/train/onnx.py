"""ONNX from an exported program, by paddle2onnx, and onnxruntime's outputs of it. Tried with 2.1.0 and 1.31.1."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.errors import ExportError

OPSET = 17  # the first with LayerNormalization as one operator; onnxruntime reads it since 1.12
FILE = "model.onnx"


def write(folder: Path) -> None:
    """Writes model.onnx beside model.json. Raises ExportError with paddle2onnx's last words.

    In a process of its own: paddle2onnx is C++ that aborts on an operator it does not know.
    """
    words = ["-m", "paddle2onnx.command", "--model_dir", str(folder), "--opset_version", str(OPSET)]
    words += ["--model_filename", "model.json", "--params_filename", "model.pdiparams"]
    done = subprocess.run(
        [sys.executable, *words, "--save_file", str(folder / FILE)], capture_output=True, text=True
    )
    if done.returncode or not (folder / FILE).exists():
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ExportError(f"paddle2onnx could not write this model (status {done.returncode}):\n{said}")


def load(folder: Path) -> Callable[[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """The outputs of model.onnx, computed by onnxruntime on the CPU."""
    import onnxruntime

    try:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4  # only what is fatal; what fails is raised
        session = onnxruntime.InferenceSession(
            str(folder / FILE), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's errors have no common base
        raise ExportError(f"onnxruntime cannot read {FILE}: {error}") from error
    name = session.get_inputs()[0].name

    def run(inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        try:
            return list(session.run(None, {name: inputs}))
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run {FILE}: {error}") from error

    return run
