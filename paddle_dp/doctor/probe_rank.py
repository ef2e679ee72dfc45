"""The measurements of `paddle-dp scale` and `plan --try` inside their ranks: products, kernels, collectives, and steps.

    paddle-dp launch --ranks N -m paddle_dp.doctor.probe_rank rates FILE REQUEST
    paddle-dp launch --ranks N -m paddle_dp.doctor.probe_rank steps FILE RECIPE [[RANKS, BATCH], …] KEY=VALUE…
    paddle-dp launch --ranks N -m paddle_dp.doctor.probe_rank trial FILE RECIPE

Rank 0 writes FILE, as JSON. REQUEST is JSON: {"device", "dtype", "shapes": [[m, n, k], …], "sizes": [bytes, …]}.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.doctor.prove_rank import machine, write
from paddle_dp.launch.silence import import_paddle
from paddle_dp.mesh.device import synchronize
from paddle_dp.plan.probe import CollectiveTiming, KernelTiming, ProductTiming

if TYPE_CHECKING:
    from paddle import Tensor

    from paddle_dp.mesh import Mesh

ROUNDS, STEP_ROUNDS, LEAST_ROUNDS = 5, 9, 3
ROUND = 0.04  # seconds of a round, at least; of a slow call, one call
LONGEST = 0.8  # seconds of a product or a kernel: larger ones are left out
SQUARES = {"cpu": (32, 64, 128, 256, 512, 1024), "other": (256, 512, 1024, 2048, 4096, 8192)}
ELEMENTS = {"cpu": 1 << 22, "other": 1 << 26}  # of the tensors of kernels: more than caches hold
WARM_STEPS, MOST_STEPS = 2, 50
STEPS_ROUND, STEPS_SECONDS = 0.5, 30.0  # seconds of a round of steps, and of all rounds
FIRST = 4  # steps of a trial that do not count
WINDOW, WINDOWS = 4, 3  # steps of a window, and how many of them
TRIAL_STEPS = FIRST + WINDOW * WINDOWS + 1  # the last window ends where another step begins
Call = Callable[[], Any]
Report = tuple[dict[str, Any], bool]
"""A task's report, as JSON, and whether this rank writes it."""


def main() -> None:
    import_paddle()
    task, file, *arguments = sys.argv[1:]
    report, is_main = TASKS[task](*arguments)
    if is_main:
        write(file, report)


def rates(request_text: str) -> Report:
    """Measures rank 0 alone, then all ranks at once, then their collectives. Returns the report, and whether this rank
    writes it. Collective."""
    from paddle_dp import gloo
    from paddle_dp.doctor.rank import library
    from paddle_dp.mesh import join

    request = json.loads(request_text)
    mesh = join(0, request["device"])
    gloo.install(mesh.device)
    timer = CallTimer(mesh)
    products: list[ProductTiming] = []
    kernels: list[KernelTiming] = []
    for busy in sorted({1, mesh.ranks}):
        if mesh.rank < busy:
            timer.together = busy == mesh.ranks
            products += product_timings(timer, request, busy)
            kernels += kernel_timings(timer, request, busy)
        mesh.wait(f"measured with {busy}")
    timer.together = True
    collectives = [*collective_timings(timer, request["sizes"])] if mesh.ranks > 1 else []
    report = {
        "ranks": mesh.ranks, "device": mesh.device, "threads": int(os.environ.get("OMP_NUM_THREADS", "0")),
        "library": library(mesh.device), "machine": machine() if mesh.is_main else {},
        "products": [asdict(each) for each in products], "kernels": [asdict(each) for each in kernels],
        "collectives": [asdict(each) for each in collectives],
    }  # fmt: skip
    mesh.wait("measured")
    return report, mesh.is_main


