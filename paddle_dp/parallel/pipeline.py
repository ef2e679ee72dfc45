"""A model in stages, one rank after another, over micros: fleet's PipelineLayer and its schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_dp.batch import Batch
from paddle_dp.errors import UsageError
from paddle_dp.parallel.counting import Loss, total_and_count
from paddle_dp.parallel.hybrid import HybridLearner


class Till:
    """The loss that fleet's last stage calls once a micro: weighs each total, and keeps the sums for the log."""

    def __init__(self, loss: Loss, counts: bool):
        self.loss, self.counts = loss, counts
        self.factors: Iterator[Any] = iter(())
        self.totals: list[paddle.Tensor] = []

    def open(self, factors: list[Any]) -> None:
        """Before a batch: what each micro's total is multiplied with, in the order of the micros."""
        self.factors, self.totals = iter(factors), []

    def __call__(self, outputs: Any, targets: Any) -> paddle.Tensor:
        total, _ = total_and_count(self.loss(outputs, targets), len(targets), self.counts)
        self.totals.append(total.detach())
        return total * next(self.factors)


def staged(model: nn.Layer, till: Till, seats: Any, stages_each: int = 1) -> PipelineLayer:
    """The model's ordered `blocks` as fleet's PipelineLayer: this rank keeps its stage's.

    Raises UsageError for a model without blocks, or whose stages would share a weight.
    """
    blocks = list(getattr(model, "blocks", ()))
    if not blocks:
        raise UsageError(
            f"strategy.pipeline: {type(model).__name__} has no ordered `blocks`, so it cannot be handed out in stages. "
            "Keep its layers in one (docs/add-a-part.md), or set strategy.pipeline=1."
        )
    owners: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise UsageError(
                    f"strategy.pipeline: blocks {owners[id(parameter)]} and {number} share the weight "
                    f"{list(parameter.shape)}, which stages cannot. Set model.tied=false, or strategy.pipeline=1."
                )
    virtual = {"num_virtual_pipeline_stages": stages_each} if stages_each > 1 else {}
    return PipelineLayer(
        layers=blocks, loss_fn=till, topology=seats.topology(), seg_method="uniform", **virtual
    )


@dataclass(kw_only=True)
class PipelineLearner(HybridLearner):
    """Keeps the learner's promise by fleet's own schedule: forwards and backwards of the micros interleave."""

    till: Till

    def _learn(self, batch: Batch, count: Any, observe: bool) -> list[dict[str, float]]:
        micros = batch.micros
        # Fleet divides each micro's loss by their number; the factor has that, and the global count, already in it.
        self.till.open([self._factor(micro, count) * len(micros) for micro in micros])
        placed: Any = self.placed
        placed.set_virtual_pipeline_rank(0)
        placed.loss_fn_idx = 0
        if placed.accumulate_steps != len(micros):
            placed.accumulate_steps = len(micros)
            placed._init_user_hooks()  # counts on the number of micros that it was made with
        placed._layers.train()
        with self.mixed.context():
            placed.forward_backward_pipeline([[m.inputs for m in micros], [m.targets for m in micros]])
        if not observe:
            return []
        if not self.mesh.speaks:
            return [{"loss": 0.0}]
        pairs = zip(self.till.totals, micros, strict=True)
        return [{"loss": float(total) if micro.samples else 0.0} for total, micro in pairs]

    def predict(self, inputs: Any) -> Any:
        """The outputs on the last stage, None elsewhere. All stages of a reader call it together."""
        placed: Any = self.placed
        steps, placed.accumulate_steps = placed.accumulate_steps, 1
        try:
            with paddle.no_grad(), self.mixed.context():
                found = placed.eval_batch([[inputs], [inputs]], compute_loss=False)
        finally:
            placed.accumulate_steps = steps
        return found[0] if self.mesh.seats["pipeline"] == self.mesh.axes.pipeline - 1 else None

    def named_parameters(self, trainable: bool = False) -> list[tuple[str, paddle.Tensor]]:
        """This stage's parameters under their whole-model names."""
        return [(f"blocks.{name}", p) for name, p in super().named_parameters(trainable)]

    def state(self) -> dict[str, paddle.Tensor]:
        return {f"blocks.{name}": tensor for name, tensor in super().state().items()}
