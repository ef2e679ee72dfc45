"""What every test stands on: one thread per process, a quiet Paddle, and this checkout for every child process."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports paddle: thread pools of several ranks on few cores would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
for leftover in [name for name in os.environ if name.startswith("PADDLE_")]:
    del os.environ[leftover]

from paddle_dp.launch.machine import mkl_type  # noqa: E402 - from this checkout
from tests.processes import Watch, starts_processes  # noqa: E402 - it reads the environment

if kind := mkl_type():
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", kind)

watch = Watch()
# pytest, what waits to be forked, and a job with its launcher: 0.8 GiB with forks, 0.9 with README's first command, by
# shares of the memory that processes have in common.
GIB_A_WORKER = 2
# A file runs on one worker from its beginning to its end: one of these, begun last, would keep the others waiting.
LONGEST_FIRST = (
    "sim/test_layouts.py", "test_docs.py", "cluster/test_ssh.py", "proof/test_verify.py", "test_names.py",
    "faults/test_refused_start.py", "faults/test_ends.py", "faults/test_stop_requests.py", "assembly/test_claims.py",
    "faults/test_surroundings.py", "train/test_run_folder.py", "faults/test_standstill.py", "axes/test_sharding.py",
    "launch/test_steady.py", "train/test_resume.py", "proof/mutants/test_mutants.py", "proof/zoo/test_zoo.py",
    "test_configs.py", "test_how_to.py", "recipe/test_page.py",
)  # fmt: skip


# Those that read the sources share one worker, which parses each file once.
READERS = (
    "tests/test_names.py", "tests/test_no_eval.py", "tests/test_private_names.py", "tests/test_layers.py",
    "tests/tools/test_house.py",
)  # fmt: skip


class ByFile(LoadFileScheduling):
    """A worker takes whole files; all of tests/sim go to one, which imports Paddle for a device once."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(READERS):
            return READERS[0]
        return "tests/sim" if nodeid.startswith("tests/sim/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_xdist_auto_num_workers() -> int:
    """`pytest -n auto`: three workers for two processors, as far as the memory holds them.

    One that has started a job waits half of the time: for a rank that another waits for, or for a limit to pass.
    """
    wanted = (3 * len(os.sched_getaffinity(0)) + 1) // 2
    return max(1, min(wanted, 12, psutil.virtual_memory().available // (GIB_A_WORKER << 30)))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")
    place = {str(ROOT / "tests" / name): number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))


def pytest_collection() -> None:
    """Importing and collecting make no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nothing that is imported until now is garbage: a collection would look at a million objects each time, and
    copy their pages in each fork."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _watched(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _watched(item))


def _watched(item: pytest.Item) -> Generator[None, Any, Any]:
    with watch.over(item):
        return (yield)
