"""Entry points that go wrong on purpose; a rank runs one as `tests.faults.entry_points:NAME`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.errors import DataError, UsageError
from paddle_dp.mesh import join

Options = dict[str, Any]


def _leave_pid(options: Options) -> int:
    """Says that this rank is at work, and returns its number."""
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    if "pids" in options:
        Path(options["pids"], f"{rank}.partial").write_text(str(os.getpid()))
        Path(options["pids"], f"{rank}.partial").rename(Path(options["pids"], str(rank)))
    return rank


def _wait(seconds: float = 120) -> None:
    """Sleeps shortly and often: a signal that comes after the interpreter has looked for one and before the system call
    does not end a sleep, and its handler would run after all of it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def work_for_ever(recipe: object, options: Options) -> None:
    """Ranks that exchange numbers until somebody ends them."""
    mesh = join()
    _leave_pid(options)
    while True:
        mesh.sum([1.0])
        time.sleep(0.01)


def spoil(recipe: object, options: Options) -> None:
    """Rank 1 does options["fault"], while the others wait for it in a collective."""
    mesh = join()
    mesh.sum([1.0])
    if _leave_pid(options) == 1:
        FAULTS[options["fault"]]()
    mesh.sum([1.0])


def _raise() -> None:
    raise ValueError("the culprit's own words")


def _raise_data_error() -> None:
    raise DataError("photo.jpg cannot be read")


FAULTS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "exit 3": lambda: sys.exit(3),
    "leave early": lambda: os._exit(0),
    "data error": _raise_data_error,
}


def broken_loss(outputs: Any, targets: Any) -> Any:
    _raise()


def raise_alone(recipe: object, options: Options) -> None:
    _raise()


def refuse(recipe: object, options: Options) -> None:
    raise UsageError("this recipe needs 4 ranks. Start it with --ranks 4.")


def raise_while_others_sleep(recipe: object, options: Options) -> None:
    """Rank 1 raises when all have begun, which the test does not have to see: it may look late."""
    ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    if _leave_pid(options) == 1:
        while "pids" in options and len([n for n in os.listdir(options["pids"]) if n.isdecimal()]) < ranks:
            time.sleep(0.01)
        _raise()
    time.sleep(120)


def put_work_away(recipe: object, options: Options) -> None:
    """Ranks that take a little time when they are told to end."""

    def stop(number: int, frame: object) -> None:
        time.sleep(0.3)
        Path(options["pids"], f"{rank}.away").touch()
        sys.exit(0)

    rank = int(os.environ["PADDLE_TRAINER_ID"])
    signal.signal(signal.SIGTERM, stop)
    _leave_pid(options)
    _wait()


def say(recipe: object, options: Options) -> None:
    mesh = join()
    print(f"rank {mesh.rank} of {mesh.ranks} says {mesh.sum([mesh.rank + 1.0])[0]:g}", flush=True)


def tell_environment(recipe: object, options: Options) -> None:
    """With options["fault"] each rank leaves a child behind afterwards, and rank 1 does what this says."""
    names = ("OMP_NUM_THREADS", "PADDLE_NNODES", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR")
    assert os.environ["SECRET_TOKEN"].startswith("only for")
    if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        print({name: os.environ.get(name) for name in names}, sorted(options), sep="\n", flush=True)
    say(recipe, options)
    if "fault" in options:
        leave_a_child_behind(recipe, options)
        time.sleep(0.5)  # the supervisor shows the lines above as they come, not only what a failure leaves
        spoil(recipe, options)


def will_not_end(recipe: object, options: Options) -> None:
    """Ranks that note that they were told to end, and go on."""
    told = Path(options["pids"], f"{os.environ['PADDLE_TRAINER_ID']}.told")
    signal.signal(signal.SIGTERM, lambda number, frame: told.touch())
    _leave_pid(options)
    _wait()


def wait_alone(recipe: object, options: Options) -> None:
    _leave_pid(options)
    _wait()


def leave_a_child_behind(recipe: object, options: Options) -> None:
    """Ends well, but a process that it started would go on for ever."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(options["pids"], f"child.{_leave_pid(options)}").write_text(str(child.pid))


def write_to_terminal(recipe: object, options: Options) -> None:
    print("for the log", flush=True)
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        with open(os.environ["PADDLE_DP_TTY"], "w") as terminal:
            terminal.write("drawn by rank 0\n")


def say_and_wait(recipe: object, options: Options) -> None:
    print("at work", flush=True)
    time.sleep(120)


class Numbers:
    """Samples for Paddle's own loader, large enough for a file of shared memory each."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        return np.full([4096], index, "float32")


def read_with_paddles_loader(recipe: object, options: Options) -> None:
    from paddle.io import DataLoader

    loader = DataLoader(Numbers(), batch_size=8, num_workers=1, use_shared_memory=True)
    for number, _ in enumerate(loader):
        if number == 3:
            _leave_pid(options)
        time.sleep(0.01)


def take_all_memory(recipe: object, options: Options) -> None:
    """Rank 1 enters a control group with a limit, and takes more than that, while rank 0 waits for it."""
    mesh = join()
    mesh.sum([1.0])
    if mesh.rank == 1:
        Path(options["group"], "cgroup.procs").write_text(str(os.getpid()))
        print("the fault is at", time.time(), flush=True)
        taken = []
        while True:
            taken.append(np.ones(1 << 22))
    mesh.sum([1.0])
