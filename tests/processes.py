"""Which tests start processes: they are marked `processes` by what their code reaches, and no other test may start one.

`make fast` leaves them out. The mark is found, not written: from a test and its fixtures through all that they name in
`tests`, to one of `STARTERS`. Where a process is started by the product itself, the mark is written at the test; a test
that starts a process without either fails and says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest

from paddle_dp.launch.prepared_ranks import WaitingRanks
from paddle_dp.launch.rank_monitor import Launcher
from tests.ranks import run_ranks

STARTERS: tuple[Any, ...] = (subprocess, os.fork, Launcher, WaitingRanks, run_ranks)
EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
STANDARD, INSTALLED = os.path.dirname(os.__file__), f"{os.sep}site-packages{os.sep}"
_harmless: set[int] = set()  # ids of functions and classes that start no process
SENTENCE = "this test starts a process ({}): mark it @pytest.mark.processes, and `make fast` leaves it out"


def starts_processes(item: pytest.Item) -> bool:
    """Whether the code of a test, its fixtures included, names something that starts processes."""
    fixtures = getattr(item, "_fixtureinfo", None)
    defined = [each for several in fixtures.name2fixturedefs.values() for each in several] if fixtures else []
    return any(map(_starts, (getattr(item, "function", None), *(each.func for each in defined))))


@cache
def _starts(function: Any) -> bool:
    """Once for all cases of a test, and all tests of a fixture."""
    seen = set(_harmless)
    reaches = _reaches(function, seen)
    if not reaches:
        _harmless.update(seen)  # nothing that it names does, either
    return reaches


def _reaches(thing: Any, seen: set[int]) -> bool:
    if any(thing is starter for starter in STARTERS):
        return True
    thing = getattr(thing, "__func__", thing)
    if id(thing) in seen or not str(getattr(thing, "__module__", "")).startswith("tests."):
        return False
    seen.add(id(thing))
    if isinstance(thing, type):
        return any(_reaches(each, seen) for each in vars(thing).values())
    return isinstance(thing, FunctionType) and any(_reaches(each, seen) for each in _named(thing))


def _named(function: FunctionType) -> Iterator[Any]:
    """The values of the global names that a function uses, inner functions included; and of `os.fork` the function."""
    for code in _codes(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield value
            if value is os or (isinstance(value, ModuleType) and value.__name__.startswith("tests.")):
                yield from (getattr(value, each, None) for each in code.co_names)
    yield from filter(callable, (cell.cell_contents for cell in function.__closure__ or ()))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _by_a_library() -> bool:
    """Whether a library asks for the process: Paddle and matplotlib look at the machine when they are imported. A trial
    of a loss, which any training may begin with, is a fork of a few milliseconds, and counts as one of theirs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("paddle_dp/assembly/sample_trial.py"):
            return True
        if file.endswith("paddle_dp/data/worker.py"):
            frame = frame.f_back
            continue
        if INSTALLED in file or not file.startswith(("<", STANDARD)):
            return INSTALLED in file
        frame = frame.f_back
    return False


class Watch:
    """Fails the test at work when it starts a process and is not marked."""

    def __init__(self) -> None:
        self.armed = False
        self.started: list[str] = []  # also by a thread, where a raise is not heard
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and event in EVENTS and not _by_a_library():
            self.started.append(f"{event} {arguments[1] if event == 'subprocess.Popen' else ''}".strip())
            pytest.fail(SENTENCE.format(self.started[-1]))

    @contextmanager
    def over(self, item: pytest.Item) -> Iterator[None]:
        """Listens while a test, or what sets it up, is at work."""
        self.armed, self.started = item.get_closest_marker("processes") is None, []
        try:
            yield
        finally:
            self.armed = False
        if self.started:
            pytest.fail(SENTENCE.format(self.started[0]))
