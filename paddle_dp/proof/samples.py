"""The samples that a proof's side reads: some of the recipe's, in unequal shares, with a record of who read which."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_dp.assembly.assemble import Split, TrainerSpec
from paddle_dp.assembly.build import dataset
from paddle_dp.data import Sampler
from paddle_dp.data.scatter import Elsewhere, is_in_order
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Recipe
from paddle_dp.train.callback import Progress


@dataclass(frozen=True)
class RecordedSubset:
    """Some samples of a data set, as a data set; `read`: the numbers of the samples that this rank read. `scattered`:
    rank 0 reads for all ranks, so `read` has the samples that it sent to this one (`delivered`)."""

    dataset: Any
    indices: np.ndarray
    scattered: bool = False
    read: list[int] = field(default_factory=list)

    def delivered(self, split: str, indices: np.ndarray) -> None:
        """Notes the samples that arrived on this rank."""
        self.read.extend(int(self.indices[i]) for i in indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> Any:
        number = int(self.indices[i])
        if not self.scattered:
            self.read.append(number)
        return self.dataset[number]


def first_samples(
    recipe: Recipe, steps: int, ranks: int, mesh: Mesh, after: Progress | None = None
) -> RecordedSubset:
    """The samples of the recipe's first `steps` full global batches, over several epochs if needed (one of a stream).

    The last batch is cut so that ranks get unequal shares. `after`: only batches after this progress. Collective.
    """
    data, scattered = _opened(recipe, "train", mesh)
    shuffle = not is_in_order(data)  # a stream keeps its order, as in training
    sampler = Sampler.for_dataset(data, recipe.train.batch, seed=recipe.train.seed, shuffle=shuffle)
    epoch, begun = (after.epoch, after.batch) if after is not None else (0, 0)
    full = sampler.samples // sampler.batch or 1
    epochs = itertools.count(epoch) if shuffle else range(epoch, epoch + 1)
    positions = ((number, k) for number in epochs for k in range(begun if number == epoch else 0, full))
    batches = [sampler.global_batch(*position) for position in itertools.islice(positions, steps)]
    if not batches:
        raise UsageError(f"the stream ends after {full} global batches: nothing is left to compare.")
    batches[-1] = batches[-1][: short(len(batches[-1]), ranks)]
    return RecordedSubset(data, np.concatenate(batches), scattered)


def evaluated_samples(recipe: Recipe, ranks: int, mesh: Mesh) -> RecordedSubset | None:
    """The first held-out samples: fewer than a global batch or, where that is less than two samples for each of the
    `ranks`, some batches. Ranks get unequal shares. None without held-out data. Collective."""
    data, scattered = _opened(recipe, "test", mesh)
    if data is None:
        return None
    samples = max(short(recipe.train.batch, ranks), 2 * ranks + 1)
    return RecordedSubset(data, np.arange(min(len(data), samples)), scattered)


def spread(dataset: Any, samples: int) -> np.ndarray:
    """Indices [samples] at equal distances, or all: a folder may be sorted by class. Of a stream, the first ones."""
    indices = np.arange(min(samples, len(dataset)))
    return indices if is_in_order(dataset) else indices * len(dataset) // len(indices)


def _opened(recipe: Recipe, split: Split, mesh: Mesh) -> tuple[Any, bool]:
    """A split's data set, or a stand-in on a rank that does not read; and whether rank 0 reads for all. Collective."""
    scattered = recipe.dataset.reading == "scatter" and mesh.ranks > 1
    data: Any = dataset(recipe, split) if mesh.is_main or not scattered else None
    return (Elsewhere.for_rank(data, mesh) if scattered else data), scattered


def short(batch: int, ranks: int) -> int:
    """The largest size below `batch` that is no multiple of `ranks`, so that some rank gets more than another."""
    return next((size for size in range(batch - 1, 0, -1) if size % ranks), max(batch - 1, 1))


def reads_global_batches(setup: TrainerSpec, mesh: Mesh) -> bool:
    """Whether every rank reads whole global batches, as a collate function of batches needs."""
    return setup.loader.collate == "batch" and not (setup.scatters and mesh.ranks > 1)


def take_first(read: list[int], rows: int) -> list[int]:
    """Removes and returns the first `rows` sample numbers: on an accelerator the loader has read more."""
    first = read[:rows]
    del read[:rows]
    return first
