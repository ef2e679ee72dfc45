"""Refuses derivatives in a forward without gradients, such as an evaluation's: Paddle has no graph there, and gives an
error about one (`paddle.grad`) or zeros (`paddle.autograd.jacobian`, `hessian`)."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from paddle_dp.errors import UsageError
from paddle_dp.identity.user_frames import location, user_frames


class DerivativeError(UsageError):
    """A forward without gradients differentiates tensors that have no graph."""


@contextmanager
def derivatives_need_gradients() -> Iterator[None]:
    """Wraps forwards without gradients. Raises DerivativeError for a derivative of outputs that were computed without
    them; a forward may enable them for a part of itself."""
    eager = paddle.base.core.eager
    original = eager.run_partial_grad

    def run_partial_grad(outputs: Any, *more: Any) -> Any:
        if not paddle.is_grad_enabled() and all(output.stop_gradient for output in outputs):
            raise DerivativeError(
                f"{_user_line()} computes a derivative, and an evaluation computes no gradients: Paddle would have no "
                "graph to differentiate, or give zeros. Put what is differentiated, and its derivatives, inside "
                "`with paddle.enable_grad():` (docs/metrics.md)."
            )
        return original(outputs, *more)

    eager.run_partial_grad = run_partial_grad
    try:
        yield
    finally:
        eager.run_partial_grad = original


def _user_line() -> str:
    """ "pinn.py, line 12, in forward: `ux = paddle.grad(u, x)`": the innermost running line of a user's code."""
    stack = [*traceback.walk_stack(sys._getframe(2))]
    line, text = location(*next(user_frames(stack), stack[-1]))
    return f"{line}: `{text}`"
