"""slow.yaml, and what it must come to: the weights and losses of a training that nothing happens to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from paddle_dp import checkpoint
from tests.eventually import eventually
from tests.faults.namespaces import ROOT

RECIPE = "tests/faults/slow.yaml"


def right_weights(
    place: Path, ranks: int = 1, recipe: str = RECIPE, *overrides: str
) -> dict[str, np.ndarray]:
    """Trains on one machine, in `place`/run, and returns the weights."""
    words = [recipe, *overrides, "--ranks", str(ranks), f"output_dir={place / 'run'}"]
    command = [sys.executable, "-m", "paddle_dp", "train", *words]
    variables = {**os.environ, "SLOW": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return weights(place / "run", place / "weights.safetensors")


def weights(out: Path, place: Path) -> dict[str, np.ndarray]:
    checkpoint.merge(checkpoint.find("newest", out / "checkpoints"), place)
    return load_file(place)


def are_right(out: Path, right: dict[str, np.ndarray]) -> float:
    """The largest difference from the right weights."""
    found = weights(out, out.parent / "found.safetensors")
    assert found.keys() == right.keys()
    return max(float(np.abs(found[name] - right[name]).max()) for name in right)


def losses(out: Path) -> dict[int, float]:
    """The loss of every step, as it was written last."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("event") == "step"}


def newest(out: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    saved = checkpoint.checkpoints(out / "checkpoints")
    return checkpoint.step_of(saved[-1]) if saved else 0


def at_step(out: Path, step: int, seconds: float = 90) -> int:
    """Waits for a checkpoint of that step or a later one; returns its step."""
    eventually(lambda: newest(out) >= step, seconds, pause=0.1)
    return newest(out)
