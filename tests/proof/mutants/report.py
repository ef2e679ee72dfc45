"""What became of many mutants: a table, the score, and the page docs/mutants.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.proof.mutants.exam import Row
from tests.proof.mutants.recipes import RECIPES
from tests.proof.mutants.reviewed import CLASSES, Reviewed

COUNTED = ("unread", "missed")  # the survivors that count as exercised and not equivalent

BEGIN, END = "<!-- by tools/mutants.py -->\n", "<!-- end -->\n"


def unseen(rows: Iterable[Row]) -> list[Row]:
    """Mutants that changed a judged number beyond the rounding of 16 bits, and of which verify says SAME."""
    return [row for row in rows if row.outcome == "same" and row.bits == "differ"]


def unread(rows: Iterable[Row], reviewed: Reviewed) -> list[Row]:
    """Survivors that are not in the list."""
    return [r for r in rows if r.outcome == "same" and r.bits != "differ" and reviewed.kind(r) == "unread"]


def needs_suite(row: Row, reviewed: Reviewed) -> bool:
    """Whether `verify` does not see a mutant of shared lines on both sides, or nobody has excused a survivor."""
    return row.in_file == "same" or (row.outcome == "same" and reviewed.kind(row) in COUNTED)


def table(rows: Sequence[Row], reviewed: Reviewed) -> str:
    """Markdown: a line for each recipe, and one for all."""
    names = [name for name in RECIPES if any(row.recipe == name for row in rows)]
    head = [
        "recipe", "drawn", "in shared lines", "DIFFERENT", "crash", "hang", "other", "--rehearse", *CLASSES,
    ]  # fmt: skip
    head += ["unread", "bits differ, SAME"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in [*names, "all"]:
        cells = _counts([row for row in rows if name in (row.recipe, "all")], reviewed)
        lines.append(f"| {name} | {' | '.join(str(cell or '') for cell in cells)} |")
    return "\n".join(lines)


def _counts(rows: Sequence[Row], reviewed: Reviewed) -> list[int]:
    outcomes = Counter(row.outcome for row in rows)
    kinds = Counter(reviewed.kind(row) for row in rows if row.outcome == "same" and row.bits != "differ")
    named = ("different", "crash", "hang", "rehearse", "same")
    other = sum(number for outcome, number in outcomes.items() if outcome not in named)
    return [
        len(rows), sum(row.shared for row in rows), outcomes["different"], outcomes["crash"], outcomes["hang"], other,
        outcomes["rehearse"], *(kinds[kind] for kind in (*CLASSES, "unread")), len(unseen(rows)),
    ]  # fmt: skip


def score(rows: Sequence[Row], reviewed: Reviewed) -> str:
    """What was killed by whom, of what is exercised and not equivalent, in two sentences."""
    left = [
        row
        for row in rows
        if row.outcome == "same" and (row.bits == "differ" or reviewed.kind(row) in COUNTED)
    ]
    rehearsed = sum(row.outcome == "rehearse" for row in rows)
    by_verify = sum(row.outcome not in ("same", "rehearse") for row in rows)
    by_suite = sum(row.suite not in (None, "survived") for row in left)
    every = by_verify + rehearsed + len(left)
    alike = [row for row in rows if row.in_file == "same"]
    killed = sum(row.suite not in (None, "survived") for row in alike)
    changing = sum(row.in_file is not None for row in rows)
    return (
        f"Of {every} mutants that are exercised and not equivalent, verify alone kills {by_verify} "
        f"({100 * by_verify / max(every, 1):.1f} %), --rehearse {rehearsed} more, the suite {by_suite} more; "
        f"{len(left) - by_suite} are left. Of {changing} that change a number in shared lines, verify says SAME to "
        f"{len(alike)} where both sides have them; the suite kills {killed} of these."
    )


def into_page(text: str, rows: Sequence[Row], reviewed: Reviewed, made: str) -> str:
    """The page `text` with these results between its marks; `made`: a sentence on how they were made."""
    before, _, rest = text.partition(BEGIN)
    some = [f"{row.recipe}: `{row.file}`, {row.function}: {row.mutation}" for row in unread(rows, reviewed)]
    parts = [made, score(rows, reviewed), table(rows, reviewed)]
    parts += ["Unread: " + "; ".join(some)] if some else []
    return before + BEGIN + "\n".join(f"{part}\n" for part in parts) + END + rest.partition(END)[2]
