"""What the tests of checkpoints share: a mesh of threads, and snapshots that are quick to make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from paddle_dp.checkpoint import Snapshot, TensorShard


class ThreadMesh:
    """Ranks that are threads of one process: the collectives that a checkpoint needs."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, values: list[Any]):
        self.rank, self.ranks, self.is_main = rank, ranks, rank == 0
        self.lost: set[int] = set()
        self._barrier, self._values = barrier, values

    def wait(self, name: str) -> None:
        self._barrier.wait()

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return self.gather(content)

    def waiting(self, activity: str) -> nullcontext[None]:
        return nullcontext()


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Any], Any]], list[Any]]:
    """`on_ranks(2, work)`: what `work(mesh)` returned on each rank, or the exception it raised there."""

    def run(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
        barrier, values = threading.Barrier(ranks, timeout=20), [None] * ranks

        def one(rank: int) -> Any:
            try:
                return work(ThreadMesh(rank, ranks, barrier, values))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        with ThreadPoolExecutor(ranks) as threads:
            return list(threads.map(one, range(ranks)))

    return run


@pytest.fixture
def snapshot_of() -> Callable[..., Snapshot]:
    """`snapshot_of(step, rank=0, ranks=1)`: `model/w` cut in rows among the ranks, `model/b` on the first alone."""

    def make(step: int, rank: int = 0, ranks: int = 1) -> Snapshot:
        whole = np.arange(24, dtype=np.float32).reshape(6, 4) + step
        first, last = rank * 6 // ranks, (rank + 1) * 6 // ranks
        tensors = {"w": TensorShard("model/w", (6, 4), (first, 0), whole[first:last])}
        if rank == 0:
            tensors["b"] = TensorShard.full("model/b", np.full(4, step, np.int64))
        return Snapshot(tensors=tensors, state={"progress": {"step": step}}, rank_state={"rank": rank})

    return make
