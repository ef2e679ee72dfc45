"""Paddle's launcher, started before its attempt is known: it imports Paddle while the command reads and checks the
recipe, or while the ranks of the attempt before train.

One line on standard input has the launcher's arguments, the variables and the file to print to. Without a line, because
the job was refused or is done, it ends. Its arguments: the launcher's module, which only lists of processes show, and
the seconds before it imports Paddle if no line comes sooner.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # Python has put this file's folder first, whose files would hide packages
    sys.path[0] = os.getcwd()

import gc
import json
import select


def begin() -> None:
    """Imports the launcher, waits for its line, and launches."""
    select.select([sys.stdin], [], [], float(sys.argv[2]))
    before = frozenset(os.environ)  # without Paddle's variables, set at its import, which a launcher keeps
    gc.disable()  # as `silence.nothing_collected` does; this program imports no paddle_dp
    from paddle.distributed.launch import controllers, main  # noqa: F401

    gc.freeze()
    gc.enable()
    line = sys.stdin.readline()
    if not line:
        return
    arguments, variables, log = json.loads(line)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor, target in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(target, descriptor)
    for name in before - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    sys.argv[1:] = arguments
    main.launch()


if __name__ == "__main__":
    begin()
