"""The input and the contract of a strategy, and the steps that all strategies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, get_args

import paddle
from paddle import nn

from paddle_dp.batch import mapped
from paddle_dp.core.batch_norm import LocalNorms, RunningStatistics
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.gathered_samples import GatheredSamples
from paddle_dp.core.loss import as_loss
from paddle_dp.core.optimizer import (
    Rate,
    check_dense,
    check_not_wrapper,
    check_rate,
    check_single_dtype,
    give_parameters,
    parameters_of,
    refuse_foreign,
    renew,
)
from paddle_dp.core.parameter_groups import use_group_decays
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.precision import MixedPrecision, widen
from paddle_dp.errors import UsageError
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.identity.walk import registered_parameters
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.learner_checks import (
    BatchNormCheck,
    BufferCheck,
    ForeignCheck,
    FrozenCheck,
    FrozenNorms,
    KnownDifferences,
    LearnerCheck,
    LossPairs,
    UnusedCheck,
)
from paddle_dp.learner.runner import BatchRunner, Dropout
from paddle_dp.learner.update import Counter, GradientNorm, UpdateMode, WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.device import moved, on
from paddle_dp.model.batch_norm_on_cpu import local_batch_norms
from paddle_dp.model.bias_on_cpu import quick_biases
from paddle_dp.model.compiled import compiled
from paddle_dp.model.convolution_on_cpu import quick_convolutions
from paddle_dp.recipe import Precision

OptimizerMaker = Callable[[Any, list[tuple[str, paddle.Tensor]]], paddle.optimizer.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task, before anything is placed on ranks.

    - `loss`: a Loss from here on, for any given callable.
    - `optimizer`: finished, or a function of (learning rate, named parameters) for strategies that change them.
    - `precision`: under float64 the model is cast here, in place, before any strategy cuts it.
    - `dropout`: `exact`, the same masks on any number of ranks, or `own`, drawn by each rank's generator.
    - `known_differences`: sentences about differences from one process that are known before placement.
    - `samples()` gives a batch of inputs to try the model on; without it, nothing is tried.
    - `full_model_reason`: why each rank holds the whole model until it is placed, although it will keep only a part
      (`initial_weights`).
    - `compared`: a proof compares outputs itself, so a cut that gives wrong outputs of the right shape is not refused.
    - `base`, `added`: names of an adapter's base, which is frozen and not saved, and of its parameters.
    - `compile`: the model's forward becomes a program.
    - `unknown`: sentences about failed trials (in another process).
    - `lendable`: whether the initial weights can be lent to the model (`trial_weights`; None: not tried).
    - `remembers`: the model's attributes, generators and weights that a forward changes, so that an additional forward
      would change the training.
    - `parameter_names`: Paddle's names of the whole model's parameters, from before it is cut.
    """

    model: nn.Layer
    loss: Any
    optimizer: paddle.optimizer.Optimizer | OptimizerMaker
    schedule: paddle.optimizer.lr.LRScheduler | None = None
    precision: Precision = field(default_factory=Precision)
    dropout: Dropout = "exact"
    known_differences: Sequence[str] = ()
    samples: Callable[[], Any] | None = None
    full_model_reason: str = ""
    compared: bool = False
    base: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    compile: bool = False
    unknown: Sequence[str] = ()
    lendable: bool | None = None
    remembers: Sequence[str] = ()
    parameter_names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        local_batch_norms(self.model)  # before any trial runs it
        if self.precision.dtype == "float64":
            widen(self.model)
            if isinstance(self.optimizer, paddle.optimizer.Optimizer):
                # The dtype of its rate: it was built for the uncast model.
                self.optimizer._dtype = paddle.float64
        object.__setattr__(self, "loss", as_loss(self.loss))
        names = self.parameter_names or frozenset(p.name for p in registered_parameters(self.model))
        object.__setattr__(self, "parameter_names", names)
        if self.dropout not in get_args(Dropout):
            raise UsageError(f"dropout: '{self.dropout}' is neither 'exact' nor 'own'")


