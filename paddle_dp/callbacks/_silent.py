"""The other ranks' side of a callback that only the first rank shows or writes."""

from __future__ import annotations

from paddle_dp.train import Callback, Moment
from paddle_dp.units import Every


class Silent(Callback):
    """Shows nothing, and is due when its speaking twin is: the numbers of a step are an exchange of all ranks."""

    def __init__(self, every: Every):
        self.every = every

    def step(self, moment: Moment) -> None:
        """Nothing to do, but overridden: the trainer asks for numbers only where somebody has a `step`."""
