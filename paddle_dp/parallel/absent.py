"""Gradients that this rank's samples did not give, where those of another rank may have: experts that a gate left out.

One process sees the samples of all ranks. A parameter that any of them uses has their gradient there; one that none of
them uses has none, and the optimizer leaves it as it is: no momentum moves it, no decay. So what one rank lacks counts
as zeros, and what all lack stays absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import paddle

from paddle_dp.mesh import Mesh

Named = Iterable[tuple[str, paddle.Tensor]]


class AbsentGradients:
    """What ranks tell each other about gradients: one small all-reduce an update, which only a rank that lacks one
    reads from the device."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._places: dict[str, int] = {}  # of each parameter's name in what is all-reduced

    @contextmanager
    def as_zeros(self, named: Named) -> Iterator[None]:
        """Inside, each of these parameters has a gradient to exchange; behind it, those do that any rank had one for.

        A name means the same parameter, or a slice of it, on every rank; a rank names those that it has. Collective.
        """
        named = list(named)
        if not self._places:
            told = self._mesh.gather([name for name, _ in named])
            names = dict.fromkeys(name for names in told for name in names)
            self._places = {name: place for place, name in enumerate(names)}
        flags = np.zeros(len(self._places), "int32")
        flags[[self._places[name] for name, p in named if p.grad is not None]] = 1
        here = self._mesh.sum_tensor(paddle.to_tensor(flags))
        absent = [(self._places[name], p) for name, p in named if p.grad is None]
        for _, parameter in absent:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
        yield
        if absent:
            ranks = here.numpy()
            for place, parameter in absent:
                if not ranks[place] and parameter.grad is not None:
                    parameter.clear_gradient(False)
