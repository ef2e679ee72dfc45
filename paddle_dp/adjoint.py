"""A function of one tensor and its adjoint as one operation of autograd, such as two collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer

Function = Callable[[paddle.Tensor], paddle.Tensor]


class WithAdjoint(PyLayer):
    """Applies `function` to a tensor in forward, and `adjoint` to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, function: Function, adjoint: Function) -> paddle.Tensor:
        ctx.adjoint = adjoint
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return ctx.adjoint(gradient)
