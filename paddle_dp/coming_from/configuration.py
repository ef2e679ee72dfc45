"""A configuration of another tool: each of its keys is carried over, has no counterpart, or is lost, and says which."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from paddle_dp.errors import UsageError

_EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")  # a text in YAML 1.1


@dataclass(frozen=True)
class Remark:
    """Keys that no recipe has, and why. `pattern`: what they have in common, such as "Infer*"."""

    pattern: str
    keys: tuple[str, ...]
    reason: str


@dataclass
class Configuration:
    """The keys of a nested mapping by their path, such as "Optimizer.lr.name". A list of mappings with one key each,
    such as `transform_ops`, counts as one mapping; a name that occurs again ends in "#2".

    `unused`: keys that change nothing that is learned. `lost`: keys that do, and have no counterpart. `differences`:
    sentences on what is done differently whatever the keys say.
    """

    name: str
    values: dict[str, Any]
    carried: set[str] = field(default_factory=set)
    unused: list[Remark] = field(default_factory=list)
    lost: list[Remark] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Configuration:
        """Reads YAML or JSON. Raises UsageError for a file that holds no mapping."""
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        try:
            parser = YAML(typ="safe", pure=True)
            parser.version = (1, 1)  # PyYAML's, where `no` and `off` are false
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that 1e-8 has no point
                content = parser.load(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        except RecursionError:
            raise UsageError(f"{file} is nested too deep") from None
        except YAMLError as error:
            raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, Mapping):
            raise UsageError(f"{file} holds no configuration: its content is a {type(content).__name__}")
        try:
            return cls(file.name, dict(_flat("", content)))
        except RecursionError:
            raise UsageError(f"{file} refers to itself, or is nested too deep") from None

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then carried over; `default` without the key, or if it is null."""
        if key not in self.values:
            return default
        self.carried.add(key)
        value = self.values[key]
        return default if value is None else value

    def take_if(self, key: str, value: Any) -> bool:
        """True if the key has this value; then it is carried over."""
        if key not in self.values or self.values[key] != value:
            return False
        self.carried.add(key)
        return True

    def has(self, prefix: str) -> bool:
        """True if there is this key, or a key below it."""
        return any(key == prefix or key.startswith(f"{prefix}.") for key in self.values)

    def without_counterpart(self, pattern: str, reason: str) -> None:
        """Notes that the remaining keys of a pattern change nothing that is learned."""
        self._note(self.unused, pattern, reason)

    def lose(self, pattern: str, reason: str) -> None:
        """Notes that the remaining keys of a pattern are not honoured, so that something else is learned."""
        self._note(self.lost, pattern, reason)

    def lose_the_rest(self) -> None:
        """Notes all keys that nothing has mentioned."""
        self.lose("*", "has no counterpart that is known here")

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Raises UsageError: without this key there is no recipe."""
        value = self.values.get(key)
        raise UsageError(f"{self.name}: {key}{'' if value is None else f': {value}'}: {reason}")

    def _note(self, remarks: list[Remark], pattern: str, reason: str) -> None:
        keys = [key for key in self._remaining() if fnmatchcase(key, pattern)]
        if keys:
            remarks.append(Remark(pattern, tuple(keys), reason))

    def _remaining(self) -> list[str]:
        mentioned = self.carried.union(*(remark.keys for remark in (*self.unused, *self.lost)))
        return [key for key in self.values if key not in mentioned]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves by path; a list without mappings is a leaf, an empty mapping has the value None."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        merged: dict[str, Any] = {}
        for each in value:
            for name, content in each.items():
                number = 2 + sum(key.startswith(f"{name}#") for key in merged)
                merged[f"{name}#{number}" if name in merged else str(name)] = content
        value = merged
    if isinstance(value, Mapping) and value:
        for name, content in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), content)
    elif prefix:
        is_number = isinstance(value, str) and _EXPONENT.fullmatch(value)
        yield prefix, None if isinstance(value, Mapping) else float(value) if is_number else value
