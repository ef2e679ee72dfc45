"""The curves of every rank for the dashboard: its memory, and its time in exchanges."""

from __future__ import annotations

import time

from paddle_dp.mesh import Mesh
from paddle_dp.train.meter import peak_memory

FEW = 16  # ranks with a memory curve each; with more, the largest and the smallest are shown


class RankCurves:
    """Gathers one row of numbers from each rank. Create and read it on every rank.

    `exchange` times every exchange over the CPU bridge from now on. Without the bridge there are no times: on a GPU an
    exchange overlaps with computation, and paddle.DataParallel exchanges inside backward.
    """

    def __init__(self, mesh: Mesh, exchange: bool):
        from paddle_dp.gloo import stopwatch  # imports paddle, which reading a recipe must not

        self.mesh = mesh
        self._watch = stopwatch.start(mesh.axes) if exchange and mesh.ranks > 1 else None
        self._axes = stopwatch.axes_timed(mesh.axes) if self._watch else []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Restarts the measured interval, after evaluating or saving."""
        self._began = time.perf_counter()
        if self._watch:
            self._watch.read()

    def read(self) -> dict[str, float]:
        """The curves of all ranks since the last reading; restarts the interval. Collective."""
        if self.mesh.ranks == 1:
            return {}
        seconds = time.perf_counter() - self._began
        spent = self._watch.read() if self._watch else {}
        local = [
            peak_memory(self.mesh.device) / 2**20,
            *(spent.get(axis, 0.0) / seconds for axis in self._axes),
        ]
        rows = _gathered(self.mesh, local)
        self.begin()
        shares = {
            f"exchange/{axis}": sum(row[1 + n] for row in rows) / len(rows)
            for n, axis in enumerate(self._axes)
        }
        return memories([row[0] for row in rows]) | shares


def memories(megabytes: list[float]) -> dict[str, float]:
    """A curve for each rank, or for many ranks the largest and the smallest."""
    if len(megabytes) > FEW:
        return {"memory_megabytes/largest": max(megabytes), "memory_megabytes/smallest": min(megabytes)}
    return {f"memory_megabytes/rank {rank}": size for rank, size in enumerate(megabytes)}


def _gathered(mesh: Mesh, numbers: list[float]) -> list[list[float]]:
    import paddle

    return [row.tolist() for row in mesh.gather_tensor(paddle.to_tensor(numbers, dtype="float64"))]
