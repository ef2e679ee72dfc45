"""A learner that all-reduces gradients over fleet's process groups: data, sequence, tensor; `pipeline` adds stages."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients,
    fused_allreduce_gradients_with_group,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import is_sequence_parallel_parameter

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.errors import UsageError
from paddle_dp.parallel import gradients
from paddle_dp.parallel.clip import Clip
from paddle_dp.parallel.data_group import NestedGroup, PaddleGroup
from paddle_dp.parallel.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.parallel.exchange.gradient_exchange import GradientExchange
from paddle_dp.parallel.exchange.memory import dtype_of
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.exchange.replica_sums import ReplicaSums
from paddle_dp.parallel.exchange.roundings import comm_dtype_of, rounds
from paddle_dp.parallel.gathered_samples import GatheredSamples
from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.library_code import is_library
from paddle_dp.parallel.loss import Count
from paddle_dp.parallel.sharding.zero import Zero
from paddle_dp.parallel.tensor.layers import before_exchanges

_ELSEWHERE = (
    "strategy.sharding_stage=3: {} reads or writes a parameter outside of the forward of the layer that holds it, "
    "where this rank does not have its values. Set strategy.sharding_stage=2, or do it in that layer's own forward."
)


@dataclass(kw_only=True)
class HybridLearner(Learner):
    """Fleet's layers and groups with its own update: exchange, one norm over the whole model, clip, step.

    Not fleet's HybridParallelOptimizer, which exchanges, clips and steps at once, so that the gradient norm cannot be
    read. `clips` are the optimizer's global-norm clips, taken over because the optimizer sees only this rank's part.
    `reduce_dtype`: that in which gradients are exchanged; None: their own.
    """

    hcg: HCG
    clips: Sequence[Clip] = ()
    zero: Zero | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stage3 = self.zero.stage3 if self.zero is not None else None
        if self._stage3 is not None:
            self._stage3.sends = False
        self._comm_dtype = comm_dtype_of(self.reduce_dtype, self.trainable)
        self._overlapped, self._after_backward = (
            self._make_overlapped_exchange(),
            self._make_exchange_after_backward(),
        )
        if self._overlapped is not None or self._after_backward is not None:
            # They are added up, where Paddle's exchange along the data axis is an average.
            self.dp_world_size = 1

    def _make_overlapped_exchange(self) -> GradientExchange | None:
        """The exchange of the axes data, sharding and sequence together; stage 3 has its own. Collective."""
        axes, zero, me = self.mesh.axes, self.zero, self.mesh.rank
        ranks = axes.group(me, "data", "sharding", "sequence")
        if len(ranks) == 1 or (zero is not None and zero.stage == 3):
            return None
        each, comm_dtype = zero is not None and zero.stage == 2, self._comm_dtype
        if self.mesh.device == "cpu":
            destinations = [ranks for _ in self.trainable]
            if zero is not None:
                owners = [zero.group.ranks[zero.owner(p)] for p in self.trainable]
                destinations = [axes.group(owner, "data", "sequence") for owner in owners]
            return PushedGradients(
                ranks, me, self.trainable, destinations, each_micro_batch=each, comm_dtype=comm_dtype
            )
        replicas, before = (
            PaddleGroup.create(axes, me, "data", "sequence").group,
            before_exchanges(self.model),
        )
        deferred = [index for index, parameter in enumerate(self.trainable) if id(parameter) in before]
        if zero is None:
            assert replicas is not None
            return BucketedGradients(replicas, self.trainable, held_back=deferred, comm_dtype=comm_dtype)
        owners = [zero.group.ranks[zero.owner(p)] for p in self.trainable]
        assert zero.comm_groups is not None
        return BucketedGradients(
            zero.comm_groups.groups[0], self.trainable, owners=owners, replicas=replicas, each_micro_batch=each,
            comm_groups=zero.comm_groups, held_back=deferred, comm_dtype=comm_dtype,
        )  # fmt: skip

    def _make_exchange_after_backward(self) -> ReplicaSums | None:
        """Under stage 3 with a dtype to travel in: that of the sums that this rank keeps, over data and sequence; in
        their own dtype Paddle exchanges them. Collective."""
        axes, zero, me = self.mesh.axes, self.zero, self.mesh.rank
        ranks = axes.group(me, "data", "sequence")
        if len(ranks) == 1 or zero is None or zero.stage < 3 or self._comm_dtype is None:
            return None
        group = None if self.mesh.device == "cpu" else PaddleGroup.create(axes, me, "data", "sequence").group
        return ReplicaSums(ranks, me, self.trainable, self._comm_dtype, group)

    @property
    def rounds_to(self) -> str | None:
        comm_dtype = self._comm_dtype
        return (
            comm_dtype
            if comm_dtype is not None and any(rounds(dtype_of(p), comm_dtype) for p in self.trainable)
            else None
        )

    def _gathered_samples(self) -> GatheredSamples:
        ranks = PaddleGroup.create(self.mesh.axes, self.mesh.rank, "data", "sharding")
        return GatheredSamples(ranks.ranks, ranks.rank, ranks)

    @contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        if self._stage3 is not None:
            self._stage3.sends = True
        try:
            with nullcontext() if self._overlapped is None else self._overlapped.backward(last):
                yield
        finally:
            if self._stage3 is not None:
                self._stage3.sends = False

    def _all_reduce_gradients(self) -> None:
        zero, named = self.zero, self._named_trainable
        if zero is not None:
            zero.finish()
        if self._overlapped is not None:
            self._overlapped.finish()
            if self.mesh.axes.tensor == self.mesh.axes.pipeline == 1:
                return  # no other axis has gradients to exchange, and no rank lacks what another has
        with self._absent.as_zeros((n, p) for n, p in named if zero is None or zero.keeps_gradient(p)):
            self._exchange()

    @property
    def counts_bytes(self) -> bool:
        """On CPUs our carriers count, and the bridge; on accelerators only the buckets of `parallel.exchange` do."""
        axes, stage = self.mesh.axes, self.zero.stage if self.zero is not None else 0
        return self.mesh.device == "cpu" or (axes.tensor == axes.sequence == axes.pipeline == 1 and stage < 3)

    @property
    def _may_freeze(self) -> bool:
        return True

    def _finish_exchange(self) -> None:
        if self.zero is not None:
            self.zero.finish()
        if self._overlapped is not None and self._overlapped.each_micro_batch:
            self._overlapped.finish()

    def _exchange(self) -> None:
        """All-reduces the gradients that this rank keeps, each of which is there. Collective."""
        marked = [p for p in self.trainable if is_sequence_parallel_parameter(p)]
        if marked:
            fused_allreduce_gradients_with_group(marked, self.hcg.get_model_parallel_group(), scale=1.0)
        axes = self.mesh.axes
        if self._after_backward is not None:
            self._after_backward.exchange()
        elif self._overlapped is None and (axes.data > 1 or axes.sequence > 1):
            # Under ZeRO: of the gradients that this rank owns.
            fused_allreduce_gradients(self.trainable, self.hcg)

    def _step(self) -> None:
        self.wait_for_params()  # what a forward left out
        if self.clips:
            norms = self._norms_over([clip.parameters for clip in self.clips])
            for clip, norm in zip(self.clips, norms, strict=True):
                factor = clip.bound / paddle.maximum(norm, paddle.full_like(norm, clip.bound))
                gradients.scale(clip.parameters, factor)
        if self._updates_parameters:
            with self.optimizer_states_on_device():
                self.optimizer.step()
        if self.zero is not None:
            self.zero.share()
        if not self.values_may_travel:
            self.wait_for_params()

    def share_updates(self) -> None:
        if self.zero is not None:
            self.zero.share()
            self.zero.settle()

    def wait_for_params(self) -> None:
        if self.zero is not None:
            self.zero.settle()

    def _begin(self) -> None:
        if self.zero is not None:
            self.zero.begin()

    def gradient_norm(self) -> paddle.Tensor:
        """Over the whole model."""
        return self._norms_over([self.trainable])[0]

    def _norms_over(self, lists: Sequence[Sequence[paddle.Tensor]]) -> paddle.Tensor:
        """The 2-norm over the whole model's gradients of each list, [lists]; each gradient counts once, at its
        parameter's main replica. One exchange for all lists. Collective."""
        at = self.mesh.coords
        counted = [
            [p for p in parameters if self.placements.placement_of(p).is_main_replica(at)]
            for parameters in lists
        ]
        # Float64 on every rank: one that counts nothing has no gradient from which to take the dtype.
        squares = [gradients.global_norm(parameters).astype("float64").square() for parameters in counted]
        return self.mesh.sum_tensor(paddle.stack(squares)).sqrt()

    def _sum_over_readers(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Over the ranks that hold the same part of the model; those of one sequence have a mean."""
        NestedGroup.from_hcg(self.hcg).sum_tensor(tensor)
        if self.mesh.axes.sequence > 1:
            dist.all_reduce(tensor, group=self.hcg.get_sep_parallel_group())
        return tensor / self.mesh.axes.sequence

    def predict(self, inputs: Any) -> Any:
        with self._serving_peers():
            return super().predict(inputs)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Any, paddle.Tensor, Count]:
        try:
            return super()._forward(micro_batch)
        except RuntimeError as error:
            if self._stage3 is None or "holds no memory" not in str(error):
                raise
            frames = traceback.walk_tb(error.__traceback__)
            own = [(frame, line) for frame, line in frames if not is_library(frame.f_globals.get("__name__"))]
            at = f"{own[-1][0].f_code.co_filename}, line {own[-1][1]}" if own else "the model"
            raise UsageError(_ELSEWHERE.format(at)) from error

    def _recompute_forward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[paddle.Tensor, Count]:
        with self._serving_peers():
            return super()._recompute_forward(micro_batch, batch)

    @contextmanager
    def _serving_peers(self) -> Iterator[None]:
        """Around a forward without backward: under ZeRO-3, then joins the rounds of ranks that still run."""
        try:
            yield
        finally:
            if self.zero is not None and self.zero.stage3 is not None:
                self.zero.finish()

    @property
    def predict_is_collective(self) -> bool:
        return self.zero is not None and self.zero.stage3 is not None

    @contextmanager
    def optimizer_states_on_device(self) -> Iterator[None]:
        offload = self.zero.offload if self.zero is not None else None
        if offload is None:
            yield
            return
        offload.to_device()
        try:
            yield
        finally:
            offload.to_host()
