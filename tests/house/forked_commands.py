"""`paddle-dp` in a folder, as a person there types it, with forks of the waiting ranks as its processes.

For commands of which the outcome matters; those of starting start it for real (programs.py). A verb that starts no rank
runs in a fork as a whole.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

from paddle_dp import cli
from paddle_dp.launch import start
from paddle_dp.launch.command import Job
from paddle_dp.launch.recipe_rank import work
from paddle_dp.proof import sides
from tests.house.forked_trial import try_in_forks
from tests.house.programs import status_of
from tests.ranks import run_ranks


def run_command(words: list[str], folder: Path, status: int = 0) -> str:
    """What a command prints, on either screen. Fails with it unless the command ends with `status`."""
    here = str(folder)
    printed, begun = StringIO(), {*sys.modules}

    def job(asked: Job, waiting: object = None) -> int:
        entry = (asked.entry_point, str(asked.recipe), list(asked.all_overrides), asked.options)
        try:
            printed.write(run_ranks(rank, asked.ranks or 1, here, *entry, timeout=200)[0])
        except AssertionError as failure:
            printed.write(str(failure))
            return 1
        return 0

    if words[0] not in ("train", "verify"):
        ((left, said),) = run_ranks(leave, 1, here, words)
        printed.write(said)
    else:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
            for module, name in ((start, "run"), (sides, "run"), (sides, "run_alone")):
                patch.setattr(module, name, job)
            patch.syspath_prepend(here)
            patch.setenv("COLUMNS", "100")
            patch.chdir(folder)
            left = _status(words)
        for name in {*sys.modules} - begun:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(here):
                del sys.modules[name]
    assert left == status, f"{words} ended with {left}:\n{printed.getvalue()}"
    return printed.getvalue()


def rank(folder: str, entry_point: str, recipe: str, overrides: list[str], options: dict[str, object]) -> str:
    """In a rank: calls an entry point in a folder, and returns what it printed."""
    _enter(folder)
    with redirect_stdout(StringIO()) as printed:
        work(entry_point, Path(recipe), overrides, options)
    return printed.getvalue()


def run_script(script: Path, ranks: int = 2) -> str:
    """What a script prints on rank 0 of forks that have what Paddle's launcher gives."""
    return run_ranks(as_main, ranks, str(script))[0]


def as_main(script: str) -> str:
    """In a rank: runs a script in its folder as `python script` does, and returns what it printed."""
    _enter(str(Path(script).parent))
    sys.argv = [script]
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def leave(folder: str, words: list[str]) -> tuple[int, str]:
    """In a fork: the exit status of a command, and what it printed."""
    _enter(folder)
    try_in_forks()
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        status = _status(words)
    return status, printed.getvalue()


def _enter(folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)


def _status(words: list[str]) -> int:
    return status_of(partial(cli.main, words), Exception)  # a limit of pytest's is none of the command's
