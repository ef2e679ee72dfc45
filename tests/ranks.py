"""Runs a test's function on N real ranks, as `paddle.distributed.launch` starts them (see rank_pool.py).

    def case(scale):                       # runs in every rank
        from paddle_dp.mesh import join
        mesh = join()
        return mesh.sum([mesh.rank * scale])

    def test_sum():
        assert run_ranks(case, 2, scale=10) == [[10.0], [10.0]]

The function stands at the top of its module, which every rank imports, and joins the mesh itself, if it wants one. Its
arguments and its result travel as JSON (arrays become lists).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # the launcher runs this file: its folder must not hide installed packages
    sys.path[0] = str(ROOT)

from paddle_dp.launch.network import reserved_ports  # noqa: E402
from paddle_dp.launch.processes import descendants, die_with_parent, kill_all, tied_to  # noqa: E402
from tests.house.training import untried  # noqa: E402
from tests.rank_pool import DEVICE, rank_pool  # noqa: E402

# Set in a rank with an accelerator: its recipe is `untried`, for which a process that sees none would start.
UNTRIED = "RANKS_UNTRIED"


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """What `function(*args, **kwargs)` returned on each rank; AssertionError with the first failure's traceback.

    The ranks are forks of a process that has imported paddle, in the environment that the launcher gives; with `fresh`,
    or where `env` asks for something in it, the launcher starts them for this call alone. One rank is a plain process.
    Raises TimeoutError after `timeout` seconds. No process of the call is left in any case.
    """
    name = _name(function)
    with tempfile.TemporaryDirectory(prefix="ranks-") as path, reserved_ports() as ports:
        folder = Path(path)
        (folder / "args.json").write_text(json.dumps([args, kwargs]))
        if not (fresh or env):
            environment = _environment({})
            pool = rank_pool(environment, ROOT)
            try:
                pool.start(name, ranks, folder, ports, environment)
                _wait(lambda: pool.ended(folder), folder, ranks, timeout)
                return [_result(folder, rank) for rank in range(ranks)]
            finally:
                pool.end_case(ranks, folder)
        command = _command(name, ranks, folder)
        with (folder / "launcher.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment({**ports, **(env or {})}), stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only
            )  # fmt: skip
        try:
            _wait(lambda: _ended(process), folder, ranks, timeout)
            return [_result(folder, rank) for rank in range(ranks)]
        finally:
            kill_all(lambda: descendants(process.pid))  # first the ranks, while they still have a parent
            process.kill()
            process.wait()


def _name(function: Callable[..., Any]) -> str:
    """`module:name`, by which a rank finds the function again."""
    module, name = sys.modules[function.__module__], function.__qualname__
    if getattr(module, name, None) is not function:
        raise ValueError(f"a rank cannot find {module.__name__}.{name}: move it to the top of its module")
    return f"{module.__name__}:{name}"


def _command(function: str, ranks: int, folder: Path) -> list[str]:
    script = [__file__, function, str(folder)]
    if ranks == 1:
        return [sys.executable, "-u", *script]
    options = ["--nproc_per_node", str(ranks), "--log_dir", str(folder / "log")]
    return [sys.executable, "-u", "-m", "paddle.distributed.launch", *options, *script]


def _environment(extra: dict[str, str]) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "MASTER_", "FLAGS_"))}
    if not kept.get("CUDA_VISIBLE_DEVICES"):
        kept.pop("CUDA_VISIBLE_DEVICES", None)
    quiet = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, **quiet, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def _ended(process: subprocess.Popen[bytes]) -> str | None:
    return None if process.poll() is None else f"the job ended with {process.returncode}"


def _wait(ended: Callable[[], str | None], folder: Path, ranks: int, timeout: float) -> None:
    """Returns when every rank has answered; raises when one has failed, the job has ended, or time is up."""
    deadline = time.monotonic() + timeout
    while len(list(folder.glob("result.*.json"))) < ranks:
        if _failures(folder):
            time.sleep(0.5)  # the others may be about to say something as well
            raise AssertionError(_report(folder))
        said = ended()
        if said and not _failures(folder) and len(list(folder.glob("result.*.json"))) < ranks:
            raise AssertionError(f"{said}\n{_report(folder)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ranks} ranks did not answer within {timeout:g} s\n{_report(folder)}")
        time.sleep(0.02)


def _failures(folder: Path) -> list[Path]:
    return sorted(folder.glob("failure.*.txt"), key=lambda path: path.stat().st_mtime_ns)


def _report(folder: Path) -> str:
    """The first failing rank's traceback, or else the ends of all logs."""
    if failed := _failures(folder):
        return f"{failed[0].name} of {len(failed)} failed:\n{failed[0].read_text()}"
    logs = [*sorted(folder.glob("log/workerlog.*")), *sorted(folder.glob("log.*")), folder / "launcher.log"]
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists()
    )


def _result(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"result.{rank}.json").read_text())


def _plain(value: Any) -> Any:
    """An array, a tensor or a NumPy scalar as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a result must be JSON; {type(value).__name__} is not")


def work(function: str, folder: Path) -> None:
    """In a rank: calls the function, and leaves its result or its traceback in `folder` under a final name."""
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    partial, status = folder / f".partial.{rank}", 0
    try:
        module, _, name = function.partition(":")
        args, kwargs = json.loads((folder / "args.json").read_text())
        if UNTRIED in os.environ and DEVICE in os.environ:
            untried()
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
        partial.write_text(json.dumps(result, default=_plain))
        name = f"result.{rank}.json"
    except BaseException:  # noqa: BLE001 - whatever it is, run_ranks must hear of it
        traceback.print_exc()
        partial.write_text(traceback.format_exc())
        name, status = f"failure.{rank}.txt", 1
    partial.rename(folder / name)
    sys.stdout.flush()
    while status == 0 and rank == "0":  # it hosts the store: the others may still need it; run_ranks ends it
        time.sleep(1)
    os._exit(status)


if __name__ == "__main__":
    die_with_parent()
    work(sys.argv[1], Path(sys.argv[2]))
