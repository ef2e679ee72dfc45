"""Copies of a model in one process, which compute parts of each micro-batch: scatter, replicate, gather, reduce.

The scatter of inputs, the replication of weights, the gather of outputs and the sum of gradients on the first copy are
those of torch's nn.DataParallel (and of Paddle's ParallelExecutor before 2.0). The loss sees the gathered outputs, so
that any loss is that of the whole micro-batch, also one that compares samples.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import Batch
from paddle_dp.errors import UsageError
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.blocks import elements_of
from paddle_dp.parallel.consistency import digests
from paddle_dp.parallel.dropout import number_elements
from paddle_dp.parallel.dropout.scope import part_of_samples
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.loss import Count
from paddle_dp.parallel.passes import Sums
from paddle_dp.structure import leaves, mapped

_NORMS = (
    "{} BatchNorm layer{} normalize{} over one copy's samples ({}{}): a process without copies (strategy.use=single) "
    "takes those of the whole batch"
)
_BUFFER = (
    "buffer {} is updated by forward from each copy's own samples, and the first copy's counts: a process without "
    "copies (strategy.use=single) takes all"
)


def copies(model: nn.Layer, count: int) -> list[nn.Layer]:
    """`count` copies of a model that has not been placed. Raises UsageError for one that cannot be copied."""
    try:
        made = [copy.deepcopy(model) for _ in range(count)]
    except Exception as error:
        raise UsageError(
            f"strategy replicas: {type(model).__name__} cannot be copied ({type(error).__name__}: {error}): choose "
            "strategy.use=data_parallel, in which each process builds its own."
        ) from error
    own = [name for name, _ in model.named_parameters()]
    if any([name for name, _ in each.named_parameters()] != own for each in made):
        raise UsageError(
            f"strategy replicas: a copy of {type(model).__name__} has other parameters than itself."
        )
    return made


class Replicated(nn.Layer):
    """Calls every replica with its part of the samples, one after another; outputs are those of one call."""

    def __init__(self, replicas: Sequence[nn.Layer]):
        super().__init__()
        self._replicas = list(replicas)  # in a list: no sublayers, so that nothing is found twice
        self.ran = 1  # replicas that had samples in the last call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises UsageError for outputs that are not [samples, …]."""
        rows = int(leaves((inputs, named))[0].shape[0])
        outputs, sizes = [], []
        parts = min(len(self._replicas), rows)
        for place, replica in enumerate(self._replicas[:parts]):
            start, stop = place * rows // parts, (place + 1) * rows // parts
            with part_of_samples(start, stop):
                some, others = (mapped(itemgetter(slice(start, stop)), part) for part in (inputs, named))
                outputs.append(replica(*some, **others))
            sizes.append(stop - start)
        self.ran = max(self.ran, parts)
        return paddle.utils.map_structure(lambda *parts: _gathered(parts, sizes), *outputs)


def _gathered(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    for part, size in zip(parts, sizes, strict=True):
        if not isinstance(part, paddle.Tensor) or not part.ndim or part.shape[0] != size:
            got = list(part.shape) if isinstance(part, paddle.Tensor) else type(part).__name__
            raise UsageError(
                f"strategy replicas puts the outputs of its copies together along the samples, and forward gave {got} "
                f"for {size} samples: choose strategy.use=data_parallel, in which each process has its own loss."
            )
    return paddle.concat(list(parts)) if len(parts) > 1 else parts[0]


@dataclass(kw_only=True)
class ReplicasLearner(Learner):
    """A learner whose model is the first of several copies: the others get its weights before each update.

    Only the model is evaluated, updated and saved. Running statistics of its BatchNorms become the mean of those of the
    copies that computed.
    """

    replicas: list[nn.Layer]

    def __post_init__(self) -> None:
        self.parallel_model = Replicated([self.model, *self.replicas])
        super().__post_init__()
        self._copies = [
            list(zip(self.model.parameters(), replica.parameters(), strict=True)) for replica in self.replicas
        ]
        layers = self.model.sublayers(include_self=True)
        self._layers = [
            list(zip(layers, replica.sublayers(include_self=True), strict=True)) for replica in self.replicas
        ]
        for replica in self.replicas:
            number_elements(elements_of(replica))
        self._own_buffers: list[str] | None = None  # that a copy changed; known after the first update

    def _begin(self) -> None:
        """Replicates: weights, buffers, and what is trained and how."""
        super()._begin()
        with paddle.no_grad():
            for replica, pairs, layers in zip(self.replicas, self._copies, self._layers, strict=True):
                for mine, twin in pairs:
                    twin.copy_(mine, False)
                    twin.stop_gradient = mine.stop_gradient
                for buffer, twin in zip(self.model.buffers(), replica.buffers(), strict=True):
                    twin.copy_(buffer, False)
                for layer, twin_layer in layers:
                    twin_layer.training = layer.training

    def _forward_backward(
        self, batch: Batch, divisor: float, collect_metrics: bool
    ) -> tuple[list[Sums], Count]:
        self.parallel_model.ran = 1
        found = super()._forward_backward(batch, divisor, collect_metrics)
        self._look_at_buffers()
        self._average_statistics()
        return found

    @paddle.no_grad()
    def _all_reduce_gradients(self) -> None:
        """Adds the copies' gradients up on the model, in their order."""
        for pairs in self._copies:
            for mine, twin in pairs:
                if twin.grad is None:
                    continue
                if mine.grad is None:
                    mine.grad = twin.grad.clone()
                else:
                    mine.grad.add_(twin.grad)
                twin.clear_gradient(False)
        super()._all_reduce_gradients()

    def compute_alone(self, batch: Batch) -> None:
        super().compute_alone(batch)
        for pairs in self._copies:
            for _, twin in pairs:
                twin.clear_gradient(False)

    @paddle.no_grad()
    def _average_statistics(self) -> None:
        of_copies = [statistics(replica) for replica in self.replicas[: self.parallel_model.ran - 1]]
        if not of_copies:
            return
        for name, mine in statistics(self.model).items():
            total = sum((found[name].astype("float64") for found in of_copies), mine.astype("float64"))
            mine.copy_((total / (len(of_copies) + 1)).astype(mine.dtype), False)

    def _look_at_buffers(self) -> None:
        """Once: which buffers, but for statistics, the copies that computed have updated otherwise than the model."""
        if self._own_buffers is not None:
            return
        mine = _others(self.model)
        found = dict(zip(mine, digests(mine.values()), strict=True))
        self._own_buffers = [
            name
            for replica in self.replicas[: self.parallel_model.ran - 1]
            for name, digest in zip(mine, digests(_others(replica)[n] for n in mine), strict=True)
            if digest != found[name]
        ]

    def differences(self) -> list[str]:
        """As on several ranks: what the copies compute each from their own samples only."""
        sentences = []
        if local := self._local_norms.names():
            several = len(local) > 1
            sentences.append(
                _NORMS.format(
                    len(local), "s" * several, "" if several else "s", local[0], ", …" if several else ""
                )
            )
        buffers = list(dict.fromkeys(self._own_buffers or ()))
        return [*sentences, *self.noticed, *map(_BUFFER.format, buffers), *self.random_differences()]


def _others(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """The buffers without BatchNorm's statistics, by name."""
    running = {id(tensor) for tensor in statistics(model).values()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in running}
