"""Checks and adapts an optimizer that was built before the model was placed: it must update this rank's parameters,
without the clips that need all of them, at the schedule's rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import paddle
from paddle import nn
from paddle import optimizer as optimizers
from paddle.incubate.optimizer import DistributedFusedLamb, LarsMomentumOptimizer
from paddle.nn import ClipGradByGlobalNorm, ClipGradByValue
from paddle.optimizer.lr import LRScheduler, ReduceOnPlateau

from paddle_dp.core.turns import Functions, TurnOptimizers
from paddle_dp.core.updates import Adafactor, Lars, Lion, Muon
from paddle_dp.errors import UsageError

Parameters = list[paddle.Tensor]
# The clips of optimizers, and of their groups, that `take_clips` has removed.
_REMOVED_CLIPS: WeakKeyDictionary[Any, tuple[Any, list[Any]]] = WeakKeyDictionary()
DISTRIBUTED: WeakSet[Any] = WeakSet()
"""Optimizers whose parameters a strategy has dealt to the ranks: no other training can begin with them."""


def check_within(optimizer: Any, loss: Any, model: nn.Layer) -> None:
    """Raises UsageError if a finished optimizer or a loss has a parameter that is not the model's: its gradient would
    not be exchanged, and no checkpoint would save it. Call it before the model is placed."""
    known = {id(parameter) for parameter in model.parameters()}
    parameters_by_owner: dict[str, Parameters] = {"optimizer": [], "loss": []}
    if isinstance(optimizer, paddle.optimizer.Optimizer):
        parameters_by_owner["optimizer"] = parameters_of(optimizer)
    for function in loss.functions if isinstance(loss, Functions) else (loss,):
        learner = getattr(function, "__self__", function)  # of a method
        if isinstance(learner, nn.Layer):
            parameters_by_owner["loss"] += [p for p in learner.parameters() if not p.stop_gradient]
    for owner, parameters in parameters_by_owner.items():
        refuse_foreign(owner, [p for p in parameters if id(p) not in known], model)


def refuse_foreign(owner: str, foreign: Parameters, model: nn.Layer) -> None:
    """Raises UsageError if an optimizer or a loss has `foreign` parameters, which are not the model's."""
    if foreign:
        raise UsageError(
            f"{owner}: its parameter '{foreign[0].name}' {list(foreign[0].shape)} is not one of the model's "
            f"({type(model).__name__}). Make whatever learns a sublayer of the model, and the optimizer of "
            "model.parameters()."
        )


def renew(optimizer: Any) -> None:
    """Gives an optimizer of an earlier training its clips back. Raises UsageError if that training has dealt its
    parameters to the ranks. Anything but an optimizer is left alone."""
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        return
    if optimizer in DISTRIBUTED:
        raise UsageError(
            "Trainer.of.optimizer: an earlier Trainer.of has dealt its parameters to the ranks. Make another one of "
            "the model's parameters, or give it by a word or a function that makes another one."
        )
    return_clips(optimizer)


def check_not_wrapper(optimizer: Any) -> None:
    """Raises UsageError for a wrapped optimizer (paddle.incubate.LookAhead): its state_dict has neither the inner one's
    moments nor its counter, so a resumed run would differ (3.3.1). Also for L-BFGS, which computes the loss several
    times per update."""
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        raise UsageError(
            "optimizer: LBFGS computes the loss several times in one update, and an update here is made from one "
            "forward and backward. Choose another, such as adamw."
        )
    if isinstance(getattr(optimizer, "inner_optimizer", None), paddle.optimizer.Optimizer):
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} keeps another optimizer inside, whose state no checkpoint would "
            f"hold. Give that one ({type(optimizer.inner_optimizer).__name__}) itself."
        )


def check_ungrouped(optimizer: Any, setting: str) -> None:
    """Raises UsageError for an optimizer with parameter groups; `setting` is the recipe's key that needs one list."""
    if _is_grouped(optimizer):
        raise UsageError(
            f"optimizer: {setting} assigns one list of parameters to the ranks, and {type(optimizer).__name__} has "
            f"parameter groups. Give it all parameters in one list, or leave {setting} out."
        )


def leave_frozen_out(optimizer: Any) -> None:
    """Removes frozen parameters from an optimizer's list: they have no update that a rank could own."""
    keep(optimizer, [parameter for parameter in optimizer._parameter_list if not parameter.stop_gradient])


def keep(optimizer: Any, parameters: Parameters) -> None:
    """Restricts an optimizer without groups to these parameters."""
    optimizer._parameter_list = optimizer._param_groups = parameters


