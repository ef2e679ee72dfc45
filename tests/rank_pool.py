"""Ranks without a start: one process has imported all that ranks import, and the ranks of a case are forks of it.

The waiting process has imported and done nothing else: one thread, no process group, no number drawn. A fork of it,
with the variables that Paddle's launcher sets, is therefore as fresh as a process that the launcher has just started;
test_ranks.py compares the two. A case costs no start and no import.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

if __name__ == "__main__":  # it is a program, too: its folder must not hide installed packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from paddle_dp.launch.prepared_ranks import launched
from paddle_dp.launch.processes import alive, descendants, die_with_parent, kill_all, tied_to

Case = dict[str, Any]


class RankPool:
    """The waiting process, as the tests' own process sees it."""

    def __init__(self, environment: Mapping[str, str], root: Path):
        self._environment = dict(environment)
        self.process = subprocess.Popen(
            [sys.executable, "-u", __file__], cwd=root, env=dict(environment), stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only
        )  # fmt: skip

    @property
    def waits(self) -> bool:
        """Whether it can be given a case."""
        return self.process.poll() is None

    def start(
        self,
        function: str,
        ranks: int,
        folder: Path,
        ports: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        """Forks `ranks` processes that run `function` with the arguments in `folder`, and meet at some of `ports`.

        They have the `environment` of now, as a launcher started now would give it.
        """
        names = {*environment, *self._environment}
        changed = {name: environment.get(name) for name in names}
        changed = {name: value for name, value in changed.items() if value != self._environment.get(name)}
        variables = [{**ports, **told} for told in launched(ranks, ports, folder)] if ranks > 1 else [{}]
        self._send(function, folder, variables=variables, changed=changed)

    def serve(self, function: str, folder: Path) -> None:
        """Forks one process that runs `function` beside all cases, until this pool is closed."""
        self._send(function, folder, variables=[{}], changed={}, serves=True)

    def _send(self, function: str, folder: Path, **words: Any) -> None:
        """Sends a case to the waiting process."""
        case, cases = {"function": function, "folder": str(folder), **words}, self.process.stdin
        assert cases is not None
        cases.write((json.dumps(case) + "\n").encode())
        cases.flush()

    def ended(self, folder: Path) -> str | None:
        """Why a case will not answer: one of its ranks has ended, or the waiting process; None while all live."""
        if not self.waits:
            return f"the process that forks the ranks ended with {self.process.returncode}"
        for file in folder.glob("exit.*"):
            if file.read_text() and not (folder / f"result{file.suffix}.json").exists():
                return f"rank {file.suffix[1:]} ended with {file.read_text()}"
        return None

    def end_case(self, ranks: int, folder: Path) -> None:
        """Ends the forks of a case, and what they have started."""
        self._wait_for(ranks, folder, "pid")  # a rank that is not forked yet would be forked behind our back
        pids = [int(file.read_text()) for file in folder.glob("pid.*")]
        kill_all(lambda: [p for pid in pids for p in (*descendants(pid), pid) if alive(p)])
        self._wait_for(ranks, folder, "exit")  # the last that is written into the folder

    def _wait_for(self, ranks: int, folder: Path, name: str, patience: float = 30.0) -> None:
        deadline = time.monotonic() + patience
        while self.waits and len(list(folder.glob(f"{name}.*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the waiting process and any rank."""
        kill_all(lambda: descendants(self.process.pid))
        self.process.kill()
        self.process.wait()


_pools: dict[tuple[tuple[str, str], ...], RankPool] = {}  # one for each device
# What ranks import besides: the modules of tests, the files of a run's dashboard, optimizers that are built.
USED_BY_RANKS = (
    "pytest", "visualdl", "matplotlib.figure", "dateutil.rrule", "PIL.PngImagePlugin", "encodings.utf_8_sig",
    "_strptime",
    "paddle.distributed.auto_parallel.fully_shard_fusion", "paddle.optimizer.fusion_utils", "tests.parity",
)  # fmt: skip
# The variable that names a device, which Paddle loads when imported, and how those begin that say what it is like.
DEVICE, LIKE = "CUSTOM_DEVICE_ROOT", "SIM_"


def rank_pool(environment: Mapping[str, str], root: Path) -> RankPool:
    """The pool for the device of this environment, which lives as long as this process."""
    if not _pools:
        atexit.register(_close_all)
    device: tuple[tuple[str, str], ...] = ()
    if DEVICE in environment:
        device = tuple(sorted(each for each in environment.items() if each[0].startswith((DEVICE, LIKE))))
    if device not in _pools or not _pools[device].waits:
        _pools[device] = RankPool(environment, root)
    return _pools[device]


def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


def children() -> list[psutil.Process]:
    """Returns all that the tests' own process has started and not waited for, but for the pools of other tests.

    A zombie counts: a test that leaves one has forgotten to wait for it. `descendants` returns living processes, to be
    killed; the zombies of a pool would be missing among its processes, and count as a test's.
    """
    pools = {pool.process.pid for pool in _pools.values()}
    family = [child for child in psutil.Process().children() if child.pid not in pools]
    for child in family:  # grows while it is walked
        with suppress(psutil.NoSuchProcess):
            family.extend(child.children())
    return family


def on_device(number: str) -> dict[str, str]:
    """What the launcher says, too, where a plugin brings a device: each rank has one of its own."""
    import paddle

    return {
        name: value
        for kind in paddle.device.get_all_custom_device_type()
        for name, value in (
            ("PADDLE_DISTRI_BACKEND", "xccl"), ("PADDLE_XCCL_BACKEND", kind), (f"FLAGS_selected_{kind}s", number),
        )
    }  # fmt: skip


def wait_for_cases(cases: IO[str], work: Callable[[str, Path], None]) -> None:
    """In the waiting process: forks the ranks of each case, and waits for their ends."""
    _import_all()
    for line in cases:
        case: Case = json.loads(line)
        folder, me, forks = Path(case["folder"]), os.getpid(), {}
        for rank, variables in enumerate(case["variables"]):
            child = os.fork()
            if child == 0:
                die_with_parent()
                if os.getppid() != me:
                    os._exit(1)
                _enter(folder / f"log.{rank}", case["changed"], variables)
                work(case["function"], folder)
            if case.get("serves"):
                continue
            forks[child] = rank
            _leave(folder, f"pid.{rank}", child)
        while forks:
            child, status = os.wait()
            if child in forks:
                _leave(folder, f"exit.{forks.pop(child)}", os.waitstatus_to_exitcode(status))


def _import_all() -> None:
    """Imports what ranks import, so that no fork has to; frozen, so that collecting garbage copies none of it."""
    gc.disable()  # what is imported is no garbage
    import numpy  # noqa: F401
    import paddle  # noqa: F401
    from matplotlib.backends import backend_agg  # noqa: F401 - the pictures of rank 0
    from paddle.distributed import fleet  # noqa: F401

    import models
    import paddle_dp

    for module in (
        *pkgutil.walk_packages(paddle_dp.__path__, "paddle_dp."),
        *pkgutil.walk_packages(models.__path__, "models."),
    ):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in USED_BY_RANKS:
        importlib.import_module(name)
    _compute_once()
    gc.collect()
    gc.freeze()
    gc.enable()


def _compute_once() -> None:
    """Computes what every training computes and keeps for its process: checksums of the code, the settings of parts."""
    from paddle_dp.identity.source_code import module_code, package_crc
    from paddle_dp.recipe import read_recipe

    package_crc()
    module_code()
    for recipe in ("digits_mlp", "gpt_tensor2_pipeline2_data2"):
        read_recipe(Path("configs", f"{recipe}.yaml"))


def _leave(folder: Path, name: str, number: int) -> None:
    """Writes `number` under its final name at once; nothing where the case's folder is gone already."""
    try:
        (folder / f".{name}").write_text(str(number))
        (folder / f".{name}").rename(folder / name)
    except FileNotFoundError:
        pass


def draw_anew() -> None:
    """Seeds a fork's generators from the machine's entropy, as at a start; Python has seeded its own."""
    import numpy as np
    from paddle.base import core

    core.default_cpu_generator().seed()
    np.random.seed()


def _enter(log: Path, changed: Mapping[str, str | None], variables: dict[str, str]) -> None:
    """Gives this fork a log and random numbers of its own, and what the launcher gives: an environment, a session."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for own, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
        os.dup2(own, descriptor)
    draw_anew()
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if variables:
        os.environ.update(variables | on_device(variables["PADDLE_RANK_IN_NODE"]))
        os.setsid()


if __name__ == "__main__":
    from tests.ranks import work

    die_with_parent()
    wait_for_cases(sys.stdin, work)
