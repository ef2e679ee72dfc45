"""Three faults of our own, described here before any of them was tried.

`swapped gradients`: an exchange in buckets puts the gradients of two parameters of one shape back in each other's
place, on every rank alike. The gradient norm of the whole model is right to the last bit, the ranks' weights are equal,
the loss of the first step is right, and the loss goes on falling. Expected: verify, which compares parameter by
parameter, names both at step 1; digests and a curve of the gradient norm see nothing.

`lazy exchange`: to save time, every third update is made from rank 0's gradient alone, broadcast to the others. All
ranks hold equal weights at all times, two of three updates are exact, and rank 0's share is an honest sample of the
batch. Expected: verify, if it looks at three steps or more; nothing in the first two.

`unequal heirs`: the last sample of a batch that the ranks cannot share equally is read by the right rank and learned
from, but the count that all divide by is that of an equal split (49 samples on 2 ranks count as 48). Full batches are
exact. Expected: verify at the short batch only, as a loss and gradients too large by 1/48, the same in every parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Fault, Setting, strategy
from tests.proof.zoo.patching import AXES, FACTOR, before_the_exchange, replaced


def swapped_gradients() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def swapping(self: Any) -> None:
            exchange(self)
            blocks = self.placed.model.blocks
            a, b = blocks[1].qkv.weight, blocks[3].qkv.weight
            first = a.grad.clone()
            a.grad.set_value(b.grad)
            b.grad.set_value(first)

        return swapping

    return replaced(f"{AXES}.finish", make)


def lazy_exchange() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def lazy(self: Any) -> None:
            self.done = getattr(self, "done", 0) + 1  # steps of this exchange
            if self.done % 3:
                exchange(self)
                return
            import paddle.distributed as dist

            for parameter in self.placed.trainable:
                dist.broadcast(parameter.grad, 0)
                parameter.grad.set_value(parameter.grad * self.placed.mesh.ranks)

        return lazy

    return before_the_exchange(make)


def unequal_heirs() -> AbstractContextManager[None]:
    def make(factor: Callable[..., Any]) -> Callable[..., Any]:
        def even(self: Any, micro_batch: Any, divisor: float, exchange: Any) -> Any:
            size = self.placed.mesh.dp_size
            return factor(self, micro_batch, divisor // size * size, exchange)

        return even

    return replaced(FACTOR, make)


DATA2, SOURCE = strategy("gpt", data=2, check_every="null"), "our own, described before it was tried"
FAULTS = (
    Fault(
        name="swapped gradients",
        says="Two weights of one shape get each other's gradient from the exchange, on every rank alike.",
        source=SOURCE,
        setting=DATA2,
        patch=swapped_gradients,
        where=("qkv.weight",),
    ),
    Fault(
        name="lazy exchange",
        says="Every third update is made from the first rank's gradient alone, and sent to all.",
        source=SOURCE,
        setting=DATA2,
        patch=lazy_exchange,
    ),
    Fault(
        name="unequal heirs",
        says="A batch that cannot be shared equally is divided by the count of one that can.",
        source=SOURCE,
        setting=Setting("mlp"),
        patch=unequal_heirs,
    ),
)
