"""The learner of a model in pipeline stages, which runs batches on one of fleet's engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.hybrid import HybridLearner
from paddle_dp.parallel.loss import Count, Loss
from paddle_dp.parallel.passes import Sums
from paddle_dp.parallel.pipeline.schedules import Engine
from paddle_dp.parallel.pipeline.stages import LocalStages
from paddle_dp.parallel.pipeline.timeline import PipelineRecorder
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


@dataclass(kw_only=True)
class PipelineLearner(HybridLearner):
    """A learner whose micro-batches run by fleet's pipeline schedules, which interleave forwards and backwards."""

    micro_batch_loss: MicroBatchLoss
    local_stages: LocalStages
    names: list[str] = field(default_factory=list)  # of the sums, which only the last stage knows at first
    batch: Batch | None = None  # the current one
    recorder: PipelineRecorder = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder = PipelineRecorder(self.mesh)

    def _compare_across(self) -> None:
        super()._compare_across()
        self.micro_batch_loss.loss = self.loss

    def _forward_backward(
        self, batch: Batch, divisor: float, collect_metrics: bool
    ) -> tuple[list[Sums], Count]:
        self.batch, micro_batches = batch, batch.micro_batches
        # Fleet divides each micro-batch's loss by their number; the factor undoes that.
        self.micro_batch_loss.open(
            micro_batches,
            [self._factor(micro_batch, divisor) * len(micro_batches) for micro_batch in micro_batches],
            collect_metrics,
        )
        self.recorder.begin()
        engine: Engine = self.parallel_model
        engine.around = self._around
        with self.mixed.context():
            engine.learn([m.inputs for m in micro_batches], [m.targets for m in micro_batches])
        return self._sums_of_micro_batches() if collect_metrics else [], self.micro_batch_loss.counted

    def _recompute_forward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[paddle.Tensor, Count]:
        """Through all stages; only the last one has a loss."""
        engine: Engine = self.parallel_model
        scope = self._draws.scope(batch, micro_batch)
        with self._serving_peers(), scope, self.mixed.context(), paddle.no_grad():
            outputs = engine.predict(micro_batch.inputs)
            if outputs is None:
                return paddle.zeros([]), 0
            with self.loss.present(not micro_batch.is_dummy):
                return self.loss(outputs, micro_batch.targets)

    def _blocks_of_layers(self) -> dict[int, int]:
        return {
            id(layer): number
            for number, block in sorted(self.elements(), reverse=True)
            for layer in block.sublayers(include_self=True)
        }

    @contextmanager
    def _around(self, work: Work) -> Iterator[None]:
        """Around each forward and backward: times it, opens its dropout scope, and protects statistics from a dummy."""
        assert self.batch is not None
        micro_batch = self.batch.micro_batches[work.micro_batch]
        last = self._exchanges and work.micro_batch == len(self.batch.micro_batches) - 1
        exchange = self._exchanging(last) if work.kind == "backward" else nullcontext()
        drawing = self._drawing(micro_batch) if work.kind == "forward" else nullcontext()
        heartbeat.enter(work.kind)
        with (
            self.recorder.span(work),
            self._dummy() if micro_batch.is_dummy else nullcontext(),
            drawing,
            exchange,
        ):
            yield
            # Ranks that hold one stage do the same works in one order. One that left a work while another still needs
            # it, for an expert of its own, would wait for the next stage, which waits for the other.
            if self.zero is not None and (work.kind == "backward" or self.predict_is_collective):
                self.zero.finish()

    def _drawing(self, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        assert self.batch is not None
        return self._draws.around(self.batch, micro_batch, self.named_layers)

    def _sums_of_micro_batches(self) -> list[Sums]:
        """Each micro-batch's sums on ranks that count, zeros with the same names elsewhere. Collective at first."""
        sums = self.micro_batch_loss.sums if self.mesh.is_loss_rank else []
        if not self.names:
            self.names = max(self.mesh.gather(list(sums[0]) if sums else []), key=len)
        return [{name: row[name] for name in self.names} for row in sums] or [dict.fromkeys(self.names, 0.0)]

    def _exchange(self) -> None:
        super()._exchange()
        # After the data axis, so that the copies of all replicas stay bit-equal.
        for tied in self.local_stages.tied:
            if not tied.parameter.stop_gradient:  # the same on all stages; a frozen one has no gradient
                tied.add_up()

    def _same_buffers(self) -> Sequence[Any]:
        groups = {
            "data": self.hcg.get_data_parallel_group,
            "sharding": self.hcg.get_sharding_parallel_group,
            "sequence": self.hcg.get_sep_parallel_group,
            "tensor": self.hcg.get_model_parallel_group,
        }
        return [group() for axis, group in groups.items() if self.mesh.axes[axis] > 1]

    def named_buffers(self) -> list[tuple[str, paddle.Tensor]]:
        return self.local_stages.named_buffers()

    def predict(self, inputs: Any) -> Any:
        """The outputs on the last stage, None elsewhere. All stages of a reader call it together."""
        engine: Engine = self.parallel_model
        with self._serving_peers(), paddle.no_grad(), self.mixed.context():
            return engine.predict(inputs)

    def elements(self) -> list[tuple[int, nn.Layer]]:
        return list(self.local_stages.blocks.items())

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        return list(self.local_stages.layers)

    def named_parameters(self, trainable: bool = False) -> list[tuple[str, paddle.Tensor]]:
        """The parameters of this rank's stages under their whole-model names."""
        running = {id(t) for t in statistics(self.model).values()}
        named = [(name, p) for name, p in self.local_stages.named_parameters() if id(p) not in running]
        return [(name, p) for name, p in named if not (trainable and p.stop_gradient)]

    def _state(self) -> dict[str, paddle.Tensor]:
        return self.local_stages.state()
