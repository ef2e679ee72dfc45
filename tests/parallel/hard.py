"""A model whose gradients are hard to exchange, and their sum in the order of ranks, taken behind backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.recompute import recompute

from paddle_dp.gloo import install
from paddle_dp.mesh import join
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.exchange.pushed_values import PushedValues

Array = np.ndarray | None
MICRO_BATCHES = 2


class Hard(nn.Layer):
    """A tied embedding, two layers in two recomputed blocks each, a layer that is never used, one that is sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 32)
        self.a, self.b, self.never, self.some = (nn.Linear(32, 32) for _ in range(4))

    def block(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.tanh(self.b(paddle.tanh(self.a(x))))

    def forward(self, ids: paddle.Tensor, some: bool) -> paddle.Tensor:
        h = self.head(recompute(self.block, recompute(self.block, self.embedding(ids))))
        return paddle.matmul(self.some(h) if some else h, self.embedding.weight, transpose_y=True)


class Trial:
    """This rank's model and samples."""

    def __init__(self) -> None:
        self.mesh = join()
        install(self.mesh.device)
        paddle.seed(3)
        self.model = Hard()
        self.parameters = list(self.model.parameters())
        self.owners = [place % self.mesh.ranks for place in range(len(self.parameters))]
        draw = np.random.RandomState(self.mesh.rank)
        self.ids = [paddle.to_tensor(draw.randint(0, 50, [4, 6])) for _ in range(MICRO_BATCHES)]

    def backward(self, micro_batch: int, some: bool) -> None:
        self.model(self.ids[micro_batch], some).square().mean().backward()

    def is_own(self, place: int) -> bool:
        return self.owners[place] == self.mesh.rank

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.clear_gradient(False)

    def take(self, places: Sequence[int]) -> list[Array]:
        """Gradients of which nothing is left then."""
        taken = []
        for place in places:
            gradient = self.parameters[place].grad
            taken.append(None if gradient is None else gradient.numpy())
            self.parameters[place].clear_gradient(False)
        return taken

    def sums(self, some: bool, each_micro_batch: bool) -> list[Array]:
        """The sums over the ranks of what each has of every gradient after its backwards.

        With `each_micro_batch` every rank starts anew in each, and adds that up.
        """
        places = range(len(self.parameters))
        parts: list[list[Array]] = [[] for _ in places]
        for micro_batch in range(MICRO_BATCHES):
            self.backward(micro_batch, some)
            if each_micro_batch or micro_batch == MICRO_BATCHES - 1:
                for place, part in zip(places, self.take(places), strict=True):
                    parts[place].append(part)
        of_ranks: list[list[Array]] = []
        dist.all_gather_object(of_ranks, [added_up(row) for row in parts])
        return [added_up(rows) for rows in zip(*of_ranks, strict=True)]

    def other_bits(self, wanted: Sequence[Array], here: Callable[[int], bool]) -> list[str]:
        """The names of gradients that have other bits than `wanted`, or are where they should not be."""
        names = [name for name, _ in self.model.named_parameters()]
        got = self.take(range(len(names)))
        return [
            name
            for place, (name, one, total) in enumerate(zip(names, got, wanted, strict=True))
            if bits(one) != bits(total if here(place) else None)
        ]


def added_up(rows: Sequence[Array]) -> Array:
    """In their order; of what is there."""
    first, *others = [row for row in rows if row is not None] or [None]
    return sum(others, start=first) if others else first


def bits(array: Array) -> bytes | None:
    return None if array is None else array.tobytes()


def to_owners(each_micro_batch: bool) -> list[list[str]]:
    """In every rank, by step: the names of gradients with other bits than the sum; last, of parameters not shared."""
    trial = Trial()
    mesh, group = trial.mesh, dist.collective._get_default_group()
    keepers = [[owner] for owner in trial.owners]
    exchange = PushedGradients(group.ranks, mesh.rank, trial.parameters, keepers, each_micro_batch)
    found = []
    for step in range(4):
        some = (
            step != 3 or mesh.rank > 0
        )  # once the first rank, which owns parts of that layer, does not use it
        wanted = trial.sums(some, each_micro_batch)
        for micro_batch in range(MICRO_BATCHES):
            with exchange.backward(micro_batch == MICRO_BATCHES - 1):
                trial.backward(micro_batch, some)
        exchange.finish()
        found.append(trial.other_bits(wanted, trial.is_own))
    with paddle.no_grad():
        for place, parameter in enumerate(trial.parameters):
            parameter.set_value(paddle.full_like(parameter, 10.0 * mesh.rank + place))
    PushedValues(group, trial.parameters, trial.owners).share()
    named = enumerate(trial.model.named_parameters())
    found.append([n for place, (n, p) in named if not (p == 10.0 * trial.owners[place] + place).all()])
    return found


def to_all() -> list[list[str]]:
    """The same where all ranks keep all sums."""
    trial = Trial()
    ranks = list(range(trial.mesh.ranks))
    exchange = PushedGradients(ranks, trial.mesh.rank, trial.parameters, [ranks] * len(trial.parameters))
    found = []
    for step in range(4):
        some = step != 3 or trial.mesh.rank > 0
        wanted = trial.sums(some, False)
        for micro_batch in range(MICRO_BATCHES):
            with exchange.backward(micro_batch == MICRO_BATCHES - 1):
                trial.backward(micro_batch, some)
        exchange.finish()
        found.append(trial.other_bits(wanted, lambda _: True))
    return found
