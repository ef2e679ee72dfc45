"""Measures speed: samples and tokens per second, the share of time spent waiting for data, bytes sent, peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.transport import traffic

if TYPE_CHECKING:
    from paddle_dp.data import Batch


class Meter:
    """Counts samples, steps, waiting and sent bytes of this rank between two readings, at the cost of some additions
    per step. `sends`: all sent bytes are counted (`mesh/transport.py`), so readings include them."""

    def __init__(self, mesh: Mesh, sends: bool = False):
        self.mesh, self._sends = mesh, sends
        self._reset()

    def _reset(self) -> None:
        self._sent = traffic.sent
        self.began, self.samples, self.waited, self.steps = time.perf_counter(), 0, 0.0, 0

    def add(self, samples: int, waited: float) -> None:
        """Counts one update from a global batch of `samples`, for which this rank waited `waited` seconds."""
        self.samples, self.waited, self.steps = self.samples + samples, self.waited + waited, self.steps + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time and bytes of work that is not training, such as evaluating and saving."""
        start, sent = time.perf_counter(), traffic.sent
        try:
            yield
        finally:
            self.began += time.perf_counter() - start
            self._sent += traffic.sent - sent

    def read(self, batch: Batch | None = None) -> dict[str, float]:
        """Returns the speed since the last reading, in tokens, too, if `batch` holds token ids, and begins anew.
        `memory`: peak bytes; `sent`: bytes per step that this rank has sent."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        numbers = {
            "samples_per_second": self.samples / seconds,
            "seconds_per_step": seconds / max(self.steps, 1),
            "waiting": min(self.waited / seconds, 1.0),
            "memory": float(peak_memory(self.mesh.device)),
        }
        if batch is not None and (length := tokens(batch)):
            numbers["tokens_per_second"] = numbers["samples_per_second"] * length
        if self._sends:
            numbers["sent"] = (traffic.sent - self._sent) / max(self.steps, 1)
        self._reset()
        return numbers


def reader_averages(rows: Sequence[Mapping[str, float]], readers: Sequence[int]) -> dict[str, float]:
    """The numbers that rank 0 shows if it reads no samples, from the `read` of each rank: its speed, the waiting and
    tokens of the `readers`, the ranks that do, and the most memory of a rank."""
    numbers = {**rows[0], "waiting": sum(rows[rank]["waiting"] for rank in readers) / len(readers)}
    numbers["memory"] = max(row["memory"] for row in rows)
    lengths = [rows[rank]["tokens_per_second"] for rank in readers if "tokens_per_second" in rows[rank]]
    return {**numbers, "tokens_per_second": max(lengths)} if lengths else numbers


def tokens(batch: Batch) -> int:
    """Tokens per sample, padding included; 0 unless inputs, or their "tokens", are integers [n, length], and on a rank
    without samples."""
    if not batch.micro_batches:
        return 0
    inputs = batch.micro_batches[0].inputs
    if isinstance(inputs, dict):
        inputs = inputs.get("tokens", ())
    if isinstance(inputs, (dict, tuple)):
        return 0
    return inputs.shape[1] if len(inputs.shape) == 2 and "int" in str(inputs.dtype) else 0


def peak_memory(device: str) -> int:
    """Peak bytes: allocated on the device, or resident in this process on the CPU."""
    if device != "cpu":
        import paddle

        return int(paddle.device.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
