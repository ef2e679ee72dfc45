"""Measures exact dropout against Paddle's own: calls of F.dropout, forward and backward, and updates of a learner.

    python tools/benchmark/dropout.py
    python tools/benchmark/dropout.py --rounds 40

Both run in turns, round after round, in one thread. It prints medians over the rounds, of times and of the ratios
within a round, which other programs hardly change. Times are the process's own CPU time. "as on a device": the masks by
Paddle's int32 operations, as on an accelerator, computed here on the CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.compute import one_thread

os.environ.update(one_thread())

import numpy as np
import paddle
from paddle.nn import functional as F

from paddle_dp.core.dropout import Scope, install, masks
from paddle_dp.data import Batch, MicroBatch
from paddle_dp.learner import Learner, Task, full_model_learner
from paddle_dp.mesh import Mesh
from paddle_dp.part import find
from tools.benchmark.turns import in_turns, ratio
from tools.command_line import parser_of

SHAPES: tuple[tuple[int, ...], ...] = ((64, 256), (16, 128, 128), (4, 512, 768))
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "mlp 64-128-128-10, 64 samples": ("mlp", {}, (64, 64), 10),
    "gpt 2 x 128, 8 x 128 tokens": ("gpt", {"depth": 2}, (8, 128), 256),
}


def medians(ways: dict[str, Callable[[], object]], rounds: int, times: int) -> dict[str, tuple[float, float]]:
    """Of each way the median seconds of CPU time of a call, and of its ratio to the first way's in the same round."""
    seconds = in_turns(ways, rounds, times, time.process_time)
    first = next(iter(seconds.values()))
    return {name: (statistics.median(each), ratio(each, first)) for name, each in seconds.items()}


def calls(shape: tuple[int, ...], p: float = 0.1) -> dict[str, Callable[[], object]]:
    """Ways to drop from a tensor [n, …] of this shape, forward and backward."""
    x, gradient = paddle.randn(shape), paddle.randn(shape)
    x.stop_gradient = False
    sample = tuple(shape[1:])

    def own() -> None:
        F.dropout(x, p).backward(gradient)

    def exact() -> None:
        with Scope(0, 0, 0, 0, shape[0]):
            out = F.dropout(x, p)
        out.backward(gradient)

    def there() -> None:
        keys = Scope(0, 0, 0, 0, shape[0]).next_keys()
        gone = masks.dropped_on_device(keys, sample, masks.everything(sample), p, x.place)
        paddle.masked_fill(x, gone.reshape(shape), 0.0).scale(1 / (1 - p)).backward(gradient)

    return {"Paddle's own": own, "exact": exact, "exact, as on a device": there}


def learner(model: str, settings: dict[str, Any], dropout: float, which: Any) -> Learner:
    """A learner of a shipped model on one process."""
    paddle.seed(0)
    built = find("models", model)(**settings, dropout=dropout).build()
    task = Task(
        model=built,
        loss=find("losses", "cross_entropy")().build(),
        optimizer=lambda rate, named: paddle.optimizer.AdamW(1e-3, parameters=[p for _, p in named]),
        dropout=which,
    )
    learner: Learner = full_model_learner(task, Mesh.alone())
    return learner


def updates(
    model: str, settings: dict[str, Any], shape: tuple[int, ...], classes: int
) -> dict[str, Callable[[], object]]:
    """Updates of the same model with either dropout, and with none."""
    random = np.random.RandomState(0)
    whole = model == "gpt"
    inputs = random.randint(0, classes, shape) if whole else random.randn(*shape).astype("float32")
    targets = random.randint(0, classes, shape if whole else shape[:1])
    micro_batch = MicroBatch(paddle.to_tensor(inputs), paddle.to_tensor(targets), shape[0])
    batch = Batch((micro_batch,), shape[0], 0, 0)
    ways = {"none (own)": (0.0, "own"), "none (exact)": (0.0, "exact")}
    ways |= {"0.1 (own)": (0.1, "own"), "0.1 (exact)": (0.1, "exact")}
    learners = {name: learner(model, settings, *how) for name, how in ways.items()}
    return {name: partial(one.train_batch, batch) for name, one in learners.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    install()
    print("F.dropout, forward and backward: ns per element, and times Paddle's own")
    for shape in SHAPES:
        found = medians(calls(shape), rounds, max(1, 2**19 // int(np.prod(shape))))
        line = [f"{name} {1e9 * t / np.prod(shape):.1f} ({ratio:.2f})" for name, (t, ratio) in found.items()]
        print(f"  {list(shape)}: " + ", ".join(line))
    print("an update of a learner: ms, and times the first")
    for name, how in MODELS.items():
        found = medians(updates(*how), rounds, 10 if how[0] == "mlp" else 1)
        line = [f"{way} {1e3 * t:.3f} ({ratio:.3f})" for way, (t, ratio) in found.items()]
        print(f"  {name}: " + ", ".join(line))


if __name__ == "__main__":
    main()
