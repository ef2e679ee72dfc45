"""Checks that ranks with the same layer use the same settings of it (modes, hooks, attributes, global variables), and
the same loss and learning rate.

A callback that sets a dropout's rate or adds a hook on one rank only changes the training, but all weights stay equal,
since gradients are summed. Settings that change after the start are compared, by layer name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from paddle import nn

from paddle_dp.errors import DivergenceError
from paddle_dp.identity.walk import Walker, globals_of, hooks_of, is_library, kind_of

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner

_MODE, _HOOKS = "the mode", "the hooks"  # not attribute names
_LOSS = "the loss"  # no name of a layer
_LONGEST = 40  # characters of a value in a message
Key = tuple[str, str]  # a layer, and its setting


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
        keys = sorted({(layer, setting) for row in rows for layer, setting in row[0]})
        if not keys:
            return []
        rank_rows = self._mesh.gather([[*key, now[key]] for key in keys if key in now])
        return list(self._compared(keys, rank_rows, when))

    def _compared(self, keys: list[Key], rank_rows: list[list[list[str]]], when: str) -> Iterable[str]:
        settings_of_ranks = [
            {(layer, setting): value for layer, setting, value in rows} for rows in rank_rows
        ]
        named = self._learner.placed.named_layers()
        user_layers = sorted(name for name, layer in named if not is_library(type(layer).__module__))
        owned = {name for names in self._mesh.gather(user_layers) for name in names}
        loss = self._learner.loss.function
        owned |= set() if is_library(getattr(loss, "__module__", None)) else {_LOSS}
        for key in keys:
            layer, setting = key
            values = {str(rank): row[key] for rank, row in enumerate(settings_of_ranks) if key in row}
            if len(set(values.values())) < 2:
                continue
            name = "loss" if layer == _LOSS else f"model.{layer}".rstrip(".")
            if setting in (_MODE, _HOOKS) or (layer not in owned and not setting.startswith("hook ")):
                raise DivergenceError(
                    f"{when}: ranks differ in {setting} of {name}: {_by_rank(values)}. {_ADVICE}"
                )
            by = "its code, or a callback," if layer == _LOSS else "forward"
            yield (
                f"{name}.{setting} is another one on each rank: {by} changes it, in plain Python, from the rank's "
                "own samples, and one process from all of them"
            )

    def _settings(self) -> dict[Key, str]:
        """Settings by layer and name, and of a user's loss, on a rank that computes."""
        settings: dict[Key, str] = {}
        walker, loss = Walker(state=True), self._learner.loss
        for name, layer in self._learner.placed.named_layers() if self._mesh.reads else ():
            if type(layer).__module__.startswith("paddle_dp."):
                continue  # this package's layers have rank-local state
            settings[name, _MODE] = "training" if layer.training else "evaluation"
            settings[name, _HOOKS] = ", ".join(_hooks(layer)) or "none"
            values = (
                walker.settings_of(layer) | hooks_of(layer) | walker.walk(globals_of(type(layer).forward))
            )
            settings |= {(name, setting): repr(value) for setting, value in values.items()}
        if self._mesh.reads and not kind_of(loss.function).startswith("paddle_dp."):
            function = getattr(loss.function, "func", loss.function)  # of a partial
            method = "forward" if isinstance(function, nn.Layer) else "__call__"
            called = function if hasattr(function, "__code__") else getattr(type(function), method, None)
            values = walker.settings_of(loss.function) | walker.walk(globals_of(called))
            settings |= {(_LOSS, setting): repr(value) for setting, value in values.items()}
        return settings


_RATE_ADVICE = (
    "Their updates differ, so their weights drift apart: a callback or a script must make the same change on "
    "every rank"
)
_ADVICE = (
    "Weights stay equal, since gradients are summed, but one process would train differently: a "
    "callback or a script must make the same change on every rank."
)


def _hooks(layer: nn.Layer) -> Iterable[str]:
    """The names of hooks on a layer's forward, except this package's."""
    for hook in (*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values()):
        named = hook if hasattr(hook, "__qualname__") else type(hook)
        if not named.__module__.startswith("paddle_dp."):
            yield named.__qualname__


def _by_rank(values: Mapping[str, str]) -> str:
    """ "0.5 on rank 1, 0.1 on ranks 0, 2": the rarest value first."""
    groups: dict[str, list[str]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value[:_LONGEST]} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}{', …' * (len(ranks) > 8)}"
        for value, ranks in sorted(groups.items(), key=lambda group: len(group[1]))
    )
