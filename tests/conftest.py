"""What every test stands on: one thread per process, a quiet Paddle, and this checkout for every child process."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports paddle: thread pools of several ranks on few cores would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
for leftover in [name for name in os.environ if name.startswith("PADDLE_")]:
    del os.environ[leftover]

from tests.processes import Watch, starts_processes  # noqa: E402 - it reads the environment

watch = Watch()
GIB_A_WORKER = 4  # pytest itself, and the ranks that wait between its tests: one job each of 1, 2, 3 and 4


def pytest_xdist_auto_num_workers() -> int:
    """`pytest -n auto`: a worker for each processor, as far as the memory holds them."""
    processors = len(os.sched_getaffinity(0))
    return max(1, min(processors, 8, psutil.virtual_memory().available // (GIB_A_WORKER << 30)))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _watched(item))


def _watched(item: pytest.Item) -> Generator[None, Any, Any]:
    with watch.over(item):
        return (yield)
