"""The exchange inside tensor-parallel layers, as PyLayers: Paddle's own kernels for it are missing on CPUs.

f (`c_identity`) and g (`mp_allreduce`) are Megatron's conjugate pair (Shoeybi et al. 2019, section 3); the parallel
cross-entropy keeps each rank's columns of the logits to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from paddle_dp.gloo.collectives import gathered, reduced
from paddle_dp.gloo.cross_entropy import cross_entropy
from paddle_dp.gloo.originals import process_group_of
from paddle_dp.gloo.patch import Patch, look_up

if TYPE_CHECKING:
    import paddle


@cache
def _conjugates() -> tuple[Any, Any]:
    """Megatron's f and g, made on first use: a class that derives from one of Paddle's needs Paddle imported."""
    from paddle.autograd import PyLayer

    class Copy(PyLayer):
        """Forward the tensor itself, backward the sum of the gradients."""

        @staticmethod
        def forward(ctx: Any, tensor: paddle.Tensor, seats: Any) -> paddle.Tensor:
            ctx.seats = seats
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return reduced(ctx.seats, gradient)

    class Sum(PyLayer):
        """Forward the sum over the seats, backward the gradient itself."""

        @staticmethod
        def forward(ctx: Any, tensor: paddle.Tensor, seats: Any) -> paddle.Tensor:
            return reduced(seats, tensor)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return gradient.clone()

    return Copy, Sum


@cache
def _columns() -> tuple[Any, Any]:
    """Joining the seats' columns, and leaving each its own."""
    import paddle
    from paddle.autograd import PyLayer

    class Concat(PyLayer):
        """Forward all seats' columns, backward this seat's columns of the gradient."""

        @staticmethod
        def forward(ctx: Any, tensor: paddle.Tensor, seats: Any) -> paddle.Tensor:
            ctx.seats = seats
            return paddle.concat(gathered(seats, tensor), axis=-1)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return own_columns(gradient, ctx.seats)

    class Split(PyLayer):
        """Forward this seat's columns, backward all seats' columns of the gradient.

        Fleet's own backward (`c_split_eager`, 3.3.1) gathers along dim 0, which is wrong on every device.
        """

        @staticmethod
        def forward(ctx: Any, tensor: paddle.Tensor, seats: Any) -> paddle.Tensor:
            ctx.seats = seats
            return own_columns(tensor, seats)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return paddle.concat(gathered(ctx.seats, gradient), axis=-1)

    return Concat, Split


def own_columns(tensor: paddle.Tensor, seats: Any) -> paddle.Tensor:
    """This seat's equal share of the last dim, in memory of its own."""
    import paddle

    return paddle.split(tensor, seats.size(), axis=-1)[seats.rank()].clone()


def _member(group: Any) -> bool:
    return group is None or group.is_member()


def c_identity(tensor: paddle.Tensor, group: Any = None, *_: Any, **__: Any) -> Any:
    """Megatron's f. None on a rank outside the group, as in fleet."""
    return _conjugates()[0].apply(tensor, process_group_of(group)) if _member(group) else None


def mp_allreduce(tensor: paddle.Tensor, op: Any = None, group: Any = None, *_: Any, **__: Any) -> Any:
    """Megatron's g; always a sum, as in fleet."""
    return _conjugates()[1].apply(tensor, process_group_of(group)) if _member(group) else None


def c_concat(tensor: paddle.Tensor, group: Any = None) -> Any:
    """Joins the seats' columns."""
    return _columns()[0].apply(tensor, process_group_of(group)) if _member(group) else None


def c_split(tensor: paddle.Tensor, group: Any = None) -> Any:
    """Leaves this seat its columns."""
    return _columns()[1].apply(tensor, process_group_of(group)) if _member(group) else None


def c_softmax_with_cross_entropy(
    logits: paddle.Tensor,
    label: paddle.Tensor,
    group: Any = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> Any:
    """The loss of each row [..., 1] from this seat's columns of the logits [..., classes / seats]."""
    if not _member(group):
        return None
    loss, softmax = cross_entropy(logits, label, process_group_of(group), ignore_index)
    return (loss, softmax) if return_softmax else loss


def lookup_in(kept: Callable[..., Any]) -> Callable[..., Any]:
    """`_c_lookup_table`: the rows [..., width] of class numbers [...] that this seat's table holds, else zeros.

    The kernel's gradient of a float64 table is wrong on a CPU (3.3.1): it clears the first half only, as many bytes as
    float32 would have, and adds to whatever lies in memory behind. There, ordinary embedding and a mask.
    """

    @wraps(kept)
    def ours(
        table: paddle.Tensor, index: paddle.Tensor, start_index: int = 0, *rest: Any, **named: Any
    ) -> Any:
        import paddle
        import paddle.nn.functional as F

        if table.dtype != paddle.float64:
            return kept(table, index, start_index, *rest, **named)
        local, size = index - start_index, table.shape[0]
        here = (local >= 0).logical_and(local < size).unsqueeze(-1)
        return F.embedding(local.clip(0, size - 1), table) * here.astype(table.dtype)

    return ours


def patches() -> Iterator[Patch]:
    mpu = "paddle.distributed.fleet.layers.mpu.mp_ops"
    yield Patch(
        owner=mpu, name="_c_lookup_table", value=lookup_in(look_up(mpu)._c_lookup_table),  # type: ignore[union-attr]
        symptom="in float64 the gradient of half the table is what lay in memory",
    )  # fmt: skip
    replaced: tuple[Callable[..., Any], ...] = (
        c_identity,
        mp_allreduce,
        c_concat,
        c_split,
        c_softmax_with_cross_entropy,
    )
    for ours in replaced:
        symptom = f"{ours.__name__} has no CPU kernel (NotFound / Unimplemented in forward or backward)"
        yield Patch(owner=mpu, name=f"_{ours.__name__}", value=ours, symptom=symptom)
        # 2.6 calls some of them by a second name.
        yield Patch(
            owner="paddle.distributed.collective",
            name=f"_{ours.__name__}",
            value=ours,
            symptom=symptom,
            missing="skip",
        )
