"""Runs the script on one process with the joined batches of N ranks, for the gradient that N ranks should have had.

At each recorded update it loads the weights, gives the script the batches of all ranks as one, saves the gradient that
reaches the optimizer, and skips the update. Model, loss, clipping and accumulation are the script's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader

from paddle_dp.audit.events import PassBegan
from paddle_dp.audit.hooks import arrays
from paddle_dp.audit.hooks.data import Loaders
from paddle_dp.audit.hooks.source_line import here
from paddle_dp.audit.hooks.updates import gradient_of
from paddle_dp.audit.hooks.watch import ScriptMonitor


class JoinError(ValueError):
    """Batches of several ranks that cannot be joined: their shapes differ beyond the number of samples."""


@dataclass(frozen=True)
class RepeatedUpdate:
    """One update to repeat; `names`: each rank's files, `sizes`: each rank's number of samples in each batch."""

    step: int
    names: Sequence[str]
    sizes: Sequence[Sequence[int]]

    def batches(self, folder: Path) -> list[Any]:
        """The batches of the update, each joined over all ranks. Raises JoinError."""
        ranks = [arrays.read_batches(folder, f"{name}.batches") for name in self.names]
        return [
            join([rank[number] for rank in ranks], [sizes[number] for sizes in self.sizes])
            for number in range(len(ranks[0]))
        ]

    def weights(self, folder: Path) -> dict[str, np.ndarray]:
        with np.load(folder / f"{self.names[0]}.whole.npz", allow_pickle=False) as file:
            return dict(file)


def join(batches: Sequence[tuple[arrays.Structure, list[np.ndarray]]], sizes: Sequence[int]) -> Any:
    """One batch of several: arrays with one row per sample are concatenated, others must be equal."""
    structure = batches[0][0]
    if any(another != structure for another, _ in batches):
        raise JoinError("the batches of the ranks have different structures")
    joined = []
    for leaves in zip(*(leaves for _, leaves in batches), strict=True):
        are_rows = all(leaf.ndim and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True))
        if are_rows and len({leaf.shape[1:] for leaf in leaves}) == 1:
            joined.append(np.concatenate(leaves))
        elif all(np.array_equal(leaf, leaves[0]) for leaf in leaves):
            joined.append(leaves[0])
        else:
            raise JoinError(
                f"shapes {', '.join(str(leaf.shape) for leaf in leaves)} cannot be joined to one batch"
            )
    return arrays.unflatten(structure, joined)


class Replay:
    """The iterator that gives the script joined batches in place of its training loader's, update by update, and saves
    the gradients."""

    def __init__(self, watch: ScriptMonitor, source: Path, loader: int, updates: Sequence[RepeatedUpdate]):
        self.watch, self.source, self.loader = watch, source, loader
        self.updates, self.position = list(updates), 0
        self.batches: list[Any] = []
        self.loaded = False

    def install(self, loaders: Loaders) -> None:
        original_iter = DataLoader.__iter__
        replay = self

        def iterate(loader: DataLoader) -> Any:
            number = loaders.numbers.get(loader)
            if number != replay.loader:
                return original_iter(loader)
            replay.watch.journal.write(PassBegan(
                loader=number, number=1, batches=None, drew=(), managed=False, where=here()
            ))  # fmt: skip
            return replay

        DataLoader.__iter__ = iterate
        DataLoader.__call__ = iterate

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        """Returns the next joined batch; before an update's first batch, loads its weights."""
        self.watch.check()
        if not self.loaded:
            self._load()
        if not self.batches:
            self.batches = self.updates[self.position].batches(self.source)
        return self.batches.pop(0)

    def _load(self) -> None:
        weights, live = self.updates[self.position].weights(self.source), arrays.live_parameters()
        missing = [name for name in weights if name not in live or live[name].size != weights[name].size]
        if missing:
            raise JoinError(f"the model on one process has no parameter {missing[0]} of that size")
        for name, value in weights.items():
            tensor = paddle.to_tensor(value.reshape(live[name].shape))
            live[name].set_value(tensor.astype(live[name].dtype))
        self.loaded = True

    def on_step(self, parameters: list[Any]) -> None:
        """Saves the gradients of this update instead of doing it, and goes on to the next one."""
        if self.batches or not self.loaded:
            raise JoinError(
                "on one process an update comes after another number of batches than on the ranks"
            )
        every = arrays.stride(parameters)
        final = {each.name: gradient_of(each) for each in parameters}
        saved = {n: arrays.numbers(g, every) for n, g in final.items() if g is not None and g.is_dense()}
        path = self.watch.folder / f"replay.step-{self.updates[self.position].step}.npz"
        np.savez(path, **saved)  # type: ignore[arg-type]
        for each in parameters:
            each.clear_gradient(False)
        self.position, self.loaded = self.position + 1, False
        if self.position == len(self.updates):
            self.watch.stop()
