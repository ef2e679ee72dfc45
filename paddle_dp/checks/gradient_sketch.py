"""Sketches of gradients: a few numbers, linear in the gradient, that compare sums without keeping gradients."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import paddle

Named = Iterable[tuple[str, paddle.Tensor]]
Sketches = dict[str, np.ndarray]
"""By parameter [3], in float64: two projections of its gradient, and its 2-norm, which is not additive."""

_FREQUENCIES = (0.7548776662466927, 0.5698402909980532)  # of two incommensurable waves along the elements


@paddle.no_grad()
def sketches(named: Named) -> Sketches:
    """The sketches of all parameters that have a gradient on this rank."""
    return {name: _sketch(p.grad) for name, p in named if p.grad is not None}


def _sketch(gradient: paddle.Tensor) -> np.ndarray:
    wide = gradient if gradient.dtype in (paddle.float32, paddle.float64) else gradient.astype("float32")
    flat = wide.reshape([-1])
    at = paddle.arange(1, flat.size + 1, dtype="float64")
    waves = [(at * (2 * np.pi * f)).sin().astype(flat.dtype) * 2**0.5 for f in _FREQUENCIES]
    return np.array([*((flat * wave).sum().item() for wave in waves), flat.square().sum().sqrt().item()])


def farthest(
    full: Sketches, noisy: Sketches, chunks: Iterable[Sketches], close: float, slight: float
) -> tuple[str, float] | None:
    """The parameter with the gradient farthest from the sum of its gradients in `chunks`, and the relative distance.

    None if no distance exceeds all of: 8 × the distance in a run with noise (`noisy`), `close` × the gradient, and
    `slight` × the largest gradient.
    """
    chunks = list(chunks)
    sizes = {
        name: max(row[2], sum(chunk[name][2] for chunk in chunks if name in chunk))
        for name, row in full.items()
    }
    largest, farthest_parameter = max(sizes.values(), default=0.0), None
    for name, row in full.items():
        added = sum((chunk[name][:2] for chunk in chunks if name in chunk), np.zeros(2))
        difference = float(np.abs(row[:2] - added).max())
        noise = float(np.abs(row[:2] - noisy[name][:2]).max()) if name in noisy else 0.0
        if not difference > max(8 * noise, close * sizes[name], slight * largest):
            continue  # other checks report NaN
        if farthest_parameter is None or difference / sizes[name] > farthest_parameter[1]:
            farthest_parameter = name, difference / sizes[name]
    return farthest_parameter
