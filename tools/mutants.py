"""Blind mutants: small changes at lines that the ranks of a recipe run, drawn by a seed. Does `verify` see each?

python tools/mutants.py                               # 20 of each recipe, seed 1: half an hour on two cores
python tools/mutants.py --seed 7 --recipe tensor pipeline --count 40 --jobs 4
python tools/mutants.py --seed "$(git rev-parse HEAD)" --recipes 2 --count 3     # six mutants, as for each push
python tools/mutants.py --suite --strict              # before a release: the suite judges, too, what verify cannot see
python tools/mutants.py --seed 11 12 13 --page docs/mutants.md
python tools/mutants.py --forget                      # drop the entries of the reviewed list whose lines are gone

An interrupted run goes on where it was: each mutant's row is in --rows. docs/mutants.md says what the words mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.proof.mutants.exam import Exam, Row, lot
from tests.proof.mutants.recipes import RECIPES
from tests.proof.mutants.report import into_page, needs_suite, score, table, unread, unseen
from tests.proof.mutants.reviewed import Reviewed, write
from tests.proof.mutants.sites import ROOT
from tests.proof.mutants.suite import Suite
from tools.command_line import parser_of


def examine(recipe: str, count: int, seeds: Sequence[str], rows: Path) -> None:
    """Judges `count` mutants of a recipe for each seed, but for those that have a row in the file, and adds theirs."""
    read = {(row.seed, row.site) for row in read_rows(rows) if row.recipe == recipe}
    if len(read) >= count * len(seeds):
        return
    with tempfile.TemporaryDirectory(prefix="paddle-dp-mutants-") as scratch:
        exam = Exam(recipe, RECIPES[recipe], Path(scratch))
        both = sum(shared for _, shared in exam.sites)
        shared_lines = f"{both} of them in lines that one process runs, too"
        print(f"{recipe}: {len(exam.sites)} sites, {shared_lines}", flush=True)
        for seed in seeds:
            for site, shared in exam.draw(count, seed):
                if (seed, site) in read:
                    continue
                row = replace(exam.judge(site, shared, seed), commit=commit())
                with rows.open("a") as file:
                    file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
                verdict = f"{recipe:10} {row.outcome:10} {row.seconds:4.0f} s"
                print(f"{verdict}  {site.file}:{site.line} {site.mutation}", flush=True)


def ask_suite(rows: Path, reviewed: Reviewed) -> None:
    """Has the suite judge the mutants of shared lines that `verify` does not see on both sides, and the survivors that
    nobody has excused; writes what it says into the rows."""
    judged = read_rows(rows)
    asked = [n for n, row in enumerate(judged) if row.suite is None and needs_suite(row, reviewed)]
    with tempfile.TemporaryDirectory(prefix="paddle-dp-mutants-") as scratch:
        suite = Suite(Path(scratch)) if asked else None
        for n in asked:
            assert suite is not None
            killer = suite.killer(judged[n].file, judged[n].number)
            row = judged[n] = replace(judged[n], suite=killer or "survived")
            rows.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in judged))
            print(f"suite: {row.file}:{row.line} {row.mutation}: {row.suite}", flush=True)


def read_rows(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@cache
def commit() -> str:
    """The commit of this tree, with a + where something was changed since."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=7"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=20, help="mutants of each recipe")
    parser.add_argument("--seed", nargs="+", default=["1"], help="any words")
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--recipes", type=int, metavar="N", help="only N recipes, drawn by the seed")
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time; each takes two cores")
    parser.add_argument(
        "--suite", action="store_true", help="also run the suite's tests of what verify does not see"
    )
    parser.add_argument("--strict", action="store_true", help="a survivor that nobody has read fails, too")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="runs/mutants/COMMIT.jsonl unless given")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables into docs/mutants.md")
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
    names, seeds, where = given.recipe or list(RECIPES), given.seed, commit()
    if given.recipes is not None:
        names = sorted(names, key=lambda name: lot(*seeds, name))[: given.recipes]
    rows = given.rows or ROOT / "runs" / "mutants" / f"{where}.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    drawn = f"commit {where}, seed {' '.join(seeds)}, {given.count} of each of {', '.join(names)}"
    print(f"{drawn}; rows in {rows}", flush=True)
    if given.jobs == 1:
        for name in names:
            examine(name, given.count, seeds, rows)
    else:
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as chains:
            jobs = [chains.submit(examine, name, given.count, seeds, rows) for name in names]
            for job in as_completed(jobs):
                job.result()
    if given.suite:
        ask_suite(rows, reviewed)
    judged = [row for row in read_rows(rows) if row.recipe in names and row.seed in seeds]
    if given.page:
        command = f"python tools/mutants.py --seed {' '.join(seeds)} --count {given.count}{' --suite' * given.suite}"
        judging, paddle = sum(row.seconds for row in judged), version("paddlepaddle")
        commits = ", ".join(dict.fromkeys(row.commit for row in judged))
        cost = f"{judging:.0f} s on {os.cpu_count()} CPU cores, Paddle {paddle}"
        made = f"`{command}`, commit {commits}: {cost}."
        given.page.write_text(into_page(given.page.read_text(), judged, reviewed, made))
    print(f"\n{table(judged, reviewed)}\n\n{score(judged, reviewed)}")
    new, wrong = unread(judged, reviewed), unseen(judged)
    survived = [row for row in judged if row.suite == "survived"]
    for word, some in (("unread", new), ("the suite passes", survived), ("BITS DIFFER AND SAME", wrong)):
        for row in some:
            print(f"{word}: {row.recipe}: {row.file}:{row.line} in {row.function}: {row.mutation}")
    print(f"{len(judged)} mutants, {drawn}: {time.perf_counter() - begun:.0f} s")
    return int(bool(wrong or (given.strict and (new or survived))))


if __name__ == "__main__":
    sys.exit(main())
