"""Tries whether a model's outputs for a sample depend on the other samples of its batch; with the parts that other
trials of samples need, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import call, leaves
from paddle_dp.core.batch_norm import by_running_statistics
from paddle_dp.core.consistency import digests
from paddle_dp.core.dropout import Scope, install
from paddle_dp.core.dropout.uncaught import DrawMonitor, rng_states
from paddle_dp.core.extra_forwards import extra_forwards
from paddle_dp.core.memory_error import memory_error, unallocated
from paddle_dp.core.precision import cast, default_dtype, read_by
from paddle_dp.core.process_runner import ProcessRunner, Result, results_of
from paddle_dp.errors import gist
from paddle_dp.identity.walk import Attributes
from paddle_dp.model.compiled import plain_forward
from paddle_dp.part.shelf import shipped
from paddle_dp.text import CAN_DIFFER

Sentences = tuple[list[str], list[str]]  # about differences, and about failed trials

CLOSE = 1e-3  # relative: rounding stays far below, and one sample's effect on another far above
# Bytes of a model whose state is compared between two runs, which reads all of its tensors.
MAX_COMPARED_BYTES = 64e6
# The files of this package's models: a user's may lie in the same folder.
MODELS = frozenset((
    "_attention", "_chain", "_checks", "_generate", "_names", "_scale", "_transformer", "bert", "convnet",
    "distillation", "gan", "gpt", "large_classifier", "llama", "mlp", "resnet", "siamese", "vit",
))  # fmt: skip
UNTRIED = "whether {} treats each sample alone: {}"


def mixing(model: nn.Layer, pair: Any, run_trial: ProcessRunner, exact: bool = True) -> Sentences:
    """A sentence if a model's output for a sample depends on other samples of its batch, and one if the trial failed.

    Two samples are computed together and alone, in evaluation and in the model's mode, but BatchNorm, checked
    elsewhere, stays in evaluation. `exact`: each sample has separate dropout masks.
    """
    name, pair = type(model).__name__, cast(pair, read_by(model))
    state = state_of(model, pair)
    if exact:
        install()
    runs = []
    for evaluation in (True, False):
        for position, cut in ((0, slice(2)), (0, slice(1)), (1, slice(1, 2))):
            scope = Scope(0, 0, 0, position, cut.stop - position) if exact else None
            runs.append(partial(_outputs, model, rows(pair, cut), scope, evaluation))
    answered = results_of(run_trial, runs, state)
    for evaluation in (True, False):
        results: list[Result] = []
        try:
            results.extend(islice(answered, 3))
        except Exception as error:  # noqa: BLE001 - if two samples fail, the first update reports it
            return [], [untried(name, "of one sample", error)] if results else []
        # Random numbers, or masks without a sample: the learner names its draws.
        if any(result["drew"] for result in results):
            continue
        together, *alone = [result["arrays"] for result in results]
        if not all(_close(both, each) for both, each in _matched(together, alone)):
            when = "also in evaluation" if evaluation else "in training"
            return [
                f"the outputs of {name} for a sample depend on the other samples in its batch, {when}: each rank "
                "computes them from its own samples"
            ], []
        both, first, second = [result["buffers"] for result in results]
        # `buffers` detects values that depend on the samples themselves: they then differ between ranks.
        if counts := [n for n in both if both[n] != first.get(n) == second.get(n)]:
            return [
                f"buffer {counts[0]} depends on the number of samples that forward gets: a rank, or a copy of the "
                f"model, gets only its share, and one process gets all{CAN_DIFFER}"
            ], []
    return [], []


def state_of(
    model: nn.Layer, samples: Any, has_package_loss: bool = True, backward: bool = False
) -> Callable[[], Any]:
    """A function whose values compare equal as long as a model, its samples and the generators are as they were:
    weights, buffers, modes and attributes. They never do for a user's code, which may keep state anywhere (a model, a
    hook, also of a gradient in a `backward`, or the loss of a run unless `has_package_loss`), nor for a large model."""
    layers = model.sublayers(include_self=True)
    code: list[Any] = [type(layer) for layer in layers]
    for layer in layers:
        code += [*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values()]
        code += [x for x in vars(layer).values() if callable(x) and not isinstance(x, nn.Layer)]
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(x.size * x.element_size() for x in tensors)
    if not has_package_loss or size > MAX_COMPARED_BYTES or not all(map(_is_shipped, code)):
        return object
    if backward and _has_gradient_hooks(model):
        return object
    attributes = Attributes({str(number): layer for number, layer in enumerate(layers)})
    inputs = [x for x in leaves(samples) if isinstance(x, paddle.Tensor)]

    def state() -> Any:
        modes = [layer.training for layer in layers]
        sums = digests([*model.parameters(), *model.buffers(), *inputs])
        return sums, modes, attributes.changed(), rng_states()

    return state


def _has_gradient_hooks(model: nn.Layer) -> bool:
    """Whether a trained parameter has had a hook before, a user's: Paddle has no list of them, but numbers them."""
    handles = [p.register_hook(lambda gradient: gradient) for p in model.parameters() if not p.stop_gradient]
    numbers = [handle._hook_id for handle in handles if handle.remove()]
    return any(numbers)


