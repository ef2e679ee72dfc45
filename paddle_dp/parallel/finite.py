"""Is every number a number? One reduction on the device for all tensors together, and names when the answer is no."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddle_dp.parallel import gradients

Named = Iterable[tuple[str, paddle.Tensor]]


def not_finite(named: Named) -> dict[str, str]:
    """The tensors that hold NaN or infinity, in the order given: {"fc1.weight": "256 NaN of 8192"}. Empty: all is well.

    Integers and bools always are. One number for each tensor, the sum of its squares, is read from the device at once;
    only a tensor whose sum is not finite (it may have overflowed) is looked at number by number.
    """
    with paddle.no_grad():
        floating = [(name, tensor.detach()) for name, tensor in named if _has_floats(tensor)]
        if not floating:
            return {}
        sums = [gradients.sum_of_squares(tensor).astype("float32").reshape([]) for _, tensor in floating]
        suspects = paddle.isfinite(paddle.stack(sums)).tolist()
        told = (
            (name, _count(tensor))
            for (name, tensor), sound in zip(floating, suspects, strict=True)
            if not sound
        )
        return {name: count for name, count in told if count}


def _has_floats(tensor: paddle.Tensor) -> bool:
    return bool(tensor.size) and tensor.is_floating_point()


def _count(tensor: paddle.Tensor) -> str:
    """«3 NaN of 100», «1 inf of 100», «2 NaN, 1 inf of 100»; nothing for a tensor whose squares overflow only."""
    nan, infinite = (int(found(tensor).sum().item()) for found in (paddle.isnan, paddle.isinf))
    kinds = ", ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (infinite, "inf")) if count)
    return f"{kinds} of {tensor.size}" if kinds else ""
