"""The arguments of a training's command, in a shell script or a text: `--learning_rate 1e-5 --bf16 …`.

Nothing is run: variables have the values that the text assigns to them, as texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp.coming_from.shell_script import Unresolved, commands
from paddle_dp.errors import UsageError

_OPTION = re.compile(r"--([A-Za-z_][\w.-]*)(?:=(.*))?", re.S)
_END = re.compile(r"--|-[a-zA-Z]|.*\.py")  # no values follow: the program
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_LAUNCHERS = (
    "nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "gpus", "devices", "xpus",
    "npus", "include",
)  # fmt: skip
_NEEDED = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs", "output_dir")
# Options that always have a value, so that a variable after one holds no further options.
_VALUED = re.compile(r".*(dir|path|file|name|id|addr|ip|port|rank|endpoint|node|token|to|type)|.*_steps|launcher\..*|"
                     r"per_device.*|learning_rate|seed|num_train_epochs|max_\w+|warmup_ratio|weight_decay")  # fmt: skip
DATA = (".json", ".yaml", ".yml")
"""The suffixes of files of arguments."""
LAUNCHER = "launcher"


def holds_options(text: str) -> bool:
    """True for a text with an option such as `--learning_rate`."""
    return re.search(r"(?m)(^|\s)--[A-Za-z]", text) is not None


@dataclass
class Command:
    """The options of one training; those before the program are the launcher's, "launcher.NAME". `launched`: the ranks
    that the launcher starts on one machine, or 0. `base`: the file of arguments that the command names, or ""."""

    options: dict[str, Any] = field(default_factory=dict)
    launched: int = 0
    base: str = ""

    @classmethod
    def read(cls, file: Path, text: str) -> Command:
        """Reads the one training of a script. Raises UsageError for none, for several, for an open quote, and for a
        word that may hold options and that only a run knows."""
        trainings = [tokens for tokens in commands(file, text) if any(map(_is_training, tokens))]
        if len(trainings) != 1:
            count = "no training" if not trainings else f"{len(trainings)} trainings"
            raise UsageError(
                f"{file} holds {count}: a file with the arguments of one, such as --learning_rate 1e-5, is read"
            )
        return cls.parse(file, trainings[0])

    @classmethod
    def parse(cls, file: Path, tokens: list[str]) -> Command:
        """The command of these tokens. An option without a value is true, and one with several has a list."""
        command, name, values = cls(), "", list[str]()
        program = _program(tokens)
        for number, token in enumerate((*tokens, "--")):
            option = _OPTION.fullmatch(token)
            if option is None and (isinstance(token, Unresolved) or not _END.fullmatch(token)):
                is_value = bool(name and not values and _VALUED.fullmatch(name))
                is_early = number < max(program, 2) and not command.options and "accelerate" not in tokens
                if not (is_value or (is_early and not name)) or re.search(r"\$[@*]|\[[@*]\]", token):
                    _reject_options(file, token)
                if not name and token.endswith(DATA) and number > program:
                    command.base = token
                values.append(token)
                continue
            if name:
                command._keep(file, name, values)
            name, values = (option[1].replace("-", "_"), []) if option else ("", [])
            name = f"{LAUNCHER}.{name}" if name and number < program else name
            if option and option[2] is not None:
                values = [token.segment(option[2]) if isinstance(token, Unresolved) else option[2]]
        return command

    def _keep(self, file: Path, name: str, values: list[str]) -> None:
        option_name = name.removeprefix(f"{LAUNCHER}.")
        is_last = option_name in _LAUNCHERS  # it has one value; the program's name follows it
        read = [_value(each) for each in (values[:1] if is_last else values)]
        value = True if not read else read[0] if len(read) == 1 else read
        if self.options.setdefault(name, value) != value:
            raise UsageError(f"{file}: --{option_name} is there twice, with other values: leave one out")
        if is_last:
            self.launched = _ranks(option_name, self.options[name]) or self.launched


def _reject_options(file: Path, token: str) -> None:
    if isinstance(token, Unresolved) and token.may_split:
        raise UsageError(
            f"{file}, line {token.line}: {token} may hold options, and what it is depends on a run: write them there, "
            "or write quotes around it if it is one value"
        )


def _is_training(token: str) -> bool:
    match = _OPTION.fullmatch(token)
    return match is not None and match[1].replace("-", "_") in _NEEDED


def _program(tokens: list[str]) -> int:
    """Where the program is: the options before it are its launcher's; 0 for a program that is not known."""
    files = (number for number, token in enumerate(tokens) if token.endswith(".py"))
    modules = (number + 1 for number, token in enumerate(tokens) if token == "-m" and number > 1)
    return next(files, next(modules, 0))


def _value(text: str) -> Any:
    """A number, true, false, null, or the text."""
    if isinstance(text, Unresolved):
        return text
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
