"""The exchange of compressed gradients: rounded numbers or factors of matrices, after first updates without."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import paddle

from paddle_dp.core.consistency import digests
from paddle_dp.core.loss import Count, number
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.errors import DivergenceError
from paddle_dp.exchange.gradient_exchange import ExtraState, GradientExchange, SavedExtraState
from paddle_dp.exchange.residuals import (
    Residuals,
    factors_of,
    residuals_of,
    restore_factors,
    restore_residuals,
)
from paddle_dp.mesh import Mesh
from paddle_dp.plan.memory import is_worthwhile, matrix
from paddle_dp.tensors import wide
from paddle_dp.text import and_more, numbered
from paddle_dp.units import Compress

# Low-rank compression of matrix gradients: two thin factors are sent (PowerSGD, Vogels et al., arXiv:1905.13727) ------


Exchange = Callable[[list[paddle.Tensor], str], GradientExchange]
"""Makes an exchange that sums the tensors' gradients; the text is a channel of `mesh.messages.CHANNELS`."""
NEGLIGIBLE_NORM = 1e-6  # relative norm of a column's remainder below which the columns before span it


class LowRankGradients(GradientExchange):
    """Sums gradients over ranks: large matrices approximated with `rank` columns, other gradients in full.

    For a rank's gradient M [n, m] with its residual added, and Q [m, rank] from the previous update:

        P = sum of M Q over the ranks, its columns made orthonormal
        Qᵀ = sum of Pᵀ M over the ranks
        gradient = P Qᵀ       residual of a rank = M - P Pᵀ M

    This is a step of a power iteration: Q approaches the leading singular vectors. Each rank computes P and P Qᵀ
    locally from the same bits, so all processors must be of one kind (`check_factors`). `exchange` makes two exchanges:
    one for P and the full gradients, which may travel during backward, and one for Q. A rank without a gradient adds
    nothing and keeps its residual; where no rank has a gradient, the result has none.
    """

    def __init__(
        self, named: Sequence[tuple[str, paddle.Tensor]], rank: int, exchange: Exchange, residuals: Residuals
    ):
        self._parameters, self._residuals = [p for _, p in named], residuals
        chosen = [is_worthwhile(parameter.shape, rank) for parameter in self._parameters]
        self.indices = [index for index, low in enumerate(chosen) if low]
        self._full_indices = [index for index, low in enumerate(chosen) if not low]
        # Qᵀ [rank, m], by index: products with it read M contiguously.
        self.right: dict[int, paddle.Tensor] = {}
        self._next: dict[int, paddle.Tensor] = {}  # Q of an update that has not been made yet
        self._left_sums: list[paddle.Tensor] = []
        self._right_sums: list[paddle.Tensor] = []
        for index in self.indices:
            name, parameter = named[index]
            rows, columns = matrix(parameter.shape)
            self.right[index] = _drawn(name, rank, columns, wide(parameter))
            self._left_sums.append(_empty(rows, rank, parameter))
            self._right_sums.append(_empty(rank, columns, parameter))
        full_parameters = [self._parameters[index] for index in self._full_indices]
        self._first = exchange([*self._left_sums, *full_parameters], "gradients")
        self._second = exchange(self._right_sums, "factors")

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        """Wraps a micro-batch's backward, `last` of an update: full gradients leave while it runs."""
        with self._first.backward(last):
            yield

    def keep(self) -> None:
        """Confirms that the update was made: its Q starts the next one."""
        self.right |= self._next
        self._next = {}

    @paddle.no_grad()
    def finish(self) -> list[int]:
        """Called after an update's last backward: all ranks get the sums. Returns the indices of parameters without a
        local gradient. Collective."""
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
                right_local = paddle.matmul(lefts[index], local[index], transpose_x=True)
                right._copy_gradient_from(right_local)
                lost = local[index] - paddle.matmul(lefts[index], right_local)
                self._residuals.lose(index, lost.reshape(self._parameters[index].shape))
        self._second.finish()
        for index, right in zip(self.indices, self._right_sums, strict=True):
            if index in lefts:
                self._approximate(index, lefts[index], right.grad)
                right.clear_gradient(False)
        count = len(self.indices)
        lacking_full = [self._full_indices[number - count] for number in lacking if number >= count]
        return sorted([*lacking_full, *(index for index in self.indices if index not in local)])

    def _with_error(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        wider = gradient.astype(wide(gradient))
        error = self._residuals.get(index)
        return (wider if error is None else wider + error).reshape(list(matrix(gradient.shape)))

    def _approximate(self, index: int, left: paddle.Tensor, right: paddle.Tensor) -> None:
        """Sets a parameter's gradient from the two factors and keeps the right one for the next update. A zero row
        keeps its old value, for a power iteration cannot leave zero."""
        parameter = self._parameters[index]
        product = paddle.matmul(left, right).reshape(parameter.shape)
        parameter._copy_gradient_from(product.astype(parameter.dtype))
        filled = (right != 0).any(1, keepdim=True)
        self._next[index] = paddle.where(filled, scaled(right, 1), self.right[index])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The distinct shapes of matrices that are sent as factors."""
        return sorted({matrix(self._parameters[index].shape) for index in self.indices})


@paddle.no_grad()
def check_factors(shapes: Sequence[tuple[int, int]], rank: int, mesh: Mesh) -> None:
    """Checks on drawn factors that every rank computes the same bits, for matrices of these shapes [n, m].

    Raises DivergenceError on all ranks if one differs, for its weights would drift away. Collective.
    """
    draw = np.random.default_rng(0)
    columns_done = []
    for rows, columns in shapes:
        left, right = (draw.integers(-999, 999, [size, rank]) / 1000 for size in (rows, columns))
        base = orthonormal(paddle.to_tensor(left, "float32"))
        columns_done += [base, paddle.matmul(base, paddle.to_tensor(right.T, "float32"))]
    first, *digest_rows = mesh.gather([list(digest) for digest in digests(columns_done)])
    if wrong := [number for number, digest in enumerate(digest_rows, start=1) if digest != first]:
        hosts = mesh.gather(mesh.host)
        named = numbered("rank", (f"{number} ({hosts[number]})" for number in wrong))
        raise DivergenceError(
            f"strategy.compress=power_sgd: from the same factors {named} computed other "
            f"bits than rank 0 ({hosts[0]}), so that their weights would drift apart: their processors, or the "
            "libraries on them, are of another kind. Take machines of one kind, or strategy.compress=bfloat16, whose "
            "sums one rank rounds for all."
        )


def orthonormal(columns: paddle.Tensor) -> paddle.Tensor:
    """Orthonormal columns [n, rank] with the same span, by Gram-Schmidt, applied twice for nearly parallel columns. A
    column in the span of earlier ones becomes zeros."""
    columns_done: list[paddle.Tensor] = []
    columns = scaled(columns, 0)
    for index in range(columns.shape[1]):
        column = columns[:, index : index + 1]
        before = column.norm()
        if columns_done:
            basis = paddle.concat(columns_done, 1)
            for _ in range(2):
                column = column - paddle.matmul(basis, paddle.matmul(basis, column, transpose_x=True))
        length = column.norm()
        explained = (length <= NEGLIGIBLE_NORM * before).astype(column.dtype)
        columns_done.append(column / (length + explained) * (1 - explained))
    return paddle.concat(columns_done, 1)


def scaled(vectors: paddle.Tensor, axis: int) -> paddle.Tensor:
    """Divides each vector along the axis by its largest magnitude, so that no square of a small gradient underflows."""
    largest = vectors.abs().max(axis, keepdim=True)
    return vectors / paddle.where(largest > 0, largest, paddle.ones_like(largest))


def _drawn(name: str, rows: int, rank: int, dtype: str) -> paddle.Tensor:
    """Draws normal numbers, the same on all ranks and in each run."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return paddle.to_tensor(draw.standard_normal([rows, rank]), dtype)


def _empty(rows: int, rank: int, like: paddle.Tensor) -> paddle.Tensor:
    """A tensor that only carries a factor as its gradient; it takes no memory itself."""
    return paddle.create_parameter([rows, rank], wide(like), is_bias=True)


_CLIPPED = (
    "step {}, or before it: the gradient of '{}'{} has numbers above 65504, which float16 has not (strategy.compress). "
    "65504 was sent for them, and the rest comes with the next updates, late: compress=bfloat16 has room for them. "
    "This is said once."
)


class CompressedExchange(GradientExchange):
    """Exchanges by `uncompressed` in the first `compress.after` updates of a training, then by `compressed`. A rank
    keeps its compression error in `residuals` and adds it to its next gradients.

    `names`: of the parameters, in the order of the residuals. With `counted_late` the loss's count is known only after
    the forward: gradients are then of totals / samples, and residuals are scaled to match.
    """

    def __init__(  # noqa: PLR0913 - two exchanges, and the residuals with their units
        self,
        compress: Compress,
        uncompressed: GradientExchange,
        compressed: GradientExchange,
        residuals: Residuals,
        names: Sequence[str],
        mesh: Mesh,
        counted_late: bool,
    ):
        self._compress, self._uncompressed, self._compressed = compress, uncompressed, compressed
        self._residuals, self._names, self._mesh, self._counted_late = residuals, names, mesh, counted_late
        self._low_rank = compressed if isinstance(compressed, LowRankGradients) else None
        self._active = uncompressed
        self._scale, self._divisor = 1.0, 1.0
        self._warned_clipped = False

    @property
    def description(self) -> str:
        return "gradients compressed in their exchange"

    def begin_update(self, number: int, loss_scale: float, divisor: float) -> None:
        super().begin_update(number, loss_scale, divisor)
        self._active = self._uncompressed if number <= self._compress.after else self._compressed
        self._scale, self._divisor = loss_scale, divisor
        self._residuals.begin(1.0 if self._counted_late else loss_scale)

    def backward(self, last: bool, counted: Count = 0) -> AbstractContextManager[Any]:
        if last and self._counted_late:
            # From mean to sum units: otherwise a batch with few targets would be swamped by the residuals of others.
            count = self._mesh.sum([number(counted)])[0]
            if count > 0:  # otherwise there is no update
                self._residuals.begin(self._scale * count / self._divisor)
        return self._active.backward(last, counted)

    def finish(self) -> list[int]:
        return self._active.finish()

    def before_metrics(self, update: int) -> None:
        """Warns once, on the first rank, of gradients whose numbers float16 cannot hold."""
        if self._compress.kind != "float16" or self._warned_clipped:
            return
        rows = self._mesh.gather([self._names[index] for index in self._residuals.take_clipped()])
        names = list(dict.fromkeys(name for row in rows for name in row))
        self._warned_clipped = bool(names)
        if names and self._mesh.is_main:
            more = and_more(names, phrase=" and of {} more")
            print(_CLIPPED.format(update, names[0], more), file=sys.stderr, flush=True)

    def commit(self) -> None:
        self._residuals.keep()
        if self._low_rank is not None:
            self._low_rank.keep()

    def extra_state(self) -> ExtraState:
        factors = {} if self._low_rank is None else factors_of(self._low_rank.right, self._names)
        return ExtraState(shared=factors, local=residuals_of(self._residuals, self._names))

    def load_extra_state(self, saved: SavedExtraState) -> None:
        restore_residuals(self._residuals, self._names, self._mesh.ranks, saved)
        if self._low_rank is not None:
            restore_factors(self._low_rank.right, self._names, saved)


def compressed_exchange(
    compress: Compress, placed: PlacedModel, counted_late: bool, fastest: Callable[..., GradientExchange]
) -> GradientExchange:
    """Creates the compressed exchange of a model's gradients over all ranks, made of the `fastest_exchange` of some
    tensors. Collective."""
    parameters, mesh, names = placed.trainable, placed.mesh, placed.trainable_names
    residuals = Residuals(parameters)
    if compress.kind == "power_sgd":
        named = list(zip(names, parameters, strict=True))
        low_rank = LowRankGradients(named, compress.rank, fastest, residuals)
        check_factors(low_rank.shapes, compress.rank, mesh)
        compressed: GradientExchange = low_rank
    else:
        compressed = fastest(parameters, "gradients", compress.kind, residuals)
    uncompressed = fastest(parameters) if compress.after else compressed
    return CompressedExchange(compress, uncompressed, compressed, residuals, names, mesh, counted_late)
