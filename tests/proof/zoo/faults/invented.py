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

from tests.proof.zoo.case import FaultTable, Setting, strategy
from tests.proof.zoo.patching import AXES, FACTOR, NOTHING_OVERLAPPED

DATA2, SOURCE = strategy("gpt", data=2, check_every="null"), "our own, described before it was tried"
FAULTS = FaultTable()


@FAULTS.add("swapped gradients", SOURCE, DATA2, f"{AXES}.finish", where=("qkv.weight",))
def swapped_gradients(finish, exchange):
    """Two weights of one shape get each other's gradient from the exchange, on every rank alike."""
    finish(exchange)
    blocks = exchange.placed.model.blocks
    a, b = blocks[1].qkv.weight, blocks[3].qkv.weight
    first = a.grad.clone()
    a.grad.set_value(b.grad)
    b.grad.set_value(first)


@FAULTS.add("lazy exchange", SOURCE, DATA2, f"{AXES}.finish", also=(NOTHING_OVERLAPPED,))
def lazy_exchange(finish, exchange):
    """Every third update is made from the first rank's gradient alone, and sent to all."""
    import paddle.distributed as dist

    exchange.done = getattr(exchange, "done", 0) + 1  # steps of this exchange
    if exchange.done % 3:
        finish(exchange)
        return
    for parameter in exchange.placed.trainable:
        dist.broadcast(parameter.grad, 0)
        parameter.grad.set_value(parameter.grad * exchange.placed.mesh.ranks)


@FAULTS.add("unequal heirs", SOURCE, Setting("mlp"), FACTOR)
def unequal_heirs(factor, runner, micro_batch, divisor, exchange):
    """A batch that cannot be shared equally is divided by the count of one that can."""
    size = runner.placed.mesh.dp_size
    return factor(runner, micro_batch, divisor // size * size, exchange)
