"""What is asked of gradients once they have met: how long they are, and whether they are finite."""

from __future__ import annotations

from collections.abc import Iterable

import paddle


def global_norm(parameters: Iterable[paddle.Tensor]) -> paddle.Tensor:
    """The 2-norm over all gradients together, a 0-d float32 tensor on the device (0 when there are none)."""
    norms = [paddle.linalg.norm(p.grad.astype("float32")) for p in parameters if p.grad is not None]
    return paddle.linalg.norm(paddle.stack(norms)) if norms else paddle.zeros([])


def scale(parameters: Iterable[paddle.Tensor], factor: float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    with paddle.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.scale_(factor)
