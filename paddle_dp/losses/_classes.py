"""Operations over all classes that a loss needs: here for whole scores, in `parallel.tensor` for cut ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paddle_dp.errors import TargetError

if TYPE_CHECKING:
    import paddle


NEVER = -(2**31)  # no class is ignored; Paddle's default, -100, would silently skip targets of -100


class Classes(Protocol):
    """Operations on scores [..., classes on this rank]; the result is the same on every rank of the tensor axis."""

    refuses: bool
    """Whether `total` raises IndexError, on CPUs, for a number that is no class; others give NaN."""

    def local_range(self, width: int) -> tuple[int, int]:
        """The number of the first of the `width` classes on this rank, and how many classes there are in all."""
        ...

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        """The sum of -log softmax(scores) at the class `numbers` [...], without those that are `ignored`."""
        ...

    def all_reduce(self, partial_sums: paddle.Tensor) -> paddle.Tensor:
        """Sums over the classes on this rank, summed over the ranks."""
        ...

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        """The number of the highest score [...], the first of equals."""
        ...

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        """The numbers of the k highest scores [..., k], the highest first."""
        ...


class AllClasses:
    """All classes are on this rank."""

    refuses = True

    def local_range(self, width: int) -> tuple[int, int]:
        return 0, width

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        """As F.cross_entropy, which also makes a mask for weights that are none here: 6 µs of its 15."""
        import paddle

        kernel, labels = paddle._C_ops.cross_entropy_with_softmax, numbers.unsqueeze(-1)
        _, losses = kernel(scores, labels, False, True, True, ignored, -1)
        return losses.sum()

    def all_reduce(self, partial_sums: paddle.Tensor) -> paddle.Tensor:
        return partial_sums

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        return scores.argmax(-1)

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        return scores.topk(k, axis=-1)[1]


class Exact(AllClasses):
    """All classes are on this rank, and losses are exact also above 64 and over a million classes.

    On CPUs (3.3.1) Paddle's losses are cut off at 64, and its sums, also logsumexp's, are sequential: over a million
    classes they are off by 1e-3. Here they are computed in float64.
    """

    refuses = False

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        import paddle

        target_scores, _, is_class = gather_target(scores, numbers, 0)
        highest = scores.max(-1, keepdim=True).detach()
        sums = (scores - highest).exp().sum(-1, dtype="float64")
        losses = sums.log().astype(scores.dtype) + highest.squeeze(-1) - target_scores
        losses = paddle.where(is_class, losses, paddle.full_like(losses, float("nan")))
        return paddle.where(numbers == ignored, paddle.zeros_like(losses), losses).sum()


def check_range(numbers: paddle.Tensor, classes: int, ignored: int) -> None:
    """Raises TargetError for a class number [n, …] that is neither one of `classes` nor the ignored one.

    On CPUs only: on an accelerator the check would wait for the device in every step, and Paddle's own kernels abort.
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
    """The score of each target [...] among the columns from class `first` on; its column [..., 1]; whether it is here.

    Where the target is not among the columns, score and column are arbitrary.
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
