"""The net below a move of code: what 74 small trainings learn, save, say and leave must stay the same, bit for bit.

    python tools/golden.py compare --against HEAD~1          # the work tree against a commit, both run on this machine
    python tools/golden.py compare --against main --only tensor pipeline --renamed exchange=reduction
    python tools/golden.py list

`compare` says of each case that differs which quantity does, and at which step first, and exits with 1. Every tensor is
compared by its name. The cases are rows of tests/golden/cases.py; what is left out, because it is never the same
twice, stands with its reason in tests/golden/record.py. Where a word of recipes, metrics, checkpoints or messages gets
another name, `--renamed old=new` says so: it is the old one in what is compared, and in what the older commit runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.golden.cases import CASES, RECIPES, Case  # noqa: E402
from tests.golden.comparison import differences, renamed, reworded  # noqa: E402
from tests.golden.lane import Lanes  # noqa: E402
from tests.golden.record import Record, environment, record  # noqa: E402
from tools.command_line import parser_of, tell  # noqa: E402


def run_cases(
    cases: Sequence[Case], tree: Path, jobs: int, names: Mapping[str, str] | None = None
) -> list[Record]:
    """The records of the cases with the package of `tree`, `jobs` at a time; `names`: the tree's own words by ours."""

    def one(case: Case) -> Record:
        begun, folder = time.perf_counter(), Path(scratch) / case.name.replace(" ", "-")
        result = record(case, _in_words(RECIPES[case.recipe], names), lanes, folder)
        shutil.rmtree(folder)
        statuses = ", ".join(str(command["status"]) for command in result["commands"])
        tell(f"{time.perf_counter() - begun:5.1f} s  {case.name}: exit status {statuses}")
        return result

    with (
        tempfile.TemporaryDirectory(prefix="golden-") as scratch,
        Lanes(tree, Path(scratch), jobs, environment(tree)) as lanes,
        ThreadPoolExecutor(jobs) as threads,
    ):  # fmt: skip
        return list(threads.map(one, [_case_in_words(case, names) for case in cases]))


def _in_words(text: str, names: Mapping[str, str] | None) -> str:
    for ours, theirs in (names or {}).items():
        text = reworded(text, ours, theirs)
    return text


def _case_in_words(case: Case, names: Mapping[str, str] | None) -> Case:
    settings, commands = (
        [_in_words(word, names) for word in words] for words in (case.settings, case.commands)
    )
    return replace(case, settings=tuple(settings), commands=tuple(commands))


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """A temporary folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="golden-tree-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
        if archive.returncode:
            raise SystemExit(f"--against {commit}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def report(old: Sequence[Record], new: Sequence[Record], names: Mapping[str, str]) -> int:
    """Prints a sentence for each case that differs; both sides have the same cases. Returns the exit status."""
    wrong = 0
    for before, after in zip(old, new, strict=True):
        apart = differences(before, renamed(after, names))
        wrong += bool(apart)
        if apart:
            others = f"\n    … and {len(apart) - 6} more" * (len(apart) > 6)
            print(f"{before['case']}: " + "\n    ".join(apart[:6]) + others)
    rest = f"; {wrong} differ" if wrong else ""
    print(f"{len(new) - wrong} of {len(new)} cases are the same, bit for bit{rest}")
    return int(bool(wrong))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("verb", choices=["compare", "list"])
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, which runs here, too")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases whose names begin with these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument(
        "--renamed", nargs="+", default=[], metavar="OLD=NEW", help="words that have another name now"
    )
    given = parser.parse_args(argv)
    if given.verb == "compare" and given.against is None:
        parser.error("compare takes --against COMMIT")
    if any("=" not in pair for pair in given.renamed):
        parser.error("--renamed takes OLD=NEW")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    given = parse(argv)
    cases = [case for case in CASES if given.only is None or case.name.startswith(tuple(given.only))]
    if not cases:
        raise SystemExit(f"no case begins with {' or '.join(given.only)}: `golden.py list` names them")
    if given.verb == "list":
        for case in cases:
            print(f"{case.name:28} {case.ranks} × {case.recipe:8} {' '.join(case.settings)}")
        return 0
    names = dict(pair.split("=", 1) for pair in given.renamed)
    with work_tree(given.against) as tree:
        before = run_cases(cases, tree, given.jobs, {new: old for old, new in names.items()})
    return report(before, run_cases(cases, ROOT, given.jobs), names)


if __name__ == "__main__":
    sys.exit(main())
