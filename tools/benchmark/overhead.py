"""Measures the trainer's overhead over a hand-written Paddle loop: same model, data, optimizer, schedule and steps.

    python tools/benchmark/overhead.py                     # digits MLP: the absolute cost per step
    python tools/benchmark/overhead.py --width 1400        # a step of about 20 ms: the ratio

The hand-written loop runs with three inputs: paddle.io.DataLoader, as in most scripts; the trainer's own loader, so
that the difference is the loop alone; and slices of a shuffled NumPy array, the cheapest input. The trainer reads
through its loader, with all default callbacks (console, metrics, dashboard, evaluate, checkpoint), and "unwatched"
without any. For comparison,
paddle.Model.fit runs over DataLoader, with accuracy, and a line every 10 steps as the trainer's. All run in turns,
round after round. It prints the medians of the differences and ratios within a round, and those of the quickest rounds
of each loop: other programs hardly change either. Times are the process's own CPU time, of all its threads (DataLoader
has one more), with the wall's beside it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.compute import one_thread

os.environ.update(one_thread())

import numpy as np
import paddle
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.recipe import Recipe, read_recipe
from tools.benchmark.turns import ratio
from tools.command_line import parser_of

RECIPE = """
model: {{use: mlp, inputs: {inputs}, hidden: [{width}, {width}], classes: 10}}
dataset: {{use: random_images, shape: [{inputs}], classes: 10, samples: {samples}}}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum}}
schedule: {{use: constant, learning_rate: 1.0e-3}}
train: {{length: 1 steps, batch: {batch}}}
callbacks:
  - {{use: console}}
  - {{use: metrics}}
  - {{use: dashboard}}
  - {{use: evaluate, every: 1000000 steps}}
  - {{use: checkpoint, every: 1000000 steps}}
"""


class Arrays(paddle.io.Dataset):
    """The samples in memory, so that reading costs the same for all loops."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[i], self.targets[i]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[indices], self.targets[indices]


def slices(data: Arrays, batch: int) -> Iterator[tuple[Any, Any]]:
    """Batches by slicing a new order every epoch, without end."""
    while True:
        order = np.random.permutation(len(data))
        for start in range(0, len(data) - batch + 1, batch):
            inputs, targets = data.take(order[start : start + batch])
            yield paddle.to_tensor(inputs), paddle.to_tensor(targets)


def shared(data: Arrays, batch: int) -> Iterator[tuple[Any, Any]]:
    """Batches by the trainer's loader, without end."""
    from paddle_dp.data import Loader

    loader = Loader.plain(data, batch)
    for epoch in itertools.count():
        for one in loader.read(epoch):
            yield one.micro_batches[0].inputs, one.micro_batches[0].targets


def loaded(data: Arrays, batch: int) -> Iterator[tuple[Any, Any]]:
    """Batches by paddle.io.DataLoader, without end."""
    while True:
        yield from paddle.io.DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


SOURCES = {"DataLoader": loaded, "loader": shared, "slices": slices}


def by_hand(model: nn.Layer, batches: Iterator[tuple[Any, Any]]) -> Iterator[None]:
    """The usual hand-written loop, as an iterator over steps; it prints the loss every 50 steps."""
    schedule = paddle.optimizer.lr.LambdaDecay(1e-3, lambda step: 1.0)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
    loss_of = nn.CrossEntropyLoss()
    for step, (inputs, targets) in enumerate(batches):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item()}")
        yield


