"""A process that makes a rank's imports and waits: the rank of each job is a fork of it (prepared_ranks.py).

It has no process group, random draw or thread that a fork would lose, so a fork equals a new process.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # Python has put this file's folder first, whose files would hide packages
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import gc
import json
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from paddle_dp.errors import PaddleDPError
from paddle_dp.launch import recipe_rank
from paddle_dp.launch.processes import adopt_orphans, descendants, die_with_parent, kill_all
from paddle_dp.launch.silence import import_paddle

# Modules that an entry point imports later, by its name.
MODULES = {"train": ("paddle_dp.assembly.build", "paddle_dp.assembly.inputs", "paddle_dp.callbacks.report")}
BEFORE = frozenset(os.environ)  # without Paddle's variables, set at its import, which a rank keeps


Case = tuple[list[str], dict[str, str], str]
"""A rank to start, a line of JSON: the rank's arguments, all its variables, and the file for its output."""


def wait(
    entry_point: str, delay: float, recipe: Path | None = None, overrides: Sequence[str] = ()
) -> Case | None:
    """Forks a rank for each case and answers its pid; answers the next line with 0 when no process of it is left.
    Imports Paddle after `delay` seconds, or at a first line without a case, and then answers the number of its threads;
    also the parts of `recipe`, if it is given and all of them are this package's.

    Returns the case in the rank, and None in this process, when there are no more cases.
    """
    select.select([sys.stdin], [], [], delay)
    import_paddle()
    import_module("paddle.distributed.fleet")
    if entry_point in recipe_rank.ENTRY_POINTS:  # importing other modules may have side effects
        target = recipe_rank.ENTRY_POINTS[entry_point]
        for module in (target.partition(":")[0], *MODULES.get(entry_point, ())):
            import_module(module)
    if recipe is not None:
        _import_recipe(recipe, overrides)
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork copies no memory of this process
    _answer(_threads_after_fork())
    sys.stdin.readline()  # the line without a case
    me = os.getpid()
    while line := sys.stdin.readline():
        rank = os.fork()
        if rank == 0:
            die_with_parent()
            if os.getppid() != me:
                os._exit(1)
            return tuple(json.loads(line))
        _answer(rank)
        sys.stdin.readline()  # until then an ended rank stays visible, with its exit status
        kill_all(lambda: descendants(me))
        with suppress(ChildProcessError):
            while True:
                os.wait()
        _answer(0)
    return None


def _import_recipe(recipe: Path, overrides: Sequence[str]) -> None:
    """Imports the parts that a recipe names. A user's code is left to the ranks: each shall import it with its own
    variables. So are mistakes in the recipe, which may be another one by then."""
    from paddle_dp.recipe import foreign_code, read_recipe

    with suppress(PaddleDPError, OSError):
        if not foreign_code(recipe, overrides):
            read_recipe(recipe, overrides)


def become(variables: dict[str, str], log: str) -> None:
    """Gives this fork its rank's variables and log, a new session, and new random seeds."""
    import numpy as np
    from paddle.base import core

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor, target in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(target, descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    for name in BEFORE - variables.keys():
        os.environ.pop(name, None)
    os.environ.update(variables)
    os.setsid()
    # Seeded from the machine's entropy, as in a new process. Python reseeds `random` itself after a fork.
    core.default_cpu_generator().seed()
    np.random.seed()


def _threads_after_fork() -> int:
    """Returns the number of threads after a fork: libraries that handle forks, as OpenBLAS, have ended theirs."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))


def _answer(number: int) -> None:
    os.write(1, f"{number}\n".encode())


if __name__ == "__main__":
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    recipe_file = Path(sys.argv[3]) if sys.argv[3:] else None
    task = wait(sys.argv[1], float(sys.argv[2]), recipe_file, sys.argv[4:])
    if task is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:], rank_variables, log_file = task
        become(rank_variables, log_file)
        recipe_rank.main()
