"""Two records of the same cases: which case differs, in which quantity, at which step first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.golden.record import Record

# The order in which differences are looked for: the first is nearest to the cause.
ORDER = ("status", "metrics", "evaluation", "checkpoint", "recipe", "files", "stdout", "stderr", "command")


def differences(old: Record, new: Record) -> list[str]:
    """A sentence for each quantity that differs, the nearest to the cause first; none where the records are equal."""
    before, after = dict(_quantities(old)), dict(_quantities(new))
    names = [*before, *(name for name in after if name not in before)]
    apart = [name for name in names if before.get(name, _ABSENT) != after.get(name, _ABSENT)]
    apart.sort(key=lambda name: _rank(name, before.get(name), after.get(name)))
    return [_sentence(name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in apart]


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A record in the words of before (`names`: new ones by old): each whole word that is new becomes the old one."""
    if isinstance(value, dict):
        return {renamed(key, names): renamed(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [renamed(part, names) for part in value]
    if isinstance(value, str):
        for old, new in names.items():
            value = reworded(value, new, old)
    return value


def reworded(text: str, word: str, substitute: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", lambda _: substitute, text)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _quantities(record: Record) -> Iterator[tuple[str, Any]]:
    for number, command in enumerate(record["commands"], 1):
        for key in ("command", "status", "stdout", "stderr"):
            yield f"{key} of command {number}", command[key]
    for name in ("metrics", "evaluation", "checkpoint", "recipe", "files"):
        yield from _named(name, record.get(name, {}))


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _named(f"{name} · {key}", part)
    else:
        yield name, value


def _rank(name: str, old: Any, new: Any) -> tuple[int, int, int]:
    """Where a difference stands: its kind, its step if it has one, and the loss before what follows from it."""
    kind = next((place for place, word in enumerate(ORDER) if name.startswith(word)), len(ORDER))
    step = name.startswith("metrics · step")
    keys = ("loss", "gradient_norm")
    key = next((place for place, word in enumerate(keys) if name.endswith(word)), len(keys))
    return kind, _first(old, new) if step else 1 << 30, key


def _first(old: Any, new: Any) -> int:
    """The first place at which two lists differ."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return 0
    pairs = enumerate(zip(old, new, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(old), len(new)))


def _sentence(name: str, old: Any, new: Any) -> str:
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{name} was {_short(old, new)} and is {_short(new, old)}"
    place = _first(old, new)
    one, other = (values[place] if place < len(values) else _ABSENT for values in (old, new))
    where = {"metrics": "time", "std": "line"}.get(
        next((w for w in ("metrics", "std") if name.startswith(w)), ""), "entry"
    )
    if name.startswith("metrics · step"):
        where = "step"
    apart = ""
    if isinstance(one, float) and isinstance(other, float) and one:
        apart = f" ({abs(other - one) / abs(one):.1e} apart)"
    if name.startswith("files"):
        gone, come = sorted(set(old) - set(new)), sorted(set(new) - set(old))
        return f"{name}: without {', '.join(gone) or 'none'}; with {', '.join(come) or 'none'} in addition"
    return f"{name}, {where} {place + 1}: was {_short(one, other)} and is {_short(other, one)}{apart}"


def _short(value: Any, other: Any) -> str:
    """The value, or of a long one the part from where it differs from the other."""
    text = repr(value)
    same = next((place for place, (a, b) in enumerate(zip(text, repr(other), strict=False)) if a != b), 0)
    begin = max(same - 40, 0) if len(text) > 200 else 0
    return "…" * bool(begin) + text[begin : begin + 200] + "…" * (len(text) > begin + 200)
