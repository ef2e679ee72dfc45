"""The exponential moving average of a model's weights, which often generalizes better than the weights themselves.

average = decay × average + (1 − decay) × weight, after every few updates, starting from the initial weights (Polyak and
Juditsky 1992; with a decay as in Tarvainen and Valpola, arXiv:1703.01780). A rank averages the parameters that it
updates; being elementwise, the averages equal one process's in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import paddle

from paddle_dp.core.placed_model import Placed
from paddle_dp.learner.learner import Learner
from paddle_dp.recipe import Ema
from paddle_dp.tensors import dtype_of

_WIDE = ("float32", "float64")


class Averages:
    """The averages of a learner's trained weights, in at least float32; buffers and frozen weights have none."""

    def __init__(self, learner: Learner, settings: Ema):
        self.learner, self.settings = learner, settings
        trained = [
            p for _, p in learner.placed.named_parameters(trainable=True) if learner.placed.is_updated(p)
        ]
        self._averages = {id(parameter): (parameter, _copy(parameter)) for parameter in trained}

    def update(self, step: int) -> None:
        """Called after update `step` (from 1): adds the weights to the averages, if due."""
        every = self.settings.every
        if not every.due_at_step(step):
            return
        number = step // every.count
        decay = self.settings.decay
        if self.settings.warmup:
            decay = min(decay, (1 + number) / (10 + number))
        with paddle.no_grad():
            for parameter, average in self._averages.values():
                average.scale_(decay)
                average.add_(parameter.astype(average.dtype) * (1 - decay))

    def begin(self) -> None:
        """Restarts from the current weights."""
        with paddle.no_grad():
            for parameter, average in self._averages.values():
                average.set_value(parameter.astype(average.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the averages replace the weights, which are restored to the same bits afterwards.
        Collective."""
        backups = [(parameter, parameter.clone()) for parameter, _ in self._averages.values()]
        try:
            with paddle.no_grad():
                for parameter, average in self._averages.values():
                    parameter.set_value(average.astype(parameter.dtype))
            self.learner.weights.share()
            yield
        finally:
            with paddle.no_grad():
                for parameter, weight in backups:
                    parameter.set_value(weight)
            self.learner.weights.share()

    def shards(self) -> Iterator[Placed]:
        """The shards of the averages that this rank saves, by the names of their weights in the whole model, as
        `PlacedModel.shards`."""
        at = self.learner.mesh.coords
        for name, parameter, average in self.named():
            # Saved under each of a tied weight's names, so the copy on another stage is not a replica.
            placement = replace(self.learner.placed.placements.placement_of(parameter), first_copy=True)
            if placement.is_main_replica(at):
                yield name, average, placement

    def named(self) -> Iterator[tuple[str, paddle.Tensor, paddle.Tensor]]:
        """This rank's averages: a name of the weight, the weight, and its average."""
        for name, tensor in self.learner.placed.state().items():
            if id(tensor) in self._averages:
                yield name, *self._averages[id(tensor)]


def _copy(parameter: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        wide = dtype_of(parameter) in _WIDE
        copy: paddle.Tensor = (parameter if wide else parameter.astype("float32")).clone()
        copy.stop_gradient = True
        return copy
