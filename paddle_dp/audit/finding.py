"""A finding: a fault of a script, the numbers that show it, the place, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# fault: a mistake of the script. difference: by the script's choice, N ranks learn something else than one process.
# note: worth knowing, but not counted.
Severity = Literal["fault", "difference", "note"]
ORDER: tuple[Severity, ...] = ("fault", "difference", "note")


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """One finding; `rule` is a stable name for machines, `what` a sentence on the fault, `where` a "file:line"."""

    rule: str
    severity: Severity
    what: str
    evidence: str
    where: str
    remedy: str


@dataclass(frozen=True)
class ReportSection:
    """One subject with its findings; `coverage`: a sentence with numbers on the examined quantities."""

    subject: str
    coverage: str
    findings: tuple[AuditFinding, ...]
