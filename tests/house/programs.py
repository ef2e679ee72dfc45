"""Runs a program to its end, as a user does, and returns what it printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def run_program(
    *command: str | Path,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 100,
    status: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in `folder`, with the variables `env` besides this process's. Fails with all that was printed
    unless it ends with `status`."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == status, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def run_python(*words: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """`run_program` of this Python: a script, or `-c` and code."""
    return run_program(sys.executable, *words, **how)  # type: ignore[arg-type]


def status_of(main: Callable[[], object], reported: type[BaseException] = BaseException) -> int:
    """The status with which Python ends a program; on standard error why it is not 0. `reported`: the exceptions that
    end `main` with a traceback; others are raised."""
    status: Any = 1
    try:
        status = main()
    except SystemExit as leaving:
        status = leaving.code
    except reported:
        traceback.print_exc()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        return 1
    return status or 0


def end_with(main: Callable[[], object]) -> NoReturn:
    """Ends a fork as Python ends a program."""
    status = status_of(main)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def shell_variables(folder: Path) -> dict[str, str]:
    """Writes `python` and `paddle-dp` of this environment into `folder`, and returns the variables of a shell that
    finds them. Both are forks of the waiting process (command_service.py), but for `python -m`."""
    from tests.house.command_service import command_line

    folder.mkdir()
    module = f'[ "$1" = -m ] && exec {shlex.quote(sys.executable)} "$@"\n'
    for name, words in {"python": [*command_line(), "python"], "paddle-dp": command_line()}.items():
        lines = f'#!/bin/sh\n{module * (name == "python")}exec {shlex.join(words)} "$@"\n'
        (folder / name).write_text(lines)
        (folder / name).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}


def commands() -> dict[int, str]:
    """The command line of each process of this machine, by its number."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            lines[int(path.parent.name)] = (
                path.read_bytes().decode(errors="replace").replace("\0", " ").strip()
            )
    return lines


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Waits until a condition holds; fails after so many seconds."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.01)
