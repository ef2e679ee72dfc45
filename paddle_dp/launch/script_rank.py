"""One rank of a script that may know nothing of this package: runs it as `python script.py …` would.

Paddle's launcher runs this file. The script sees its usual sys.argv, sys.path, `__file__` and `__name__`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # Python has put this file's folder first; the script's folder belongs there
    sys.path[0] = os.getcwd() if sys.argv[1] == "-m" else os.path.dirname(os.path.realpath(sys.argv[1]))
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import faulthandler
import json
import runpy
import traceback
from collections.abc import Sequence
from typing import NoReturn

from paddle_dp.launch.failures import Failure
from paddle_dp.launch.rank_process import become_rank, is_well, leave
from paddle_dp.launch.silence import import_paddle
from paddle_dp.mesh.heartbeat import heartbeat

_BRIDGE = "(on CPUs, fleet's hybrid layouts run over gloo alone: `paddle-dp launch --cpu-bridge`, docs/parallelism.md)"


def execute(arguments: Sequence[str]) -> BaseException | None:
    """Runs the script `arguments[0]`, or the module after "-m", with the arguments after it.

    Returns its error, with a traceback that begins in the script; None without an error.
    """
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:  # noqa: BLE001 - the supervisor needs to know any error of a script
        trim_traceback(error)
        if sys.version_info >= (3, 11) and misses_bridge(error):
            error.add_note(_BRIDGE)
        return error
    return None


def bridge() -> None:
    """Makes fleet's hybrid parallelism run over gloo if the job was started with --cpu-bridge."""
    if json.loads(os.environ.get("PADDLE_DP_OPTIONS", "{}")).get("cpu_bridge"):
        import paddle

        from paddle_dp.gloo import install

        install(paddle.get_device())


def misses_bridge(error: BaseException) -> bool:
    """True if Paddle's communication raised the error in fleet's layers, of a job on CPUs without --cpu-bridge."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_fleet = any(module.startswith("paddle.distributed.fleet.") for module in modules)
    if not in_fleet or not modules[-1].startswith("paddle.distributed."):
        return False
    import paddle

    from paddle_dp import gloo

    return str(paddle.get_device()).startswith("cpu") and not gloo.is_installed()


def trim_traceback(error: BaseException) -> BaseException:
    """Returns the error with a traceback that begins in the script."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename == __file__ or "runpy" in frames.tb_frame.f_code.co_filename
    ):
        frames = frames.tb_next
    return error.with_traceback(frames)


def main() -> NoReturn:
    rank, folder = become_rank()
    heartbeat.enter("unwatched")  # until a Trainer's fit reports its phases
    heartbeat.detach()
    import_paddle()
    faulthandler.enable()
    bridge()
    error = execute(sys.argv[1:])
    sys.stdout.flush()  # a failure records how much this rank has printed before
    if error is None or is_well(error):
        leave(None)
    failure = Failure.recorded(error, rank, folder)
    leave(failure, failure.message if failure.expected else failure.traceback)


if __name__ == "__main__":
    main()
