"""Whether one process's training depends on the order of its samples, or on what no seed decides.

The noise that excuses a difference is measured on runs with neutral changes (proof.noise). Another order of samples is
neutral only if samples and random draws are independent: a queue, the last sample's cache or numbers drawn in forward
make it another training, and what it moves would excuse the same fault on N ranks. So one process first trains all
steps twice, plainly and permuted, in float64 if the model has it. A quantity x (loss, gradient norm, buffer) of step t
shows a dependence where

    |x_permuted - x_plain| > max(β · size, FAR · largest |x_nudged - x_plain| up to t)

β leaves about half of the digits to rounding; size is the largest |x| up to t. A training may amplify rounding beyond
β: then so it does to a run whose weights are nudged by their last place. That run, and a repetition of the plain one,
are made only where β is exceeded. If the repetition departs as well, something is drawn that no seed decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from paddle_dp.parallel import Learner
from paddle_dp.parallel.compiled import is_compiled
from paddle_dp.proof import noise
from paddle_dp.proof.compare import BEYOND
from paddle_dp.proof.record import running_statistics
from paddle_dp.proof.watched import Watchable

FAR = 64.0  # of honest models at most 7 was seen in float32
# Operators whose result jumps, or bends, at some input, as Paddle names their kernels.
_KINKED = re.compile(
    r"relu|(^|_|arg)(max|min|amax|amin)|abs|clip|hard|shrink|sign|floor|ceil|round|sort|top_?k|where|than|equal|pool"
)

Curve = list[dict[str, np.ndarray]]  # by step: quantities by name
Run = Callable[[noise.Noise | None], Curve]


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """The first quantity of a run that departs from the plain run's by more than rounding; `kind`: "order" of samples,
    or "chance", for something that no seed decides. `apart`: relative."""

    kind: str
    step: int
    name: str
    plain: float | None  # of a number
    other: float | None
    apart: float


def find_dependence(run: Run, plain: Curve, dtype: str) -> Dependence | None:
    """None if another order of samples changes nothing beyond rounding, or if `dtype` is too coarse to tell.

    `run` trains once more, with a kind of noise or with none.
    """
    if dtype not in BEYOND:
        return None
    kinds = {kind.name: kind for kind in noise.runs(dtype, 1)}
    permuted = run(kinds["permuted 1"])
    beyond = BEYOND[dtype]
    if _departure("order", plain, permuted, beyond) is None:
        return None
    chance = _departure("chance", plain, run(None), beyond)
    return chance or _departure("order", plain, permuted, beyond, run(kinds["weights 1"]))


def _departure(
    kind: str, plain: Curve, other: Curve, beyond: float, nudged: Curve | None = None
) -> Dependence | None:
    """The first departure beyond `beyond` of its size and beyond FAR times that of the nudged run."""
    sizes: dict[str, float] = {}
    moved: dict[str, float] = {}
    for step, quantities in enumerate(plain, start=1):
        for name, x in quantities.items():
            y = other[step - 1].get(name, x)
            sizes[name] = max(sizes.get(name, 0.0), _norm(x))
            if nudged is not None:
                moved[name] = max(moved.get(name, 0.0), _distance(nudged[step - 1].get(name, x), x))
            distance = _distance(y, x)
            if distance > max(beyond * sizes[name], FAR * moved.get(name, 0.0)):
                numbers = (float(x), float(y)) if x.ndim == 0 else (None, None)
                relative = min(distance / sizes[name], 1e9) if sizes[name] else 1.0
                return Dependence(
                    kind=kind, step=step, name=name, plain=numbers[0], other=numbers[1], apart=relative
                )
    return None


def _norm(x: np.ndarray) -> float:
    size = float(np.linalg.norm(x.reshape(-1)))
    return size if np.isfinite(size) else 0.0


def _distance(y: np.ndarray, x: np.ndarray) -> float:
    """The 2-norm of their difference, without elements that are not finite: these are judged elsewhere."""
    if x.shape != y.shape:
        return float("inf")
    finite = np.isfinite(x) & np.isfinite(y)
    return float(np.linalg.norm(np.where(finite, y, 0.0) - np.where(finite, x, 0.0)))


def train(side: Watchable, learner: Learner, order: Callable[[int], np.ndarray] | None) -> Curve:
    """Trains the run's batches: each step's loss and gradient norm; after the last one also the buffers."""
    curve: Curve = []
    for batch in side.batches(False):
        metrics = learner.train_batch(
            batch if order is None else noise.permute(batch, order), collect_metrics=True
        )
        assert metrics is not None
        numbers = {"loss": metrics["loss"], "gradient norm": metrics["gradient_norm"]}
        curve.append({name: np.asarray(number, "float64") for name, number in numbers.items()})
    known = running_statistics(learner)
    for name, buffer in learner.placed.named_buffers():
        if name not in known and buffer._is_initialized():
            curve[-1][f"buffer {name}"] = buffer.astype("float64").numpy()
    side.chosen.read.clear()
    return curve


@contextmanager
def kinks(learner: Learner) -> Iterator[set[str]]:
    """Within it the set gets the operators of the learner's forwards, and of its loss, that jump or bend: relu, max
    pooling, argmax, comparisons. A compiled forward shows none of its own, and counts as one."""
    operators = {"a compiled forward"} if is_compiled(learner.model) else set()
    forward = learner.runner.forward

    def counted(*arguments: Any) -> Any:
        core.clear_low_precision_op_list()
        answer = forward(*arguments)
        operators.update(name for name in core.get_low_precision_op_list() if _KINKED.search(name))
        return answer

    paddle.set_flags({"FLAGS_low_precision_op_list": 1})
    learner.runner.forward = counted  # type: ignore[method-assign, assignment]
    try:
        yield operators
    finally:
        learner.runner.forward = forward  # type: ignore[method-assign]
        paddle.set_flags({"FLAGS_low_precision_op_list": 0})
