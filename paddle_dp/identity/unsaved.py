"""Prints reasons why a resumed run differs: state that no checkpoint holds, and changes by callbacks at its start."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paddle_dp.core.consistency import digests
from paddle_dp.core.optimizer import groups_of
from paddle_dp.identity.walk import PADDLE_ATTRIBUTES, Attributes, Walker, is_library, kind_of, prefixed
from paddle_dp.learner import Learner
from paddle_dp.learner.learner_checks import gathered_names
from paddle_dp.text import and_more


class Unsaved:
    """Prints each name once, at the first check after it has changed."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._callbacks = Attributes({})
        self._sets_rate = False  # whether each start sets the learning rate, a resumed run's as well
        self._settings: dict[str, Any] = {}  # after each callback's `start`

    def watch(self, callbacks: Iterable[Any], learner: Learner) -> None:
        """Looks at the numbers and texts of users' callbacks from now on, at the learning rate, and at settings."""
        self._sets_rate = learner.rate.replaced is not None
        self._settings = _settings(learner)
        walker = Walker(only_plain=True)
        self._callbacks = Attributes(walker.by_label((type(c).__name__, c) for c in callbacks), walker)

    def print_new(self, learner: Learner) -> None:
        """Prints a line for buffers, one for the optimizer's attributes, one for attributes of model, loss and
        schedule, one for callbacks, one for a learning rate that is not the schedule's, and one each for parameters,
        layers, the loss and the optimizer that are set otherwise since the start. Collective."""
        states = self._new("callback", gathered_names(self._callbacks.changed(), learner.placed.mesh))
        buffers = self._new("buffer", learner.unsaved.buffers())
        optimizer = self._new("optimizer", learner.unsaved.attributes_of_optimizer())
        attributes = self._new("attribute", learner.unsaved.attributes())
        now = _settings(learner)
        changed = [name for name, value in self._settings.items() if value != now.get(name, value)]
        changed = gathered_names(changed, learner.placed.mesh)
        rates = learner.rate.replaced
        if not learner.mesh.is_main:
            return
        if rates and not self._sets_rate and self._new("rate", ["set"]):
            _print(
                f"learning rate {rates[0]:.6g}: a callback or the script has set it, and it is not in the checkpoint, "
                f"so a resumed run starts with {rates[1]:.6g}. Give a schedule, or set it in `start`, too, by "
                "moment.progress."
            )
        for kind in ("parameter", "layer", "loss", "optimizer"):
            if names := self._new("setting", [name for name in changed if name.startswith(kind)]):
                _print(
                    f"{names[0]}{and_more(names)}: a forward, a callback or the script has set it, and it is not in "
                    "the checkpoint, so a resumed run starts with its first value. Nothing is lost if each forward "
                    "sets it before it is used, or a callback sets it in `start`, too, by moment.progress."
                )
        if buffers:
            _print(
                f"buffer {buffers[0]}{and_more(buffers)}: changed in training, and not in the checkpoint, so a resumed "
                "run starts with its first value. If later batches read it, make it with register_buffer(name, "
                "tensor): a tensor that is assigned to a layer's attribute, or made with persistable=False, is not "
                "saved."
            )
        if optimizer:
            _print(
                f"optimizer {type(learner.optimizer).__name__}: its attribute{'s' * (len(optimizer) > 1)} "
                f"{', '.join(optimizer)} changed in training, and not in its state_dict, so a resumed run starts with "
                "the first value. Keep it in an accumulator, which is saved: self._add_accumulator(name, parameter)."
            )
        if attributes:
            _print(
                f"{attributes[0]}{and_more(attributes)}: changed in training, and not in the checkpoint, so a resumed "
                "run starts with its first value. If later batches read it, keep it in a buffer of the model "
                "(register_buffer); of a schedule, name it in state_keys."
            )
        if states:
            _print(
                f"callback {states[0]}{and_more(states)}: changed in training, and not in the checkpoint, so a resumed "
                "run starts with its first value. If it decides when to stop, or a rate, let it follow from "
                "moment.progress, or save it at each checkpoint (`saved`), and read it at the start."
            )

    def _new(self, kind: str, names: Sequence[str]) -> list[str]:
        unprinted = [name for name in names if f"{kind} {name}" not in self._printed]
        self._printed.update(f"{kind} {name}" for name in unprinted)
        return unprinted


@contextmanager
def changes_printed(learner: Learner, step: int) -> Iterator[None]:
    """Wraps the callbacks' `start`. After a resume (`step` > 0) it prints a line for weights and buffers that they
    change, since an uninterrupted run has not changed them then. Collective."""
    before = _digests(learner) if step else {}
    yield
    after = _digests(learner) if step else {}
    changed = learner.mesh.gather([n for n in after if after[n] != before.get(n)]) if step else []
    names = list(dict.fromkeys(name for row in changed for name in row))
    if names and learner.mesh.is_main:
        _print(
            f"{names[0]}{and_more(names)}: a callback changed it in `start`, after {step} updates. A run that was not "
            "interrupted has it otherwise: change weights only where moment.progress.step is 0."
        )


def _settings(learner: Learner) -> dict[str, Any]:
    """Whether each parameter is frozen, its rate factor, and whether it is clipped; each layer's mode; the numbers of
    Paddle's layers, losses and optimizers. (`UnsavedState` has users' classes.)"""
    settings: dict[str, Any] = {}
    for name, p in learner.placed.named_parameters():
        settings[f"parameter {name}.stop_gradient"] = p.stop_gradient
        settings[f"parameter {name}.optimize_attr"] = getattr(p, "optimize_attr", {}).get("learning_rate")
        settings[f"parameter {name}.need_clip"] = getattr(p, "need_clip", True)
    for name, layer in learner.placed.named_layers():
        settings[f"layer {name or 'model'}.training"] = layer.training
        settings |= prefixed(f"layer {name or 'model'}", _numbers_of_library(layer))
    settings |= prefixed("loss", _numbers_of_library(learner.loss.function))
    return settings | _optimizer_settings(learner.optimizer)


def _numbers_of_library(thing: Any) -> dict[str, Any]:
    """Without texts: a forward of BatchNorm1D sets its data format."""
    settings = Walker(only_plain=True).settings_of(thing) if kind_of(thing).startswith("paddle.") else {}
    return {name: value for name, value in settings.items() if not isinstance(value, str)}


def _optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """The numbers and texts of Paddle's optimizers, or of their groups, which Paddle copies to the optimizer; and those
    of their clips and regularizers."""
    members = [o for o in getattr(optimizer, "members", [optimizer]) if is_library(type(o).__module__)]
    tables = [t for o in members for t in ([vars(o)] if groups_of(o) is None else o._param_groups)]
    settings: dict[str, Any] = {}
    for number, table in enumerate(tables):
        values = {name: value for name, value in table.items() if name not in PADDLE_ATTRIBUTES}
        for name in ("_grad_clip", "grad_clip", "regularization", "weight_decay"):
            values |= prefixed(name, getattr(table.get(name), "__dict__", {}))
        label = f"optimizer.groups.{number}" if len(tables) > 1 else "optimizer"
        settings |= prefixed(label, Walker(only_plain=True).walk(values))
    return settings


def _digests(learner: Learner) -> dict[str, tuple[int, int]]:
    state = learner.placed.state()
    return dict(zip(state, digests(state.values()), strict=True))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
