"""The arguments of a training's command, in a shell script or a text: `--learning_rate 1e-5 --bf16 …`.

Nothing is run: variables have the values that the text assigns to them, as texts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError

_OPTION = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.S)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)(?::?-([^}]*))?\})")
_END = re.compile(r"--|-[a-zA-Z]|\d?[<>].*|.*\.py")  # no values follow: the program, a redirection
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_LAUNCHERS = (
    "nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "gpus", "devices", "xpus",
    "npus", "include",
)  # fmt: skip
_NEEDED = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs", "output_dir")
_LONGEST = 1 << 16  # characters of a value with its variables


def holds_options(text: str) -> bool:
    """True for a text with an option such as `--learning_rate`."""
    return re.search(r"(?m)(^|\s)--[A-Za-z]", text) is not None


@dataclass
class Command:
    """The options of one training. `launched`: the ranks that its launcher starts on one machine, or 0."""

    options: dict[str, Any] = field(default_factory=dict)
    launched: int = 0

    @classmethod
    def read(cls, file: Path, text: str) -> Command:
        """Reads the one training of a script. Raises UsageError for none, for several, and for an open quote."""
        variables: dict[str, str] = {}
        trainings = []
        for tokens in _commands(file, text):
            while tokens and ((assigned := _ASSIGNED.fullmatch(tokens[0])) or tokens[0] == "export"):
                if assigned:
                    variables[assigned[1]] = _filled(assigned[2], variables)
                tokens = tokens[1:]
            if any(
                match and match[1].replace("-", "_") in _NEEDED for match in map(_OPTION.fullmatch, tokens)
            ):
                trainings.append(cls.parse(file, [_filled(token, variables) for token in tokens]))
        if len(trainings) != 1:
            count = "no training" if not trainings else f"{len(trainings)} trainings"
            raise UsageError(
                f"{file} holds {count}: a file with the arguments of one, such as --learning_rate 1e-5, is read"
            )
        return trainings[0]

    @classmethod
    def parse(cls, file: Path, tokens: list[str]) -> Command:
        """The command of these words. An option without a value is true, and one with several has a list."""
        command, name, values = cls(), "", list[str]()
        for token in (*tokens, "--"):
            option = _OPTION.fullmatch(token)
            if option is None and not _END.fullmatch(token):
                values.append(token)
                continue
            if name:
                command._keep(file, name, values)
            if token[0] != "-" and not token.endswith(".py"):
                break
            name, values = (option[1].replace("-", "_"), []) if option else ("", [])
            if option and option[2] is not None:
                values = [option[2]]
        return command

    def _keep(self, file: Path, name: str, values: list[str]) -> None:
        is_last = name in _LAUNCHERS  # a launcher's option has one value; the program's name follows it
        read = [_value(each) for each in (values[:1] if is_last else values)]
        value = True if not read else read[0] if len(read) == 1 else read
        if self.options.setdefault(name, value) != value:
            raise UsageError(f"{file}: --{name} is there twice, with other values: leave one out")
        if is_last:
            self.launched = _ranks(name, self.options[name]) or self.launched


def _commands(file: Path, text: str) -> Iterator[list[str]]:
    """The words of each command of a script, without comments. A text that begins with an option is one command."""
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    text = re.sub(r"\\\r?\n", " ", text)
    lines = [" ".join(text.split("\n"))] if text.lstrip().startswith("--") else text.splitlines()
    for line in lines:
        if line.lstrip().startswith("--") and len(lines) > 1:
            raise UsageError(
                f"{file}: the line {line.strip()[:60]} begins with an option: the command before it has ended, by a "
                "comment or without a \\ at its end"
            )
        yield from filter(None, _sequence(file, line))


def _sequence(file: Path, line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token and not token.strip(";&|"):
                commands.append([])
            else:
                commands[-1].append(token)
    except ValueError as error:
        raise UsageError(f"{file}: a command cannot be read: {error}: {line[:80]}") from None
    return commands


def _filled(text: str, variables: dict[str, str]) -> str:
    """The text with the values of variables; unknown ones stay."""
    filled = _VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[3] if m[3] is not None else m[0]), text)
    if len(filled) > _LONGEST:
        raise UsageError(f"A value is longer than {_LONGEST} letters: {text[:80]}")
    return filled


def _value(text: str) -> Any:
    """A number, true, false, null, or the text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for kind in (int, float):
        if re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", text, re.I | re.A):
            try:
                return kind(text)
            except ValueError:
                pass
    return text


def _ranks(option: str, value: Any) -> int:
    """How many ranks an option of a launcher starts: a number, or a list such as "0,1,2,3"."""
    if option in ("nnodes", "num_machines", "num_nodes", "include"):
        return 0
    if option in ("nproc_per_node", "num_processes", "num_gpus"):
        return value if isinstance(value, int) else 0
    names = [each for each in re.split(r"[,\s]+", str(value)) if each]
    return len(names) if all(name.isdigit() for name in names) else 0
