"""Gradients of matrices as products of two thin factors (PowerSGD, Vogels et al., arXiv:1905.13727): what is sent."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import paddle

from paddle_dp.errors import DivergenceError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.consistency import digests
from paddle_dp.parallel.exchange.gradient_exchange import GradientExchange
from paddle_dp.parallel.exchange.residuals import Residuals, wide
from paddle_dp.plan.extra_memory import is_worthwhile, matrix

Exchange = Callable[[list[paddle.Tensor], str], GradientExchange]
"""What sums the gradients of some tensors over the ranks; the text is a channel of `mesh.messages.CHANNELS`."""
NEGLIGIBLE_NORM = 1e-6  # of a column: what is left of it beside the columns before, when these explain it


class LowRankGradients:
    """Sums gradients over ranks: of large matrices their best known approximation of `rank` columns, others whole.

    For a gradient M [n, m] of each rank, to which its error is added (Q [m, rank] is that of the update before):

        P = sum of M Q over the ranks, its columns made orthonormal
        Qᵀ = sum of Pᵀ M over the ranks
        gradient = P Qᵀ       error of a rank = M - P Pᵀ M

    which is one turn of a power iteration: Q comes closer to the first singular vectors from update to update. Each
    rank computes P and P Qᵀ for itself, from the same bits; so all must be processors of one kind (`check_factors`).
    The sums are those of `exchange`, twice: of P beside the gradients that are sent whole, which may travel while
    backward runs, and of Q. A rank without a gradient adds nothing, and keeps its error; where no rank has one, there
    is none.
    """

    each_micro_batch = False

    def __init__(
        self, named: Sequence[tuple[str, paddle.Tensor]], rank: int, exchange: Exchange, residuals: Residuals
    ):
        self._parameters, self._residuals = [p for _, p in named], residuals
        chosen = [is_worthwhile(parameter.shape, rank) for parameter in self._parameters]
        self.indices = [index for index, low in enumerate(chosen) if low]
        self._full_indices = [index for index, low in enumerate(chosen) if not low]
        # Qᵀ [rank, m], by place: products with it read M as it lies.
        self.right: dict[int, paddle.Tensor] = {}
        self._next: dict[int, paddle.Tensor] = {}  # Q of an update that is not yet made
        self._left_sums: list[paddle.Tensor] = []
        self._right_sums: list[paddle.Tensor] = []
        for index in self.indices:
            name, parameter = named[index]
            rows, columns = matrix(parameter.shape)
            self.right[index] = _drawn(name, rank, columns, wide(parameter))
            self._left_sums.append(_empty(rows, rank, parameter))
            self._right_sums.append(_empty(rank, columns, parameter))
        whole = [self._parameters[index] for index in self._full_indices]
        self._first = exchange([*self._left_sums, *whole], "gradients")
        self._second = exchange(self._right_sums, "factors")

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward, `last` of an update: what is sent whole leaves while it runs."""
        with self._first.backward(last):
            yield

    def keep(self) -> None:
        """The update was made: the next one begins with its Q."""
        self.right |= self._next
        self._next = {}

    @paddle.no_grad()
    def finish(self) -> list[int]:
        """After an update's last backward: all ranks have the sums then. Returns the places of which this rank had no
        gradient. Collective."""
        self._next = {}
        local: dict[int, paddle.Tensor] = {}
        for index, left in zip(self.indices, self._left_sums, strict=True):
            parameter = self._parameters[index]
            if parameter.grad is not None:
                local[index] = self._with_error(index, parameter.grad)
                left._copy_gradient_from(paddle.matmul(local[index], self.right[index], transpose_y=True))
        lacking = self._first.finish()
        lefts: dict[int, paddle.Tensor] = {}
        for index, left, right in zip(self.indices, self._left_sums, self._right_sums, strict=True):
            if left.grad is not None:
                lefts[index] = orthonormal(left.grad)
                left.clear_gradient(False)
            if index in local:
                own = paddle.matmul(lefts[index], local[index], transpose_x=True)
                right._copy_gradient_from(own)
                lost = local[index] - paddle.matmul(lefts[index], own)
                self._residuals.lose(index, lost.reshape(self._parameters[index].shape))
        self._second.finish()
        for index, right in zip(self.indices, self._right_sums, strict=True):
            if index in lefts:
                self._approximate(index, lefts[index], right.grad)
                right.clear_gradient(False)
        count = len(self.indices)
        of_whole = [self._full_indices[number - count] for number in lacking if number >= count]
        return sorted([*of_whole, *(index for index in self.indices if index not in local)])

    def _with_error(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        wider = gradient.astype(wide(gradient))
        error = self._residuals.get(index)
        return (wider if error is None else wider + error).reshape(list(matrix(gradient.shape)))

    def _approximate(self, index: int, left: paddle.Tensor, right: paddle.Tensor) -> None:
        """Gives a parameter its gradient, from the two factors, and keeps the right one for the next update: a row that
        this gradient has not filled stays as it was, for from zeros none would come again."""
        parameter = self._parameters[index]
        whole = paddle.matmul(left, right).reshape(parameter.shape)
        parameter._copy_gradient_from(whole.astype(parameter.dtype))
        filled = (right != 0).any(1, keepdim=True)
        self._next[index] = paddle.where(filled, scaled(right, 1), self.right[index])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the matrices that are sent as factors, each once."""
        return sorted({matrix(self._parameters[index].shape) for index in self.indices})


@paddle.no_grad()
def check_factors(shapes: Sequence[tuple[int, int]], rank: int, mesh: Mesh) -> None:
    """Tries on drawn factors whether every rank gets the same bits, for matrices of these shapes [n, m].

    Raises DivergenceError, the same on every rank, where one does not: its weights would drift away from the others'.
    Collective.
    """
    draw = np.random.default_rng(0)
    columns_done = []
    for rows, columns in shapes:
        left, right = (draw.integers(-999, 999, [size, rank]) / 1000 for size in (rows, columns))
        base = orthonormal(paddle.to_tensor(left, "float32"))
        columns_done += [base, paddle.matmul(base, paddle.to_tensor(right.T, "float32"))]
    first, *others = mesh.gather([list(digest) for digest in digests(columns_done)])
    if wrong := [number for number, found in enumerate(others, start=1) if found != first]:
        hosts = mesh.gather(mesh.host)
        named = ", ".join(f"{number} ({hosts[number]})" for number in wrong)
        raise DivergenceError(
            f"strategy.compress=power_sgd: from the same factors rank{'s' * (len(wrong) > 1)} {named} computed other "
            f"bits than rank 0 ({hosts[0]}), so that their weights would drift apart: their processors, or the "
            "libraries on them, are of another kind. Take machines of one kind, or strategy.compress=bfloat16, whose "
            "sums one rank rounds for all."
        )


def orthonormal(columns: paddle.Tensor) -> paddle.Tensor:
    """Columns [n, rank] that span the same, by Gram and Schmidt, twice, for once leaves much of what is nearly
    parallel; zeros for a column that those before explain."""
    columns_done: list[paddle.Tensor] = []
    columns = scaled(columns, 0)
    for number in range(columns.shape[1]):
        column = columns[:, number : number + 1]
        before = column.norm()
        if columns_done:
            others = paddle.concat(columns_done, 1)
            for _ in range(2):
                column = column - paddle.matmul(others, paddle.matmul(others, column, transpose_x=True))
        length = column.norm()
        explained = (length <= NEGLIGIBLE_NORM * before).astype(column.dtype)
        columns_done.append(column / (length + explained) * (1 - explained))
    return paddle.concat(columns_done, 1)


def scaled(vectors: paddle.Tensor, axis: int) -> paddle.Tensor:
    """Each vector along the axis over its largest number, so that no square of a small gradient's underflows."""
    largest = vectors.abs().max(axis, keepdim=True)
    return vectors / paddle.where(largest > 0, largest, paddle.ones_like(largest))


def _drawn(name: str, rows: int, rank: int, dtype: str) -> paddle.Tensor:
    """Normal numbers, the same on all ranks and in each run."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return paddle.to_tensor(draw.standard_normal([rows, rank]), dtype)


def _empty(rows: int, rank: int, like: paddle.Tensor) -> paddle.Tensor:
    """A tensor whose gradient is a factor: it takes no memory of its own."""
    return paddle.create_parameter([rows, rank], wide(like), is_bias=True)
