"""A model whose gradients are hard to exchange, and their sum in the order of ranks, taken behind backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.recompute import recompute

from paddle_dp.axes.sharding.param_broadcast import ParamBroadcast
from paddle_dp.exchange import buckets
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.gloo import install
from paddle_dp.mesh import join

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

    def forward(self, ids: paddle.Tensor, some: bool, blocks: int = 2) -> paddle.Tensor:
        h = self.embedding(ids)
        for _ in range(blocks):
            h = recompute(self.block, h)
        h = self.head(h)
        return paddle.matmul(self.some(h) if some else h, self.embedding.weight, transpose_y=True)


class Trial:
    """This rank's model and samples."""

    def __init__(self) -> None:
        self.mesh = join()
        install(self.mesh.device)
        buckets.SMALLEST = 1 << 13  # bytes: of this model several, too
        paddle.seed(3)
        self.model = Hard()
        self.parameters = list(self.model.parameters())
        self.owners = [place % self.mesh.ranks for place in range(len(self.parameters))]
        draw = np.random.RandomState(self.mesh.rank)
        self.ids = [paddle.to_tensor(draw.randint(0, 50, [4, 6])) for _ in range(MICRO_BATCHES)]

    def exchange(self, owners: bool, each_micro_batch: bool = False) -> GradientExchange:
        """To owners, or to all ranks; as it is on this device."""
        ranks, parameters = list(range(self.mesh.ranks)), self.parameters
        if self.mesh.device == "cpu":
            keepers = [[owner] if owners else ranks for owner in self.owners]
            return PushedGradients(
                ranks, self.mesh.rank, parameters, keepers, each_micro_batch=each_micro_batch
            )
        group, given = dist.new_group(ranks), self.owners if owners else None
        return BucketedGradients(group, parameters, owners=given, each_micro_batch=each_micro_batch)

    def backward(self, micro_batch: int, some: bool, blocks: int = 2) -> None:
        self.model(self.ids[micro_batch], some, blocks).square().mean().backward()

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

    def sums(self, some: bool, each_micro_batch: bool = False, blocks: int = 2) -> list[Array]:
        """The sums over the ranks of what each has of every gradient after its backwards.

        With `each_micro_batch` every rank starts anew in each, and adds that up.
        """
        places = range(len(self.parameters))
        parts: list[list[Array]] = [[] for _ in places]
        for micro_batch in range(MICRO_BATCHES):
            self.backward(micro_batch, some, blocks)
            if each_micro_batch or micro_batch == MICRO_BATCHES - 1:
                for place, part in zip(places, self.take(places), strict=True):
                    parts[place].append(part)
        of_ranks: list[list[Array]] = []
        dist.all_gather_object(of_ranks, [added_up(row) for row in parts])
        return [added_up(rows) for rows in zip(*of_ranks, strict=True)]

    def others(self, wanted: Sequence[Array], here: Callable[[int], bool], exactly: bool = True) -> list[str]:
        """The names of gradients that have other bits than `wanted`, or are where they should not be; other values, but
        for rounding, if not `exactly`."""
        names = [name for name, _ in self.model.named_parameters()]
        got = self.take(range(len(names)))
        return [
            name
            for place, (name, one, total) in enumerate(zip(names, got, wanted, strict=True))
            if not equal(one, total if here(place) else None, exactly)
        ]


def added_up(rows: Sequence[Array]) -> Array:
    """In their order; of what is there."""
    first, *others = [row for row in rows if row is not None] or [None]
    return sum(others, start=first) if others else first


def equal(one: Array, other: Array, exactly: bool) -> bool:
    if one is None or other is None:
        return one is other
    return one.tobytes() == other.tobytes() if exactly else np.allclose(one, other, rtol=1e-5, atol=1e-7)


def learn(owners: bool, each_micro_batch: bool = False) -> list[list[str]]:
    """In every rank, by step: the names of gradients that are not the sum over the ranks, bit by bit; last, of
    parameters whose values did not come from their owners."""
    trial = Trial()
    exchange = trial.exchange(owners, each_micro_batch)
    found = []
    for step in range(6):
        # Once the first rank, which owns parts of it, does not use a layer.
        some = step != 3 or trial.mesh.rank > 0
        blocks = 3 if step == 4 and trial.mesh.rank == 1 else 2  # a gradient more than in the step before
        wanted = trial.sums(some, each_micro_batch, blocks)
        for micro_batch in range(MICRO_BATCHES):
            with exchange.backward(micro_batch == MICRO_BATCHES - 1):
                trial.backward(micro_batch, some, blocks)
        exchange.finish()
        here = trial.is_own if owners else lambda _: True
        # What comes late is added behind the others.
        found.append(trial.others(wanted, here, exactly=step != 4))
    if owners and trial.mesh.device == "cpu":
        found.append(not_shared(trial))
    return found


@paddle.no_grad()
def not_shared(trial: Trial) -> list[str]:
    for place, parameter in enumerate(trial.parameters):
        parameter.set_value(paddle.full_like(parameter, 10.0 * trial.mesh.rank + place))
    ParamBroadcast(dist.collective._get_default_group(), trial.parameters, trial.owners).share()
    named = enumerate(trial.model.named_parameters())
    return [name for place, (name, p) in named if not (p == 10.0 * trial.owners[place] + place).all()]
