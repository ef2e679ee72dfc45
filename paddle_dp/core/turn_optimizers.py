"""Optimizers of disjoint parameters as one, for turns with different rules, such as AdamW for one and momentum for
another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.optimizer import Optimizer

from paddle_dp.part.groups import is_any_match
from paddle_dp.recipe import Recipe, TurnSettings

# Dicts and sets of states that Paddle keeps by a parameter's name: all members use the same ones, so that the state of
# the whole is written, loaded and measured as one optimizer's.
_SHARED = ("_accumulators", "_accumulators_holder", "_already_create_accumulator", "_master_weights")


class TurnOptimizers(Optimizer):
    """The `members`, each with separate parameters, at one learning rate.

    A step is a step of the members that have a gradient. Removing parameters from the list (`core.optimizer.keep`)
    removes them from their member.
    """

    def __init__(self, rate: float, members: Sequence[Optimizer]):
        self.members = tuple(members)
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
        return TurnOptimizers(1e-3 if rate is None else float(rate), members)


def make_optimizer_of(recipe: Recipe) -> Any:
    """The function of (learning rate, named parameters) that makes a recipe's optimizer."""
    if any(turn.optimizer is not None for turn in recipe.turns.values()):
        return MakeTurnOptimizers(recipe.optimizer, recipe.turns)
    return recipe.optimizer.build
