"""The rehearsal beside ranks that round their gradients: one process makes its updates with theirs.

So it begins each step with the ranks' weights, and its own gradients may be apart from theirs by the noise of one
process and what the ranks' rounding can have taken (parallel.exchange.roundings), no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import TensorShard
from paddle_dp.parallel import Learner
from paddle_dp.proof.record import Recorder
from paddle_dp.proof.replay import give
from paddle_dp.proof.trace_files import Key, Trace, Writer, key

NAME = "rehearsal"  # of the trace
Rows = list[dict[str, Any]]


@contextmanager
def recorded(learner: Learner, folder: Path) -> Iterator[Recorder]:
    """Within it the gradients of the updates that the recorder watches are written to the folder. Collective."""
    with Writer(folder, NAME, learner.mesh.rank) as sheet:
        recorder = Recorder(learner, sheet.put, updates=False)
        yield recorder
        sheet.finish({"rounded": recorder.rounded})


class Followed:
    """`many`: the gradients of the ranks. The first run is the one that the others, with noise, are compared with."""

    def __init__(self, many: Trace):
        self.many = many
        self._own: dict[str, np.ndarray] = {}  # the first run's gradients, by key
        self._squares: defaultdict[int, float] = defaultdict(float)  # of this run's distances, by step
        self._first = True

    def recorder(self, learner: Learner) -> Recorder:
        """Of a run: updates that it watches are made with the ranks' gradients."""
        return Recorder(learner, self._put, updates=False, given=lambda step: give(learner, step, self.many))

    def _put(self, number: str, shard: TensorShard) -> None:
        own = shard.array.astype("float64")
        if self._first:
            self._own[number] = shard.array
            other = self.many.array(number) if number in self.many.keys else np.zeros(own.shape)
        else:
            other = self._own[number]
        square = np.square(own - other).sum() if own.shape == other.shape else np.inf
        self._squares[Key.read(number).step] += float(square)

    def tell(self, rows: Rows) -> None:
        """At the end of a run: adds to its rows how far its gradients are `apart`: from the ranks' in the first run,
        from the first run's in those with noise; to the first run's also what may be `rounded`. 2-norms of the model's.
        """
        if self._first:
            for number in self.many.keys - self._own.keys():
                self._squares[Key.read(number).step] += float(np.square(self.many.array(number)).sum())
        for row in rows:
            row["apart"] = self._squares[row["step"]] ** 0.5
            if self._first:
                row["rounded"] = self.many.rounded(key("gradient norm", row["step"], ""))
        self._squares.clear()
        self._first = False
