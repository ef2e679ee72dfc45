"""A configuration of another tool: each of its keys is carried over, has no counterpart, or is lost, and says which."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from paddle_dp.coming_from.command_line import DATA, Command, holds_options
from paddle_dp.coming_from.shell_script import Unresolved
from paddle_dp.errors import UsageError

Section = dict[str, Any]
"""A group of a recipe's settings."""
_LARGEST = 2**22  # bytes of a configuration
_MOST = 100_000  # values of a configuration, aliases followed
_TORCH = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # how files of torch.save begin, the second before PyTorch 1.6
_PICKLE = b"\x80"  # how any other pickle begins, such as paddle.save's
_PAIR = re.compile(r"\\u([dD][89abAB]\w\w)\\u([dD][c-fC-F]\w\w)")  # one letter, in JSON
_EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")  # a text in YAML 1.1


@dataclass(frozen=True)
class Remark:
    """Keys that no recipe has, and why. `pattern`: their common pattern, such as "Infer*"."""

    pattern: str
    keys: tuple[str, ...]
    reason: str


@dataclass
class Configuration:
    """The keys of a nested mapping by their path, such as "Optimizer.lr.name". A list of mappings with one key each,
    such as `transform_ops`, counts as one mapping; a name that occurs again ends in "#2".

    `unused`: keys that change nothing that is learned. `lost`: keys that do, and have no counterpart. `differences`:
    sentences on other behaviour whatever the keys say. `to_fill`: the settings that the user has to write into the
    recipe, as "key: sentence". `folder`: the file's. `launched`: the number of ranks of a command's launcher, or 0.
    """

    name: str
    values: dict[str, Any]
    folder: Path = field(default_factory=Path)
    launched: int = 0
    carried: set[str] = field(default_factory=set)
    unused: list[Remark] = field(default_factory=list)
    lost: list[Remark] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    to_fill: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Configuration:
        """Reads YAML, JSON or the arguments of a command, such as a shell script. Raises UsageError for a file that
        holds no mapping, and for a pickle, such as training_args.bin."""
        try:
            if file.stat().st_size > _LARGEST:
                raise UsageError(f"{file} is no configuration: it is larger than {_LARGEST >> 20} MB")
            content = file.read_bytes()
            if content.startswith((*_TORCH, _PICKLE)):
                raise UsageError(_pickle_refusal(file, is_torch=content.startswith(_TORCH)))
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        if file.suffix.lower() not in DATA and holds_options(text):
            command = Command.read(file, text)
            base = {}
            if command.base:
                if not (named := file.parent / command.base).is_file():
                    raise UsageError(
                        f"{file} names the arguments of {command.base}, which is not next to it: put it there, or "
                        "import that file, with the options of the command on top"
                    )
                base = cls.read(named).values
            return cls(file.name, base | command.options, file.parent, command.launched)
        try:
            return cls(file.name, flat_keys(yaml_content(file, text)), file.parent)
        except RecursionError:
            raise UsageError(f"{file} refers to itself, or is nested too deep") from None

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then carried over; `default` without the key, or if it is null. Raises
        UsageError for one that only a run knows."""
        if key not in self.values:
            return default
        self.carried.add(key)
        value = self.values[key]
        if isinstance(value, Unresolved):
            why = "the script does not set it, or sets it twice, on a condition, or before it reads a file (source)"
            self.reject(key, f"what it is depends on a run: {why}. Write the value into line {value.line}")
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

    def give(self, values: Mapping[str, Any]) -> None:
        """Adds keys of another file that this one names."""
        self.values |= {key: value for key, value in values.items() if key not in self.values}

    def named_file(self, name: Any) -> Path | None:
        """The file that a value names, next to this one or from the current folder; None if it is not there."""
        return next((f for f in (self.folder / str(name), Path(str(name)).expanduser()) if f.is_file()), None)

    def content_of(self, key: str, file: Path, prefix: str) -> dict[str, Any]:
        """The keys of another file, below `prefix`. Raises UsageError, for the `key` that names it."""
        try:
            return flat_keys(yaml_content(file, file.read_text("utf-8")), prefix)
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{self.name}: {key}: {file} cannot be read: {error}") from error

    def fill(self, key: str, reason: str) -> None:
        """Notes a setting of the recipe that the user has to write."""
        self.to_fill.append(f"{key}: {reason}")

    def differ(self, sentence: str) -> None:
        """Notes another behaviour, whatever the keys say."""
        self.differences.append(sentence)

    def remaining(self) -> list[str]:
        """The keys that nothing has mentioned yet."""
        mentioned = self.carried.union(*(remark.keys for remark in (*self.unused, *self.lost)))
        return [key for key in self.values if key not in mentioned]

    def at_rest(self, keys: Sequence[str], reason: str) -> None:
        """Notes keys with values that change nothing; the recipe lists their names alone."""
        if keys:
            self.unused.append(Remark("", tuple(keys), reason))

    def lose_key(self, key: str, reason: str) -> None:
        """Notes that this one key is not honoured, if it is there, also if it was carried over before."""
        if key in self.values:
            self.carried.discard(key)
            self.lost.append(Remark(key, (key,), reason))

    def without_counterpart(self, pattern: str, reason: str) -> None:
        """Notes that the remaining keys of a pattern change nothing that is learned."""
        self._note(self.unused, pattern, reason)

    def lose(self, pattern: str, reason: str) -> None:
        """Notes that the remaining keys of a pattern are not honoured, so that something else is learned."""
        self._note(self.lost, pattern, reason)

    def lose_the_rest(self) -> None:
        """Notes all keys that nothing has mentioned."""
        self.lose("*", "has no counterpart that is known here")

    def reject(self, key: str, reason: str) -> NoReturn:
        """Raises UsageError: without this key there is no recipe."""
        value = self.values.get(key)
        raise UsageError(f"{self.name}: {key}{'' if value is None else f': {value}'}: {reason}")

    def _note(self, remarks: list[Remark], pattern: str, reason: str) -> None:
        keys = [key for key in self.remaining() if key == pattern or fnmatchcase(key, pattern)]
        if keys:
            remarks.append(Remark(pattern, tuple(keys), reason))


def _pickle_refusal(file: Path, is_torch: bool) -> str:
    """The refusal of a pickle, with the shell's line that writes its arguments as JSON."""
    # In double quotes, which the shell's single ones enclose.
    path = json.dumps(str(file), ensure_ascii=False)
    load = f"torch.load({path}, weights_only=False)" if is_torch else f"paddle.load({path})"
    code = f"import {'torch' if is_torch else 'paddle'}; print({load}.to_json_string())"
    kind = "a file of torch.save: a pickle" if is_torch else "a pickle, as paddle.save writes"
    return (
        f"{file} is {kind}, which may run any program, so it is not read. Write its arguments as JSON in "
        "the environment in which it was made, or in its script where that defines their class, by their "
        f"to_json_string(), and import the JSON: python -c {shlex.quote(code)} > "
        f"{shlex.quote(str(file.with_suffix('.json')))}"
    )


