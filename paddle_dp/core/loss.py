"""The contract of a loss, and a wrapper that makes any user-defined callable fulfil it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Union

import paddle
from paddle import nn

from paddle_dp.batch import leaves, mapped
from paddle_dp.core.precision import NOTHING
from paddle_dp.errors import LossError, TargetError, UsageError, gist
from paddle_dp.tensors import has_counted_nan, holds_nan
from paddle_dp.text import plural

if TYPE_CHECKING:
    from paddle_dp.core.gathered_samples import GatheredSamples
    from paddle_dp.part import Part

Count = Union[int, float, "paddle.Tensor"]
Scores = dict[str, paddle.Tensor]
PADDLE_IGNORE_INDEX = -100  # the default of Paddle's cross-entropies


class Loss:
    """A loss returns totals and counts, so that one division by the global count gives the one-process mean.

    `counted` tells when the count is known: "samples": always, it is their number; "targets": before the forward, from
    `count(targets)`; "answers": only from the call.
    """

    function: Any = None  # the wrapped callable
    name: str
    counted: Literal["samples", "targets", "answers"]
    compares: Literal["", "ranks", "rank"] = ""
    """The samples of a micro-batch that it compares: of all `ranks`, after `across`, or of one `rank` only; "": each
    sample has a separate loss."""
    joins: Callable[[Any], Any] | None = None
    """Makes whole outputs of this rank's classes; None: it holds all. Collective."""
    splits_outputs: bool = False
    """Whether it can be computed from shards of the outputs: some of the classes (`parallel`), or of the tokens."""
    multi_label: bool = False
    """Whether each output is a separate yes-or-no label's, so that the probabilities of a sample do not add up to 1."""

    @property
    def owner(self) -> Any:
        """The object that may keep state for the loss: a bound method's object, else the wrapped callable itself."""
        return getattr(self.function, "__self__", self.function)

    @property
    def ignored(self) -> int | None:
        """The class number of targets that do not count, as metrics read it; None if all count."""
        number = getattr(self.function, "ignore_index", None)
        return number if type(number) is int else None

    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, count): the sum over a micro-batch, with a gradient, and the number of its terms.

        Raises LossError for a loss that returns neither a pair nor one loss per sample.
        """
        raise NotImplementedError

    def for_backward(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """The same for a backward of the total, whose value nobody reads: it may hide NaN."""
        return self(outputs, targets)

    def count(self, targets: paddle.Tensor) -> Count:
        """The count for these targets; called only where `counted` is "targets"."""
        raise NotImplementedError

    def scores(self, outputs: Any, targets: paddle.Tensor) -> Scores:
        """Further sums over a micro-batch, by name, to be divided by the same count, such as "acc1"."""
        return {}

    def sums(self, outputs: Any, targets: paddle.Tensor, total: paddle.Tensor) -> Scores:
        """The loss (`total`) and the scores of a micro-batch, by name."""
        with paddle.no_grad():
            return {"loss": total.detach(), **self.scores(outputs, targets)}

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """The number of classes that outputs [n, …] score; this rank may hold only some of them."""
        return int(outputs.shape[-1])

    def predictions(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The class of the highest score [n]."""
        return outputs.argmax(-1)

    def probabilities(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The probability of each class, or label, for float32 outputs [n, classes] of all of them."""
        # Paddle's softmax hides NaN on CPUs (3.3.1).
        return (outputs - outputs.logsumexp(-1, keepdim=True)).exp()

    def full_outputs(self, outputs: Any) -> Any:
        """The outputs of all classes and tokens, if this rank holds some of them. Collective then."""
        return outputs if self.joins is None else self.joins(outputs)

    def parallel(self, classes: Any) -> Loss | None:
        """The same loss for scores of which this rank holds some classes; `classes` computes over all of them.

        None if the loss cannot be computed from some of the classes.
        """
        return None

    def across(self, samples: GatheredSamples) -> Loss:
        """The same loss, comparing this rank's samples with all of `samples`; called only if `compares` is "ranks"."""
        raise NotImplementedError

    def present(self, present: bool) -> AbstractContextManager[None]:
        """Wraps the loss of a micro-batch; if not `present`, it is a dummy, with which nothing is compared."""
        return NOTHING

    def alone(self) -> AbstractContextManager[None]:
        """Wraps losses that need no exchange between ranks."""
        return NOTHING


class WrappedLoss(Loss):
    """Makes a callable (outputs, targets), predefined or user-defined, a Loss.

    It uses the callable's `count(targets)`, `scores(outputs, targets)`, `num_classes(outputs)`, `predictions(outputs)`,
    `probabilities(outputs)`, `multi_label`, `parallel(classes)` and `across(samples)`, if defined, and `for_backward`
    of its class. `counts_samples = True` promises that the count is always the number of samples, which saves an
    exchange.
    """

    def __init__(self, function: Any, samples: GatheredSamples | None = None):
        self.function, self._samples = function, samples
        self.name = getattr(function, "__name__", type(function).__name__)
        for method in ("count", "scores", "num_classes", "predictions", "probabilities"):
            if callable(implementation := getattr(function, method, None)):
                setattr(self, method, implementation)
        # Not of a subclass: its `__call__` may compute with the total, and NaN would reach the gradient.
        is_known = "for_backward" in vars(type(function))
        self._for_backward = function.for_backward if is_known else function
        self.splits_outputs = hasattr(function, "parallel")
        self.multi_label = getattr(function, "multi_label", False) is True
        if hasattr(function, "across"):
            self.compares = getattr(function, "compares", "ranks")
        if "count" in vars(self):
            self.counted = "targets"
        else:
            self.counted = "samples" if getattr(function, "counts_samples", False) else "answers"
        self._may_write = type(function).__module__.partition(".")[0] not in ("paddle", "paddle_dp")

    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        total, count = self._call(self.function, outputs, targets)
        if type(self.function) is nn.CrossEntropyLoss and _is_nan_hidden(self.function, outputs, targets):
            total = total + math.nan
        return total, count

    def for_backward(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        return self._call(self._for_backward, outputs, targets)

    def _call(self, function: Any, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        samples = int(leaves(targets)[0].shape[0])
        try:
            result = (
                self._protected_call(function, outputs, targets)
                if self._may_write
                else function(outputs, targets)
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(targets, dict) and targets.keys() == {"first", "second", "share"}:
                raise LossError(
                    f"the loss {self.name} fails with mixed targets: {type(error).__name__}: {error}. With mix it gets "
                    "three tensors [n] of a training batch, {first, second, share}: return share · the loss of first + "
                    "(1 - share) · the loss of second, or take cross_entropy (docs/augmentation.md)."
                ) from error
            if isinstance(error, IndexError):  # Paddle's cross-entropies raise it without naming the target
                raise _wrong_target(outputs, targets, self._ignored()) or _with_outputs(
                    error, outputs
                ) from None
            if not isinstance(error, KeyError):
                _with_outputs(error, outputs)
            raise
        total, count = total_and_count(result, samples)
        if self.counted == "samples" and count != samples:
            raise LossError(
                f"the loss {self.name} has counts_samples = True, but counts {number(count):g} in {samples} "
                "samples: remove counts_samples, and the ranks will sum the counts that it returns."
            )
        return total, count

    def _protected_call(self, function: Any, outputs: Any, targets: Any) -> Any:
        """The result of the callable, which may write into its targets (`labels[labels == 255] = 0`) or take entries
        out of a dict: metrics, scores and repeated calls read these afterwards, so it gets copies. Raises LossError if
        it writes into tensors of outputs without gradients; a copy of all would cost as much memory as they."""
        if paddle.is_grad_enabled():
            return function(outputs, copied(targets) if "scores" in vars(self) else targets)
        versions = [(x, x.inplace_version) for x in leaves(outputs) if isinstance(x, paddle.Tensor)]
        result = function(_new_containers(outputs), copied(targets))
        if any(tensor.inplace_version != version for tensor, version in versions):
            raise LossError(
                f"the loss {self.name} writes into the model's outputs, which metrics read afterwards: let it write "
                "into outputs.clone()."
            )
        return result

    def _ignored(self) -> list[int]:
        """The targets that the callable may ignore: its `ignore_index`, or Paddle's and numbers of its settings."""
        if isinstance(ignored := getattr(self.owner, "ignore_index", None), int):
            return [ignored]
        settings = getattr(self.function, "keywords", {}).values()  # of a partial: a recipe's settings
        return [PADDLE_IGNORE_INDEX, *(value for value in settings if isinstance(value, int))]

    def parallel(self, classes: Any) -> Loss | None:
        return WrappedLoss(self.function.parallel(classes)) if self.splits_outputs else None

    def across(self, samples: GatheredSamples) -> Loss:
        return WrappedLoss(self.function.across(samples), samples)

    def present(self, present: bool) -> AbstractContextManager[None]:
        return NOTHING if self._samples is None else self._samples.present(present)

    def alone(self) -> AbstractContextManager[None]:
        return NOTHING if self._samples is None else self._samples.alone()


def _is_nan_hidden(loss: nn.CrossEntropyLoss, outputs: Any, targets: Any) -> bool:
    """True if scores hold NaN that Paddle's kernel took for a very small number (losses/_classes.py)."""
    if not isinstance(outputs, paddle.Tensor) or not holds_nan(outputs):
        return False
    if loss.soft_label or targets.ndim not in (outputs.ndim, outputs.ndim - 1):
        return True
    numbers = targets.squeeze(-1) if targets.ndim == outputs.ndim else targets
    return has_counted_nan(outputs, numbers, loss.ignore_index)


def as_loss(function: Any) -> Loss:
    """`function` itself if it is a Loss, otherwise the callable (outputs, targets), wrapped."""
    return function if isinstance(function, Loss) else WrappedLoss(function)


def loss_of(loss: Part | None, model: Any, name: str) -> Any:
    """The loss that a recipe's part builds, or the method `loss` of model `name`. Raises UsageError if there is
    neither."""
    if loss is not None:
        return loss.build()
    if callable(getattr(model, "loss", None)):
        return model.loss
    raise UsageError(
        f"model {name} has no method loss(outputs, targets), so the recipe must name one: "
        "loss: {use: cross_entropy}, for a classifier."
    )


def total_and_count(result: Any, samples: int) -> tuple[paddle.Tensor, Count]:
    """The `result` of a loss for `samples` samples as (total, count), the total in float32 at least.

    A result is that pair, with an int, a float or a one-element tensor as count; or a tensor [samples, …] of losses,
    each of which counts as one. Raises LossError for anything else: a mean without its count cannot be averaged over
    unequal shares.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        total, count = result
        if not isinstance(total, paddle.Tensor) or prod(total.shape) != 1:
            raise LossError(
                f"the loss returned (total, count) with a total of {_described(total)}: the total must be the sum, one "
                "number."
            )
        if isinstance(count, paddle.Tensor):
            if prod(count.shape) != 1:
                raise LossError(
                    f"the loss returned (total, count) with a count of {_described(count)}: the count must be one "
                    "number, such as (targets != -100).sum()."
                )
            return total, count.detach()
        return total, count
    if isinstance(result, paddle.Tensor) and result.ndim >= 1 and result.shape[0] == samples:
        wide = result if result.dtype in (paddle.float32, paddle.float64) else result.astype("float32")
        return wide.sum(), int(result.size)
    raise LossError(
        f"the loss returned {_described(result)}, without its count. Return (total, count), the sum and the number of "
        "its terms, or one loss per sample: paddle.nn.CrossEntropyLoss(reduction='none'), for example. The count of a "
        "mean is its divisor: (targets != 0).sum() if it ignores targets of 0, weights[targets].sum() if it weights "
        "classes."
    )


def _wrong_target(outputs: Any, targets: paddle.Tensor, ignored: Sequence[int]) -> TargetError | None:
    """An error that names the first of targets [n, …] that is neither `ignored` nor a class of outputs [n, …, classes];
    None if there is none, or if the shapes are not of this form."""
    if not isinstance(outputs, paddle.Tensor) or targets.is_floating_point() or not outputs.ndim:
        return None
    classes, values = outputs.shape[-1], targets.numpy()
    if values.size * classes != outputs.size:
        return None
    wrong = (values >= classes) | (values < 0)
    for target in ignored:
        wrong &= values != target
    if not wrong.any():
        return None
    row = int(wrong.reshape(len(values), -1).any(1).argmax())
    value = int(values[row][wrong[row]].flat[0])
    return TargetError(
        f"target {value} is no class: the {classes} classes of the model's outputs are 0 to {classes - 1}. Give the "
        "model more classes, correct the data set, or let the loss ignore such targets.",
        row,
        value,
    )


def _new_containers(value: Any) -> Any:
    """The same tensors in other dicts and lists, also of a user's class."""
    if isinstance(value, (dict, list)):
        other = copy.copy(value)
        for key in value if isinstance(value, dict) else range(len(value)):
            other[key] = _new_containers(value[key])
        return other
    return tuple(map(_new_containers, value)) if type(value) is tuple else value


def copied(value: Any) -> Any:
    """The same nesting with copies of the tensors."""
    return mapped(lambda x: x.clone() if isinstance(x, paddle.Tensor) else x, value)


def number(value: Any) -> float:
    """A number, or a one-element tensor, as a float. (`float(tensor)` is five times slower than `item`.)"""
    return float(value.item() if isinstance(value, paddle.Tensor) else value)


def numbers(values: Sequence[Any]) -> list[float]:
    """`number` of each, in float64, with one read from the device for all of them."""
    on_device = [v for v in values if isinstance(v, paddle.Tensor) and not v.place.is_cpu_place()]
    if not on_device:
        return [number(value) for value in values]
    with paddle.no_grad():
        read = iter(paddle.stack([v.astype("float64").reshape([]) for v in on_device]).tolist())
    device_ids = {id(v) for v in on_device}
    return [next(read) if id(value) in device_ids else number(value) for value in values]


def _with_outputs(error: Exception, outputs: Any) -> Exception:
    """The error, which says what the model returns if the loss has taken a tuple, list or dict for a tensor."""
    kind = type(outputs).__name__
    if kind in ("tuple", "list", "dict") and re.search(rf"\b{kind}\b", message := gist(error)):
        items = ", ".join(map(repr, outputs)) if kind == "dict" else plural(len(outputs), "item")
        error.args = (f"{message} (your model returns a {kind} of {items}, and the loss gets it as it is)",)
    return error


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, paddle.Tensor) else type(value).__name__
