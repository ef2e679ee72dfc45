"""Handles parameters without a gradient on some ranks, such as experts that a gate did not choose for their samples.

On one process a parameter has a gradient if any sample uses it; otherwise the optimizer does not change it, not even by
momentum or decay. Therefore a gradient that only some ranks lack is zeros there, and one that all ranks lack stays
absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paddle_dp.mesh import Mesh

Named = Iterable[tuple[str, paddle.Tensor]]


class MissingGradients:
    """Exchanges which gradients exist: one small all-reduce per update. Only a rank that lacks a gradient reads the
    result from the device."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._index_of: dict[str, int] = {}  # index of each parameter's name in the all-reduced flags
        # On the host and on the device: copied only when they change, because the host waits for a copy.
        self._flags: tuple[np.ndarray[Any, Any], paddle.Tensor] | None = None

    @contextmanager
    def as_zeros(self, named: Named) -> Iterator[None]:
        """Within the block, each of these parameters has a gradient, zeros if need be; afterwards only parameters with
        a gradient on some rank keep it.

        `named`: this rank's parameters; a name means the same parameter, or a slice of it, on every rank. Collective.
        """
        named = list(named)
        if not self._index_of:
            rank_names = self._mesh.gather([name for name, _ in named])
            names = dict.fromkeys(name for names in rank_names for name in names)
            self._index_of = {name: index for index, name in enumerate(names)}
        flags = np.zeros(len(self._index_of), "int32")
        flags[[self._index_of[name] for name, p in named if p.grad is not None]] = 1
        if self._flags is None or not np.array_equal(flags, self._flags[0]):
            self._flags = flags, paddle.to_tensor(flags)
        sums = self._mesh.sum_tensor(self._flags[1].clone())
        absent = [(self._index_of[name], p) for name, p in named if p.grad is None]
        for _, parameter in absent:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
        yield
        if absent:
            ranks_with_gradient = sums.numpy()
            for index, parameter in absent:
                if not ranks_with_gradient[index] and parameter.grad is not None:
                    parameter.clear_gradient(False)