def check_dense(model: nn.Layer) -> None:
    """Raises UsageError for an embedding with sparse gradients: exchange, norm and scaling here need dense ones."""
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.Embedding) and layer._sparse:
            raise UsageError(
                f"model: layer {name} is an Embedding with sparse=True, whose gradient is rows of a table; ranks "
                "exchange whole gradients only. Make it with sparse=False."
            )


def check_single_dtype(model: nn.Layer) -> None:
    """Raises UsageError if some trained parameters are float64 and others narrower: Paddle's clip and optimizers take
    one dtype (3.3.1)."""
    trained = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    wide = [name for name, p in trained if p.dtype == paddle.float64]
    if 0 < len(wide) < len(trained):
        raise UsageError(
            f"model: parameter {wide[0]} is float64, and others are not; Paddle's clip and optimizers take one dtype. "
            "Create it with dtype='float32', or compute all in float64: train.precision=float64."
        )


def give_parameters(optimizer: paddle.optimizer.Optimizer, model: nn.Layer) -> None:
    """Replaces the optimizer's parameters with this rank's parameters of `model`, matched by name.

    A sharded layer has new parameters, and a pipeline stage has only some; the optimizer would continue to update the
    whole model's, which no forward uses.
    """
    here = {parameter.name: parameter for parameter in model.parameters()}

    def local(parameters: Iterable[paddle.Tensor]) -> Parameters:
        return [here[p.name] for p in parameters if p.name in here]

    if _is_grouped(optimizer):
        for group in (*optimizer._parameter_list, *optimizer._param_groups):
            group["params"] = local(group["params"])
    else:
        keep(optimizer, local(optimizer._parameter_list))


def _is_grouped(optimizer: Any) -> bool:
    return bool(optimizer._parameter_list) and isinstance(optimizer._parameter_list[0], dict)


def parameters_of(optimizer: Any) -> Parameters:
    """The parameters that an optimizer updates, grouped or not."""
    groups = groups_of(optimizer)
    return list(optimizer._parameter_list or ()) if groups is None else [p for group in groups for p in group]


def groups_of(optimizer: Any) -> list[Parameters] | None:
    """The parameters of each of an optimizer's groups; None if it has one list."""
    if not _is_grouped(optimizer):
        return None
    return [list(group["params"]) for group in optimizer._param_groups]


# Optimizers that may update only a part of a model: slices of parameters, or some of the parameters -------------------


# By exact type: a subclass may override `step`.
_ELEMENTWISE = {
    optimizers.SGD, optimizers.Momentum, optimizers.Adam, optimizers.AdamW, optimizers.Adamax, optimizers.NAdam,
    optimizers.RAdam, optimizers.Adagrad, optimizers.Adadelta, optimizers.RMSProp, optimizers.ASGD,
    optimizers.Rprop, Lion,
}  # fmt: skip
# Subclasses included: a layer's rate uses a norm over its parameter (Lamb, LARS), or products run over all (L-BFGS).
_BY_FULL_PARAMETER = (
    optimizers.Lamb, DistributedFusedLamb, LarsMomentumOptimizer, optimizers.LBFGS, Lars, Adafactor, Muon,
)  # fmt: skip
# Optimizers that compute parameter by parameter.
_BY_PARAMETER = {*_ELEMENTWISE, optimizers.Lamb, Lars, Adafactor, Muon}


def check_elementwise(optimizer: Any, tensor: int) -> list[str]:
    """Sentences about possible differences from one process if `tensor` ranks update slices: one for a user-defined
    optimizer, none for Paddle's elementwise ones.

    Raises UsageError for an optimizer that takes a norm over a parameter: over a slice it is another number.
    """
    if isinstance(optimizer, TurnOptimizers):
        return [text for member in optimizer.members for text in check_elementwise(member, tensor)]
    name = type(optimizer).__name__
    if tensor == 1 or type(optimizer) in _ELEMENTWISE:
        return []
    if isinstance(optimizer, _BY_FULL_PARAMETER):
        work = (
            "orthogonalizes whole matrices"
            if isinstance(optimizer, Muon)
            else "takes norms over whole parameters"
        )
        raise UsageError(
            f"strategy.tensor={tensor}: optimizer {name} {work}, and each rank would see only its slices, so it would "
            "learn something else than one process. Choose an optimizer that "
            "computes element by element (such as adamw), or set strategy.tensor=1: sharding, pipeline and data keep "
            "parameters whole."
        )
    return [
        f"optimizer {name}: whether it computes element by element is not known, and under strategy.tensor it sees "
        "slices of parameters: `paddle-dp verify` tells"
    ]


