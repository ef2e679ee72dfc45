"""The parts of a learner over fleet's axes: data, sharding, sequence, tensor; `pipeline` adds stages.

fleet's HybridParallelOptimizer is not used: it exchanges, clips and steps at once, so the norm cannot be read.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients,
    fused_allreduce_gradients_with_group,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import is_sequence_parallel_parameter

from paddle_dp.axes.pipeline.stages import LocalStages
from paddle_dp.axes.sharding.zero import Zero
from paddle_dp.axes.tensor.layers import before_exchanges
from paddle_dp.core.batch_norm import SumOverReaders
from paddle_dp.core.data_group import HCG, Group, NestedGroup, PaddleGroup
from paddle_dp.core.gathered_samples import GatheredSamples
from paddle_dp.core.loss import Count
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.errors import UsageError
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.pushed_gradients import PushedGradients, PushReduce
from paddle_dp.exchange.roundings import is_narrower, reduce_dtype_of, roundings
from paddle_dp.identity.user_frames import is_users, user_frames
from paddle_dp.learner.update import UpdateMode, WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import GRADIENT_AXES, REPLICA_AXES, SAMPLE_AXES
from paddle_dp.mesh.messages import Push
from paddle_dp.mesh.transport import traffic
from paddle_dp.tensors import as_dtype, dtype_of, nbytes

# Handles parameters without a gradient on some ranks, such as experts that a gate did not choose for their samples ----


Named = Iterable[tuple[str, paddle.Tensor]]


class MissingGradients:
    """Exchanges which gradients exist: one small all-reduce per update. Only a rank that lacks a gradient reads the
    result from the device."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._index_of: dict[str, int] = {}  # index of each parameter's name in the all-reduced flags
        # On the host and on the device: copied only when they change, because the host waits for a copy.
        self._flags: tuple[np.ndarray[Any, Any], paddle.Tensor] | None = None

    @contextmanager
    def as_zeros(self, named: Named) -> Iterator[None]:
        """Within the block, each of these parameters has a gradient, zeros if need be; afterwards only parameters with
        a gradient on some rank keep it.

        `named`: this rank's parameters; a name means the same parameter, or a slice of it, on every rank. Collective.
        """
        named = list(named)
        if not self._index_of:
            rank_names = self._mesh.gather([name for name, _ in named])
            names = dict.fromkeys(name for names in rank_names for name in names)
            self._index_of = {name: index for index, name in enumerate(names)}
        flags = np.zeros(len(self._index_of), "int32")
        flags[[self._index_of[name] for name, p in named if p.grad is not None]] = 1
        if self._flags is None or not np.array_equal(flags, self._flags[0]):
            self._flags = flags, paddle.to_tensor(flags)
        sums = self._mesh.sum_tensor(self._flags[1].clone())
        absent = [(self._index_of[name], p) for name, p in named if p.grad is None]
        for _, parameter in absent:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
        yield
        if absent:
            ranks_with_gradient = sums.numpy()
            for index, parameter in absent:
                if not ranks_with_gradient[index] and parameter.grad is not None:
                    parameter.clear_gradient(False)


# Sums of gradients over the ranks with the same owned parameters, rounded in transit, after backward (ZeRO-3) ---------


