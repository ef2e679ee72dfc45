"""Measures what a rank computes in a step: forward, backward, and the rest, without any exchange.

    python tools/benchmark/compute.py tools/benchmark/mlp_25mb.yaml train.batch=128

Prints {"forward", "backward", "update"}: seconds in the quickest quarter of the steps, of one process that trains the
recipe alone, in one thread, as `paddle-dp train` does. wire.py and overlap.py run it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.command import MALLOC
from paddle_dp.launch.machine import mkl_type
from paddle_dp.plan.bound import Compute

MKL = "MKL_DEBUG_CPU_TYPE"
FIRST = 3  # steps that do not count


def mkl() -> dict[str, str]:
    """The variable that tells MKL what the processor can do, where it needs one."""
    kind = mkl_type()
    return {MKL: kind} if kind else {}


def variables() -> dict[str, str]:
    """The environment in which a rank on a CPU computes, with one thread; before its process starts."""
    return {**MALLOC, **mkl(), "OMP_NUM_THREADS": "1"}


def without_variables() -> dict[str, str]:
    """This process's environment for Paddle as it comes, with one thread: malloc and MKL are told nothing."""
    kept = {name: value for name, value in os.environ.items() if name not in (*MALLOC, MKL)}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}


def one_thread() -> dict[str, str]:
    """The variables of a process that computes in one thread, as a rank; what is set stays. Before Paddle's import."""
    return {name: os.environ.get(name, value) for name, value in ({"OMP_NUM_THREADS": "1"} | mkl()).items()}


def start_with(wanted: dict[str, str], *options: str) -> None:
    """Starts this script anew, with Python's `options`, unless it has these variables: malloc and MKL read them when
    they are loaded."""
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *options, *sys.argv], {**os.environ, **wanted})


def command(recipe: Path, words: Iterable[str]) -> list[str]:
    return [sys.executable, __file__, str(recipe), *words]


def printed(recipe: Path, words: Iterable[str], extra: dict[str, str]) -> str:
    """What a process of this script prints that has these `extra` variables."""
    environment = {**os.environ, **extra}
    return subprocess.run(
        command(recipe, words), env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout


def mean_compute(texts: Sequence[str]) -> Compute:
    """Of what several processes printed."""
    reports = [json.loads(text.splitlines()[-1]) for text in texts]
    return Compute(**{name: statistics.mean(each[name] for each in reports) for name in reports[0]})


def measured(file: Path, words: list[str], steps: int) -> dict[str, float]:
    """Seconds by phase, in this process."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.mesh.heartbeat import heartbeat
    from paddle_dp.recipe import read_recipe
    from tools.benchmark import slow_device

    slow_device.install()
    with tempfile.TemporaryDirectory() as folder:
        own = ["strategy={use: single}", f"train.length={steps} steps", f"output_dir={folder}/run"]
        recipe = read_recipe(file, [*words, *own, "callbacks=[]"])
        recipe.folder.mkdir()
        trainer = build(recipe, join(recipe.train.seed, recipe.train.device))
        learn, rows = trainer.learner.train_batch, [(time.perf_counter(), heartbeat.spent())]

        def timed(*args: Any, **more: Any) -> Any:
            rows.append((time.perf_counter(), heartbeat.spent()))
            return learn(*args, **more)

        trainer.learner.train_batch = timed  # type: ignore[method-assign]
        trainer.fit(recipe.train.length)
    rows = rows[1 + FIRST :]
    steps_taken = list(itertools.pairwise(rows))
    phases = {
        name: quick(after[name] - before[name] for (_, before), (_, after) in steps_taken)
        for name in ("forward", "backward")
    }
    whole = quick(after - before for (before, _), (after, _) in steps_taken)
    return {**phases, "update": whole - sum(phases.values())}


def quick(times: Iterable[float]) -> float:
    """What the quickest quarter takes: whatever else the machine does slows down the others."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


if __name__ == "__main__":
    start_with(variables())
    print(json.dumps(measured(Path(sys.argv[1]), sys.argv[2:], steps=14)))
