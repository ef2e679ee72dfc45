"""Quantities that carry their unit, in YAML and in signatures: "3 epochs", "50 steps", "25 MB", "every 2 blocks".

Each type is made from its text, prints as that text, and validates itself inside any pydantic model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isinf
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

Positive = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
Rate = Annotated[float, Ge(0)]
AboveZero = Annotated[float, Gt(0)]
Probability = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Gt(0), Le(1)]

_NUMBER = r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_NUMBER_UNIT = re.compile(rf"{_NUMBER}\s*([A-Za-z]*)\s*")


def _split(text: object, units: dict[str, Any], example: str) -> tuple[float, Any]:
    """`"3 epochs"` → (3.0, units["epochs"]). Raises ValueError, with an example, for any other text."""
    known, match = ", ".join(units), _NUMBER_UNIT.fullmatch(str(text))
    if not match or match[2] not in units:
        unitless = match and not match[2]
        wrong = "has no unit: write a quantity" if unitless else "is not a quantity"
        raise ValueError(f"'{text}' {wrong} like '{example}' (units: {known})")
    number, unit = float(match[1].replace("_", "")), units[match[2]]
    if isinf(number if isinstance(unit, str) else number * unit):
        raise ValueError(f"'{text}' is too large")
    return number, unit


def _shortest(number: float) -> str:
    """The number as text that reads back as exactly this number, without ".0"."""
    return str(int(number)) if number == int(number) else repr(number)


class Quantity:
    """Base: pydantic reads the quantity from text and writes it back as text."""

    example: ClassVar[str]
    _units: ClassVar[dict[str, Any]]

    @classmethod
    def parse(cls, text: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no parse()")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema as schema

        read = schema.no_info_plain_validator_function(lambda v: v if isinstance(v, cls) else cls.parse(v))
        text = schema.to_string_ser_schema()
        return schema.json_or_python_schema(json_schema=read, python_schema=read, serialization=text)

    @classmethod
    def __get_pydantic_json_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "examples": [cls.example], "pattern": f"^{cls.pattern()}$"}

    @classmethod
    def pattern(cls) -> str:
        """A regular expression, for editors, that matches every text that `parse` accepts."""
        return rf"{_NUMBER}\s*({'|'.join(cls._units)})\s*"


@dataclass(frozen=True)
class Length(Quantity):
    """A number of epochs or steps. Fractions of an epoch are allowed ("0.5 epochs")."""

    count: float
    unit: str
    example: ClassVar[str] = "3 epochs"
    _units: ClassVar[dict[str, str]] = {
        "epoch": "epochs", "epochs": "epochs", "step": "steps", "steps": "steps",
    }  # fmt: skip

    @classmethod
    def parse(cls, text: Any) -> Length:
        count, unit = _split(text, cls._units, cls.example)
        if unit == "steps" and count != int(count):
            raise ValueError(f"'{text}': a number of steps is whole")
        return cls(count, unit)

    def steps(self, steps_per_epoch: int) -> int:
        """This length in optimizer steps, when an epoch has `steps_per_epoch` of them."""
        return round(self.count * (steps_per_epoch if self.unit == "epochs" else 1))

    def __str__(self) -> str:
        unit = self.unit[:-1] if self.count == 1 else self.unit
        return f"{_shortest(self.count)} {unit}"


@dataclass(frozen=True)
class Every(Length):
    """An interval, in steps or whole epochs."""

    example: ClassVar[str] = "50 steps"

    @classmethod
    def parse(cls, text: Any) -> Every:
        """Reads "50 steps" or "2 epochs", with or without a leading "every"."""
        count, unit = _split(str(text).strip().removeprefix("every "), cls._units, cls.example)
        if count < 1 or count != int(count):
            kinds = " or ".join(dict.fromkeys(cls._units.values()))
            raise ValueError(f"'{text}': give a whole number of {kinds}, 1 or more")
        return cls(count, unit)

    @classmethod
    def pattern(cls) -> str:
        return rf"\s*(every )?{super().pattern()}"

    def due_at_step(self, step: int) -> bool:
        """True if due after update `step` (counted from 1)."""
        return self.unit == "steps" and step % self.count == 0

    def due_at_epoch(self, epochs_done: int) -> bool:
        """True if due after `epochs_done` complete epochs."""
        return self.unit == "epochs" and epochs_done % int(self.count) == 0


_STEPS = {"step": "steps", "steps": "steps"}


@dataclass(frozen=True)
class Steps(Length):
    """A number of steps; epochs are refused."""

    example: ClassVar[str] = "100 steps"
    _units: ClassVar[dict[str, str]] = _STEPS


@dataclass(frozen=True)
class EverySteps(Every):
    """An interval in steps; epochs are refused."""

    _units: ClassVar[dict[str, str]] = _STEPS


def check_steps(**lengths: Length | None) -> None:
    """Raises ValueError, with the setting's name, for a length in epochs: a script's lengths are not parsed, and Python
    does not check types."""
    for name, length in lengths.items():
        if length is not None and length.unit != "steps":
            raise ValueError(f"{name}: '{length}' is not a number of steps")


@dataclass(frozen=True)
class Bytes(Quantity):
    """An amount of memory; 1 MB = 2**20 bytes, as in paddle.DataParallel's comm_buffer_size."""

    count: int
    example: ClassVar[str] = "25 MB"
    _units: ClassVar[dict[str, int]] = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}

    @classmethod
    def parse(cls, text: Any) -> Bytes:
        count, unit = _split(text, cls._units, cls.example)
        return cls(round(count * unit))

    @property
    def megabytes(self) -> float:
        return self.count / 2**20

    def __str__(self) -> str:
        """The amount in the largest unit that is exact with two decimals."""
        exact = [(n, s) for n, s in self._units.items() if self.count >= s and self.count * 100 % s == 0]
        name, size = exact[-1] if exact else ("B", 1)
        return f"{_shortest(self.count / size)} {name}"


