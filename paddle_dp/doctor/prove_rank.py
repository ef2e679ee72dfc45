"""The measurements of `paddle-dp doctor --prove` inside its processes: the machine, sums between ranks, a step's time.

    python -m paddle_dp.doctor.prove_rank machine FILE
    paddle-dp launch --ranks N -m paddle_dp.doctor.prove_rank exchange FILE
    python -m paddle_dp.doctor.prove_rank speed FILE RECIPE KEY=VALUE…

Each writes FILE, as JSON. A recipe names `KillRank` as a callback.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.doctor.machine import driver
from paddle_dp.doctor.rank import exchange
from paddle_dp.launch.machine import cores
from paddle_dp.launch.silence import import_paddle
from paddle_dp.mesh.device import synchronize
from paddle_dp.mesh.environment import Environment
from paddle_dp.train import Callback, Moment
from paddle_dp.units import Every
from paddle_dp.version import __version__

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

MEGABYTES = (1, 16, 64)  # of the tensors that are summed
# Rounds of the step's time, steps of each round, and steps before the first one.
ROUNDS, STEPS, WARMUP = 15, 20, 20


def main() -> None:
    import_paddle()
    task, file, *arguments = sys.argv[1:]
    if task == "exchange":
        report = exchange("auto", megabytes=MEGABYTES)
        if Environment.read().rank == 0:
            write(file, report)
    else:
        write(file, machine() if task == "machine" else speed(*arguments))


def write(file: str, report: dict[str, Any]) -> None:
    Path(file).write_text(json.dumps(report), "utf-8")


class KillRank(Callback):
    """Ends the last rank by SIGKILL after update `step`, as the kernel does when memory runs out."""

    reads = weights = False

    def __init__(self, run: Any, step: int):
        self.every = Every.parse("1 step")
        self._mesh, self._step = run.mesh, step

    def step(self, moment: Moment) -> None:
        if moment.progress.step == self._step and self._mesh.rank == self._mesh.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def machine() -> dict[str, Any]:
    """Returns the cards, versions, processors and memory; nothing that names the machine or its user."""
    return {
        "cards": cards(), "versions": versions(), "commit": commit(Path(__file__).resolve().parents[2]),
        "processors": cores(), "processor": processor(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }  # fmt: skip


def processor() -> str:
    """Returns the name of the processors."""
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return model[1] if model else platform.machine()


def cards() -> list[dict[str, Any]]:
    """Returns the model's name and the bytes of each visible GPU, or only the kind of each other device."""
    import paddle

    device = paddle.device.get_device().partition(":")[0]
    if device == "gpu":
        cuda = paddle.device.cuda
        properties = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
        return [{"model": each.name, "memory": int(each.total_memory)} for each in properties]
    if device == "xpu":
        return [{"model": "xpu"}] * paddle.device.xpu.device_count()
    names = paddle.device.get_available_custom_device()
    return [{"model": device} for name in names if name.partition(":")[0] == device]


def versions() -> dict[str, str]:
    """Returns the versions of Paddle, its libraries, the driver, Python, Linux and this package, where known."""
    import numpy
    import paddle

    known = {
        "paddle": paddle.version.full_version, "paddle commit": paddle.version.commit, "cuda": paddle.version.cuda(),
        "cudnn": paddle.version.cudnn(), "nccl": paddle.version.nccl(), "driver": driver(Path("/")),
        "python": platform.python_version(), "numpy": numpy.__version__, "paddle_dp": __version__,
        "linux": (re.match(r"\d+\.\d+", platform.release()) or [""])[0],
    }  # fmt: skip
    texts = {name: str(version) for name, version in known.items() if str(version) not in ("", "False", "0")}
    harmless = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,47}")
    return {name: (harmless.match(text) or ["unknown"])[0] for name, text in texts.items()}


def commit(folder: Path) -> str | None:
    """Returns the commit of the checkout in `folder`, with `-dirty` for changed files; None if it is no checkout."""
    if not (folder / ".git").exists():
        return None
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if re.fullmatch(r"[0-9a-f]{40}(-dirty)?\n", done.stdout) else None


def speed(recipe_name: str, *overrides: str) -> dict[str, Any]:
    """Returns the seconds of a step: the trainer's and a bare loop's, in pairs that alternate.

    Both have the recipe's model, optimizer, schedule and samples, and read them through the same loader.
    """
    from paddle_dp.recipe import read_recipe, shipped

    recipe = read_recipe(shipped.at_hand(Path(recipe_name)), overrides)
    loops = {"trainer": _trainer(recipe), "bare": _bare(recipe)}
    for run in loops.values():
        run(WARMUP)
    rounds = [_round(loops, number) for number in range(ROUNDS)]
    ratios = sorted(seconds["trainer"] / seconds["bare"] for seconds in rounds)
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in loops}
    ratio = {"min": ratios[0], "median": statistics.median(ratios), "max": ratios[-1]}
    return {"seconds_per_step": medians, "ratio": ratio, "rounds": ROUNDS, "steps": STEPS}


def _round(loops: dict[str, Callable[[int], None]], number: int) -> dict[str, float]:
    """Returns the seconds of a step of each loop; each round begins with the other loop."""
    seconds = {}
    for name in loops if number % 2 else reversed(loops):
        began = time.perf_counter()
        loops[name](STEPS)
        seconds[name] = (time.perf_counter() - began) / STEPS
    return seconds


def _trainer(recipe: Recipe) -> Callable[[int], None]:
    """Returns a function that trains the recipe for some more steps, as `paddle-dp train` does, without callbacks."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join

    trainer = build(recipe, join(recipe.train.seed))

    def run(steps: int) -> None:
        trainer.total_steps = trainer.progress.step + steps
        trainer.drive()
        synchronize(trainer.mesh.device)

    return run


def _bare(recipe: Recipe) -> Callable[[int], None]:
    """Returns a function that runs some more steps of the usual hand-written loop."""
    import paddle

    from paddle_dp.data import Loader

    model = recipe.model.build()
    steps_per_epoch = recipe.dataset.config.samples // recipe.train.batch
    schedule = recipe.schedule.build(steps=10**6, steps_per_epoch=steps_per_epoch, batch=recipe.train.batch)
    optimizer = recipe.optimizer.build(schedule, list(model.named_parameters()))
    loss_function = paddle.nn.CrossEntropyLoss()
    loader = Loader.plain(recipe.dataset.build("train"), recipe.train.batch)

    batches = chain.from_iterable(map(loader.read, count()))

    def run(steps: int) -> None:
        for batch in islice(batches, steps):
            samples = batch.micro_batches[0]
            loss_function(model(samples.inputs), samples.targets).backward()
            optimizer.step()
            optimizer.clear_grad()
            schedule.step()
        synchronize(paddle.device.get_device())

    return run


if __name__ == "__main__":
    main()
