"""What a learner asks of a loss, and how whatever a user gives becomes that."""

from __future__ import annotations

from typing import Any, Literal, Union

import paddle

from paddle_dp.errors import LossError, TargetError

Count = Union[int, float, "paddle.Tensor"]
Scores = dict[str, paddle.Tensor]
PADDLE_IGNORES = -100  # by default


class Loss:
    """A loss as learners ask it: totals, and what they are over, so that one division makes the one-process mean.

    `counted` says when the count is known: "samples": at once, it is their number; "targets": before the forward, from
    `count(targets)`; "answers": only when the loss has been called.
    """

    given: Any = None  # what it was made of
    name: str
    counted: Literal["samples", "targets", "answers"]
    from_parts: bool = False
    """Whether it can be computed from parts of the outputs: some of the classes (`parallel`), or of the tokens."""

    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, count): the sum over a micro-batch, with a gradient, and how many things it sums over.

        Raises LossError for a loss that does not say what it is over.
        """
        raise NotImplementedError

    def count(self, targets: paddle.Tensor) -> Count:
        """What the total of these targets is over; asked only where `counted` is "targets"."""
        raise NotImplementedError

    def scores(self, outputs: Any, targets: paddle.Tensor) -> Scores:
        """Further sums over a micro-batch, by name, to be divided by the same count: "acc1", for example."""
        return {}

    def sums(self, outputs: Any, targets: paddle.Tensor, total: paddle.Tensor) -> Scores:
        """Everything that is summed over a micro-batch, by name: its loss, which is `total`, and the scores."""
        with paddle.no_grad():
            return {"loss": total.detach(), **self.scores(outputs, targets)}

    def num_classes(self, outputs: paddle.Tensor) -> int:
        """How many classes outputs [n, …] are scores of; this rank may hold some of them only."""
        return int(outputs.shape[-1])

    def predictions(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The class of the highest score [n]."""
        return outputs.argmax(-1)

    def parallel(self, classes: Any) -> Loss | None:
        """The same loss of scores of which this rank holds some classes; `classes` answers for all of them.

        None for a loss that cannot be computed so.
        """
        return None


class Given(Loss):
    """A loss of the shelf or of a user's: any callable, with as much of the contract as it has.

    `count(targets)`, `scores(outputs, targets)`, `num_classes(outputs)`, `predictions(outputs)` and `parallel(classes)`
    are taken where it has them. `counts_samples = True` promises that its count is always the number of samples, and
    saves the ranks an exchange.
    """

    def __init__(self, given: Any):
        self.given = given
        self.name = type(given).__name__ if not hasattr(given, "__name__") else given.__name__
        for method in ("count", "scores", "num_classes", "predictions"):
            if callable(own := getattr(given, method, None)):
                setattr(self, method, own)
        self.from_parts = hasattr(given, "parallel")
        if "count" in vars(self):
            self.counted = "targets"
        else:
            self.counted = "samples" if getattr(given, "counts_samples", False) else "answers"

    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        samples = int(targets.shape[0])
        try:
            result = self.given(outputs, targets)
        except IndexError as error:  # what Paddle's cross-entropies raise, without saying whose target it is
            raise _of_no_class(outputs, targets) or error from None
        total, count = total_and_count(result, samples)
        if self.counted == "samples" and count != samples:
            raise LossError(
                f"the loss {self.name} has counts_samples = True, and counts {number(count):g} things in {samples} "
                "samples: leave counts_samples out, and the ranks will agree on the counts that it returns."
            )
        return total, count

    def parallel(self, classes: Any) -> Loss | None:
        return Given(self.given.parallel(classes)) if self.from_parts else None


def as_loss(given: Any) -> Loss:
    """`given` as a Loss: itself if it is one, else any callable (outputs, targets), wrapped."""
    return given if isinstance(given, Loss) else Given(given)


def total_and_count(result: Any, samples: int) -> tuple[paddle.Tensor, Count]:
    """What a loss returned for `samples` samples as (total, count), total at least float32.

    It is that pair already, its count an int, a float or a tensor of one number; or a tensor [samples, …] of one loss
    per sample, or per part of a sample, of which each counts as one. Raises LossError for anything else: a bare mean
    cannot be averaged over unequal shares.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        total, count = result
        if not isinstance(total, paddle.Tensor) or total.size != 1:
            raise LossError(
                f"the loss returned (total, count) with a total of {_described(total)}: it has to be the sum, one "
                "number."
            )
        if isinstance(count, paddle.Tensor):
            if count.size != 1:
                raise LossError(
                    f"the loss returned (total, count) with a count of {_described(count)}: it has to be one number, "
                    "such as (targets != -100).sum()."
                )
            return total, count.detach()
        return total, count
    if isinstance(result, paddle.Tensor) and result.ndim >= 1 and result.shape[0] == samples:
        wide = result if result.dtype in (paddle.float32, paddle.float64) else result.astype("float32")
        return wide.sum(), int(result.size)
    raise LossError(
        f"the loss gave {_described(result)}, which does not say what it is over. Return (total, count), the sum and "
        "how many it sums over, or one loss per sample: paddle.nn.CrossEntropyLoss(reduction='none'), for example."
    )


def _of_no_class(outputs: Any, targets: paddle.Tensor) -> TargetError | None:
    """The error that names the first of targets [n, …] that is none of the classes of outputs [n, …, classes]; None
    where all are, or where outputs and targets are nothing of the kind."""
    if not isinstance(outputs, paddle.Tensor) or targets.is_floating_point() or not outputs.ndim:
        return None
    classes, found = outputs.shape[-1], targets.numpy()
    if found.size * classes != outputs.size:
        return None
    wrong = (found >= classes) | ((found < 0) & (found != PADDLE_IGNORES))
    if not wrong.any():
        return None
    row = int(wrong.reshape(len(found), -1).any(1).argmax())
    value = int(found[row][wrong[row]].flat[0])
    return TargetError(
        f"target {value} is no class: the {classes} classes of the model's outputs are 0 to {classes - 1}. Give the "
        "model more classes, mend the data set, or let the loss leave such targets out.",
        row,
        value,
    )


def number(value: Any) -> float:
    """A tensor of one number, or a number, as a float. `float(tensor)` is five times as slow as `item`."""
    return float(value.item() if isinstance(value, paddle.Tensor) else value)


def _described(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, paddle.Tensor) else type(value).__name__
