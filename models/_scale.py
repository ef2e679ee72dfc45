"""A norm's factors, multiplied the fast way on CPUs."""

from __future__ import annotations

import paddle

ELEMENTS = 1 << 14  # size of x from which two more operations cost less than the loop


def scaled(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """x [..., width] times weight [width], bit for bit.

    On CPUs Paddle sums the gradient of a broadcast factor in a slow loop: two thirds of an RMSNorm. If a product with
    ones broadcasts the factor, its gradient is a product, too: the same sum in another order. A traced program
    (paddle.jit, ONNX) keeps the plain product.
    """
    learns = paddle.is_grad_enabled() and not weight.stop_gradient
    if not paddle.in_dynamic_mode() or not learns or not x.place.is_cpu_place() or x.size < ELEMENTS:
        return x * weight
    if x.dtype != weight.dtype or x.dtype not in (paddle.float32, paddle.float64):
        return x * weight
    ones = paddle.ones([x.size // x.shape[-1], 1], x.dtype)
    return x * paddle.matmul(ones, weight.unsqueeze(0)).reshape(x.shape)
