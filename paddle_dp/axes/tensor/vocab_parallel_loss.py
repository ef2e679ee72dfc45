"""Losses for scores with classes sharded over the tensor axis, without gathering the scores."""

from __future__ import annotations

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.core.data_group import Group
from paddle_dp.core.loss import Loss
from paddle_dp.errors import UsageError


def vocab_parallel(loss: Loss, group: Group) -> Loss:
    """The same loss for scores [n, …, classes / tp_size].

    Raises UsageError for a loss that cannot be computed from sharded scores.
    """
    parallel = loss.parallel(VocabParallel(group))
    if parallel is None:
        raise UsageError(
            f"strategy.tensor cuts the classes of this model's scores, and {loss.name} cannot be computed "
            "from parts of them. Set loss to {use: cross_entropy} or {use: margin_softmax}, or strategy.tensor=1."
        )
    parallel.joins = lambda outputs: mp_ops._c_concat(outputs, group=group)
    return parallel


class VocabParallel:
    """Operations over all classes, computed jointly by the ranks of the tensor axis. Each method is collective."""

    refuses = hides_nan = False

    def __init__(self, group: Group):
        self.group = group

    def local_range(self, width: int) -> tuple[int, int]:
        """The number of this rank's first class, and the total number of classes."""
        return self.group.rank * width, self.group.nranks * width

    def total(
        self,
        scores: paddle.Tensor,
        numbers: paddle.Tensor,
        ignored: int,
        weights: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """The sum of -log softmax(scores) at the class `numbers` [...] except `ignored`, each times its weight; NaN if
        a number is not a class."""
        parallel = fleet.meta_parallel.ParallelCrossEntropy(mp_group=self.group, ignore_index=ignored)
        losses = parallel(scores, numbers.unsqueeze(-1)).squeeze(-1)
        # Fleet's loss uses score 0 for a number that is not a class; one process raises an error.
        known = (numbers >= 0).logical_and(numbers < self.local_range(scores.shape[-1])[1])
        known = known.logical_or(numbers == ignored)
        losses = paddle.where(known, losses, paddle.full_like(losses, float("nan")))
        return (losses if weights is None else losses * weights).sum()

    def all_reduce(self, partial_sums: paddle.Tensor) -> paddle.Tensor:
        """The sum over the ranks; its gradient goes to each rank unchanged."""
        return mp_ops._mp_allreduce(partial_sums, group=self.group)

    def highest(self, scores: paddle.Tensor) -> paddle.Tensor:
        """The number of the highest score [...]; of equal ones the first."""
        local = scores.argmax(-1, keepdim=True)
        candidates, numbers = self._candidates(scores, local)
        return self._pick(numbers, candidates.argmax(-1, keepdim=True)).squeeze(-1)

    def best(self, scores: paddle.Tensor, k: int) -> paddle.Tensor:
        """The numbers of the k highest scores [..., k], chosen from each rank's k highest."""
        local = scores.topk(min(k, scores.shape[-1]), axis=-1)[1]
        candidates, numbers = self._candidates(scores, local)
        return self._pick(numbers, candidates.topk(k, axis=-1)[1])

    def _candidates(
        self, scores: paddle.Tensor, columns: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Scores and class numbers of every rank's chosen columns [..., tp_size · columns], without gradient."""
        with paddle.no_grad():
            picked = self._pick(scores, columns)
            numbers = columns + self.local_range(scores.shape[-1])[0]
            return mp_ops._c_concat(picked, group=self.group), mp_ops._c_concat(numbers, group=self.group)

    @staticmethod
    def _pick(tensor: paddle.Tensor, columns: paddle.Tensor) -> paddle.Tensor:
        return tensor.take_along_axis(columns, -1, broadcast=False)