class CallTimer:
    """Times calls. `together`: all ranks do so at once, and the slowest rank's time counts."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.together = mesh, False

    def __call__(self, call: Call, longest: float = LONGEST) -> dict[str, float] | None:
        """Seconds of a call by name (`plan.probe.Timing`); None for one that takes longer than `longest`."""
        self._round(call, 1)  # allocates, and chooses kernels
        once = self._round(call, 1)
        if once > longest:
            return None
        count = max(1, min(1000, round(ROUND / max(once, 1e-6))))
        seconds = sorted(self._round(call, count) for _ in range(ROUNDS))
        return {"seconds": statistics.median(seconds), "low": seconds[0], "high": seconds[-1]}

    def _round(self, call: Call, count: int) -> float:
        if self.together:
            self.mesh.sum([0.0])
        synchronize(self.mesh.device)
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(self.mesh.device)
        seconds = (time.perf_counter() - began) / count
        return max(self.mesh.gather(seconds)) if self.together else seconds


def product_timings(timer: CallTimer, request: dict[str, Any], busy: int) -> Iterator[ProductTiming]:
    """Squares, and the request's shapes, each also as the two products of its backward."""
    import paddle

    squares = [(side, side, side) for side in _by_device(SQUARES, timer.mesh.device)]
    for shape in dict.fromkeys([*squares, *map(tuple, request["shapes"])]):
        for transpose in ("",) if shape in squares else ("", "x", "y"):
            m, n, k = shape
            m, n, k = {"": (m, n, k), "x": (k, n, m), "y": (m, k, n)}[transpose]
            x = paddle.ones([k, m] if transpose == "x" else [m, k]).astype(request["dtype"])
            y = paddle.ones([n, k] if transpose == "y" else [k, n]).astype(request["dtype"])

            def call(x: Tensor = x, y: Tensor = y, transpose: str = transpose) -> Any:
                return paddle.matmul(x, y, transpose_x=transpose == "x", transpose_y=transpose == "y")

            timing = timer(call)
            if timing is not None:
                yield ProductTiming(m=m, n=n, k=k, busy=busy, transpose=transpose, **timing)


