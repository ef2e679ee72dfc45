"""The command lines of the tools, and of `paddle-dp` in a process that a tool starts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parser_of(docstring: str | None, *, in_short: bool = False) -> argparse.ArgumentParser:
    """A parser whose --help begins with the docstring of a tool; `in_short`: with its first line."""
    if in_short:
        title = (docstring or "").partition("\n")[0]
        return argparse.ArgumentParser(description=title, epilog="All of it: see this file's beginning.")
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def paddle_dp(*words: object) -> list[str]:
    """The command `paddle-dp WORDS` with this Python."""
    return [sys.executable, "-m", "paddle_dp", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """This process's variables and these, by which a process finds this repository's packages first."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def tell(text: object) -> None:
    """Prints beside a tool's table: to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def why_no_import(python: str, modules: str) -> str | None:
    """The last line that a Python says in which modules, "a, b", cannot be imported; None if they can. No module of the
    folder that the tool runs in counts."""
    python = os.path.abspath(python) if os.sep in python else python
    done = subprocess.run(
        [python, "-c", f"import {modules}"], capture_output=True, text=True, check=False, cwd="/"
    )
    return (done.stderr.splitlines() or [f"status {done.returncode}"])[-1] if done.returncode else None
