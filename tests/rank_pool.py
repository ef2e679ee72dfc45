"""Ranks that wait for work: Paddle's launcher starts them once, and each case runs in forks of them.

A waiting rank has imported paddle and fleet and done nothing else: one thread, no process group, no number drawn. A
fork of it is therefore as fresh as a process that the launcher has just started; a case costs no start and no import.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":  # the launcher runs this file: its folder must not hide installed packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from paddle_dp.launch.network import reserved_ports
from paddle_dp.launch.processes import alive, descendants, die_with_parent, kill_all, tied_to

Case = dict[str, Any]


class RankPool:
    """`ranks` waiting processes under one launcher; one rank is a plain process without it."""

    def __init__(self, ranks: int, environment: Mapping[str, str], root: Path):
        self.ranks, self.home = ranks, Path(tempfile.mkdtemp(prefix="rank-pool-"))
        for rank in range(ranks):
            os.mkfifo(self.home / f"cases.{rank}")
        # Open for reading as well: opening must not wait for a reader, and the readers' end comes with this process.
        self._cases = [os.open(self.home / f"cases.{rank}", os.O_RDWR) for rank in range(ranks)]
        command = [sys.executable, "-u"]
        if ranks > 1:
            logs = str(self.home / "log")
            command += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "--log_dir", logs]
        with (self.home / "launcher.log").open("wb") as log, reserved_ports() as ports:
            self.process = subprocess.Popen(
                [*command, __file__, str(self.home)], cwd=root, env={**environment, **ports},
                stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only
            )  # fmt: skip

    @property
    def waits(self) -> bool:
        """Whether it can be given a case."""
        return self.process.poll() is None

    def start(self, function: str, folder: Path, ports: Mapping[str, str]) -> None:
        """Has every rank fork, and the forks run `function` with the arguments in `folder`."""
        case = {"function": function, "folder": str(folder), "ports": _free(ports, self.ranks + 1)}
        for cases in self._cases:
            os.write(cases, (json.dumps(case) + "\n").encode())

    def ended(self, folder: Path) -> str | None:
        """How a case ended that has not answered: by its launcher, or by one of its ranks; None while all live."""
        if not self.waits:
            return f"the launcher ended with {self.process.returncode}"
        for file in folder.glob("exit.*"):
            if file.read_text() and not (folder / f"result{file.suffix}.json").exists():
                return f"rank {file.suffix[1:]} ended with {file.read_text()}"
        return None

    def end_case(self, folder: Path) -> None:
        """Ends the forks of a case, and what they have started."""
        self._wait_for(folder, "pid")  # a rank that has not forked yet would fork behind our back
        pids = [int(file.read_text()) for file in folder.glob("pid.*")]
        kill_all(lambda: [p for pid in pids for p in (*descendants(pid), pid) if alive(p)])
        self._wait_for(folder, "exit")  # the last that is written into the folder

    def _wait_for(self, folder: Path, name: str, patience: float = 30.0) -> None:
        deadline = time.monotonic() + patience
        while self.waits and len(list(folder.glob(f"{name}.*"))) < self.ranks and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the launcher and the waiting ranks."""
        kill_all(lambda: descendants(self.process.pid))
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


_pools: dict[int, RankPool] = {}


def pool_of(ranks: int, environment: Mapping[str, str], root: Path) -> RankPool:
    """The pool of so many ranks, which lives as long as this process."""
    if not _pools:
        atexit.register(_close_all)
    if ranks not in _pools or not _pools[ranks].waits:
        _pools[ranks] = RankPool(ranks, environment, root)
    return _pools[ranks]


def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


def children() -> list[psutil.Process]:
    """What the tests' own process has started and still has, but for the ranks that wait here for other tests."""
    roots = [pool.process.pid for pool in _pools.values()]
    waiting = {pid for root in roots for pid in (root, *descendants(root))}
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in waiting]


def _free(ports: Mapping[str, str], count: int) -> list[int]:
    """Ports of the job's own range at which nobody listens."""
    first, _, last = ports.get("PORT_RANGE", "0:0").partition(":")
    found: list[int] = []
    for port in range(int(first), int(last) + 1) if int(first) else [0] * count:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(probe.getsockname()[1])
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} free ports in {ports}")


def wait_for_cases(home: Path, work: Callable[[str, Path], None]) -> None:
    """In a waiting rank: forks for each case, until the tests' process is gone."""
    import paddle  # noqa: F401 - so that no fork has to
    from paddle.distributed import fleet  # noqa: F401

    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    with (home / f"cases.{rank}").open() as cases:
        for line in cases:
            case, me = json.loads(line), os.getpid()
            child = os.fork()
            if child == 0:
                die_with_parent()
                if os.getppid() != me:
                    os._exit(1)
                _enter(case, int(rank))
                work(case["function"], Path(case["folder"]))
            _leave(Path(case["folder"]), f"pid.{rank}", child)
            _, status = os.waitpid(child, 0)
            _leave(Path(case["folder"]), f"exit.{rank}", os.waitstatus_to_exitcode(status))


def _leave(folder: Path, name: str, number: int) -> None:
    """Writes `number` under its final name at once; nothing where the case's folder is gone already."""
    try:
        (folder / f".{name}").write_text(str(number))
        (folder / f".{name}").rename(folder / name)
    except FileNotFoundError:
        pass


def _enter(case: Case, rank: int) -> None:
    """Gives this fork the ports of its case, as the launcher would have, and a log of its own."""
    log = Path(case["folder"]) / f"log.{rank}"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if "PADDLE_TRAINERS_NUM" in os.environ:
        ports: Sequence[int] = case["ports"]
        endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
        os.environ["PADDLE_MASTER"] = f"127.0.0.1:{ports[0]}"
        os.environ["PADDLE_TRAINER_ENDPOINTS"] = ",".join(endpoints)
        os.environ["PADDLE_CURRENT_ENDPOINT"] = endpoints[rank]


if __name__ == "__main__":
    from tests.ranks import work

    die_with_parent()
    wait_for_cases(Path(sys.argv[1]), work)
