"""Runs the micro-batches of a model in pipeline stages on one of fleet's engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
from paddle import nn

from paddle_dp.axes.pipeline.schedules import Engine
from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.buffers import copies
from paddle_dp.core.loss import Count, Loss
from paddle_dp.core.precision import NOTHING
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.learner.runner import BatchRunner, Sums
from paddle_dp.learner.timeline import PipelineRecorder
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.plan.pipeline_schedule import Work


class MicroBatchLoss:
    """The loss that fleet's last stage calls for each micro-batch: scales the total, and collects sums and counts."""

    def __init__(self, loss: Loss):
        self.loss = loss
        self.upcoming: Iterator[tuple[MicroBatch, Any]] = iter(())
        self.collect_metrics = False
        self.sums: list[Sums] = []
        self.counted: Count = 0

    def open(self, micro_batches: tuple[MicroBatch, ...], factors: list[Any], collect_metrics: bool) -> None:
        """Before a batch: sets its micro-batches, the factor of each one's total, and whether to collect sums."""
        self.upcoming = iter(zip(micro_batches, factors, strict=True))
        self.collect_metrics, self.sums = collect_metrics, []
        self.counted = 0

    def __call__(self, outputs: Any, _: Any) -> paddle.Tensor:
        micro_batch, factor = next(self.upcoming)
        # Fleet's are the same, but detached, and only a tensor or a tuple of them.
        targets = micro_batch.targets
        with self.loss.present(not micro_batch.is_dummy):
            total, count = self.loss(outputs, targets)
            sums = self.loss.sums(outputs, targets, total) if self.collect_metrics else {}
        self.counted = self.counted if micro_batch.is_dummy else self.counted + count
        if self.collect_metrics:
            self.sums.append({name: paddle.zeros([]) for name in sums} if micro_batch.is_dummy else sums)
        return total * factor


@contextmanager
def separate_buffers(layers: Sequence[tuple[str, nn.Layer]]) -> Iterator[None]:
    """Wraps a forward that computes with copies of the layers' buffers; afterwards the buffers have the copies' values.

    Backward reads the tensors that forward used, and other micro-batches run forward before it. A buffer that each
    forward writes in place (a moving scale) would have their values by then, and other gradients would result.
    """
    slots = [(layer._buffers, key) for _, layer in layers for key in layer._buffers]
    buffers = [table[key] for table, key in slots]
    forward_buffers = copies(buffers)
    for (table, key), copy in zip(slots, forward_buffers, strict=True):
        table[key] = copy
    try:
        yield
    finally:
        for (table, key), buffer, copy in zip(slots, buffers, forward_buffers, strict=True):
            if copy is not buffer and table[key] is copy:  # else forward has put another tensor there
                paddle.assign(copy, buffer)
                table[key] = buffer


@dataclass(kw_only=True)
class PipelineRunner(BatchRunner):
    """Runs micro-batches by fleet's pipeline schedules, which interleave forwards and backwards.

    `micro_batch_loss`: the loss that was built into the last stage.
    """

    micro_batch_loss: MicroBatchLoss

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder = PipelineRecorder(self.placed.mesh)
        self.micro_batch_loss.loss = self.loss

    def run(
        self, batch: Batch, divisor: float, exchange: GradientExchange, collect: bool, final: bool = True
    ) -> tuple[list[Sums], Count]:
        micro_batches = batch.micro_batches
        # Fleet divides each micro-batch's loss by their number; the factor undoes that.
        factors = [
            self._factor(micro_batch, divisor, exchange) * len(micro_batches) for micro_batch in micro_batches
        ]
        self.micro_batch_loss.open(micro_batches, factors, collect)
        assert self.recorder is not None
        self.recorder.begin()
        engine: Engine = self.parallel_model
        engine.around = partial(self._around, batch, exchange, final)
        with self.mixed.context():
            engine.learn([m.inputs for m in micro_batches], [m.targets for m in micro_batches])
        sums = self.micro_batch_loss.sums if collect and self.placed.mesh.is_loss_rank else []
        return sums, self.micro_batch_loss.counted

    @contextmanager
    def _around(self, batch: Batch, exchange: GradientExchange, final: bool, work: Work) -> Iterator[None]:
        """Around each forward and backward: times it, opens its dropout scope, and protects statistics from a dummy."""
        assert self.recorder is not None
        micro_batch, backward = batch.micro_batches[work.micro_batch], work.kind == "backward"
        last = final and work.micro_batch == len(batch.micro_batches) - 1
        drawing = NOTHING if backward else self.draws.around(batch, micro_batch, self.placed.named_layers)
        interleaves = len(batch.micro_batches) > 1
        heartbeat.enter(work.kind)
        with (
            self.recorder.span(work),
            NOTHING if backward or not interleaves else separate_buffers(self.placed.named_layers()),
            self.statistics.unchanged() if micro_batch.is_dummy else NOTHING,
            drawing,
            exchange.backward(last) if backward else NOTHING,
        ):
            yield
            self.weights.end_pass(backward)

    def predict(self, inputs: Any) -> Any:
        engine: Engine = self.parallel_model
        with self.weights.forward_only(), paddle.no_grad(), self.mixed.context():
            return engine.predict(inputs)

    def repeat_forward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[paddle.Tensor, Count]:
        """Through all stages; only the last one has a loss."""
        engine: Engine = self.parallel_model
        scope = self.draws.scope(batch, micro_batch)
        with self.weights.forward_only(), scope, self.mixed.context(), paddle.no_grad():
            outputs = engine.predict(micro_batch.inputs)
            if outputs is None:
                return paddle.zeros([]), 0
            with self.loss.present(not micro_batch.is_dummy):
                return self.loss(outputs, micro_batch.targets)