class ReplicaSums:
    """Sums existing gradients over the global `ranks`, all of which have the same ones; `rank` is this one.

    On CPUs, without a `group` of these ranks, each gradient is rounded to `reduce_dtype` once and added up in float32,
    and the sum is rounded where it travels (`PushReduce`). On accelerators the group's all-reduce adds in
    `reduce_dtype`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        parameters: Sequence[paddle.Tensor],
        reduce_dtype: str,
        group: Group | None = None,
    ):
        self._parameters, self._reduce_dtype, self._group = parameters, reduce_dtype, group
        self._push: PushReduce | None = None
        if group is None:
            keepers = [list(ranks) for _ in parameters]
            self._push = PushReduce(
                Push("gradients", ranks, rank), parameters, keepers, reduce_dtype=reduce_dtype
            )

    @paddle.no_grad()
    def exchange(self) -> None:
        """Collective."""
        if self._push is not None:
            self._push.finish()
        if self._group is None:
            return
        sums, tasks = [], []
        for parameter in self._parameters:
            if parameter.grad is not None:
                roundings.note(parameter, parameter.grad, self._reduce_dtype, len(self._group.ranks))
                total = as_dtype(parameter.grad, self._reduce_dtype)
                traffic.all_reduced(nbytes(total), len(self._group.ranks))
                tasks.append(dist.all_reduce(total, group=self._group, sync_op=False))
                sums.append((parameter, total))
        for (parameter, total), task in zip(sums, tasks, strict=True):
            task.wait()
            parameter._copy_gradient_from(as_dtype(total, dtype_of(parameter)))


_ELSEWHERE = (
    "strategy.sharding_stage=3: {} reads or writes a parameter outside of the forward of the layer that holds it, "
    "where this rank does not have its values. Set strategy.sharding_stage=2, or do it in that layer's own forward."
)
_BYPASSED = (
    "strategy.sharding_stage=3: {} calls the method {}.forward, and only a call of the layer fetches its parameters: "
    "write {}(…) in place of {}.forward(…)."
)
_NO_VALUES = ("holds no memory", "Tensor not initialized yet")  # Paddle's operators say one of them


class AxesExchange(GradientExchange):
    """Sums gradients over the axes of a hybrid layout. `finish` has three phases: ZeRO-3 ends its rounds; the exchange
    that overlaps with backward ends (data, sharding, sequence); then follow, with missing gradients as zeros, the sums
    that need all backwards: marked parameters of a sequence-parallel model, replicas of ZeRO-3, tied weights.

    `reduce_dtype`: the dtype of exchanged gradients; None: unchanged. `stages`: of a pipeline; they share tied weights.
    """

    def __init__(
        self,
        placed: PlacedModel,
        hcg: HCG,
        zero: Zero | None = None,
        reduce_dtype: str | None = None,
        stages: LocalStages | None = None,
    ):
        axes = placed.mesh.axes
        self.placed, self._hcg, self.zero = placed, hcg, zero
        self._tied = stages.tied if stages is not None else ()
        self._stage3 = zero.stage3 if zero is not None else None
        if self._stage3 is not None:
            self._stage3.sends = False
        self._missing = MissingGradients(placed.mesh)
        reduce_dtype = reduce_dtype_of(reduce_dtype, placed.trainable)
        self._overlapped = _overlapped_exchange(placed, zero, reduce_dtype)
        self._replicas = _replica_sums(placed, zero, reduce_dtype)
        # Our exchanges add up; Paddle's along the data axis averages.
        ours = self._overlapped is not None or self._replicas is not None
        self.mean_over = 1 if ours else axes.data
        # A pipeline times its works by itself.
        self._waits = self.mean_over > 1 and stages is None
        # On CPUs our exchanges and the bridge count; on accelerators only the buckets of `exchange` do.
        stage = zero.stage if zero is not None else 0
        only_buckets = axes.tensor == axes.sequence == axes.pipeline == 1 and stage < 3
        self.counts_bytes = placed.mesh.device == "cpu" or only_buckets
        if reduce_dtype is not None and any(is_narrower(reduce_dtype, dtype_of(p)) for p in placed.trainable):
            self.rounds_to = reduce_dtype

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        with ExitStack() as stack:
            if last and self._waits:
                stack.enter_context(self.placed.mesh.waiting("the exchange of gradients", computes=True))
            if self._stage3 is not None:
                self._stage3.sends = True
                stack.callback(setattr, self._stage3, "sends", False)
            if self._overlapped is not None:
                stack.enter_context(self._overlapped.backward(last))
            yield

    def finish(self) -> list[int]:
        axes, zero = self.placed.mesh.axes, self.zero
        if zero is not None:
            zero.finish()
        if self._overlapped is not None:
            self._overlapped.finish()
            if axes.tensor == axes.pipeline == 1:
                return []  # no other axis exchanges gradients, and missing ones count as zeros already
        named = self.placed.named_trainable
        with self._missing.as_zeros((n, p) for n, p in named if zero is None or zero.keeps_gradient(p)):
            self._after_backward()
        return []

    def discard(self) -> None:
        if self.zero is not None:
            self.zero.finish()
        if self._overlapped is not None and self._overlapped.each_micro_batch:
            self._overlapped.finish()

    def _after_backward(self) -> None:
        """Sums over the axes that need all backwards, once no gradient is missing. Collective."""
        axes, trainable = self.placed.mesh.axes, self.placed.trainable
        marked = [p for p in trainable if is_sequence_parallel_parameter(p)]
        if marked:
            fused_allreduce_gradients_with_group(marked, self._hcg.get_model_parallel_group(), scale=1.0)
        if self._replicas is not None:
            self._replicas.exchange()
        elif self._overlapped is None and (axes.data > 1 or axes.sequence > 1):
            # Under ZeRO: of the gradients that this rank owns.
            fused_allreduce_gradients(trainable, self._hcg)
        # After the data axis, so that the copies of all replicas stay bit-equal.
        for tied in self._tied:
            if not tied.parameter.stop_gradient:  # the same on all stages; a frozen one has no gradient
                tied.add_up()


def _overlapped_exchange(
    placed: PlacedModel, zero: Zero | None, reduce_dtype: str | None
) -> GradientExchange | None:
    """Creates the exchange over the axes data, sharding and sequence together; None for stage 3. Collective."""
    mesh, trainable = placed.mesh, placed.trainable
    axes, me = mesh.axes, mesh.rank
    ranks = axes.group(me, *GRADIENT_AXES)
    if len(ranks) == 1 or (zero is not None and zero.stage == 3):
        return None
    each = zero is not None and zero.stage == 2
    owners = None if zero is None else [zero.group.ranks[zero.owner(p)] for p in trainable]
    if mesh.device == "cpu":
        destinations = [ranks for _ in trainable]
        if owners is not None:
            destinations = [axes.group(owner, *REPLICA_AXES) for owner in owners]
        return PushedGradients(
            ranks, me, trainable, destinations, each_micro_batch=each, reduce_dtype=reduce_dtype
        )
    replicas, before = PaddleGroup.create(axes, me, *REPLICA_AXES).group, before_exchanges(placed.model)
    deferred = [index for index, parameter in enumerate(trainable) if id(parameter) in before]
    if zero is None:
        assert replicas is not None
        return BucketedGradients(replicas, trainable, deferred=deferred, reduce_dtype=reduce_dtype)
    assert zero.comm_groups is not None
    return BucketedGradients(
        zero.comm_groups.groups[0], trainable, owners=owners, replicas=replicas, each_micro_batch=each,
        comm_groups=zero.comm_groups, deferred=deferred, reduce_dtype=reduce_dtype,
    )  # fmt: skip


def _replica_sums(placed: PlacedModel, zero: Zero | None, reduce_dtype: str | None) -> ReplicaSums | None:
    """Creates, under stage 3 with a `reduce_dtype`, the exchange of this rank's sums over data and sequence; without
    one Paddle exchanges them. Collective."""
    mesh = placed.mesh
    axes, me = mesh.axes, mesh.rank
    ranks = axes.group(me, *REPLICA_AXES)
    if len(ranks) == 1 or zero is None or zero.stage < 3 or reduce_dtype is None:
        return None
    group = None if mesh.device == "cpu" else PaddleGroup.create(axes, me, *REPLICA_AXES).group
    return ReplicaSums(ranks, me, placed.trainable, reduce_dtype, group)


class OwnerWeights(WeightSync):
    """ZeRO: the owner of a parameter updates it, and sends it to the others; under stage 3 they fetch it in each
    forward and backward."""

    def __init__(self, mode: UpdateMode, zero: Zero):
        super().__init__(mode)
        self.zero, self.collective_forward = zero, zero.stage3 is not None

    def begin_update(self, number: int) -> UpdateMode:
        self.zero.begin()
        return self.mode

    def step(self, optimizer: paddle.optimizer.Optimizer) -> None:
        with self.optimizer_states_on_device():
            optimizer.step()

    def publish(self) -> None:
        self.zero.share()
        if not self.overlaps:
            self.wait()

    def wait(self) -> None:
        self.zero.settle()

    def share(self) -> None:
        self.zero.share()
        self.zero.settle()

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Under stage 3, joins the rounds of ranks that are still running, after this rank's forward."""
        try:
            yield
        except RuntimeError as error:
            if (explained := self.explain(error)) is None:
                raise
            raise explained from error
        finally:
            if self.collective_forward:
                self.zero.finish()

    def end_pass(self, backward: bool) -> None:
        """Ranks of one stage run the same work in one order. If a rank left early while another needs it (for an expert
        that only the other runs), it would wait for the next stage, which waits for the other: a deadlock."""
        if backward or self.collective_forward:
            self.zero.finish()

    @contextmanager
    def optimizer_states_on_device(self) -> Iterator[None]:
        offload = self.zero.offload
        if offload is None:
            yield
            return
        offload.to_device()
        try:
            yield
        finally:
            offload.to_host()

    def explain(self, error: RuntimeError) -> Exception | None:
        if not self.collective_forward or not any(text in str(error) for text in _NO_VALUES):
            return None
        frames = list(traceback.walk_tb(error.__traceback__))
        for (caller, line), (frame, _) in reversed([*pairwise(frames)]):
            layer, owner = frame.f_locals.get("self"), caller.f_locals.get("self")
            if frame.f_code.co_name != "forward" or not isinstance(layer, nn.Layer) or owner is layer:
                continue
            if is_users(caller):
                call, at = _name_in(owner, layer), f"{caller.f_code.co_filename}, line {line}"
                return UsageError(_BYPASSED.format(at, type(layer).__name__, call, call))
            break
        users = [*user_frames(frames)]
        at = f"{users[-1][0].f_code.co_filename}, line {users[-1][1]}" if users else "the model"
        return UsageError(_ELSEWHERE.format(at))


