"""The axes of a sweep: a setting of the recipe, and the values that it may take; read by a grammar, never evaluated.

    KEY=[0, 0.05, 0.1]          one of these values, in YAML
    KEY=uniform(0, 0.5)         a number between them
    KEY=loguniform(1e-4, 1e-1)  a number between them, its logarithm uniform
    KEY=int(16, 256)            an integer, both ends included; int(16, 256, 16): in steps of 16
    KEY=logint(16, 4096)        an integer, its logarithm uniform

Any other KEY=VALUE is a setting of all trials.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.recipe.yaml_document import parse

Settings = tuple[str, ...]
"""The value of each axis, as YAML."""

_REAL = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_RANGES = {  # by name: has it integers, is their logarithm uniform, and an example
    "uniform": (False, False, "uniform(0, 0.5)"),
    "loguniform": (False, True, "loguniform(1e-4, 1e-1)"),
    "int": (True, False, "int(16, 256)"),
    "logint": (True, True, "logint(16, 4096)"),
}
_GOLDEN = 0.618034  # of the way from low to high: a value between them that is no round number
_MOST_COUNTED = 10_000


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting and its values: `choices`, each as YAML, or the range from `low` to `high`, both included."""

    key: str
    choices: Settings = ()
    low: float = 0.0
    high: float = 0.0
    step: int = 1
    integer: bool = False
    log: bool = False

    @property
    def values(self) -> Settings | None:
        """All values as YAML if they can be counted, else None."""
        if self.choices:
            return self.choices
        if not self.integer or (self.high - self.low) / self.step >= _MOST_COUNTED:
            return None
        return tuple(str(value) for value in range(int(self.low), int(self.high) + 1, self.step))

    @property
    def samples(self) -> Settings:
        """Values that stand for all in a check: each choice, or both ends of a range and a number between them."""
        if self.choices:
            return self.choices
        if self.log:
            between = self.low * (self.high / self.low) ** _GOLDEN
        else:
            between = self.low + (self.high - self.low) * _GOLDEN
        if self.integer:
            between = self.low + round((between - self.low) / self.step) * self.step
        return tuple(dict.fromkeys(self.written(value) for value in (self.low, between, self.high)))

    def written(self, value: float | str) -> str:
        """A value of the axis as YAML; a choice is that already."""
        if isinstance(value, str):
            return value
        return str(int(value)) if self.integer else repr(float(value))


def read_axes(texts: Sequence[str]) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Separates axes from settings of all trials.

    Raises UsageError for a mistake in an axis, for a key that is there twice, and if there is no axis.
    """
    axes, settings = [], []
    for text in texts:
        key, _, value = text.partition("=")
        axis = _read_axis(key.strip(), value)
        if axis is None:
            settings.append(text)
        else:
            axes.append(axis)
    keys = set_keys(axes, settings)
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"{twice} is set twice: give each key once.")
    if not axes:
        raise UsageError(
            "A sweep needs a setting with several values: 'schedule.learning_rate=loguniform(1e-4, 1e-1)' or "
            "'optimizer.weight_decay=[0, 0.05]'. paddle-dp train RECIPE trains one setting."
        )
    return tuple(axes), tuple(settings)


def set_keys(axes: Sequence[Axis], settings: Sequence[str]) -> list[str]:
    """The keys that a sweep sets: of its axes, and of its settings of all trials."""
    return [axis.key for axis in axes] + [text.partition("=")[0].strip() for text in settings]


def _read_axis(key: str, value: str) -> Axis | None:
    """The axis, or None if the value is a plain one."""
    location = f"{key}={value}"
    if value.lstrip().startswith("["):
        return Axis(key=key, choices=_choices(location, value))
    call = _CALL.fullmatch(value)
    if call is None:
        if re.match(rf"\s*({'|'.join(_RANGES)})\s*\(", value):
            raise UsageError(f"{location}: a bracket is not closed.")
        return None
    name, arguments = call[1], [argument.strip() for argument in call[2].split(",")]
    if name not in _RANGES:
        raise UsageError(f"{location}: there is no range '{name}'.{did_you_mean(name, _RANGES, 'There are')}")
    return _range(key, location, name, arguments)


def _choices(location: str, value: str) -> Settings:
    page = parse(value, location, numbered=False)
    if page.mistakes:
        raise UsageError("\n".join(map(str, page.mistakes)))
    choices = tuple(json.dumps(choice, ensure_ascii=False) for choice in page.values)
    if not choices:
        raise UsageError(f"{location}: give at least one value: {location.partition('=')[0]}=[0, 0.05].")
    if twice := next((choice for choice in choices if choices.count(choice) > 1), None):
        raise UsageError(
            f"{location}: {twice} is there twice. A list has the values to choose from; if it is one value itself, "
            f"write it in a list: [{value.strip()}]."
        )
    return choices


def _range(key: str, location: str, name: str, arguments: Sequence[str]) -> Axis:
    integer, log, example = _RANGES[name]
    most = 3 if name == "int" else 2
    number = r"[-+]?\d+" if integer else _REAL
    kind = "integers" if integer else "numbers"
    if not 2 <= len(arguments) <= most or not all(re.fullmatch(number, argument) for argument in arguments):
        raise UsageError(f"{location}: {name} takes {kind}, such as {example}.")
    low, high, step = *map(float, arguments[:2]), int(arguments[2]) if len(arguments) == 3 else 1
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"{location}: the first number is the smaller end of the range.")
    if log and low <= 0:
        raise UsageError(f"{location}: {name} needs an end above 0, since 0 has no logarithm.")
    if integer and max(abs(low), abs(high)) >= 2**53:
        raise UsageError(f"{location}: give integers below 2**53.")
    if integer and (step < 1 or (high - low) % step):
        raise UsageError(
            f"{location}: steps of {step} do not lead from {arguments[0]} to {arguments[1]}: give another end."
        )
    return Axis(key=key, low=low, high=high, step=step, integer=integer, log=log)


def combinations(axes: Sequence[Axis]) -> int | None:
    """The number of settings, or None if a range has no countable values."""
    values = [axis.values for axis in axes]
    return None if None in values else math.prod(len(v) for v in values if v is not None)


def all_settings(axes: Sequence[Axis]) -> Iterator[Settings]:
    """Every setting of countable axes, the last axis the quickest."""
    return itertools.product(*(axis.values or () for axis in axes))


def overrides(axes: Sequence[Axis], settings: Settings) -> Settings:
    """The settings as the recipe's overrides, "optimizer.weight_decay=0.05"."""
    return tuple(f"{axis.key}={value}" for axis, value in zip(axes, settings, strict=True))


def labels(axes: Sequence[Axis]) -> list[str]:
    """A short name of each axis: the last word of its key, or the key where two would be equal."""
    last = [axis.key.rpartition(".")[2] for axis in axes]
    return [name if last.count(name) == 1 else axis.key for name, axis in zip(last, axes, strict=True)]


def shown(value: str) -> str:
    """A value for people: four digits of a number, a text without quotes."""
    if re.fullmatch(_REAL, value) and not re.fullmatch(r"[-+]?\d+", value):
        return f"{float(value):.4g}"
    return value.strip('"')