class Strategy(Protocol):
    """Places a model on its mesh, split over the axes of its layout. Its Config works without processes
    (strategies/_base.py)."""

    @property
    def mesh(self) -> Mesh: ...

    def place(self, task: Task) -> Learner:
        """Returns the finished learner; its updates are the one-process updates. Collective."""
        ...


def _samples_of_all(placed: PlacedModel) -> GatheredSamples:
    mesh = placed.mesh
    return GatheredSamples(range(mesh.ranks), mesh.rank, mesh)


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """A task on this rank, ready to make a learner: the model in its precision, and an optimizer of its parameters on
    this rank. `rate` sets the optimizer's learning rate."""

    task: Task
    mesh: Mesh
    model: nn.Layer
    optimizer: paddle.optimizer.Optimizer
    rate: Rate
    mixed: MixedPrecision

    def placed(self, **fields: Any) -> PlacedModel:
        """Returns the placed model; `fields`: names, placements, rank_local_layers."""
        return PlacedModel(model=self.model, mesh=self.mesh, base=self.task.base, **fields)

    @property
    def counted_late(self) -> bool:
        """Whether the loss's count is known only after the forward."""
        return bool(self.task.loss.counted == "answers")

    @property
    def zero_dtype(self) -> str:
        """Of a gradient norm without gradients."""
        return "float64" if self.mixed.double else "float32"

    def learner(  # noqa: PLR0913 - the parts of a learner, each with its default
        self,
        placed: PlacedModel | None = None,
        *,
        exchange: GradientExchange | None = None,
        norm: GradientNorm | None = None,
        weights: Callable[[UpdateMode], WeightSync] = WeightSync,
        runner: Callable[..., BatchRunner] = BatchRunner,
        parallel_model: nn.Layer | None = None,
        statistics: RunningStatistics | None = None,
        buffers: Buffers | None = None,
        gathered: Callable[[PlacedModel], GatheredSamples] = _samples_of_all,
        batch_norm_check: Callable[[LocalNorms], LearnerCheck] | None = None,
        known_differences: Sequence[str] = (),
    ) -> Learner:
        """Returns the finished learner. The default of each part is for one process with the whole model. Collective.

        `parallel_model`: the model itself by default. `gathered` returns the samples for a loss that compares the
        samples of all ranks. `known_differences` are added to the task's.
        """
        placed = placed or self.placed()
        loss = self.task.loss
        if loss.compares == "ranks" and self.mesh.dp_size > 1:
            loss = loss.across(gathered(placed))
        mode = UpdateMode(
            exchange=exchange or GradientExchange(),
            counter=Counter(loss, self.mesh),
            norm=norm or GradientNorm(placed.trainable, self.zero_dtype),
        )
        weight_sync = weights(mode)
        statistics = statistics or RunningStatistics(self.model, self.mesh)
        buffers = buffers or Buffers(placed.named_buffers, self.mesh)
        batch_runner = runner(
            placed=placed, parallel_model=parallel_model or self.model, loss=loss, mixed=self.mixed,
            statistics=statistics, weights=weight_sync, dropout=self.task.dropout,
        )  # fmt: skip
        known = [*self.task.known_differences, *known_differences]
        local_norms = LocalNorms(placed.named_layers())
        norms = (batch_norm_check or partial(BatchNormCheck, self.mesh))(local_norms)
        return Learner(
            placed=placed, loss=loss, optimizer=self.optimizer, rate=self.rate, mixed=self.mixed,
            runner=batch_runner, weights=weight_sync, statistics=statistics, buffers=buffers,
            local_norms=local_norms, known_differences=known, unknown=list(self.task.unknown),
            checks=[
                FrozenCheck(placed), ForeignCheck(placed, loss, self.task.parameter_names),
                *([FrozenNorms(local_norms, statistics)] if local_norms.watched else []),
                norms, KnownDifferences(known), LossPairs(loss, self.mesh),
                *([BufferCheck(buffers, self.mesh)] if self.mesh.ranks > 1 else []), batch_runner.draws,
                UnusedCheck(placed, loss),
            ],
        )  # fmt: skip

    def prepare_copy(self, model: nn.Layer, device: str) -> None:
        """Prepares a copy of the unprepared model on a device of this process: its layers, precision and program."""
        quicken(model, self.mesh)
        self.mixed.include(model)
        if self.task.compile:
            samples = self.task.samples
            with on(device):
                compiled(
                    model,
                    samples
                    and (lambda: self.mixed.cast(mapped(lambda tensor: moved(tensor, device), samples()))),
                )