def kernel_timings(timer: CallTimer, request: dict[str, Any], busy: int) -> Iterator[KernelTiming]:
    """The kinds of kernels between a block's products; "tiny" is an addition of two numbers."""
    import paddle
    from paddle.nn import functional

    width, elements = 1024, _by_device(ELEMENTS, timer.mesh.device)
    x, number = (paddle.ones(shape).astype(request["dtype"]) for shape in ([elements // width, width], [1]))
    calls: dict[str, tuple[Call, int]] = {
        "copy": (lambda: paddle.assign(x), 2), "add": (lambda: x + x, 3), "gelu": (lambda: functional.gelu(x), 2),
        "softmax": (lambda: functional.softmax(x), 2), "layer_norm": (lambda: functional.layer_norm(x, width), 2),
    }  # fmt: skip
    for operation, (call, passes) in calls.items():
        if timing := timer(call):
            size = passes * elements * x.element_size()
            yield KernelTiming(operation=operation, bytes=size, busy=busy, **timing)
    if timing := timer(lambda: number + number):
        yield KernelTiming(operation="tiny", bytes=3 * number.element_size(), busy=busy, **timing)


def collective_timings(timer: CallTimer, sizes: Sequence[int]) -> Iterator[CollectiveTiming]:
    """Each operation at each size; a message goes from rank 0 to rank 1 and back, and half of that counts."""
    import paddle
    import paddle.distributed as dist

    mesh = timer.mesh
    for size in sizes:
        elements = max(1, size // 4 // mesh.ranks)
        total, shard = paddle.ones([elements * mesh.ranks]), paddle.ones([elements])
        shards = list(paddle.split(total, mesh.ranks))
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, total), "all_gather": partial(gathered, shard),
            "reduce_scatter": partial(dist.reduce_scatter, shard, shards),
            "send": partial(there_and_back, mesh.rank, total),
        }  # fmt: skip
        for operation, call in calls.items():
            if timing := timer(call, inf):
                ways, size_sent = 2 if operation == "send" else 1, 4 * elements * mesh.ranks
                one_way = {name: seconds / ways for name, seconds in timing.items()}
                yield CollectiveTiming(operation=operation, ranks=mesh.ranks, bytes=size_sent, **one_way)


def gathered(tensor: Tensor) -> None:
    """Gathers the tensor of all ranks into a new list."""
    import paddle.distributed as dist

    dist.all_gather([], tensor)


def there_and_back(rank: int, tensor: Tensor) -> None:
    """Sends the tensor from rank 0 to rank 1, and back; other ranks do nothing."""
    import paddle.distributed as dist

    ways = {0: (dist.send, dist.recv), 1: (dist.recv, dist.send)}
    for way in ways.get(rank, ()):
        way(tensor, 1 - rank)


def _by_device(numbers: dict[str, Any], device: str) -> Any:
    return numbers["cpu" if device == "cpu" else "other"]


def steps(recipe_file: str, batches: str, *overrides: str) -> Report:
    """Trains the recipe in rounds of steps, without its callbacks: alone on rank 0, and on all ranks, by turns, so that
    other programs on the machine count for both. `batches`: JSON, [[ranks, batch], …] with 1 or all ranks. Returns the
    seconds of a step as `rates` does, for each of them. Collective."""
    from paddle_dp.mesh import Mesh, join
    from paddle_dp.recipe import read_recipe

    requested = [tuple(each) for each in json.loads(batches)]
    train = read_recipe(Path(recipe_file), overrides).train
    mesh = join(train.seed, train.device)
    alone = replace(Mesh.alone(), device=mesh.device)
    runs = [
        StepRounds(recipe_file, (*overrides, f"train.batch={batch}"), mesh, alone if ranks == 1 else mesh)
        for ranks, batch in requested
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    began = time.perf_counter()
    for number in range(STEP_ROUNDS):
        for run, rounds in zip(runs, seconds, strict=True):
            rounds.append(run.seconds(run.count))
        spent = mesh.sum([time.perf_counter() - began])[0] / mesh.ranks
        if number + 1 >= LEAST_ROUNDS and spent > STEPS_SECONDS:
            break
    mesh.wait("measured")
    pairs = zip(requested, seconds, strict=True)
    rows = [{"ranks": ranks, "batch": batch, "rounds": rounds} for (ranks, batch), rounds in pairs]
    return {"steps": rows}, mesh.is_main


class StepRounds:
    """Rounds of steps of one training: on all ranks of the job, or, with a mesh of one rank, on rank 0 while the others
    wait. `count`: the steps of a round."""

    def __init__(self, recipe_file: str, overrides: Sequence[str], job: Mesh, mesh: Mesh):
        import paddle

        from paddle_dp.assembly.build import build
        from paddle_dp.recipe import read_recipe

        self._job, self._mesh = job, mesh
        self._works = mesh.ranks == job.ranks or job.is_main
        if self._works:
            with paddle.utils.unique_name.guard():
                self._trainer = build(read_recipe(Path(recipe_file), overrides), mesh)
        self.seconds(WARM_STEPS)
        self.count = max(1, min(MOST_STEPS, round(STEPS_ROUND / self.seconds(1))))

    def seconds(self, count: int) -> float:
        """Seconds of a step in a round of `count`, on the slowest rank. Collective."""
        seconds = 0.0
        if self._mesh.ranks == self._job.ranks:
            self._job.sum([0.0])
        if self._works:
            self._trainer.total_steps = self._trainer.progress.step + count
            began = time.perf_counter()
            self._trainer.drive()
            synchronize(self._job.device)
            seconds = (time.perf_counter() - began) / count
        self._job.wait("a round of steps")  # without computing
        return float(max(self._job.gather(seconds)))


def trial(recipe_file: str) -> Report:
    """Trains the recipe, with its callbacks, for TRIAL_STEPS. Returns the mean seconds of a step by window."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(Path(recipe_file))
    mesh = join(recipe.train.seed, recipe.train.device)
    if mesh.is_main:
        recipe.folder.mkdir(parents=True)
    mesh.wait("the run folder is made")
    trainer = build(recipe, mesh)
    # A measurement of the training's own waits for the device after each phase, so that nothing overlaps.
    trainer.measurements.plan = lambda *_: None  # type: ignore[method-assign]
    train_batch, number, times = trainer.learner.train_batch, 0, list[float]()

    def timed(*args: Any, **settings: Any) -> Any:
        nonlocal number
        if number >= FIRST and (number - FIRST) % WINDOW == 0:
            synchronize(mesh.device)
            times.append(time.perf_counter())
        number += 1
        return train_batch(*args, **settings)

    trainer.learner.train_batch = timed  # type: ignore[method-assign]
    trainer.fit(recipe.train.length)
    return {"seconds": [(after - before) / WINDOW for before, after in pairwise(times)]}, mesh.is_main


TASKS: dict[str, Callable[..., Report]] = {"rates": rates, "steps": steps, "trial": trial}

if __name__ == "__main__":
    main()