def _name_in(owner: Any, layer: nn.Layer) -> str:
    """ "self.fm" for a sublayer of `owner`, else "layer"."""
    named = owner.named_sublayers() if isinstance(owner, nn.Layer) else ()
    return next((f"self.{name}" for name, sublayer in named if sublayer is layer), "layer")


def gathered_samples(placed: PlacedModel) -> GatheredSamples:
    """The samples of the ranks that hold the same part of a model. Collective."""
    mesh = placed.mesh
    ranks = PaddleGroup.create(mesh.axes, mesh.rank, *SAMPLE_AXES)
    return GatheredSamples(ranks.ranks, ranks.rank, ranks)


def sum_over_readers(hcg: HCG, sequence: int) -> SumOverReaders:
    """Returns a function that sums a tensor over the ranks with the same part of the model, and averages it over the
    `sequence` ranks of one sequence."""

    def summed(tensor: paddle.Tensor) -> paddle.Tensor:
        NestedGroup.from_hcg(hcg).sum_tensor(tensor)
        if sequence > 1:
            dist.all_reduce(tensor, group=hcg.get_sep_parallel_group())
        return tensor / sequence

    return summed


def groups_of_equal_buffers(placed: PlacedModel, hcg: HCG) -> Sequence[dist.communication.group.Group]:
    """The groups of ranks that hold the same stages, one for each axis."""
    groups = {
        "data": hcg.get_data_parallel_group,
        "sharding": hcg.get_sharding_parallel_group,
        "sequence": hcg.get_sep_parallel_group,
        "tensor": hcg.get_model_parallel_group,
    }
    return [group() for axis, group in groups.items() if placed.mesh.axes[axis] > 1]
