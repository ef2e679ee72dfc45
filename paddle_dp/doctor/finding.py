"""Findings on a machine: each has a line, and the next step if something is wrong."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "look", "mend"]
NAME, INDENT = 14, "      "


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """A finding. "look": a training works, but perhaps not as wished; "mend": it will not work.

    `found` has a few words, `todo` the next step.
    """

    name: str
    found: str
    state: State = "ok"
    todo: str = ""

    def lines(self, width: int) -> Iterator[str]:
        """Yields the finding's lines for a screen of `width` columns."""
        first = f"{self.state:<{len(INDENT)}}{self.name:<{NAME}}"
        yield from textwrap.wrap(self.found, width, initial_indent=first, subsequent_indent=" " * len(first))
        for paragraph in self.todo.splitlines():
            yield from textwrap.wrap(
                paragraph, width, initial_indent=f"{INDENT}→ ", subsequent_indent=f"{INDENT}  "
            )


def summary(findings: Sequence[DoctorCheck]) -> str:
    """Returns the last line of the screen."""
    wrong = [finding.name for finding in findings if finding.state == "mend"]
    odd = [finding.name for finding in findings if finding.state == "look"]
    if wrong:
        return f"{len(wrong)} to mend before a training starts here: {', '.join(wrong)}"
    return "ready" + (f"; look at {', '.join(odd)}" if odd else "")


def as_json(findings: Sequence[DoctorCheck]) -> str:
    return json.dumps({"ok": is_well(findings), "findings": [asdict(each) for each in findings]}, indent=1)


def is_well(findings: Sequence[DoctorCheck]) -> bool:
    return not any(finding.state == "mend" for finding in findings)
