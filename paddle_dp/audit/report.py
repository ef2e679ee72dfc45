"""The report of an audit, as text and as JSON: the findings, and what was examined."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from paddle_dp.audit.finding import ORDER, Finding, Section, plural

WIDTH = 110


@dataclass(frozen=True)
class Outcome:
    """The result of an audit. `failure`: a message on the script's own failure, "" if it ran as far as needed."""

    script: str
    ranks: int
    steps: int
    sections: tuple[Section, ...]
    failure: str = ""

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first; notes come last and do not count."""
        found = [finding for section in self.sections for finding in section.findings]
        return sorted(found, key=lambda finding: ORDER.index(finding.severity))

    @property
    def counted(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity != "note"]

    @property
    def exit_status(self) -> int:
        """0: no findings. 1: findings. 3: the script failed, or did nothing that can be audited."""
        if self.counted:
            return 1
        return 3 if self.failure else 0

    def as_json(self) -> str:
        return json.dumps(
            {
                "script": self.script, "ranks": self.ranks, "steps": self.steps, "failure": self.failure,
                "exit_status": self.exit_status, "findings": [asdict(finding) for finding in self.findings],
                "looked_at": {section.subject: section.looked for section in self.sections},
            },
            indent=1, ensure_ascii=False,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The report, line by line."""
        for finding in self.findings:
            yield f"{finding.severity.upper()} · {finding.where or self.script} · {finding.rule}"
            yield from _filled("  ", finding.what)
            yield from _filled("  seen: ", finding.evidence)
            yield from _filled("  do:   ", finding.remedy)
            yield ""
        if self.sections:
            yield "looked at:"
            for section in self.sections:
                yield from _filled(f"  {section.subject + ':':<13}", section.looked)
            yield ""
        if self.failure:
            yield from self.failure.rstrip().splitlines()
        yield self._verdict()

    def _verdict(self) -> str:
        seen = f"{plural(self.steps, 'step')} on {plural(self.ranks, 'rank')}"
        if self.counted:
            kinds = [
                plural(sum(each.severity == kind for each in self.counted), kind)
                for kind in ("fault", "difference")
            ]
            return f"{self.script}: {' and '.join(kinds)} found in {seen}."
        if self.failure:
            return f"{self.script}: could not be audited: {seen}."
        return f"{self.script}: nothing found in {seen}."


def _filled(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False
    ) or [label]
