"""Turns: a global batch trains some of a model's parameters by one loss, then others by another, such as a GAN's.

Each turn is a whole update of its parameters: forward, backward, exchange, count, norm, clip, step. So it is divided as
exactly as any other update, and the next turn's forward reads the new weights. All turns share the model's forward, the
optimizer and its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import paddle
from paddle.optimizer import Optimizer

from paddle_dp.batch import Batch
from paddle_dp.core.loss import Count, Loss, Scores, as_loss, loss_of
from paddle_dp.core.loss import number as number_of
from paddle_dp.errors import LossError, UsageError
from paddle_dp.part.groups import is_any_match
from paddle_dp.recipe import Recipe, TurnSettings
from paddle_dp.units import EverySteps

_RANDOM = 40  # bits by which a turn's number is shifted into the seed of its random numbers
Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """`number`: its position, from 0. `match`: patterns of the parameters that it trains. `every`: how often."""

    name: str
    number: int
    match: Sequence[str]
    loss: Loss
    every: EverySteps

    def trains(self, name: str) -> bool:
        """Whether it trains the parameter with this whole-model name."""
        return is_any_match(self.match, [name])

    def batch(self, batch: Batch) -> Batch:
        """The same samples, with other random numbers than in the turns before it."""
        return replace(batch, seed=batch.seed ^ (self.number << _RANDOM)) if self.number else batch


class TurnsLoss(Loss):
    """The losses of all turns as one: within a turn (`during`) its loss, else the sum of all, for held-out samples.

    Turns may count different things in training, each divided by its count; for the sum they must count the same.
    """

    def __init__(self, turns: Sequence[Turn]):
        self.turns = tuple(turns)
        self._turn: Turn | None = None
        # The sum that was returned last, and its terms: `sums` is called with it next.
        self._last: tuple[paddle.Tensor, list[paddle.Tensor]] | None = None
        self.function = Functions(tuple(turn.loss.function for turn in turns))
        self.name = " and ".join(turn.name for turn in turns)
        self.multi_label = turns[0].loss.multi_label
        for turn in turns:
            if turn.loss.compares:
                raise UsageError(
                    f"turns.{turn.name}: its loss {turn.loss.name} compares the samples of a batch, and a turn's loss "
                    "must be a sum over samples: take one without `across`."
                )

    @property
    def owner(self) -> Any:
        return next(
            (o for turn in self.turns if isinstance(o := turn.loss.owner, paddle.nn.Layer)), self.function
        )

    @property
    def ignored(self) -> int | None:
        return self.turns[0].loss.ignored  # whose `predictions` are compared with the targets

    @property
    def counted(self) -> Any:  # type: ignore[override]
        if self._turn is not None:
            return self._turn.loss.counted
        kinds = {turn.loss.counted for turn in self.turns}
        return kinds.pop() if len(kinds) == 1 else "answers"

    def count(self, targets: paddle.Tensor) -> Count:
        return (self._turn or self.turns[0]).loss.count(targets)

    @contextmanager
    def during(self, turn: Turn, named: Sequence[tuple[str, paddle.Tensor]]) -> Iterator[None]:
        """A context for the update of a turn; `named`: all trained parameters, of which the others are fixed in it;
        frozen ones stay frozen."""
        fixed = [p for name, p in named if not (turn.trains(name) or p.stop_gradient)]
        self._turn = turn
        for parameter in fixed:
            parameter.stop_gradient = True
        try:
            yield
        finally:
            self._turn = None
            for parameter in fixed:
                parameter.stop_gradient = False

    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        if self._turn is not None:
            return self._turn.loss(outputs, targets)
        totals, count = self._all(outputs, targets)
        self._last = (total := paddle.add_n(totals)), totals
        return total, count

    def _all(self, outputs: Any, targets: paddle.Tensor) -> tuple[list[paddle.Tensor], Count]:
        """The total of each turn, and their count. Raises LossError if they count differently."""
        totals, counts = zip(*(turn.loss(outputs, targets) for turn in self.turns), strict=True)
        for turn, count in zip(self.turns, counts, strict=True):
            if number_of(count) != number_of(counts[0]):
                raise LossError(
                    f"the losses of the turns {self.turns[0].name} and {turn.name} count {number_of(counts[0]):g} and "
                    f"{number_of(count):g} for the same samples; for held-out samples they are added up, and must "
                    "count the same: one number for each sample, for example."
                )
        return [total.reshape([]) for total in totals], counts[0]

    def sums(self, outputs: Any, targets: paddle.Tensor, total: paddle.Tensor) -> Scores:
        if self._turn is not None:
            return self._turn.loss.sums(outputs, targets, total)
        with paddle.no_grad():
            known = self._last is not None and self._last[0] is total
            totals = self._last[1] if known else self._all(outputs, targets)[0]  # type: ignore[index]
            self._last = None
            sums: Scores = {"loss": total.detach()}
            for turn, turn_total in zip(self.turns, totals, strict=True):
                sums |= _prefixed(turn, turn.loss.sums(outputs, targets, turn_total))
        return sums

    def num_classes(self, outputs: paddle.Tensor) -> int:
        return self.turns[0].loss.num_classes(outputs)

    def predictions(self, outputs: paddle.Tensor) -> paddle.Tensor:
        return self.turns[0].loss.predictions(outputs)

    def probabilities(self, outputs: paddle.Tensor) -> paddle.Tensor:
        return self.turns[0].loss.probabilities(outputs)


@dataclass(frozen=True)
class Functions:
    """The losses' callables in the order of their turns; a dataclass, so that a resumed run compares each."""

    functions: tuple[Any, ...]


