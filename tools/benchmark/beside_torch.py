"""Times a step of the shipped models beside the same models in plain PyTorch, on a CPU.

    python tools/benchmark/beside_torch.py                        # where torch can be imported
    python tools/benchmark/beside_torch.py --torch ~/torch/bin/python --rounds 20 --models gpt,resnet
    python tools/benchmark/beside_torch.py --compile              # ours beside ours with train.compile=true

Each side is a process of its own with one thread, and they take turns, step by step: forward, cross-entropy, backward
and AdamW. Ours has the variables that `paddle-dp train` gives its ranks on a CPU and what it does to a model there.
PyTorch's are measured as they come and with the same malloc variables. Printed: the median CPU time of a step, and the
median over the rounds of its ratio to PyTorch's.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.turns import ratio
from tools.command_line import parser_of, why_no_import
from tools.tables import table_head, table_row

Step = Callable[[], object]
CLASSES, TOKENS = 10, 256
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"inputs": 256, "hidden": (1024, 1024), "classes": CLASSES, "activation": "gelu"},
    "resnet": {"depth": 18, "classes": CLASSES},
    "gpt": {"vocab": TOKENS, "width": 256, "depth": 4, "heads": 8, "length": 128},
    "llama": {
        "vocab": TOKENS, "width": 256, "depth": 4, "heads": 8, "kv_heads": 4, "hidden": 704, "length": 128,
    },
    "vit": {"image": 32, "patch": 4, "classes": CLASSES, "width": 256, "depth": 4, "heads": 8},
}  # fmt: skip
INPUTS: dict[str, tuple[int, ...]] = {
    "mlp": (128, 256), "resnet": (16, 3, 64, 64), "gpt": (8, 128), "llama": (8, 128), "vit": (16, 3, 32, 32),
}  # fmt: skip
COMPILED = "train.compile"
SIDES = ("PyTorch", "PyTorch, malloc keeps memory", "paddle_dp")


def main() -> int:
    parser = parser_of(__doc__, in_short=True)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that can import torch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument(
        "--compile", action="store_true", help="ours beside train.compile=true, without PyTorch"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return 0
    sides = ("paddle_dp", COMPILED) if given.compile else SIDES
    if "PyTorch" in sides and why_no_import(given.torch, "torch"):
        print(f"{given.torch} cannot import torch: name one that can, --torch PYTHON.", file=sys.stderr)
        return 2
    print(table_head([f"a step in ms, and its ratio to {sides[0]}'s", *sides]), flush=True)
    for name in given.models.split(","):
        taken = in_turns(name, sides, given.torch, given.rounds)
        cells = [f"{1000 * statistics.median(each):.1f} ({ratio(each, taken[0]):.2f})" for each in taken]
        print(table_row([name, *cells]), flush=True)
    return 0


def in_turns(name: str, sides: tuple[str, ...], torch: str, rounds: int) -> list[list[float]]:
    """The CPU seconds of every step of every side. Raises ValueError where the models have not as many parameters."""
    processes = [start(side, name, torch if "PyTorch" in side else sys.executable) for side in sides]
    try:
        sizes = {int(answer(process)) for process in processes}
        if len(sizes) != 1:
            raise ValueError(
                f"{name}: the two sides have {sorted(sizes)} parameters; the models must be the same"
            )
        taken: list[list[float]] = [[] for _ in processes]
        for turn in range(3 + rounds):
            for process, found in zip(processes, taken, strict=True):
                asked(process)  # brings what it needs back into the caches
                seconds = asked(process)
                if turn >= 3:
                    found.append(seconds)
        return taken
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start(side: str, name: str, python: str) -> subprocess.Popen[str]:
    """A process that has built its side's model and waits."""
    from paddle_dp.launch.command import MALLOC
    from tools.benchmark.compute import mkl, without_variables

    ours, plain = "PyTorch" not in side, side == "PyTorch"
    environment = {**without_variables(), **({} if plain else MALLOC), **(mkl() if ours else {})}
    return subprocess.Popen(
        [python, "-W", "ignore", __file__, "--serve", side, name],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ChildProcessError(f"{process.args!r} ended with {process.wait()}: its words are above")
    return float(line)


def asked(process: subprocess.Popen[str]) -> float:
    """The CPU seconds of one more step."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def serve(side: str, name: str) -> None:
    """Does a step for each line of standard input, and says how long it took; says its number of parameters first."""
    step, size = torchs(name) if "PyTorch" in side else ours(name, side == COMPILED)
    print(size, flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        step()
        print(time.process_time() - began, flush=True)


def shipped(name: str) -> tuple[Any, Any, Any]:
    """A shipped model, and inputs and targets for one batch."""
    import paddle

    model = import_module(f"models.{name}").Config(**SIZES[name]).build()
    if name in ("gpt", "llama"):
        return model, *(paddle.randint(0, TOKENS, INPUTS[name]) for _ in range(2))
    return model, paddle.randn(INPUTS[name]), paddle.randint(0, CLASSES, INPUTS[name][:1])


def ours(name: str, compile: bool = False) -> tuple[Step, int]:
    """A step of the shipped model as paddle_dp trains it on a CPU, and its number of parameters."""
    import paddle
    import paddle.nn.functional as F

    from paddle_dp.model.bias_on_cpu import quick_biases
    from paddle_dp.model.compiled import compiled
    from paddle_dp.model.convolution_on_cpu import quick_convolutions

    paddle.seed(0)
    model, inputs, targets = shipped(name)
    quick_biases(model)
    quick_convolutions(model)
    if compile:
        compiled(model, None)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), weight_decay=0.01)

    def step() -> None:
        scores = model(inputs)
        F.cross_entropy(scores.reshape([-1, scores.shape[-1]]), targets.flatten()).backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)  # as the trainer does, and as PyTorch does by default

    return step, sum(parameter.size for parameter in model.parameters() if parameter.trainable)


def torchs(name: str) -> tuple[Step, int]:
    """The same in PyTorch."""
    import torch
    import torch.nn.functional as F

    from tools.benchmark.torch_models import built

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = built(name, SIZES[name])
    of_tokens, shape = name in ("gpt", "llama"), INPUTS[name]
    inputs = torch.randint(0, TOKENS, shape) if of_tokens else torch.randn(shape)
    targets = torch.randint(0, TOKENS, shape) if of_tokens else torch.randint(0, CLASSES, shape[:1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)

    def step() -> None:
        scores = model(inputs)
        F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
