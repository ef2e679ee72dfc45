"""The input and the contract of a strategy, and the steps that all strategies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.multi_device import moved, on
from paddle_dp.parallel.bias_on_cpu import quick_biases
from paddle_dp.parallel.compiled import compiled
from paddle_dp.parallel.convolution_on_cpu import quick_convolutions
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.learning_rate import check_rate
from paddle_dp.parallel.loss import as_loss
from paddle_dp.parallel.optimizer_checks import (
    check_dense,
    check_not_wrapper,
    check_single_dtype,
    give_parameters,
)
from paddle_dp.parallel.parameter_groups import use_group_decays
from paddle_dp.parallel.passes import Dropout
from paddle_dp.parallel.precision.amp import MixedPrecision, widen
from paddle_dp.recipe import Precision
from paddle_dp.structure import mapped

OptimizerMaker = Callable[[Any, list[tuple[str, paddle.Tensor]]], paddle.optimizer.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task, before anything is placed on ranks.

    - `loss`: a Loss from here on, for any given callable.
    - `optimizer`: finished, or a function of (learning rate, named parameters) for strategies that change them.
    - `precision`: under float64 the model is cast here, in place, before any strategy cuts it.
    - `dropout`: `exact`, the same masks on any number of ranks, or `own`, as each rank's Paddle draws them.
    - `known_differences`: sentences about differences from one process that are known before placement.
    - `samples()` gives a batch of inputs to try the model on; without it, nothing is tried.
    - `full_model_reason`: why each rank has the whole model until it is placed, although it will keep a part
      (`initial_weights`).
    - `compared`: a proof compares outputs itself, so a cut that gives wrong outputs of the right shape is not refused.
    - `base`, `added`: names of an adapter's base, which is frozen and not saved, and of its parameters.
    - `compile`: the model's forward becomes a program.
    - `unknown`: sentences about failed trials (in another process).
    - `lendable`: whether the initial weights can be lent to the model (`trial_weights`; None: not tried).
    - `remembers`: whether a forward changes the model's attributes or generators, so that an additional forward would
      change the training.
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
    remembers: bool = False

    def __post_init__(self) -> None:
        if self.precision.dtype == "float64":
            widen(self.model)
            if isinstance(self.optimizer, paddle.optimizer.Optimizer):
                self.optimizer._dtype = (
                    paddle.float64
                )  # the dtype of its rate: it was built for the uncast model
        object.__setattr__(self, "loss", as_loss(self.loss))
        if self.dropout not in get_args(Dropout):
            raise UsageError(f"dropout: '{self.dropout}' is neither 'exact' nor 'own'")


class Strategy(Protocol):
    """Places a model on its mesh, split over the axes of its layout.

    Its Config answers questions before there are processes (strategies/_base.py).
    """

    @property
    def mesh(self) -> Mesh: ...

    def place(self, task: Task) -> Learner:
        """The finished learner; its updates are the one-process updates. Collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """A task on this rank, ready to make a learner: the model in its precision, and an optimizer of its local
    parameters."""

    task: Task
    mesh: Mesh
    model: nn.Layer
    optimizer: paddle.optimizer.Optimizer
    schedule: paddle.optimizer.lr.LRScheduler | None
    mixed: MixedPrecision

    def learner(
        self, kind: Callable[..., Learner] = Learner, *, known_differences: Sequence[str] = (), **fields: Any
    ) -> Learner:
        """The finished learner: a `kind` with further `fields`. `parallel_model` defaults to the model itself;
        `known_differences` follow the task's."""
        return kind(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            mixed=self.mixed,
            mesh=self.mesh,
            loss=self.task.loss,
            dropout=self.task.dropout,
            base=self.task.base,
            known_differences=[*self.task.known_differences, *known_differences],
            unknown=list(self.task.unknown),
            **{"parallel_model": self.model, **fields},
        )

    def prepare_copy(self, model: nn.Layer, device: str) -> None:
        """Prepares an unprepared copy of the model for a device of this process: its layers, precision, program."""
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

    Raises UsageError for an optimizer or an embedding that is not supported.
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
        check_not_wrapper(optimizer)
        check_rate(optimizer, schedule)
        use_group_decays(optimizer)
    model, optimizer = mixed.decorate(model, optimizer)
    if task.compile:
        samples = task.samples and (lambda: mixed.cast(task.samples()))  # type: ignore[misc]
        with mixed.context() if mixed.double else nullcontext():
            compiled(model, samples, emulated=mixed.low and mesh.device == "cpu", ranks=mesh.ranks)
    return PreparedTask(
        task=task, mesh=mesh, model=model, optimizer=optimizer, schedule=schedule, mixed=mixed
    )


def quicken(model: nn.Layer, mesh: Mesh) -> None:
    """Replaces layers of a model by faster equivalents on CPUs."""
    if mesh.device == "cpu":
        quick_biases(model)
        quick_convolutions(model)


def make_optimizer(make: OptimizerMaker, task: Task, model: nn.Layer) -> paddle.optimizer.Optimizer:
    """A new optimizer of the parameters that a model trains; the learner updates its rate."""
    named = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    return make(task.schedule() if task.schedule else None, named)


def full_model_learner(task: Task, mesh: Mesh) -> Learner:
    """A learner for the whole model on this rank, without exchange."""
    return prepare(task, mesh).learner()
