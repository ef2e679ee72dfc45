"""Splits the model itself: tensor (within layers), pipeline (between them), sharding (updates: ZeRO); and the data."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Layout, ReduceDtype, width_of
from paddle_dp.plan.pipeline_schedule import Schedule
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.text import few
from paddle_dp.units import Count, Positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddle import nn

    from paddle_dp.axes.pipeline.stages import LocalStages
    from paddle_dp.axes.sharding.zero import Zero
    from paddle_dp.core.placement import Placements
    from paddle_dp.learner import Learner, Task
    from paddle_dp.learner.task import PreparedTask
    from paddle_dp.mesh import Mesh
    from paddle_dp.plan import Shape
    from paddle_dp.recipe import Recipe

Counts = tuple[Positive, ...]


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    """The degrees of the axes multiply to the number of ranks."""

    data: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; `auto`: all ranks divided by the other degrees."""

    tensor: Positive = 1
    """Ranks that split each layer's weights."""

    pipeline: Positive = 1
    """Ranks that each hold consecutive layers."""

    sharding: Positive = 1
    """Data-parallel ranks among which the updates are sharded (ZeRO)."""

    sequence: Positive = 1
    """Ranks that split each sample's tokens (Ulysses)."""

    sequence_parallel: bool = False
    """Between cut layers, each rank of the tensor axis holds only its tokens (Megatron)."""

    sharding_stage: Literal[1, 2, 3] = 1
    """Tensors that the sharding axis shards (ZeRO): 1 optimizer states, 2 gradients too, 3 parameters too."""

    prefetch: Count = 1
    """Chunks of layers whose parameters are prefetched while one computes (sharding_stage 3); 0: each when needed."""

    reduce_dtype: ReduceDtype | None = None
    """The dtype in which gradients are exchanged along data, sharding and sequence; null: the gradient's dtype,
    float32 except for weights in 16 bits (train.precision.level O2 on accelerators)."""

    offload: bool = False
    """Keep optimizer states in host memory between updates (GPU only)."""

    pipeline_schedule: Schedule = "1f1b"
    """Order of the micro-batches' forwards and backwards in a pipeline."""

    virtual_stages: Positive | Literal["auto"] = "auto"
    """Stages on each rank; `auto`: 2 under interleaved, else 1."""

    partition: Literal["uniform", "parameters"] | Counts = "uniform"
    """Blocks of each stage: equal in number (`uniform`), as equal in parameters as possible (`parameters`), or a list
    of numbers."""

    sync_batch_norm: bool = True
    """BatchNorm over the samples of all data and sharding ranks, as on one process. `false`: over each rank's own."""

    _placed: ClassVar[Degrees | None] = None  # the layout for which this process's fleet groups were made

    def layout(self, ranks: int) -> Layout:
        """The layout on `ranks` ranks; `data: auto` becomes ranks divided by the other degrees, at least 1."""
        model_degrees = self.tensor * self.pipeline * self.sharding * self.sequence
        data = max(ranks // model_degrees, 1) if self.data == "auto" else self.data
        return Layout(
            degrees=Degrees(
                data=data,
                pipeline=self.pipeline,
                sharding=self.sharding,
                sequence=self.sequence,
                tensor=self.tensor,
            ),
            partition=self.partition,
            virtual_stages=self.stages_per_rank,
            pipeline_schedule=self.pipeline_schedule,
            sharding_stage=self.sharding_stage,
            prefetch=self.prefetch,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            reduce_dtype=self.reduce_dtype,
        )

    @property
    def stages_per_rank(self) -> int:
        auto = 2 if self.pipeline_schedule == "interleaved" else 1
        return auto if self.virtual_stages == "auto" or self.pipeline == 1 else self.virtual_stages

    @property
    def takes_turns(self) -> bool:
        return self.pipeline == 1 and self.sequence == 1

    @property
    def partitions_model(self) -> bool:
        return self.tensor > 1 or self.pipeline > 1 or (self.sharding > 1 and self.sharding_stage == 3)

    def not_promised(self, recipe: Recipe) -> str:
        if not self.compared_by_step:
            return ""
        return (
            f"with strategy.reduce_dtype={self.reduce_dtype} a whole training is not one process's: {self.rounding}. "
            "`paddle-dp verify` compares each step by itself, from the same weights; whole trainings are compared with "
            "strategy.reduce_dtype=float32, or by their held-out numbers (docs/exchange.md)."
        )

    @property
    def compared_by_step(self) -> bool:
        return self.reduce_dtype is not None and width_of(self.reduce_dtype) < width_of("float32")

    @property
    def chained(self) -> str:
        if self.pipeline > 1:
            return "strategy.pipeline"
        if self.sequence_parallel:
            return "strategy.sequence_parallel"
        return "strategy.sequence" if self.sequence > 1 else super().chained

    @property
    def rounding(self) -> str:
        """The effect of reduce_dtype, as a part of a sentence."""
        from paddle_dp.exchange.roundings import DIGITS

        digits = DIGITS[self.reduce_dtype or "float32"]
        return f"ranks round their gradients to {digits} digits of base 2 before they add them up"

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError, with the nearest legal layouts, unless the degrees divide model and ranks."""
        from paddle_dp.checks.preflight import built_without_memory, preflight_check
        from paddle_dp.plan import layout_error
        from paddle_dp.plan.sharded import unshardable

        model = built_without_memory(recipe.build_model)
        shape = self.shape(recipe, model)
        reason = layout_error(self.layout(ranks).degrees, shape, ranks)
        tied = shape.anatomy is None and bool(getattr(recipe.model.config, "tied", False))
        reason = reason or unshardable(self.sharding, self.pipeline, self.offload, tied, device)
        if reason:
            raise UsageError(reason)
        preflight_check(recipe, self.layout(ranks), model, splits=ranks > 1)

    def shape(self, recipe: Recipe, model: nn.Layer | None) -> Shape:
        """The sizes that a layout of the recipe must divide. `model`: the recipe's; None if it cannot be built without
        memory for its weights: then the ranks check its sizes."""
        from paddle_dp.axes.meta_init import anatomy
        from paddle_dp.core.loss import as_loss
        from paddle_dp.plan import Shape

        train, sizes = recipe.train, None if model is None else anatomy(model)
        shape = Shape.from_config(recipe.model.config, train.batch, train.micro_batches, sizes)
        splits_outputs = recipe.loss is not None and as_loss(recipe.loss.build()).splits_outputs
        shape = replace(
            shape,
            virtual_stages=self.stages_per_rank,
            pipeline_schedule=self.pipeline_schedule,
            partition=self.partition,
            partial_loss=splits_outputs,
        )
        return shape.along(recipe.dataset.config, self.sequence_parallel)

    def build(self, mesh: Mesh) -> Hybrid:
        """Starts fleet in this layout. Collective."""
        from paddle.distributed import fleet
        from paddle.distributed.fleet.base import topology

        from paddle_dp.gloo import install
        from paddle_dp.gloo.fleet_mends import PIPELINE_SETTINGS

        degrees = self.layout(mesh.ranks).degrees
        if degrees.ranks != mesh.ranks:  # started without paddle-dp, which refuses it before
            raise UsageError(
                f"strategy: {degrees} needs {degrees.ranks} ranks, and there are {mesh.ranks}: start as many, or set "
                "other degrees."
            )
        mesh = replace(mesh, degrees=degrees)
        if mesh.ranks == 1:
            return Hybrid(self, mesh, None)
        install(mesh.device)
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {
            "dp_degree": degrees.data, "pp_degree": degrees.pipeline, "mp_degree": degrees.tensor,
            "sharding_degree": degrees.sharding, "sep_degree": degrees.sequence,
            "mp_configs": {"need_broadcast_data": False},
            "pp_configs": {"enable_dynamic_shape": True},
        }  # fmt: skip
        strategy.pipeline_configs = {"accumulate_steps": 1, "micro_batch_size": 1, **PIPELINE_SETTINGS}
        # A second layout in this process: fleet would keep the first one's groups.
        if Config._placed != degrees:
            topology._HYBRID_PARALLEL_GROUP, Config._placed = None, degrees
        fleet.init(is_collective=True, strategy=strategy)
        return Hybrid(self, mesh, fleet.get_hybrid_communicate_group())


@dataclass(frozen=True)
class Hybrid:
    """Places a model: cuts its layers and sequences over their axes, then splits it into pipeline stages."""

    config: Config
    mesh: Mesh
    hcg: Any  # an HCG; None on one rank, where nothing is split

    def place(self, task: Task) -> Learner:
        """Returns a learner for this rank's part. Collective. Raises UsageError if the model cannot be split so."""
        from paddle_dp.axes.axes_exchange import (
            AxesExchange,
            OwnerWeights,
            gathered_samples,
            groups_of_equal_buffers,
            sum_over_readers,
        )
        from paddle_dp.core.batch_norm import RunningStatistics, synchronize
        from paddle_dp.core.buffers import Buffers
        from paddle_dp.core.data_group import NestedGroup
        from paddle_dp.core.optimizer import DISTRIBUTED, take_clips
        from paddle_dp.core.placement import Placements
        from paddle_dp.core.split_models import mark_split
        from paddle_dp.learner import full_model_learner, prepare
        from paddle_dp.learner.task import make_optimizer
        from paddle_dp.learner.update import PlacedNorm, WeightSync
        from paddle_dp.model.initial_weights import check_lendable, draw, initial_weights, reads_weights

        axes, drawn = self.mesh.axes, initial_weights(task.model) is not None
        check_lendable(task.model, task.samples, task.lendable)
        if self._cuts or axes.pipeline > 1 or self._stores_subset:
            mark_split(task.model)
        if self.config.sync_batch_norm and axes.dp_size > 1:
            synchronize(task.model, NestedGroup.from_hcg(self.hcg))
        placements = Placements()
        model, loss = self._cut(task, placements)
        if self.mesh.ranks == 1:
            return full_model_learner(task, self.mesh)
        model, stages, runner = self._staged(model, loss, placements)
        # Before the optimizer is made, if it reads weights. A rank that stores a subset draws it once owners are known.
        if not self._stores_subset or reads_weights(
            task.model, lambda: make_optimizer(task.optimizer, task, model)
        ):
            draw(task.model, model.parameters())
        unknown = [*task.unknown, *self._untried(task)]
        prepared = prepare(replace(task, model=model, loss=loss, unknown=unknown), self.mesh)
        known_differences = self._known_differences(prepared.optimizer, task.compared)
        clips = take_clips(prepared.optimizer)  # before owners are dealt: over all parameters of these layers
        if axes.sharding > 1 or axes.pipeline > 1:
            DISTRIBUTED.add(prepared.optimizer)
        engine = None if stages is None else self._engine(model, drawn)
        zero = self._zero(prepared, placements) if axes.sharding > 1 else None
        if self._stores_subset:
            at = self.mesh.coords
            draw(task.model, [p for p in model.parameters() if placements.placement_of(p).is_stored_at(at)])
        placed = prepared.placed(placements=placements, names=stages)
        learner = prepared.learner(
            placed,
            exchange=AxesExchange(placed, self.hcg, zero, self.config.reduce_dtype, stages),
            norm=PlacedNorm(placed, clips),
            weights=WeightSync if zero is None else partial(OwnerWeights, zero=zero),
            runner=runner,
            parallel_model=engine,
            statistics=RunningStatistics(model, self.mesh, sum_over_readers(self.hcg, axes.sequence)),
            buffers=None if stages is None else Buffers(
                placed.named_buffers, self.mesh, groups_of_equal_buffers(placed, self.hcg)
            ),
            gathered=gathered_samples,
            known_differences=known_differences,
        )  # fmt: skip
        learner.check_placed()
        return learner

    def _staged(
        self, model: Any, loss: Any, placements: Placements
    ) -> tuple[Any, LocalStages | None, Callable[..., Any]]:
        """This rank's part of the model, its stages if there is a pipeline, and the runner of both."""
        from paddle_dp.axes.pipeline.runner import MicroBatchLoss, PipelineRunner
        from paddle_dp.axes.pipeline.stages import build_stages
        from paddle_dp.learner.runner import BatchRunner

        if self.mesh.axes.pipeline == 1:
            return model, None, BatchRunner
        micro_batch_loss, config = MicroBatchLoss(loss), self.config
        model, stages = build_stages(
            model, micro_batch_loss, self.hcg, placements, config.partition, config.stages_per_rank
        )
        return model, stages, partial(PipelineRunner, micro_batch_loss=micro_batch_loss)

    @property
    def _cuts(self) -> bool:
        return self.mesh.axes.tensor > 1 or self.mesh.axes.sequence > 1

    def _untried(self, task: Task) -> list[str]:
        """A sentence if the cut model is not compared with the whole one, because further forwards would change the
        training."""
        if not self._cuts or not task.remembers:
            return []
        return [
            f"whether {type(task.model).__name__} gives the same outputs whole and cut: each forward changes "
            f"{few(task.remembers, 2)}, so none is made at the start to compare them (`paddle-dp verify` does)"
        ]

    def _known_differences(self, optimizer: Any, is_compared: bool) -> list[str]:
        """Sentences on differences from one process that the settings or a user's optimizer may cause."""
        from paddle_dp.core.optimizer import check_by_parameter, check_elementwise

        axes = self.mesh.axes
        sentences = check_elementwise(optimizer, axes.tensor)
        sentences += check_by_parameter(optimizer, sharding=axes.sharding, pipeline=axes.pipeline)
        if self.config.compared_by_step and not is_compared:
            sentences.append(
                f"{self.config.rounding}: strategy.reduce_dtype=float32 exchanges them as they are"
            )
        return sentences

    @property
    def _stores_subset(self) -> bool:
        """Whether this rank stores only some of its layers' parameters; their owners are known after `_zero`."""
        return self.mesh.axes.sharding > 1 and self.config.sharding_stage == 3

    def _cut(self, task: Task, placements: Placements) -> tuple[Any, Any]:
        """Cuts the task's model and loss along the tensor and the sequence axis. Raises UsageError if the cut model
        gives other outputs than the whole one for some samples."""
        from paddle_dp.axes.cut_check import CutCheck
        from paddle_dp.axes.sequence.megatron_sp import SequenceParallelizer
        from paddle_dp.axes.sequence.ulysses import parallelize_sequence
        from paddle_dp.axes.tensor.layers import TensorParallelizer
        from paddle_dp.axes.tensor.vocab_parallel_loss import vocab_parallel
        from paddle_dp.model.initial_weights import initial_weights, trial_weights
        from paddle_dp.model.recompute import recomputed

        axes, model, loss = self.mesh.axes, task.model, task.loss
        slices: list[tuple[int, Any]] = []
        with trial_weights(model):
            samples = task.samples if self._cuts and not task.remembers else None
            cut_check = CutCheck(model, samples, values=not task.compared, by_table=axes.tensor > 1)
        if axes.tensor > 1:
            group = self.hcg.get_model_parallel_group()
            kind = SequenceParallelizer if self.config.sequence_parallel else TensorParallelizer
            parallelizer = kind(group, placements, initial_weights(model))
            model = parallelizer.parallelize(model)
            loss = vocab_parallel(loss, group) if parallelizer.cuts_classes else loss
            slices += [(-1, group)] if parallelizer.cuts_classes else []
        # In the order of core.wrapping: random numbers, recompute, sequence.
        model = recomputed(model, self.config.recompute)
        if axes.sequence > 1:
            model, loss = parallelize_sequence(model, loss, self.hcg.get_sep_parallel_group())
            slices.append((1, self.hcg.get_sep_parallel_group()))
        with trial_weights(model):
            cut_check.check(model, f"strategy.{'tensor' if axes.tensor > 1 else 'sequence'}", slices)
        return model, loss

    def _zero(self, prepared: PreparedTask, placements: Placements) -> Zero:
        """Deals the parameters to the ranks of the sharding axis."""
        from paddle_dp.axes.sharding.zero import Zero
        from paddle_dp.core.optimizer import check_ungrouped, leave_frozen_out
        from paddle_dp.exchange.roundings import reduce_dtype_of

        check_ungrouped(prepared.optimizer, "strategy.sharding")
        leave_frozen_out(prepared.optimizer)
        trained = [p for p in prepared.model.parameters() if not p.stop_gradient]
        return Zero(
            prepared.model,
            prepared.optimizer,
            self.hcg,
            placements,
            self.config.sharding_stage,
            self.config.offload,
            self.config.prefetch,
            reduce_dtype_of(self.config.reduce_dtype, trained),
        )

    def _engine(self, model: Any, drawn: bool) -> Any:
        """fleet's engine for this rank's stages, which it does not synchronize if their weights were `drawn`."""
        from paddle.distributed import fleet

        from paddle_dp.axes.pipeline.schedules import ENGINES, unsynchronized

        engine = ENGINES[self.config.pipeline_schedule, self.config.stages_per_rank > 1]
        with unsynchronized(model) if drawn else nullcontext():
            return engine(model, self.hcg, fleet.fleet._user_defined_strategy)
