"""The table of the faults that were injected: printed after the tests, and written into docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HEAD = ("fault", "phase", "noticed after", "first cause named", "orphans", "data lost")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault. `seconds`: from the fault to when it was noticed. `named`: None where nobody is left to say it.
    `lost`: what it cost (tests/faults/lost.py), "–" where nothing was trained, or where that was not measured."""

    fault: str
    seconds: float
    named: bool | None
    phase: str = "–"
    orphans: int | None = None
    lost: str = "–"

    def __str__(self) -> str:
        left = "?" if self.orphans is None else str(self.orphans)
        named = "–" if self.named is None else "yes" if self.named else "NO"
        return _line(self.fault, self.phase, f"{self.seconds:.1f} s", named, left, self.lost)

    def state(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(reports: Iterable[Any]) -> list[Row]:
    """The rows that tests have noted in their reports, the last of each fault, with the orphans that each test left."""
    found: dict[str, tuple[str, Row]] = {}
    orphans: dict[str, int] = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "fault":
                found[value["fault"]] = (report.nodeid, Row(**value))
            if name == "orphans":  # in the report of the test's end alone
                orphans[report.nodeid] = value
    return [replace(row, orphans=orphans.get(test)) for test, row in found.values()]


def lines_of(rows: Iterable[Row]) -> list[str]:
    """The table in Markdown."""
    return [_line(*HEAD), "|" + "---|" * len(HEAD), *map(str, rows)]


def write(rows: Iterable[Row], page: Path) -> None:
    """Writes the rows into the table of a page: in place of those of the same faults, new ones below. Rows of faults
    that were not injected now stay as they were measured."""
    text = page.read_text("utf-8").splitlines()
    first = text.index(_line(*HEAD))
    last = next((n for n in range(first, len(text)) if not text[n].startswith("|")), len(text))
    table = {_fault(line): line for line in text[first + 2 : last]}
    table |= {row.fault: str(row) for row in rows}
    text[first:last] = [*lines_of([]), *table.values()]
    page.write_text("\n".join(text) + "\n", "utf-8")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _fault(line: str) -> str:
    return line.split(" | ")[0].removeprefix("| ")
