"""Checks that ranks with the same layer use the same settings of it (modes, hooks, attributes), and the same loss and
learning rate.

A callback that sets a dropout's rate or adds a hook on one rank only changes the training, but all weights stay equal,
since gradients are summed. Settings that change after the start are compared, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paddle import nn

from paddle_dp.core.turns import TurnsLoss
from paddle_dp.errors import DivergenceError
from paddle_dp.identity.walk import Walker, hooks_around, is_library, kind_of, prefixed
from paddle_dp.text import CAN_DIFFER

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner

_MODE, _HOOKS = "the mode", "the hooks"  # not attribute names
_LONGEST = 40  # characters of a value in a message
Key = tuple[str, str]  # a layer or a loss, and its setting


class LayerSettings:
    """Records the settings of a learner's layers when it is created, and compares those that have changed since."""

    def __init__(self, learner: Learner):
        self._learner, self._mesh = learner, learner.mesh
        self._start = self._settings()

    def check(self, when: str) -> list[str]:
        """Raises DivergenceError, naming layer and ranks, if ranks have different learning rates, modes, hooks or
        settings of library layers. Returns sentences about attributes of user-defined layers, which forward may change
        from each rank's samples. Collective."""
        if self._mesh.ranks == 1:
            return []
        now = self._settings()
        rate = 0.0 if self._learner.async_rank is not None else self._learner.optimizer.get_lr()
        changed = [key for key, value in now.items() if value != self._start.get(key)]
        rows = self._mesh.gather([changed, rate])
        rates = {str(rank): repr(row[1]) for rank, row in enumerate(rows)}
        if len(set(rates.values())) > 1:
            raise DivergenceError(
                f"{when}: ranks differ in the learning rate: {_by_rank(rates)}. {_RATE_ADVICE}"
            )
        keys = sorted({(name, setting) for row in rows for name, setting in row[0]})
        if not keys:
            return []
        rank_rows = self._mesh.gather([[*key, now[key]] for key in keys if key in now])
        return list(self._compared(keys, rank_rows, when))

    def _compared(self, keys: list[Key], rank_rows: list[list[list[str]]], when: str) -> Iterable[str]:
        settings_of_ranks = [{(name, setting): value for name, setting, value in rows} for rows in rank_rows]
        named = {n: t.func if isinstance(t, partial) else t for n, t in self._named().items()}
        user_defined = sorted(name for name, thing in named.items() if not is_library(kind_of(thing)))
        owned = {name for names in self._mesh.gather(user_defined) for name in names}
        for key in keys:
            name, setting = key
            values = {str(rank): row[key] for rank, row in enumerate(settings_of_ranks) if key in row}
            if len(set(values.values())) < 2:
                continue
            if setting in (_MODE, _HOOKS) or (name not in owned and not setting.startswith("hook ")):
                raise DivergenceError(
                    f"{when}: ranks differ in {setting} of {name}: {_by_rank(values)}. {_ADVICE}"
                )
            by = "forward" if name.startswith("model") else "its code, or a callback,"
            yield (
                f"{name}.{setting} is another one on each rank: {by} changes it, in plain Python, from the rank's "
                f"own samples, and one process from all of them{CAN_DIFFER}"
            )

    def _named(self) -> dict[str, Any]:
        """The layers and the loss, or the losses of turns, by name."""
        named = {f"model.{name}".rstrip("."): layer for name, layer in self._learner.placed.named_layers()}
        if isinstance(loss := self._learner.loss, TurnsLoss):
            return named | {f"turns.{turn.name}.loss": turn.loss.function for turn in loss.turns}
        return named | {"loss": loss.function}

    def _settings(self) -> dict[Key, str]:
        """Settings by layer or loss and name, on a rank that computes."""
        settings: dict[Key, str] = {}
        for name, thing in self._named().items() if self._mesh.reads else ():
            if kind_of(thing).startswith("paddle_dp."):
                continue  # this package's layers have rank-local state
            values = Walker(state=True).settings_of(thing)
            if isinstance(thing, nn.Layer):
                settings[name, _MODE] = "training" if thing.training else "evaluation"
                hooks = hooks_around(thing)
                kinds = (getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks.values())
                settings[name, _HOOKS] = ", ".join(kinds) or "none"
                for label, hook in hooks.items():
                    values |= prefixed(label, Walker(only_plain=True).settings_of(hook))
            settings |= {(name, setting): repr(value) for setting, value in values.items()}
        return settings


_RATE_ADVICE = (
    "Their updates differ, so their weights drift apart: a callback or a script must make the same change on "
    "every rank"
)
_ADVICE = (
    "Weights stay equal, since gradients are summed, but one process would train differently: a "
    "callback or a script must make the same change on every rank."
)


def _by_rank(values: Mapping[str, str]) -> str:
    """ "0.5 on rank 1, 0.1 on ranks 0, 2": the rarest value first."""
    groups: dict[str, list[str]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value[:_LONGEST]} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}{', …' * (len(ranks) > 8)}"
        for value, ranks in sorted(groups.items(), key=lambda group: len(group[1]))
    )
