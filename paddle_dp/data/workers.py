"""Reading ahead in worker processes: the same batches in the same order, only sooner.

`prefetch` batches are under way while one is in use. The workers are forked at the first read and live from epoch to
epoch; a read that fails, or is left before its end, ends them, and the next read forks new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from paddle_dp.data.crew import Crew
from paddle_dp.data.sample import Dataset
from paddle_dp.data.sampler import Indices, Share
from paddle_dp.data.source import Filled


class Workers:
    """A source of batches that `workers` processes read ahead; see Loader for the settings."""

    def __init__(self, dataset: Dataset, share: Share, workers: int, prefetch: int, timeout: float):
        self.dataset, self.share = dataset, share
        self.workers, self.prefetch, self.timeout = workers, prefetch, timeout
        self._crew: Crew | None = None

    def read(self, epoch: int, start: int) -> Iterator[list[Filled]]:
        """The micro-batches of each global batch from `start` on; views that hold until the next batch is asked for."""
        if start == self.share.batches:
            return
        crew = self._idle_crew(epoch, int(self.share.reads(epoch, start)[0][0][0]))
        batches = iter(range(start, self.share.batches))
        begun: deque[list[tuple[Indices, int]]] = deque()

        def begin() -> None:
            if (k := next(batches, None)) is not None:
                begun.append(self.share.reads(epoch, k))
                crew.begin(epoch, np.concatenate([indices for indices, _ in begun[-1]]))

        try:
            for _ in range(self.prefetch):
                begin()
            while begun:
                inputs, targets = crew.finish()
                micro_batches, row = [], 0
                for indices, count in begun.popleft():
                    rows = slice(row, row := row + len(indices))
                    micro_batches.append((inputs[rows], targets[rows], count))
                begin()
                yield micro_batches
        finally:
            if crew.busy:
                crew.end()

    def _idle_crew(self, epoch: int, index: int) -> Crew:
        """The crew, made now if there is none at rest; `index` is a sample that it will read."""
        if self._crew is None or self._crew.busy or self._crew.ended:
            self.close()
            self._crew = Crew(self.dataset, self.share.seed, self.timeout)
            self._crew.start(self.workers, self.share.rows, self.prefetch + 1, sample=(epoch, index))
        return self._crew

    def close(self) -> None:
        """End the workers; the next read forks new ones."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None