@dataclass(frozen=True)
class Duration(Quantity):
    """A time in seconds."""

    seconds: float
    example: ClassVar[str] = "120 s"
    _units: ClassVar[dict[str, float]] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

    @classmethod
    def parse(cls, text: Any) -> Duration:
        count, unit = _split(text, cls._units, cls.example)
        return cls(count * unit)

    def __str__(self) -> str:
        return f"{_shortest(self.seconds)} s"


@dataclass(frozen=True)
class LinkSpeed(Quantity):
    """The bandwidth of a link in each direction, in bytes per second; 1 Gbit/s = 10**9 bits per second, as networks
    count."""

    bytes_per_second: float
    example: ClassVar[str] = "10 Gbit/s"
    _units: ClassVar[dict[str, float]] = {
        "Mbit": 125e3, "Gbit": 125e6, "MB": 1e6, "GB": 1e9,
    }  # fmt: skip

    @classmethod
    def parse(cls, text: Any) -> LinkSpeed:
        speed = str(text).strip()
        count, unit = _split(speed.removesuffix("/s"), cls._units, cls.example)
        if not count or not speed.endswith("/s"):
            raise ValueError(f"'{text}' is not a speed above 0 like '{cls.example}'")
        return cls(count * unit)

    @classmethod
    def pattern(cls) -> str:
        return rf"{super().pattern()}/s\s*"

    def __str__(self) -> str:
        unit = "Gbit" if self.bytes_per_second >= self._units["Gbit"] else "Mbit"
        return f"{_shortest(self.bytes_per_second / self._units[unit])} {unit}/s"


@dataclass(frozen=True)
class Sigmas(Quantity):
    """A distance from a mean, in standard deviations."""

    count: float
    example: ClassVar[str] = "5 sigma"
    _units: ClassVar[dict[str, float]] = {"sigma": 1.0, "sigmas": 1.0}

    @classmethod
    def parse(cls, text: Any) -> Sigmas:
        count, unit = _split(text, cls._units, cls.example)
        if not count:
            raise ValueError(f"'{text}': give a number above 0")
        return cls(count * unit)

    def __str__(self) -> str:
        return f"{_shortest(self.count)} sigma"


@dataclass(frozen=True)
class Recompute(Quantity):
    """The activations that backward recomputes instead of storing: `none`, `full` (every block), `selective` (inside
    attention only), or `every 2 blocks` (every second block)."""

    blocks: int = 0  # one of this many blocks is recomputed; 0: none
    attention: bool = False
    example: ClassVar[str] = "every 2 blocks"
    _every: ClassVar[re.Pattern[str]] = re.compile(r"every\s+([1-9][0-9]*)\s+blocks?")

    @classmethod
    def parse(cls, text: Any) -> Recompute:
        setting = str(text).strip()
        values = {"none": cls(), "full": cls(1), "selective": cls(attention=True)}
        match = cls._every.fullmatch(setting)
        if setting not in values and not match:
            raise ValueError(f"'{text}' is not one of none, full, selective, '{cls.example}'")
        return cls(int(match[1])) if match else values[setting]

    @classmethod
    def pattern(cls) -> str:
        return rf"\s*(none|full|selective|{cls._every.pattern})\s*"

    def __str__(self) -> str:
        if self.attention:
            return "selective"
        return {0: "none", 1: "full"}.get(self.blocks, f"every {self.blocks} blocks")


@dataclass(frozen=True)
class Compress(Quantity):
    """The compression of exchanged gradients: `none`, `bfloat16` or `float16` numbers, or `power_sgd rank 4`, which
    sends two factors of 4 columns for each matrix. `power_sgd` exchanges whole gradients in the first 10 updates, with
    `power_sgd rank 4 after 100 steps` in the first 100."""

    kind: str = "none"
    rank: int = 0  # columns of the factors of power_sgd; 0 for numbers
    after: int = 0  # updates, of power_sgd
    example: ClassVar[str] = "power_sgd rank 4"
    # For ResNet-18 on digits, 10 recover the accuracy lost without them (docs/exchange.md); PyTorch's
    # start_powerSGD_iter is 1000.
    uncompressed_updates: ClassVar[int] = 10
    _low_rank: ClassVar[re.Pattern[str]] = re.compile(
        r"power_sgd(?:\s+rank\s+([1-9][0-9]*))?(?:\s+after\s+([0-9]+)\s+steps?)?"
    )

    @classmethod
    def parse(cls, text: Any) -> Compress:
        setting = str(text).strip()
        if setting in ("none", "bfloat16", "float16"):
            return cls(setting)
        if match := cls._low_rank.fullmatch(setting):
            return cls("power_sgd", int(match[1] or 4), int(match[2] or cls.uncompressed_updates))
        raise ValueError(
            f"'{text}' is not one of none, bfloat16, float16, '{cls.example}', '{cls.example} after 100 steps'"
        )

    @classmethod
    def pattern(cls) -> str:
        return r"\s*(none|bfloat16|float16|power_sgd(\s+rank\s+[1-9][0-9]*)?(\s+after\s+[0-9]+\s+steps?)?)\s*"

    def __str__(self) -> str:
        if not self.rank:
            return self.kind
        after = "" if self.after == self.uncompressed_updates else f" after {self.after} steps"
        return f"power_sgd rank {self.rank}{after}"

    def __bool__(self) -> bool:
        return self.kind != "none"
