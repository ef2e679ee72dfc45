"""The suite's judgement on a mutant in the file itself, in a copy of the tree: never in the user's."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.proof.mutants.sites import ROOT, mutated

LIMIT = 900  # seconds for the tests of a file
# Of all that learns: every layout with dropout, and against one process; of what a proof evaluates.
BROAD = (
    "tests/core/dropout/test_layouts.py", "tests/learner/test_parity.py", "tests/train/test_evaluate.py",
)  # fmt: skip


class Suite:
    """A copy of the tree in an empty folder, in which the tests of a changed file run."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def killer(self, file: str, number: int) -> str | None:
        """The test that fails with the change at site `number` and passes without it; None if there is none."""
        source = (ROOT / file).read_text()
        target = self.folder / file
        target.write_text(ast.unparse(mutated(source, number)))
        try:
            failed = self._failed([str(test) for test in suite_files(file)])
        finally:
            target.write_text(source)
        return failed if failed is not None and self._failed([failed]) is None else None

    def _failed(self, tests: list[str]) -> str | None:
        """The first test that fails, as pytest names it."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return tests[0]
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode and found is None:
            return tests[0]
        return found[1] if found is not None else None


def suite_files(file: str) -> list[Path]:
    """The test files of a file of the package: its mirror, its folder, those that import it, and broad ones."""
    inside = Path(file).relative_to("paddle_dp")
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    mirror = ROOT / "tests" / inside.parent
    chosen = [mirror / f"test_{inside.stem}.py", mirror.parent / f"test_{inside.parent.name}.py"]
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b"
                         rf"|from {re.escape(package)} import .*\b{name}\b)", re.MULTILINE)  # fmt: skip
    chosen += [test for test, source in _sources().items() if imports.search(source)]
    chosen += [ROOT / name for name in BROAD]
    return [test.relative_to(ROOT) for test in dict.fromkeys(chosen) if test.exists()]


@cache
def _sources() -> dict[Path, str]:
    return {test: test.read_text() for test in sorted(ROOT.glob("tests/**/test_*.py"))}