def joined(metrics: Mapping[str, Metrics]) -> Metrics:
    """The metrics of the turns of one update, by turn, as one: each under `<turn>_<name>`, the sum of the losses, and
    the norm of all gradients together. A turn in which nothing counted has no part in both."""
    counted = [row for row in metrics.values() if not math.isnan(row["loss"]) or row["gradient_norm"]]
    return {
        "loss": sum(row["loss"] for row in counted) if counted else math.nan,
        **{f"{turn}_{name}": value for turn, row in metrics.items() for name, value in row.items()},
        "gradient_norm": math.hypot(*(row["gradient_norm"] for row in metrics.values())),
    }


def _prefixed(turn: Turn, sums: Scores) -> Scores:
    return {f"{turn.name}_{name}": value for name, value in sums.items()}


def make_turns(
    settings: Mapping[str, TurnSettings], model: Any, name: str, losses: Mapping[str, Any] | None = None
) -> TurnsLoss:
    """The loss of a model's turns; `name`: the model's, in messages. A turn's loss is its entry of `losses`, the one
    that its settings name, or the model's method `<turn>_loss`. Raises UsageError if it has none."""
    turns: list[Turn] = []
    for turn, each in settings.items():
        loss = (losses or {}).get(turn) or (each.loss and each.loss.build())
        loss = loss or getattr(model, f"{turn}_loss", None)
        if not callable(loss):
            raise UsageError(
                f"turns.{turn}: model {name} has no method {turn}_loss(outputs, targets), so the turn must have a "
                f"loss: set turns.{turn}.loss."
            )
        number = len(turns)
        turns.append(Turn(name=turn, number=number, match=each.match, loss=as_loss(loss), every=each.every))
    return TurnsLoss(turns)


def loss_of_recipe(recipe: Recipe, model: Any) -> Any:
    """The loss that a recipe names, its turns', or the model's method `loss`. Raises UsageError if there is none."""
    if recipe.turns:
        return make_turns(recipe.turns, model, recipe.model.name)
    return loss_of(recipe.loss, model, recipe.model.name)


# Turns with different rules -------------------------------------------------------------------------------------------
# Optimizers of disjoint parameters as one, for turns with different rules, such as AdamW for one and momentum for
# another.

# Dicts and sets of states that Paddle keeps by a parameter's name: all members use the same ones, so that the state of
# the whole is written, loaded and measured as one optimizer's.
_SHARED = ("_accumulators", "_accumulators_holder", "_already_create_accumulator", "_master_weights")


class TurnOptimizers(Optimizer):
    """The `members`, each with separate parameters, at one learning rate. `names`: of their turns.

    A step is a step of the members that have a gradient. Removing parameters from the list (`core.optimizer.keep`)
    removes them from their member.
    """

    def __init__(self, rate: float, members: Sequence[Optimizer], names: Sequence[str]):
        self.members, self.names = tuple(members), tuple(names)
        self._parameters: list[paddle.Tensor] = []
        super().__init__(learning_rate=rate, parameters=[p for each in members for p in each._parameter_list])
        for member in self.members:
            for name in _SHARED:
                setattr(member, name, getattr(self, name))

    @property
    def _parameter_list(self) -> list[paddle.Tensor]:
        return self._parameters

    @_parameter_list.setter
    def _parameter_list(self, parameters: list[paddle.Tensor]) -> None:
        listed = {id(parameter) for parameter in parameters}
        for member in self.members:
            member._parameter_list = [p for p in member._parameter_list if id(p) in listed]
            member._param_groups = member._parameter_list
        self._parameters = parameters

    def set_lr(self, value: float) -> None:
        super().set_lr(value)
        for member in self.members:
            member.set_lr(value)

    @paddle.no_grad()
    def step(self) -> None:
        for member in self.members:
            if any(parameter.grad is not None for parameter in member._parameter_list):
                member.step()

    def _create_accumulators(self, block: Any, parameters: list[paddle.Tensor]) -> None:
        for member in self.members:
            ids = {id(parameter) for parameter in member._parameter_list}
            if local := [parameter for parameter in parameters if id(parameter) in ids]:
                member._create_accumulators(block, local)


@dataclass(frozen=True)
class MakeTurnOptimizers:
    """Makes the optimizer of a recipe's turns: a function of (learning rate, named parameters). `optimizer` is the
    recipe's, for the turns that name none. A dataclass, so that a resumed run compares its settings."""

    optimizer: Any
    turns: Mapping[str, TurnSettings]

    def __call__(self, rate: Any, named: list[tuple[str, paddle.Tensor]]) -> TurnOptimizers:
        members = []
        for turn in self.turns.values():
            trained = [(name, p) for name, p in named if is_any_match(turn.match, [name])]
            members.append((turn.optimizer or self.optimizer).build(rate, trained))
        return TurnOptimizers(1e-3 if rate is None else float(rate), members, [*self.turns])


def make_optimizer_of(recipe: Recipe) -> Any:
    """The function of (learning rate, named parameters) that makes a recipe's optimizer."""
    if any(turn.optimizer is not None for turn in recipe.turns.values()):
        return MakeTurnOptimizers(recipe.optimizer, recipe.turns)
    return recipe.optimizer.build
