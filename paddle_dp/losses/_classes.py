"""What a loss asks of scores over classes: answered here for whole scores, elsewhere for scores cut by classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paddle_dp.errors import TargetError

if TYPE_CHECKING:
    import paddle


NEVER = -(2**31)  # no class is ignored; Paddle's own default, -100, would silently pass over targets of -100


class Classes(Protocol):
    """Answers about scores [..., classes on this rank], the same on every rank that holds some of them."""

    def local_range(self, width: int) -> tuple[int, int]:
        """The number of the first of `width` classes that lie here, and how many there are in all."""
        ...

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        """The sum of -log softmax(scores) at the class `numbers` [...], without those that are `ignored`."""
        ...

    def all_reduce(self, parts: paddle.Tensor) -> paddle.Tensor:
        """Sums that were taken over the classes on this rank, as sums over all classes."""
        ...

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        """The number of the highest score [...], the first of equals."""
        ...

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        """The numbers of the k highest scores [..., k], the highest first."""
        ...


class Whole:
    """All classes lie here."""

    def local_range(self, width: int) -> tuple[int, int]:
        return 0, width

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        from paddle.nn.functional import cross_entropy

        return cross_entropy(scores, numbers, ignore_index=ignored, reduction="sum")

    def all_reduce(self, parts: paddle.Tensor) -> paddle.Tensor:
        return parts

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        return scores.argmax(-1)

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        return scores.topk(k, axis=-1)[1]


class Exact(Whole):
    """All classes lie here, and losses are exact also above 64 and over a million classes.

    On CPUs (3.3.1) Paddle's own are cut off at 64, and its sums, also logsumexp's, add one number after another: over a
    million classes they are off by 1e-3. Here they are added up in float64.
    """

    def total(self, scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> paddle.Tensor:
        import paddle

        mine, _, here = gather_target(scores, numbers, 0)
        highest = scores.max(-1, keepdim=True).detach()
        sums = (scores - highest).exp().sum(-1, dtype="float64")
        losses = sums.log().astype(scores.dtype) + highest.squeeze(-1) - mine
        losses = paddle.where(here, losses, paddle.full_like(mine, float("nan")))
        return paddle.where(numbers == ignored, paddle.zeros_like(losses), losses).sum()


def check_range(numbers: paddle.Tensor, classes: int, ignored: int) -> None:
    """Raises TargetError for a class number [n, …] that is none of `classes`, nor the ignored one.

    On CPUs only: elsewhere looking would wait for the device in every step, and Paddle's own kernels stop.
    """
    if not numbers.place.is_cpu_place() or not numbers.size:
        return
    found = numbers.numpy()
    if found.min() >= 0 and found.max() < classes:
        return
    wrong = (found < 0) | (found >= classes)
    if ignored != NEVER:
        wrong &= found != ignored
    if wrong.any():
        place = wrong.reshape(len(found), -1).any(1).argmax()
        value = int(found[place][wrong[place]].flat[0])
        known = f"the {classes} classes of the model's outputs are 0 to {classes - 1}"
        left_out = "" if ignored == NEVER else f", and loss.ignore_index is {ignored}"
        raise TargetError(
            f"target {value} is no class: {known}{left_out}. Give the model more classes (model.classes, or "
            f"num_classes), mend the data set, or leave such targets out: loss.ignore_index={value}.",
            int(place), value,
        )  # fmt: skip


def gather_target(
    scores: paddle.Tensor, numbers: paddle.Tensor, first: int
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """The score of each target [...] among the columns from class `first` on; its column [..., 1]; whether it is here.

    Where the target is not among the columns, score and column are another's.
    """
    local = numbers - first
    here = (local >= 0).logical_and(local < scores.shape[-1])
    column = local.clip(0, scores.shape[-1] - 1).unsqueeze(-1)
    return scores.take_along_axis(column, -1, broadcast=False).squeeze(-1), column, here


def margin_over_mean(scores: paddle.Tensor, numbers: paddle.Tensor, classes: Classes) -> paddle.Tensor:
    """By how much each target's score [...] is above the mean of all classes' scores.

    (1 - e)·CE(target) + e·mean over classes of CE(class) = CE(target) + e·margin: the softmax's sum is in both alike.
    """
    first, count = classes.local_range(scores.shape[-1])
    mine, _, here = gather_target(scores, numbers, first)
    return classes.all_reduce(mine * here.astype(scores.dtype) - scores.sum(-1) / count)
