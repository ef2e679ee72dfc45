"""A finding: what is wrong with a script, the numbers that show it, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# fault: the script does something else than it seems to. difference: N ranks learn something else than one process
# by the nature of what was chosen. note: worth knowing, and no finding.
Severity = Literal["fault", "difference", "note"]
ORDER: tuple[Severity, ...] = ("fault", "difference", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the report; `rule` is a word for machines that never changes its meaning."""

    rule: str
    severity: Severity
    what: str
    evidence: str
    where: str
    remedy: str


@dataclass(frozen=True)
class Section:
    """What was looked at on one subject, in a sentence with numbers, and what was found."""

    subject: str
    looked: str
    findings: tuple[Finding, ...]


def few(numbers: object, most: int = 6) -> str:
    """ "3, 17, 42, …": the first of many."""
    listed = list(numbers)  # type: ignore[call-overload]
    return ", ".join(map(str, listed[:most])) + (", …" if len(listed) > most else "")


def plural(number: int, noun: str, many: str | None = None) -> str:
    return f"{number} {noun if number == 1 else many or noun + 's'}"
