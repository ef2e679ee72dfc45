"""A device of so many FLOP/s: each linear layer takes as long as its products would take there, and no core meanwhile.

So several ranks compute side by side on a machine with fewer cores, and as evenly as a device does. The products are
computed all the same. A nap follows the layer's kernel, which runs when its stream comes to it, as each kernel of the
simulated accelerator does: what the stream waits for, an exchange, the nap waits for, too.

SLOW_DEVICE: the FLOP/s. As an entry point: `tools.benchmark.slow_device:train`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

VARIABLE = "SLOW_DEVICE"


class Nap(PyLayer):
    """Sleeps in forward, and twice as long in backward: two products for each of forward."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, seconds: float) -> paddle.Tensor:
        ctx.seconds = seconds
        made = x.clone()
        time.sleep(seconds)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        made = gradient.clone()  # a kernel: it comes after all that its stream waits for
        time.sleep(2 * ctx.seconds)
        return made


def install() -> None:
    """From now on F.linear takes its time, if SLOW_DEVICE says so; before any model is built."""
    speed = float(os.environ.get(VARIABLE, "0"))
    if not speed:
        return
    plain = F.linear

    def linear(
        x: paddle.Tensor, weight: paddle.Tensor, bias: Any = None, name: str | None = None
    ) -> paddle.Tensor:
        rows = x.size // x.shape[-1]
        return Nap.apply(plain(x, weight, bias, name), 2 * rows * weight.size / speed)

    F.linear = linear


def train(recipe: Any, options: dict[str, Any]) -> None:
    """The entry point `train`, on that device; on an accelerator without measurements of steps: while one runs, phases
    wait for the device, and nothing overlaps."""
    from paddle_dp.assembly.entry_points import train as train_plainly
    from paddle_dp.train.measurements import Measurements

    install()
    if recipe.train.device != "cpu":
        Measurements.plan = lambda *_: None  # type: ignore[method-assign]
    train_plainly(recipe, options)
