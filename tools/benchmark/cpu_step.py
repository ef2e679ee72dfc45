"""Measures what paddle-dp does for a step on CPUs, one thing after another, on three shipped models.

    python tools/benchmark/cpu_step.py
    python tools/benchmark/cpu_step.py --rounds 5 --models mlp,gpt

Each measurement is a process of its own, for MKL and malloc read their variables when they are loaded; all take turns,
round after round, in one thread. It prints the median over the rounds of a step's CPU time in milliseconds (forward,
backward and AdamW), and of the ratio to Paddle as it comes within a round, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.command import MALLOC
from tools.benchmark.beside_torch import shipped
from tools.benchmark.compute import mkl, without_variables
from tools.benchmark.turns import ratio
from tools.command_line import parser_of
from tools.tables import table_head, table_row

MKL = mkl()
# Each adds one thing to the one before: (what the table calls it, the process's variables, what the model does).
STAGES: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    ("Paddle as it comes", {}, ()),
    ("MKL told what the processor can do", MKL, ()),
    ("malloc keeps memory", {**MKL, **MALLOC}, ()),
    ("attention moves heads in memory", {**MKL, **MALLOC}, ("attention",)),
    ("biases learned by a product", {**MKL, **MALLOC}, ("attention", "biases")),
    ("small convolutions as one product", {**MKL, **MALLOC}, ("attention", "biases", "convolutions")),
]
MODELS = ("mlp", "resnet", "gpt")


def main() -> None:
    parser = parser_of(__doc__, in_short=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each process; the first two do not count")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        model, *done = given.measure.split(",")
        print(measure(model, tuple(done), given.steps))
        return
    for line in table(given.models.split(","), given.rounds, given.steps):
        print(line, flush=True)


def table(models: list[str], rounds: int, steps: int) -> Iterator[str]:
    """A row for each stage, a column for each model: milliseconds and ratio."""
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for model in models:
            for name, variables, done in STAGES:
                taken.setdefault((model, name), []).append(in_process(model, variables, done, steps))
    yield table_head(["a step in ms, and its share of the first row's", *models])
    for name, _, _ in STAGES:
        cells = []
        for model in models:
            own, first = taken[model, name], taken[model, STAGES[0][0]]
            cells.append(f"{statistics.median(own):.1f} ({ratio(own, first):.2f})")
        yield table_row([name, *cells])


def in_process(model: str, variables: dict[str, str], done: tuple[str, ...], steps: int) -> float:
    words = ["-W", "ignore", __file__, "--measure", ",".join((model, *done)), "--steps", str(steps)]
    environment = {**without_variables(), **variables}
    job = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return float(job.stdout.split()[-1])


def measure(name: str, done: tuple[str, ...], steps: int) -> float:
    """The median CPU time of a step in milliseconds, in this process."""
    import paddle
    import paddle.nn.functional as F

    from models import _attention
    from paddle_dp.model.bias_on_cpu import quick_biases
    from paddle_dp.model.convolution_on_cpu import quick_convolutions

    if "attention" not in done:
        _attention._strided_copies_are_slow = lambda x: False
    paddle.seed(0)
    model, inputs, targets = shipped(name)
    if "biases" in done:
        quick_biases(model)
    if "convolutions" in done:
        quick_convolutions(model)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    taken = []
    for _ in range(steps):
        began = time.process_time()
        scores = model(inputs)
        F.cross_entropy(scores.reshape([-1, scores.shape[-1]]), targets.reshape([-1])).backward()
        optimizer.step()
        optimizer.clear_grad()
        taken.append(time.process_time() - began)
    return 1000 * statistics.median(taken[2:])


if __name__ == "__main__":
    main()