def prepare(task: Task, mesh: Mesh) -> PreparedTask:
    """Prepares the task for this rank's part of the model.

    Raises UsageError for an optimizer or an embedding that is not supported, and for a function that returns an
    optimizer which an earlier training has dealt to the ranks.
    """
    model, schedule, optimizer = task.model, task.schedule, task.optimizer
    check_dense(model)
    check_single_dtype(model)
    quicken(model, mesh)
    mixed = MixedPrecision(task.precision, model, mesh.device)
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        check_not_wrapper(optimizer)
        give_parameters(optimizer, model)
        rate = optimizer._learning_rate
        schedule = schedule or (rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None)
    else:
        optimizer = make_optimizer(optimizer, task, model)
        renew(optimizer)  # a function may return one that it keeps
        check_not_wrapper(optimizer)
        check_rate(optimizer, schedule)
        use_group_decays(optimizer)
    model, optimizer = mixed.decorate(model, optimizer)
    if task.compile:
        samples = task.samples and (lambda: mixed.cast(task.samples()))  # type: ignore[misc]
        with mixed.context() if mixed.double else nullcontext():
            compiled(model, samples, emulated=mixed.low and mesh.device == "cpu", ranks=mesh.ranks)
    return PreparedTask(
        task=task, mesh=mesh, model=model, optimizer=optimizer, rate=Rate(optimizer, schedule), mixed=mixed
    )


def quicken(model: nn.Layer, mesh: Mesh) -> None:
    """Replaces layers of a model by faster equivalents on CPUs."""
    if mesh.device == "cpu":
        quick_biases(model)
        quick_convolutions(model)


def make_optimizer(make: OptimizerMaker, task: Task, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Makes an optimizer of the parameters that a model trains; the learner updates its rate. Raises UsageError for a
    function that fails without a schedule's rate, or that gives its optimizer a parameter which is not the model's."""
    named = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    optimizer = make(task.schedule(), named) if task.schedule else _without_rate(make, named)
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        updated, here = parameters_of(optimizer), {id(p) for p in registered_parameters(model)}
        refuse_foreign("optimizer", [p for p in updated if p.name not in task.parameter_names], task.model)
        if any(id(parameter) not in here for parameter in updated):  # of a list from before the model was cut
            give_parameters(optimizer, model)
    return optimizer


def _without_rate(make: OptimizerMaker, named: list[tuple[str, paddle.Tensor]]) -> Any:
    try:
        return make(None, named)
    except UsageError:
        raise
    except Exception as error:  # Paddle's optimizers raise an AssertionError without a text
        if _fails_with_rate(make, named):  # its absence is not the cause
            raise
        raise UsageError(
            "optimizer: its function was called with the learning rate None, because no schedule is given, and raised "
            f"{type(error).__name__}: {str(error) or 'without a text'}. Give a schedule, such as "
            "schedule={'use': 'constant', 'learning_rate': 1e-3}, or set a rate in the function."
        ) from error


def _fails_with_rate(make: OptimizerMaker, named: list[tuple[str, paddle.Tensor]]) -> bool:
    """Whether an optimizer's function raises an error although it gets a rate."""
    try:
        make(0.1, named)
    except Exception:  # noqa: BLE001 - a user's function may raise anything
        return True
    return False


def full_model_learner(task: Task, mesh: Mesh) -> Learner:
    """Returns a learner for the whole model on this rank, without exchange."""
    return prepare(task, mesh).learner()