def yaml_content(file: Path, text: str) -> Mapping[Any, Any]:
    """The mapping in a text of YAML or JSON. Raises UsageError for anything else."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        parser = YAML(typ="safe", pure=True)
        parser.version = (1, 1)  # PyYAML's, where `no` and `off` are false
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that 1e-8 has no point
            content = parser.load(_PAIR.sub(_letter, text))
    except RecursionError:
        raise UsageError(f"{file} is nested too deep") from None
    except (YAMLError, ValueError) as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{file} holds no configuration: its content is a {type(content).__name__}")
    return content


def flat_keys(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by their path. Raises UsageError for more values than a configuration has, as of
    one that contains itself, and RecursionError for one that is nested too deep."""
    remaining: list[Any] = [content]
    size = 0
    while remaining:
        value = remaining.pop()
        size += 1 + (len(value) // 128 if isinstance(value, str) else 0)
        if size > _MOST:
            raise UsageError(
                f"A configuration refers to itself, or its aliases make more than {_MOST:,} values of it"
            )
        if isinstance(value, Mapping | list | tuple):
            remaining += value.values() if isinstance(value, Mapping) else value
    return dict(_flat(prefix, content))


def _letter(pair: re.Match[str]) -> str:
    """The letter of JSON's two halves of it."""
    high, low = (int(half, 16) for half in pair.groups())
    return chr(0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF))


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
