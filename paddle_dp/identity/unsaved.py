"""Prints reasons why a resumed run differs: state that no checkpoint holds, and changes by callbacks at its start."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paddle_dp.core.consistency import digests
from paddle_dp.identity.walk import Attributes, Walker
from paddle_dp.learner import Learner
from paddle_dp.learner.learner_checks import gathered_names
from paddle_dp.text import and_more


class Unsaved:
    """Prints each name once, at the first check after it has changed."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._callbacks = Attributes({})
        self._sets_rate = False  # whether each start sets the learning rate, a resumed run's as well
        self._parameters: dict[str, Any] = {}  # their settings after each callback's `start`

    def watch(self, callbacks: Iterable[Any], learner: Learner) -> None:
        """Looks at the numbers and texts of users' callbacks from now on, at the learning rate, and at settings of
        parameters."""
        self._sets_rate = learner.rate.replaced is not None
        self._parameters = _parameter_settings(learner)
        walker = Walker(only_plain=True)
        self._callbacks = Attributes(walker.by_label((type(c).__name__, c) for c in callbacks), walker)

    def print_new(self, learner: Learner) -> None:
        """Prints a line for buffers, one for the optimizer's attributes, one for attributes of model, loss and
        schedule, one for callbacks, one for a learning rate that is not the schedule's, and one for parameters that are
        frozen, or set otherwise, since the start. Collective."""
        states = self._new("callback", gathered_names(self._callbacks.changed(), learner.placed.mesh))
        buffers = self._new("buffer", learner.unsaved.buffers())
        optimizer = self._new("optimizer", learner.unsaved.attributes_of_optimizer())
        attributes = self._new("attribute", learner.unsaved.attributes())
        initial, now = self._parameters, _parameter_settings(learner)
        changed = [name for name, value in now.items() if value != initial.get(name, value)]
        parameters = gathered_names(changed, learner.placed.mesh)
        rates = learner.rate.replaced
        if not learner.mesh.is_main:
            return
        if rates and not self._sets_rate and self._new("rate", ["set"]):
            _print(
                f"learning rate {rates[0]:.6g}: a callback or the script has set it, and it is not in the checkpoint, "
                f"so a resumed run starts with {rates[1]:.6g}. Give a schedule, or set it in `start`, too, by "
                "moment.progress."
            )
        if parameters and self._new("parameter", ["set"]):
            _print(
                f"parameter {parameters[0]}{and_more(parameters)}: a callback or the script has set it, and it is not "
                "in the checkpoint, so a resumed run starts with its first value, unless a callback sets it in "
                "`start`, too, by moment.progress."
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


def _parameter_settings(learner: Learner) -> dict[str, Any]:
    """Whether each parameter is frozen, its rate factor, and whether it is clipped."""
    settings = {}
    for name, p in learner.placed.named_parameters():
        settings[f"{name}.stop_gradient"] = p.stop_gradient
        settings[f"{name}.optimize_attr"] = getattr(p, "optimize_attr", {}).get("learning_rate")
        settings[f"{name}.need_clip"] = getattr(p, "need_clip", True)
    return settings


def _digests(learner: Learner) -> dict[str, tuple[int, int]]:
    state = learner.placed.state()
    return dict(zip(state, digests(state.values()), strict=True))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
