"""Finds tensors with NaN or infinity, with one read from the device for all of them together."""

from __future__ import annotations

from collections.abc import Iterable

import paddle

from paddle_dp.parallel import gradients

Named = Iterable[tuple[str, paddle.Tensor]]


def not_finite(named: Named) -> dict[str, str]:
    """The tensors that hold NaN or infinity, in the order given: {"fc1.weight": "256 NaN of 8192"}.

    One number per floating-point tensor, the sum of its squares, is computed, and all are read from the device at once;
    only a tensor whose sum is not finite (it may have overflowed) is examined element by element.
    """
    with paddle.no_grad():
        floating = [(name, tensor.detach()) for name, tensor in named if _has_floats(tensor)]
        if not floating:
            return {}
        sums = [gradients.sum_of_squares(tensor).astype("float32").reshape([]) for _, tensor in floating]
        finite = paddle.isfinite(paddle.stack(sums)).tolist()
        counts = {
            name: _count(tensor)
            for (name, tensor), is_finite in zip(floating, finite, strict=True)
            if not is_finite
        }
        return {name: count for name, count in counts.items() if count}


def _has_floats(tensor: paddle.Tensor) -> bool:
    return bool(tensor.size) and tensor.is_floating_point()


def _count(tensor: paddle.Tensor) -> str:
    """«3 NaN of 100», «1 inf of 100», «2 NaN, 1 inf of 100»; "" for a tensor of which only the squares overflow."""
    nan, infinite = (int(test(tensor).sum().item()) for test in (paddle.isnan, paddle.isinf))
    kinds = ", ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (infinite, "inf")) if count)
    return f"{kinds} of {tensor.size}" if kinds else ""
