"""The survivors that somebody has read, each with a reason: mutants that change no number which `verify` judges, or
one of 16 bits within its rounding."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.proof.mutants.exam import Row
from tests.proof.mutants.sites import ROOT, sites

LIST = Path(__file__).with_name("reviewed.jsonl")
CLASSES = {
    "equivalent": "computes the same in every recipe",
    "speed": "changes time, memory or traffic, no number",
    "note": "changes what is said, or what is left for a reader",
    "guard": "changes a check of something that is not wrong here",
    "not exercised": "would be wrong in another recipe; in those named, or in all of the exam, nothing hangs on it",
    "rounding": "changes numbers by no more than rounding does",
    "timing": "the result hangs on the clock",
    "missed": "wrong, and the proof does not see it",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A survivor that was read. `recipes`: for which ones it holds, where it does not for all of the exam."""

    file: str
    function: str
    text: str
    mutation: str
    kind: str  # of CLASSES
    why: str
    recipes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.file, self.function, self.text, self.mutation

    @property
    def stale(self) -> bool:
        """Whether the package has no such site any more."""
        return self.key not in _keys(self.file)


@dataclass(frozen=True)
class Reviewed:
    """The entries of the list."""

    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, path: Path = LIST) -> Reviewed:
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return cls(tuple(Entry(**{**row, "recipes": tuple(row.get("recipes", ()))}) for row in rows))

    def kind(self, row: Row) -> str:
        """The class of a survivor; "unread" where it was not read, or not in this recipe, or is not only rounding."""
        for entry in self._of_key.get(row.key, []):
            if (not entry.recipes or row.recipe in entry.recipes) and (
                entry.kind == "rounding" or row.bits == "equal"
            ):
                return entry.kind
        return "unread"

    @cached_property
    def _of_key(self) -> dict[tuple[str, str, str, str], list[Entry]]:
        entries: dict[tuple[str, str, str, str], list[Entry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.key, []).append(entry)
        return entries


@cache
def _keys(file: str) -> set[tuple[str, str, str, str]]:
    """Of all sites of a file, if it is there."""
    path = ROOT / file
    return {site.key for site in sites(file, path.read_text())} if path.exists() else set()


def write(entries: Iterable[Entry], path: Path = LIST) -> None:
    """Writes a list, sorted by file, function and line."""
    ordered = sorted(entries, key=lambda entry: (entry.key, entry.recipes))
    rows = ({k: v for k, v in asdict(entry).items() if v} for entry in ordered)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
