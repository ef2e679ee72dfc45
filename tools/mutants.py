"""Blind mutants: small changes at lines that the ranks of a recipe run, drawn by a seed. Does `verify` see each?

python tools/mutants.py                               # 20 of each recipe, seed 1: half an hour on two cores
python tools/mutants.py --seed 7 --recipe tensor pipeline --count 40 --jobs 4
python tools/mutants.py --seed "$(git rev-parse HEAD)" --recipes 2 --count 5     # ten mutants, as for each push
python tools/mutants.py --suite --strict              # before a release: the suite judges, too, what verify cannot see
python tools/mutants.py --forget                      # drop the entries of the reviewed list whose lines are gone

An interrupted run goes on where it was: each mutant's row is in --rows. docs/mutants.md says what the words mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.proof.mutants.exam import Exam, Row, lot
from tests.proof.mutants.recipes import RECIPES
from tests.proof.mutants.reviewed import CLASSES, Reviewed, write
from tests.proof.mutants.sites import ROOT
from tests.proof.mutants.suite import Suite

KILLED = ("different", "crash", "hang", "rehearse")


def examine(recipe: str, count: int, seed: str, rows: Path) -> None:
    """Judges `count` mutants of a recipe, but for those that have a row in the file, and adds theirs."""
    read = {(row.key, row.number) for row in read_rows(rows) if row.recipe == recipe}
    if len(read) >= count:
        return
    with tempfile.TemporaryDirectory(prefix="paddle-dp-mutants-") as scratch:
        exam = Exam(recipe, RECIPES[recipe], Path(scratch))
        shared = sum(shared for _, shared in exam.sites)
        print(
            f"{recipe}: {len(exam.sites)} sites, {shared} of them in lines that one process runs, too",
            flush=True,
        )
        for site, is_shared in exam.draw(count, seed):
            if (site.key, site.number) in read:
                continue
            row = exam.judge(site, is_shared)
            with rows.open("a") as file:
                file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
            print(
                f"{recipe:10} {row.outcome:10} {row.seconds:4.0f} s  {site.file}:{site.line} {site.mutation}",
                flush=True,
            )


def ask_suite(rows: Path, reviewed: Reviewed) -> None:
    """Has the suite judge the mutants of shared lines that `verify` does not see on both sides, and the survivors that
    nobody has excused; writes what it says into the rows."""
    table = read_rows(rows)
    asked = [n for n, row in enumerate(table) if row.suite is None and needs_suite(row, reviewed)]
    with tempfile.TemporaryDirectory(prefix="paddle-dp-mutants-") as scratch:
        suite = Suite(Path(scratch)) if asked else None
        for n in asked:
            assert suite is not None
            killer = suite.killer(table[n].file, table[n].number)
            table[n] = replace(table[n], suite=killer or "survived")
            rows.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in table))
            print(f"suite: {table[n].file}:{table[n].line} {table[n].mutation}: {table[n].suite}", flush=True)


def needs_suite(row: Row, reviewed: Reviewed) -> bool:
    survives = row.outcome == "same" and reviewed.kind(row) in ("unread", "missed")
    return survives or row.in_file == "same"


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Row], reviewed: Reviewed) -> str:
    """Markdown: a line for each recipe, and one for all."""
    names = [name for name in RECIPES if any(row.recipe == name for row in rows)]
    head = ["recipe", "drawn", "in shared lines", "verify: DIFFERENT", "crash", "hang", "other", "--rehearse", *CLASSES,
            "unread", "**bits differ, SAME**"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in [*names, "all"]:
        cells = _counts([row for row in rows if name in (row.recipe, "all")], reviewed)
        lines.append(f"| {name} | {' | '.join(str(cell or '') for cell in cells)} |")
    return "\n".join(lines)


def _counts(rows: Sequence[Row], reviewed: Reviewed) -> list[int]:
    outcomes = Counter(row.outcome for row in rows)
    survivors = [row for row in rows if row.outcome == "same"]
    kinds = Counter(reviewed.kind(row) for row in survivors if row.bits == "equal")
    other = sum(number for outcome, number in outcomes.items() if outcome not in (*KILLED, "same"))
    return [
        len(rows), sum(row.shared for row in rows), outcomes["different"], outcomes["crash"], outcomes["hang"], other,
        outcomes["rehearse"], *(kinds[kind] for kind in (*CLASSES, "unread")), len(unseen(rows)),
    ]  # fmt: skip


def unseen(rows: Iterable[Row]) -> list[Row]:
    """Mutants that changed a recorded number, and of which verify says SAME."""
    return [row for row in rows if row.outcome == "same" and row.bits == "differ"]


def score(rows: Sequence[Row], reviewed: Reviewed) -> str:
    """What was killed by whom, of what is exercised and not equivalent, in two sentences."""
    by_verify = [row for row in rows if row.outcome not in ("same", "rehearse")]
    rehearsed = [row for row in rows if row.outcome == "rehearse"]
    left = [row for row in rows if row.outcome == "same" and reviewed.kind(row) in ("unread", "missed")]
    by_suite = [row for row in left if row.suite not in (None, "survived")]
    every = len(by_verify) + len(rehearsed) + len(left)
    in_file = [row for row in rows if row.in_file == "same"]
    said = sum(row.suite not in (None, "survived") for row in in_file)
    changing = sum(row.in_file is not None for row in rows)
    return (
        f"Of {every} that are exercised and not equivalent, verify alone kills {len(by_verify)} "
        f"({100 * len(by_verify) / max(every, 1):.1f} %), --rehearse {len(rehearsed)} more, the suite "
        f"{len(by_suite)} more; {len(left) - len(by_suite)} are left. Of {changing} that change a number in lines that "
        f"one process runs, too, verify says SAME to {len(in_file)} where it has them, too; the suite kills {said} of "
        "these."
    )


def commit() -> str:
    """The commit of this tree, with a + where something was changed since."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20, help="mutants of each recipe")
    parser.add_argument("--seed", default="1", help="any word")
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--recipes", type=int, metavar="N", help="only N recipes, drawn by the seed")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time; each takes two cores")
    parser.add_argument(
        "--suite", action="store_true", help="also run the suite's tests of what verify does not see"
    )
    parser.add_argument("--strict", action="store_true", help="a survivor that nobody has read fails, too")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="runs/mutants/COMMIT-SEED.jsonl unless given"
    )
    parser.add_argument(
        "--forget", action="store_true", help="drop stale entries of the reviewed list, and end"
    )
    return parser.parse_args()


