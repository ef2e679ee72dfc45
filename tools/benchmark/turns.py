"""Ways that take turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tools.benchmark.run_job import run_job

Way = TypeVar("Way")
Seconds = dict[str, list[float]]


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a turn, which other programs hardly change."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def in_turns(
    ways: Mapping[Way, Callable[[], object]],
    turns: int,
    calls: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Way, list[float]]:
    """Seconds of a call of each way, the mean of so many `calls`, in every turn; a turn before them does not count."""
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, call in ways.items():
            began = clock()
            for _ in range(calls):
                call()
            if turn:
                seconds[way].append((clock() - began) / calls)
    return seconds


def train_in_turns(trainers: Mapping[str, Any], mesh: Any, steps: int, turns: int, folder: str) -> None:
    """In every rank: makes so many `steps` with each trainer in every turn, and one turn before them that does not
    count. All ranks begin and end a turn together; one whose trainer is None waits. Rank 0 writes seconds a step."""
    streams = {name: batches(trainer.loader) for name, trainer in trainers.items() if trainer is not None}
    seconds: Seconds = {name: [] for name in trainers}
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            mesh.sum([0.0])
            began = time.perf_counter()
            for _ in range(steps):
                if trainer is not None:
                    trainer.learner.train_batch(next(streams[name]))
            mesh.sum([0.0])
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
    if mesh.is_main:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))


def batches(loader: Any) -> Iterator[Any]:
    """The batches of epoch after epoch, without end."""
    for epoch in itertools.count():
        yield from loader.read(epoch)


def measure(recipe: Any, options: dict[str, Any]) -> None:
    """The entry point of `seconds_of_job`, in every rank: builds a trainer for each of `trainers`, and trains in turns.
    One of the strategy `single` is rank 0's alone."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import Mesh, join
    from paddle_dp.recipe import read_recipe

    mesh, folder = join(seed=0), options["folder"]
    trainers: dict[str, Any] = dict.fromkeys(options["trainers"])
    for name, words in options["trainers"].items():
        alone = "strategy={use: single}" in words
        if mesh.is_main or not alone:
            overrides = [*words, f"output_dir={folder}/{name}", "callbacks=[]"]
            settings = read_recipe(Path(options["recipe"]), overrides)
            trainers[name] = build(settings, Mesh.alone() if alone else mesh)
    train_in_turns(trainers, mesh, options["steps"], options["turns"], folder)
    for trainer in filter(None, trainers.values()):
        trainer.loader.close()


def seconds_of_job(
    recipe: Path, ranks: int, trainers: Mapping[str, Sequence[str]], steps: int, turns: int
) -> Seconds:
    """Seconds a step of each trainer, which are overrides of the recipe by name: all live in the same ranks, and make
    so many `steps` in each of the `turns`."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        words = {"folder": folder, "recipe": str(recipe), "steps": steps, "turns": turns}
        run_job("tools.benchmark.turns:measure", recipe, ranks, folder, extra={**words, "trainers": trainers})
        seconds: Seconds = json.loads(Path(folder, "seconds.json").read_text())
        return seconds