def check_by_parameter(optimizer: Any, **degrees: int) -> list[str]:
    """A sentence about a user-defined optimizer if axes give each rank some of the parameters to update; none for
    Paddle's, which compute parameter by parameter. `degrees`: by axis."""
    if isinstance(optimizer, TurnOptimizers):
        return [text for member in optimizer.members for text in check_by_parameter(member, **degrees)]
    split_axes = [axis for axis, degree in degrees.items() if degree > 1]
    if not split_axes or type(optimizer) in _BY_PARAMETER:
        return []
    return [
        f"optimizer {type(optimizer).__name__}: whether an update of a parameter looks at other parameters is not "
        f"known, and under strategy.{split_axes[0]} each rank updates some of them: `paddle-dp verify` tells"
    ]


# Clips by a global norm, which an optimizer with a part of the model would take over that part ------------------------


@dataclass(frozen=True)
class Clip:
    """The gradients of `parameters` (this rank's share of them) are clipped together to a 2-norm of `bound`."""

    bound: float
    updated: Sequence[paddle.Tensor]

    @property
    def parameters(self) -> Parameters:
        """The parameters with need_clip, which a callback may set between two updates."""
        return [p for p in self.updated if getattr(p, "need_clip", True) is not False]


def take_clips(optimizer: Any) -> list[Clip]:
    """Removes the global-norm clips from an optimizer and returns them: one, or one per parameter group.

    As in Paddle, each group has a separate norm, without parameters that have need_clip=False or that the optimizer
    does not update. All ranks have the same clips, some of which may have no parameter here. Raises UsageError for
    another kind of clip.
    """
    if isinstance(optimizer, TurnOptimizers):
        return [clip for member in optimizer.members for clip in take_clips(member)]
    groups = groups_of(optimizer)
    tables = optimizer._param_groups if groups is not None else [{"grad_clip": optimizer._grad_clip}]
    group_parameters = [parameters_of(optimizer)] if groups is None else groups
    _REMOVED_CLIPS[optimizer] = optimizer._grad_clip, [table.get("grad_clip") for table in tables]
    optimizer._grad_clip = _remaining_clip(optimizer._grad_clip)
    clips = []
    for table, parameters in zip(tables, group_parameters, strict=True):
        clip = table.get("grad_clip")
        table["grad_clip"] = _remaining_clip(clip)
        if clip is not None and table["grad_clip"] is None:
            clips.append(Clip(float(clip.clip_norm), list(parameters)))
    return clips


def return_clips(optimizer: Any) -> None:
    """Gives an optimizer the clips back that a training has taken (`take_clips`): the next training, or a user's loop,
    clips by them, too, whatever its strategy."""
    for member in getattr(optimizer, "members", ()):
        return_clips(member)
    clip, group_clips = _REMOVED_CLIPS.pop(optimizer, (None, []))
    if optimizer._grad_clip is None:
        optimizer._grad_clip = clip
    if groups_of(optimizer) is not None:
        for table, removed in zip(optimizer._param_groups, group_clips, strict=False):
            table["grad_clip"] = table.get("grad_clip") or removed


@contextmanager
def without_clips(optimizer: Any, clips: Sequence[Clip] | None) -> Iterator[None]:
    """Wraps a training. Within it the optimizer has no global-norm clip if the learner clips by `clips`; after it, it
    has its clips again. `clips`: None if the optimizer clips by itself.

    Raises UsageError if the optimizer has other bounds than `clips`: they were set after the learner was made.
    """
    if clips is None:
        yield
        return
    return_clips(optimizer)
    try:
        now, before = ([f"{clip.bound:g}" for clip in c] for c in (take_clips(optimizer), clips))
        if now != before:
            raise UsageError(
                f"Trainer.fit: the optimizer's clip was {' and '.join(before) or 'none'} at Trainer.of and is "
                f"{' and '.join(now) or 'none'}: this strategy clips by the first. Make another Trainer.of of a new "
                "model and a new optimizer with the new clip, and load=FOLDER of this run."
            )
        yield
    finally:
        return_clips(optimizer)


def bound_of(learner: Any) -> float | None:
    """The bound of a placed learner's clip by the norm of all gradients; None without one, or with one per parameter
    group."""
    bounds = [clip.bound for clip in learner.mode.norm.clips]
    left = getattr(learner.optimizer, "_grad_clip", None)
    if left is not None and type(left) is ClipGradByGlobalNorm:
        bounds.append(float(left.clip_norm))
    return bounds[0] if len(bounds) == 1 else None


def _remaining_clip(clip: Any) -> Any:
    """The clip that stays in the optimizer: one by value, which does not depend on other parameters; else None.

    The type must match exactly, because a subclass may do anything.
    """
    if clip is None or type(clip) is ClipGradByValue:
        return clip
    if type(clip) is not ClipGradByGlobalNorm:
        raise UsageError(
            "this strategy takes ClipGradByGlobalNorm (clip) and ClipGradByValue (clip_value), not "
            f"{type(clip).__name__}."
        )
    return None


