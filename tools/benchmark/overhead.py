"""What the trainer costs over a hand-written Paddle loop: same model, data, optimizer, schedule and steps.

    python tools/benchmark/overhead.py                     # digits MLP: the absolute cost per step
    python tools/benchmark/overhead.py --width 1400        # a step of about 20 ms: the ratio

The hand-written loop slices a NumPy array and makes tensors of the slices, the cheapest input there is; a second one
reads through paddle.io.DataLoader, as most scripts do. The trainer reads through its loader, with all default callbacks
(console, metrics, dashboard, evaluate, checkpoint). The three run in turns, several rounds; the medians are compared.
Times are the process's own CPU time: every loop here computes without pause in one thread, and CPU time does not count
what other programs on the machine take.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.machine import slow_mkl

if slow_mkl():
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")

import numpy as np
import paddle
from paddle import nn

from paddle_dp.recipe import read_recipe
from paddle_dp.train.trainer import Trainer

RECIPE = """
model: {{use: mlp, inputs: {inputs}, hidden: [{width}, {width}], classes: 10}}
dataset: {{use: random_images, shape: [{inputs}], classes: 10, samples: {samples}}}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum}}
schedule: {{use: constant, peak: 1.0e-3}}
train: {{length: {steps} steps, batch: {batch}}}
callbacks:
  - {{use: console}}
  - {{use: metrics}}
  - {{use: dashboard}}
  - {{use: evaluate, every: 1000000 steps}}
  - {{use: checkpoint, every: 1000000 steps}}
"""


class Arrays(paddle.io.Dataset):
    """The samples in memory, so that reading costs the same for everybody."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[i], self.targets[i]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[indices], self.targets[indices]


def slices(data: Arrays, batch: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Batches by slicing."""
    for step in range(steps):
        start = step * batch % (len(data) - batch + 1)
        yield (
            paddle.to_tensor(data.inputs[start : start + batch]),
            paddle.to_tensor(data.targets[start : start + batch]),
        )


def loaded(data: Arrays, batch: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Batches by paddle.io.DataLoader."""
    done = 0
    while done < steps:
        for pair in paddle.io.DataLoader(data, batch_size=batch, shuffle=True, drop_last=True):
            if done == steps:
                return
            done += 1
            yield pair


def by_hand(model: nn.Layer, batches: Iterator[tuple[Any, Any]]) -> None:
    """The loop that everybody writes first; it prints the loss every 50 steps."""
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


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return time.process_time() - start


class Bench:
    """The same problem for all three loops."""

    def __init__(self, width: int, batch: int, steps: int):
        self.batch, self.steps, inputs, samples = batch, steps, 64, 100 * batch
        self.folder = Path(tempfile.mkdtemp(prefix="overhead-"))
        text = RECIPE.format(width=width, inputs=inputs, samples=samples, steps=steps, batch=batch)
        (self.folder / "recipe.yaml").write_text(text)
        self.recipe = read_recipe(self.folder / "recipe.yaml")
        random = np.random.RandomState(0)
        self.data = Arrays(
            random.rand(samples, inputs).astype("float32"), random.randint(0, 10, samples).astype("int64")
        )

    def trainer(self, number: int) -> Trainer:
        """A trainer as `paddle-dp train` makes it, over the arrays in memory."""
        from paddle_dp.data import Loader, Share
        from paddle_dp.mesh import join
        from paddle_dp.train.build import build

        mesh = join(seed=0)
        recipe = self.recipe.model_copy(update={"out": str(self.folder / f"run-{number}")})
        recipe.folder.mkdir(parents=True)
        trainer = build(recipe, mesh)
        trainer.loader = Loader(self.data, Share.of(len(self.data), self.batch, mesh))
        return trainer

    def round(self, number: int) -> dict[str, float]:
        """Microseconds per step of each loop, one after the other."""
        model, steps = self.recipe.model.build, self.steps
        sources = {"slices": slices, "DataLoader": loaded}
        times = {}
        for name, source in sources.items():
            work = partial(by_hand, model(), source(self.data, self.batch, steps))
            times[name] = seconds(work) / steps * 1e6
        trainer = self.trainer(number)
        trainer.tell("start")  # what happens once per run is not a cost per step
        trainer.total_steps = steps
        times["trainer"] = seconds(trainer._train) / steps * 1e6
        return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=64, help="of the two hidden layers (default 64)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    bench = Bench(given.width, given.batch, given.steps)
    bench.round(0)
    rounds = [bench.round(number) for number in range(1, given.rounds + 1)]
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    print(
        f"{given.rounds} rounds of {given.steps} steps, batch {given.batch}, width {given.width}: median µs per step"
    )
    for name, value in middle.items():
        print(f"  {name:<12}{value:10.1f}")
    for name in ("slices", "DataLoader"):
        extra = statistics.median(row["trainer"] - row[name] for row in rounds)
        ratio = statistics.median(row["trainer"] / row[name] for row in rounds)
        print(f"trainer against {name}: {extra:+.1f} µs per step, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
