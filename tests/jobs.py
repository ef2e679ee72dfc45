"""A job's entry point in forks of the waiting ranks: `launch.start.run` without the seconds that starts take.

For tests of what an entry point computes. Those of starting, watching and ending a job start it for real.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paddle_dp.launch.command import Job
from paddle_dp.launch.recipe_rank import work
from paddle_dp.proof import Verdict, compare_sides, sides
from tests.ranks import run_ranks


def do(entry_point: str, recipe: str, overrides: Sequence[str], options: dict[str, Any]) -> None:
    work(entry_point, Path(recipe), overrides, options)


def run_in_forks(job: Job, waiting: object = None, timeout: float = 600) -> int:
    """0, or 1 with the first failing rank's traceback on standard error. `timeout`: seconds for all of it."""
    try:
        words = (job.entry_point, str(job.recipe), job.all_overrides, job.options)
        run_ranks(do, job.ranks or 1, *words, timeout=timeout)
    except AssertionError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def train_in_forks(recipe: Path, out: Path, ranks: int, *overrides: str, resume: str | None = None) -> None:
    """What `paddle-dp train` computes, without the seconds that its start takes."""
    job = Job(recipe=recipe, ranks=ranks, output_dir=out, overrides=overrides, resume=resume)
    assert run_in_forks(job) == 0


def run_in_one_fork(job: Job, folder: Path, forks: bool = False) -> tuple[int, str, str]:
    """`launch.start.run` as a process in `folder` calls it, without the second of its imports: the exit status, what it
    printed, and what it complained. A job of one rank runs there as a whole; several are started, or `forks` of it."""
    words = {name: value for name, value in asdict(job).items() if name not in ("recipe", "script")}
    ((status, said, complained),) = run_ranks(supervise, 1, str(folder), str(job.recipe), words, forks)
    return status, said, complained


def supervise(folder: str, recipe: str, words: dict[str, Any], forks: bool) -> tuple[int, str, str]:
    from paddle_dp.launch.start import run
    from tests.house.forked_jobs import ForkedRanks

    os.chdir(folder)
    sys.path.insert(0, folder)
    with TemporaryDirectory() as screens:
        said, complained = (Path(screens) / name for name in ("said", "complained"))
        for stream, file in ((sys.stdout, said), (sys.stderr, complained)):
            stream.flush()
            with file.open("w") as screen:
                os.dup2(screen.fileno(), stream.fileno())
        with ForkedRanks() if forks else nullcontext() as ranks:
            status = run(Job(recipe=Path(recipe), **words), ranks)  # type: ignore[arg-type]
        sys.stdout.flush()
        sys.stderr.flush()
        return status, said.read_text(), complained.read_text()


@contextmanager
def comparisons_in_forks() -> Iterator[None]:
    """Both sides of a `SideRunner` run in forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sides, "run", run_in_forks)
        patch.setattr(sides, "run_alone", run_in_forks)
        yield


def verdict_in_forks(runner: sides.SideRunner, patch: str | None = None) -> Verdict:
    """The verdict on two ranks, with a fault where one is given, and one process."""
    with comparisons_in_forks():
        many = runner.run_candidate(2, patch=patch)
        return compare_sides(runner.run_reference([many]), many)