# The schedule's learning rate -----------------------------------------------------------------------------------------


def with_members(optimizer: paddle.optimizer.Optimizer) -> Sequence[paddle.optimizer.Optimizer]:
    """An optimizer, and the ones of single turns within it."""
    return [optimizer, *(optimizer.members if isinstance(optimizer, TurnOptimizers) else ())]


class Rate:
    """Steps `schedule` and sets its rate in `optimizer`.

    An optimizer built with the scheduler itself is used unchanged: it reads the rate and fills a tensor at every
    update, for 60 µs, which other optimizers save. Raises UsageError for an optimizer with another scheduler than
    `schedule`, and for ReduceOnPlateau.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer, schedule: LRScheduler | None):
        self.steps = 0  # updates so far, including those before a resume
        self.optimizer, self.schedule = optimizer, schedule
        self._optimizers = with_members(optimizer)
        self._rates = [each._learning_rate for each in self._optimizers]  # each a number or a scheduler
        self._has_scheduler = isinstance(self._rates[0], LRScheduler)
        if isinstance(schedule, ReduceOnPlateau):
            raise UsageError(
                "schedule: ReduceOnPlateau needs a metric at each step, and schedules here are stepped by updates "
                "alone. The schedule plateau has its rules, over held-out samples: schedule: {use: plateau, "
                "learning_rate: 0.1, watch: loss, patience: 10}"
            )
        if any(isinstance(rate, LRScheduler) and rate is not schedule for rate in self._rates):
            raise UsageError(
                "schedule: the optimizer has another scheduler, which would not be stepped: give one of the two"
            )
        self.apply()

    @property
    def replaced(self) -> tuple[float, float] | None:
        """The optimizer's rate and the one that it had from here, if a callback or a script has set another one."""
        rates = [each._learning_rate for each in self._optimizers]
        if self._has_scheduler or any(isinstance(rate, LRScheduler) for rate in rates):
            return None  # `step` refuses another one
        return next(((rate, was) for rate, was in zip(rates, self._rates, strict=True) if rate != was), None)

    def step(self) -> None:
        """Call it after each update. Raises UsageError for a scheduler that a callback or a script has set."""
        self.steps += 1
        for each in self._optimizers:
            if (rate := each._learning_rate) is not self.schedule and isinstance(rate, LRScheduler):
                raise UsageError(
                    f"optimizer: a callback or the script has given it another schedule, {type(rate).__name__}, which "
                    "is neither stepped nor saved: give it to the training at its start, Trainer.of(schedule=…)."
                )
        if self.schedule is not None:
            self.schedule.step()
            self.apply()

    def apply(self) -> None:
        """Sets the schedule's current rate in the optimizer."""
        if self.schedule is None or self._has_scheduler:
            return
        if (rate := self.schedule()) != self._rates[0]:
            self.optimizer.set_lr(rate)
            self._rates = [rate] * len(self._rates)


def check_rate(optimizer: paddle.optimizer.Optimizer, schedule: LRScheduler | None) -> None:
    """Raises UsageError if an optimizer does not have the schedule's rate, with which it was to be built. A turn's may
    have another one under a constant schedule, which never sets a rate."""
    if schedule is None:
        return
    provided = f"it was given the schedule's learning rate {schedule()}, but has"
    if optimizer.get_lr() != schedule():
        raise UsageError(
            f"optimizer: {provided} {optimizer.get_lr()}: build it with the rate that it is given, or leave out the "
            "schedule"
        )
    if not isinstance(optimizer, TurnOptimizers):
        return
    for name, member in zip(optimizer.names, optimizer.members, strict=True):
        if member.get_lr() != schedule() and not _is_constant(schedule):
            raise UsageError(
                f"turns.{name}.optimizer: {provided} {member.get_lr()}, and each update sets the schedule's rate in "
                "all turns: build it with the rate that it is given, and give the turn a multiple of it by the "
                "recipe's optimizer: {groups: [{match: …, lr_scale: 2}]}; or choose schedule: {use: constant, …}"
            )


def _is_constant(schedule: LRScheduler) -> bool:
    """True for a schedule of the shelf that never moves. A user's function is not called: it may count its calls."""
    function: Any = getattr(schedule, "lr_lambda", None)
    if not (getattr(function, "__module__", None) or "").startswith("paddle_dp.schedules"):
        return False
    return bool(function(0) == function(1) == function(10**9))  # the first two differ in a warm-up