def _is_shipped(code: Any) -> bool:
    """Whether a class, a function, or an object's class is Paddle's, or in this package or its models."""
    name = getattr(code, "__module__", None) or ""
    if name.partition(".")[0] in ("paddle", "paddle_dp"):
        return True
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "/")
    return file.stem in MODELS and file.parent == shipped("models")


def _outputs(model: nn.Layer, samples: Any, scope: Scope | None, evaluation: bool) -> Result:
    """The outputs for some samples, the buffers after their forward, and whether it drew random numbers."""
    watch = DrawMonitor()
    with extra_forwards(model):
        with (
            by_running_statistics(model),
            default_dtype(read_by(model)),
            scope or nullcontext(),
            watch.on([]),
        ):
            for layer in model.sublayers(include_self=True):
                layer.training = layer.training and not evaluation
            outputs = answers(call(model, samples, plain_forward(model)))
        buffers = dict(model.named_buffers())
        arrays = [(x if x.dtype == paddle.float64 else x.astype("float32")).numpy() for x in outputs]
        left = {name: list(digest) for name, digest in zip(buffers, digests(buffers.values()), strict=True)}
    return {"arrays": arrays, "buffers": left, "drew": bool(watch.kinds_by_layer or watch.doubted)}


def _matched(
    together: list[np.ndarray], alone: list[list[np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs each output of both samples, [2, …] or with several rows each, with the single samples' outputs; skips
    outputs without a sample dim."""
    for both, first, second in zip(together, *alone, strict=False):
        if not both.ndim or not first.shape == second.shape != both.shape:
            continue
        if both.shape == (2 * first.shape[0], *first.shape[1:]):
            yield both, np.concatenate([first, second])


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    difference, largest = float(np.abs(a - b).max(initial=0.0)), float(np.abs(b).max(initial=0.0))
    return not difference > CLOSE * largest  # other checks report NaN


def rows(data: Any, cut: slice) -> Any:
    """Some samples of nested tensors."""
    return paddle.utils.map_structure(lambda x: x[cut], data)


def answers(outputs: Any) -> list[paddle.Tensor]:
    """The floating-point tensors of a model's outputs."""
    flat = paddle.utils.flatten(outputs)
    return [x for x in flat if isinstance(x, paddle.Tensor) and x.is_floating_point()]


def untried(name: str, when: str, error: Exception) -> str:
    """The sentence on a trial that failed; `when`: "with fewer samples"."""
    if memory_error(error) is not None:
        size = f" ({size})" if (size := unallocated(error)) else ""
        return UNTRIED.format(
            name, f"the trial ran out of memory{size}: the training itself probably will, too"
        )
    cause = gist(error) if type(error).__name__ == "TrialError" else f"{type(error).__name__}: {gist(error)}"
    return UNTRIED.format(name, f"its trial {when} failed ({cause})")