def advance(loop: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(loop)


def fit(model: nn.Layer, data: Arrays, batch: int) -> Callable[[int], None]:
    """paddle.Model.fit, with its own callbacks and metrics."""
    whole = paddle.Model(model)
    schedule = paddle.optimizer.lr.LambdaDecay(1e-3, lambda step: 1.0)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
    whole.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    loader = paddle.io.DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    return lambda steps: whole.fit(loader, epochs=1, num_iters=steps, verbose=2, log_freq=10)


def train(trainer: Trainer, steps: int) -> None:
    trainer.total_steps = trainer.progress.step + steps
    trainer.drive()


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Of CPU, and by the wall."""
    start = time.process_time(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return time.process_time() - start[0], time.perf_counter() - start[1]


class Bench:
    """The same problem for all loops; each continues from round to round."""

    def __init__(self, width: int, batch: int):
        self.batch, inputs, samples = batch, 64, 100 * batch
        self.folder = Path(tempfile.mkdtemp(prefix="overhead-"))
        text = RECIPE.format(width=width, inputs=inputs, samples=samples, batch=batch)
        (self.folder / "recipe.yaml").write_text(text)
        recipe = self.read("run")
        random = np.random.RandomState(0)
        self.data = Arrays(
            random.rand(samples, inputs).astype("float32"), random.randint(0, 10, samples).astype("int64")
        )
        model = recipe.model.build
        self.loops: dict[str, Callable[[int], None]] = {
            **{
                name: partial(advance, by_hand(model(), source(self.data, batch)))
                for name, source in SOURCES.items()
            },
            "Model.fit": fit(model(), self.data, batch),
            "trainer": partial(train, self.trainer(recipe)),
            "unwatched": partial(train, self.trainer(self.read("unwatched", "callbacks=[]"))),
        }
        self.order = list(self.loops)

    def read(self, name: str, *overrides: str) -> Recipe:
        return read_recipe(self.folder / "recipe.yaml", [f"output_dir={self.folder}/{name}", *overrides])

    def trainer(self, recipe: Recipe) -> Trainer:
        """A trainer as `paddle-dp train` makes it, over the arrays in memory."""
        from paddle_dp.assembly.build import build
        from paddle_dp.data import Loader, Sampler
        from paddle_dp.mesh import join

        mesh = join(seed=0)
        recipe.folder.mkdir(parents=True)
        trainer = build(recipe, mesh)
        trainer.loader = Loader(self.data, Sampler.for_mesh(len(self.data), self.batch, mesh))
        trainer.tell_start()  # what happens once per run is not a cost per step
        trainer.measurements.plan(0, 10**6)  # all rounds are one training: few of its steps are measured
        return trainer

    def round(self, steps: int) -> dict[str, tuple[float, float]]:
        """Microseconds per step of each loop, of CPU and by the wall, one loop after the other, in an order that
        changes from round to round."""
        self.order = [*self.order[1:], self.order[0]]
        took = {name: seconds(partial(self.loops[name], steps)) for name in self.order}
        return {name: (cpu / steps * 1e6, wall / steps * 1e6) for name, (cpu, wall) in took.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=64, help="of the two hidden layers (default 64)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="per round and loop (default 100)")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    bench = Bench(given.width, given.batch)
    for _ in range(3):
        bench.round(given.steps)
    rounds = [bench.round(given.steps) for _ in range(given.rounds)]
    cpu = {name: [row[name][0] for row in rounds] for name in bench.loops}
    wall = {name: [row[name][1] for row in rounds] for name in bench.loops}
    print(
        f"{given.rounds} rounds of {given.steps} steps, batch {given.batch}, width {given.width}: µs per step"
    )
    print(f"  {'':<12}{'CPU, median':>12}{'quickest':>10}{'wall, median':>14}{'quickest':>10}")
    for name in bench.loops:
        of_cpu, of_wall = (f"{statistics.median(t[name]):12.1f}{min(t[name]):10.1f}" for t in (cpu, wall))
        print(f"  {name:<12}{of_cpu}  {of_wall}")
    compared = [(one, other) for one in ("trainer", "unwatched") for other in SOURCES]
    for one, other in [*compared, ("Model.fit", "DataLoader")]:
        extra = statistics.median(a - b for a, b in zip(cpu[one], cpu[other], strict=True))
        share = ratio(cpu[one], cpu[other])
        quick = min(cpu[one]) - min(cpu[other]), min(cpu[one]) / min(cpu[other])
        said = f"{one} against the loop over {other}: {extra:+.1f} µs of CPU per step, ratio {share:.3f}"
        print(f"{said}; of the quickest rounds {quick[0]:+.1f}, {quick[1]:.3f}")


if __name__ == "__main__":
    main()
