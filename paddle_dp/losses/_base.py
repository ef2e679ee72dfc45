"""The base of the losses: totals in float32 under every precision, and targets in the shape of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from paddle_dp.errors import LossError

if TYPE_CHECKING:
    import paddle

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(method: Callable[P, R]) -> Callable[P, R]:
    """Disables autocast around `method`, at almost no cost if it is disabled already.

    Casting only the outputs is not enough: at level O2 autocast would cast them back before the sum.
    """

    @wraps(method)
    def without_autocast(*arguments: P.args, **named: P.kwargs) -> R:
        import paddle

        is_enabled = getattr(paddle, "is_autocast_enabled", None)  # missing before Paddle 3.3: it may be on
        if is_enabled is not None and not is_enabled():
            return method(*arguments, **named)
        with paddle.amp.auto_cast(enable=False):
            return method(*arguments, **named)

    return without_autocast


def widened(numbers: paddle.Tensor) -> paddle.Tensor:
    """Converts `numbers` to float32, unless they are float64."""
    import paddle

    return numbers if numbers.dtype in (paddle.float32, paddle.float64) else numbers.astype("float32")


def single_tensor(outputs: Any, loss: str) -> paddle.Tensor:
    """Returns `outputs` if they are one tensor; else raises LossError with advice."""
    import paddle

    if isinstance(outputs, paddle.Tensor):
        return outputs
    count = f"{len(outputs)} outputs" if isinstance(outputs, Sized) else "outputs"
    raise LossError(
        f"the model returns a {type(outputs).__name__} of {count}, and {loss} takes one tensor. Return the scores "
        "alone from forward, or write a loss, which gets the result of forward: "
        "loss: {use: my_module.my_loss}."
    )


def paired(outputs: paddle.Tensor, targets: paddle.Tensor, loss: str) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Converts both to float32 and one shape. Raises LossError if the sizes differ; it never broadcasts [n, 1] and [n]
    to [n, n]."""
    outputs = single_tensor(outputs, loss)
    if isinstance(targets, dict | tuple | list):
        raise LossError(
            f"{loss} takes one array as targets, and these are a {type(targets).__name__}"
            + (": mix makes such of class numbers, for cross_entropy." if "share" in targets else ".")
        )
    if outputs.shape != targets.shape:
        if outputs.size != targets.size or outputs.shape[0] != targets.shape[0]:
            raise LossError(
                f"outputs {list(outputs.shape)} and targets {list(targets.shape)} differ in size: give targets the "
                "shape of the outputs"
            )
        targets = targets.reshape(outputs.shape)
    return widened(outputs), widened(targets)
