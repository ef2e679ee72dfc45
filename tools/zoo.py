"""The zoo: known silent faults that the proof must catch, and honest models that it must pass."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.proof.zoo.cases import CASES
from tests.proof.zoo.marking import examine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    names = [n for n in CASES if not given.only or any(word in n for word in given.only)]
    with tempfile.TemporaryDirectory(prefix="paddle-dp-zoo-") as scratch:
        for mark in examine(names, Path(scratch)):
            word = "ok " if mark.passed else "BAD"
            print(
                f"{word} {mark.case.name:30} {mark.guard!s:10} {mark.seconds:5.1f} {mark.said[:200]}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