def main() -> int:
    """Returns 1 if the bits of a mutant differ and verify says SAME; with --strict also for survivors that are unread,
    and for what the suite does not kill."""
    given, reviewed, begun = parse(), Reviewed.read(), time.perf_counter()
    if given.forget:
        write(entry for entry in reviewed.entries if not entry.stale)
        return 0
    names = given.recipe or list(RECIPES)
    if given.recipes is not None:
        names = sorted(names, key=lambda name: lot(given.seed, name))[: given.recipes]
    rows = given.rows or ROOT / "runs" / "mutants" / f"{commit()}-{given.seed}.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"commit {commit()}, seed {given.seed}, {given.count} mutants of each of: {', '.join(names)}; rows in {rows}",
        flush=True,
    )
    if given.jobs == 1:
        for name in names:
            examine(name, given.count, given.seed, rows)
    else:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as chains:
            for chain in as_completed(
                [chains.submit(examine, name, given.count, given.seed, rows) for name in names]
            ):
                chain.result()
    if given.suite:
        ask_suite(rows, reviewed)
    judged = [row for row in read_rows(rows) if row.recipe in names]
    return report(judged, reviewed, given, time.perf_counter() - begun)


def report(rows: Sequence[Row], reviewed: Reviewed, given: argparse.Namespace, seconds: float) -> int:
    """Prints the table, what is unread and what fails; returns the exit status."""
    print(f"\n{table(rows, reviewed)}\n\n{score(rows, reviewed)}")
    unread = [
        row
        for row in rows
        if row.outcome == "same" and row.bits == "equal" and reviewed.kind(row) == "unread"
    ]
    survived = [row for row in rows if row.suite == "survived"]
    for word, some in (
        ("unread", unread),
        ("the suite passes", survived),
        ("BITS DIFFER AND SAME", unseen(rows)),
    ):
        for row in some:
            print(f"{word}: {row.recipe}: {row.file}:{row.line} in {row.function}: {row.mutation}")
    judging = sum(row.seconds for row in rows)
    print(
        f"{len(rows)} mutants, commit {commit()}, seed {given.seed}: {seconds:.0f} s now, {judging:.0f} s of judging"
    )
    return int(bool(unseen(rows) or (given.strict and (unread or survived))))


if __name__ == "__main__":
    sys.exit(main())
