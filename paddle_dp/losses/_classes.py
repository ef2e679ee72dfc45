"""A loss's operations over all classes: here for whole scores, in `axes.tensor` for split scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from paddle_dp.errors import TargetError

if TYPE_CHECKING:
    import paddle


Weights = Union["paddle.Tensor", None]
NEVER = -(2**31)  # no class is ignored; Paddle's default, -100, would silently skip targets of -100


class Classes:
    """Operations on scores [..., classes on this rank], here on all classes. Split ones have the same methods, with
    equal results on every rank of the tensor axis."""

    refuses = True
    """True if `total` raises IndexError, on CPUs, for a number that is no class; otherwise it gives NaN."""

    hides_nan = True
    """True if `total` may be finite for scores of NaN, on CPUs."""

    def local_range(self, width: int) -> tuple[int, int]:
        """The number of the first of the `width` classes on this rank, and the number of all classes."""
        return 0, width

    def total(
        self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int, weights: Weights = None
    ) -> paddle.Tensor:
        """The sum of -log softmax(scores) at the class `numbers` [...], without the `ignored` number; with `weights`
        [...], each times its weight.

        Calls the kernel of F.cross_entropy, which would also make an unused weight mask: 6 µs of its 15.

        On CPUs (3.3.1) the kernel takes NaN for a very small number: 200 scores of NaN have the loss log 200, and a
        finite gradient (`hides_nan`).
        """
        import paddle

        kernel, labels = paddle._C_ops.cross_entropy_with_softmax, numbers.unsqueeze(-1)
        _, losses = kernel(scores, labels, False, True, True, ignored, -1)
        if weights is not None:
            losses = losses.squeeze(-1) * weights
        return losses.sum()

    def all_reduce(self, partial_sums: paddle.Tensor) -> paddle.Tensor:
        """Adds up the ranks' sums over their classes. Collective if the classes are split."""
        return partial_sums

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        """The class number of the highest score [...]; the first among equals."""
        return scores.argmax(-1)

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        """The class numbers of the k highest scores [..., k], the highest first."""
        return scores.topk(k, axis=-1)[1]


class Exact(Classes):
    """All classes are on this rank, and losses are exact above 64 and with a million classes, too.

    On CPUs (3.3.1) Paddle cuts losses off at 64, and its sums, logsumexp's included, are sequential: with a million
    classes they are off by 1e-3. Here sums are computed in float64.
    """

    refuses = hides_nan = False

    def total(
        self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int, weights: Weights = None
    ) -> paddle.Tensor:
        import paddle

        target_scores, _, is_class = gather_target(scores, numbers, 0)
        highest = scores.max(-1, keepdim=True).detach()
        sums = (scores - highest).exp().sum(-1, dtype="float64")
        losses = sums.log().astype(scores.dtype) + highest.squeeze(-1) - target_scores
        losses = paddle.where(is_class, losses, paddle.full_like(losses, float("nan")))
        losses = paddle.where(numbers == ignored, paddle.zeros_like(losses), losses)
        return (losses if weights is None else losses * weights).sum()


def check_range(numbers: paddle.Tensor, classes: int, ignored: int) -> None:
    """Raises TargetError for a class number [n, …] outside 0 … `classes` - 1 that is not the ignored one.

    Checks on CPUs only: on an accelerator it would wait for the device in every step, and Paddle's kernels abort.
    """
    if not numbers.place.is_cpu_place():
        return
    values = numbers.numpy()
    if not values.size or (values.min() >= 0 and values.max() < classes):
        return
    wrong = (values < 0) | (values >= classes)
    if ignored != NEVER:
        wrong &= values != ignored
    if wrong.any():
        row = wrong.reshape(len(values), -1).any(1).argmax()
        value = int(values[row][wrong[row]].flat[0])
        known = f"the {classes} classes of the model's outputs are 0 to {classes - 1}"
        left_out = "" if ignored == NEVER else f", and loss.ignore_index is {ignored}"
        raise TargetError(
            f"target {value} is no class: {known}{left_out}. Give the model more classes (model.classes, or "
            f"num_classes), correct the data set, or leave such targets out: loss.ignore_index={value}.",
            int(row), value,
        ) from None  # fmt: skip


def gather_target(
    scores: paddle.Tensor, numbers: paddle.Tensor, first: int
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Looks targets up in columns that start at class `first`. Returns (score [...], column [..., 1], bool [...]: the
    target is in these columns); for other targets score and column are arbitrary.
    """
    local = numbers - first
    here = (local >= 0).logical_and(local < scores.shape[-1])
    column = local.clip(0, scores.shape[-1] - 1).unsqueeze(-1)
    return scores.take_along_axis(column, -1, broadcast=False).squeeze(-1), column, here


def margin_over_mean(scores: paddle.Tensor, numbers: paddle.Tensor, classes: Classes) -> paddle.Tensor:
    """Each target's score [...] minus the mean of all classes' scores.

    (1 - e)·CE(target) + e·mean over classes of CE(class) = CE(target) + e·margin: the log of the softmax's sum cancels.
    """
    first, count = classes.local_range(scores.shape[-1])
    target_scores, _, here = gather_target(scores, numbers, first)
    return classes.all_reduce(target_scores * here.astype(scores.dtype) - scores.sum(-1) / count)
