"""Examines whether one process's training depends on the order of its samples, or on unseeded draws.

The noise that excuses a difference is measured on runs with neutral changes (proof.noise). Another order of samples is
neutral only if samples and random draws are independent. With a queue, a cache of the last sample or draws in forward,
it would excuse the same fault on N ranks. So one process first trains all steps twice, plainly and permuted, in float64
if the model has it. A quantity x (loss, gradient norm, buffer) of step t shows a dependence if

    |x_permuted - x_plain| > max(β · size, FAR · largest |x_nudged - x_plain| up to t)

β leaves about half of the digits to rounding; size is the largest |x| up to t. A training that amplifies rounding
beyond β also does so with weights nudged by their last place. That run and a repetition of the plain one are done only
if β is exceeded. If the repetition departs as well, some draw has no seed.
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

from paddle_dp.learner import Learner
from paddle_dp.model.compiled import is_compiled
from paddle_dp.proof import noise
from paddle_dp.proof.record import running_statistics
from paddle_dp.proof.tolerance import ROUNDING_BOUND
from paddle_dp.proof.watched import WatchedSide

FAR = 64.0  # correct models reached 7 at most, in float32
# Kernel names of Paddle's operators that jump or bend at some input.
_KINKED = re.compile(
    r"relu|(^|_|arg)(max|min|amax|amin)|abs|clip|hard|shrink|sign|floor|ceil|round|sort|top_?k|where|than|equal|pool"
)

Curve = list[dict[str, np.ndarray]]  # by step: quantities by name
Run = Callable[[noise.Noise | None], Curve]


@dataclass(frozen=True)
class Dependence:
    """The first quantity of a run that departs from the plain run's by more than rounding; `distance`: relative.

    `kind`: "order" of the samples, or "chance": a draw without a seed.
    """

    kind: str
    step: int
    name: str
    plain: float | None  # None unless the quantity is a number
    other: float | None
    distance: float


def find_dependence(run: Run, plain: Curve, dtype: str) -> Dependence | None:
    """Returns None if another order of samples changes nothing beyond rounding, or if `dtype` is too coarse to tell.

    `run` trains once more, with a kind of noise or without.
    """
    if dtype not in ROUNDING_BOUND:
        return None
    kinds = {kind.name: kind for kind in noise.kinds(dtype, 1)}
    permuted = run(kinds["permuted 1"])
    beyond = ROUNDING_BOUND[dtype]
    if _departure("order", plain, permuted, beyond) is None:
        return None
    chance = _departure("chance", plain, run(None), beyond)
    return chance or _departure("order", plain, permuted, beyond, run(kinds["weights 1"]))


def _departure(
    kind: str, plain: Curve, other: Curve, beyond: float, nudged: Curve | None = None
) -> Dependence | None:
    """The first departure beyond `beyond` of its size and beyond FAR times the nudged run's."""
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
                numbers = [float(x), float(y)] if x.ndim == 0 else [None, None]
                relative = min(distance / sizes[name], 1e9) if sizes[name] else 1.0
                return Dependence(kind, step, name, numbers[0], numbers[1], relative)
    return None


def _norm(x: np.ndarray) -> float:
    size = float(np.linalg.norm(x.reshape(-1)))
    return size if np.isfinite(size) else 0.0


def _distance(y: np.ndarray, x: np.ndarray) -> float:
    """The 2-norm of y - x over finite elements; the others are judged elsewhere."""
    if x.shape != y.shape:
        return float("inf")
    finite = np.isfinite(x) & np.isfinite(y)
    return float(np.linalg.norm(np.where(finite, y, 0.0) - np.where(finite, x, 0.0)))


def trained_curve(side: WatchedSide, learner: Learner, order: Callable[[int], np.ndarray] | None) -> Curve:
    """Trains the run's batches. Returns each step's loss and gradient norm; in the last step, also the buffers."""
    curve: Curve = []
    for batch in side.batches(False):
        ordered = batch if order is None else noise.permute(batch, order)
        metrics = learner.train_batch(ordered, collect_metrics=True)
        assert metrics is not None
        numbers = {"loss": metrics["loss"], "gradient norm": metrics["gradient_norm"]}
        curve.append({name: np.asarray(number, "float64") for name, number in numbers.items()})
    known = running_statistics(learner)
    for name, buffer in learner.placed.named_buffers():
        if name not in known and buffer._is_initialized():
            curve[-1][f"buffer {name}"] = buffer.astype("float64").numpy()
    side.subset.read.clear()
    return curve


@contextmanager
def kinks(learner: Learner) -> Iterator[set[str]]:
    """Context in which the set collects the operators of the learner's forwards and loss that jump or bend: relu, max
    pooling, argmax, comparisons. A compiled forward hides its operators, and counts as one."""
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
