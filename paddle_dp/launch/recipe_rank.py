"""One rank of a job: reads the recipe again and calls the entry point; it writes a failure before anything else.

The launcher runs this file; `tools/train.py` and `tools/evaluate.py` call the same `main`.
"""

from __future__ import annotations

import os
import sys
import traceback

if __name__ == "__main__":  # Python has put this file's folder first, whose files would hide packages
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import argparse
import faulthandler
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from paddle_dp.errors import JobError, UsageError, did_you_mean
from paddle_dp.launch.command import Job, LaunchPlan, headline, settings
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.processes import die_with_parent
from paddle_dp.launch.rank_process import become_rank, is_well, leave, log_folder
from paddle_dp.launch.silence import import_paddle
from paddle_dp.launch.steady import open_standard_files, steady_screen
from paddle_dp.mesh.heartbeat import heartbeat

ENTRY_POINTS = {
    "train": "paddle_dp.assembly.entry_points:train",
    "evaluate": "paddle_dp.assembly.entry_points:evaluate",
    "merge": "paddle_dp.assembly.entry_points:merge",
    "generate": "paddle_dp.verbs.generate:generate",
    "predict": "paddle_dp.verbs.predict:predict",
    "export": "paddle_dp.export.export:export",
    "export_weights": "paddle_dp.export.hugging_face:export",
    "trace": "paddle_dp.proof.trace:trace",
    "first_forward": "paddle_dp.proof.trace:first_forward",
}
WATCHED = ("train", "evaluate")  # the entry points that report their phases


def work(entry_point: str, recipe_path: Path, overrides: Sequence[str], options: Mapping[str, Any]) -> None:
    """Calls `entry_point` with the recipe in this process, and raises its errors.

    `entry_point` is a key of ENTRY_POINTS, or "module:function" of any function(recipe, options). Raises JobError if a
    watched entry point leaves early by sys.exit(0).
    """
    from paddle_dp.recipe import read_recipe

    heartbeat.enter("start", "importing paddle")
    import_paddle()
    faulthandler.enable()  # after paddle, which installs its handlers
    heartbeat.enter("start", "reading the recipe")
    recipe = read_recipe(recipe_path, overrides)
    heartbeat.enter("start" if entry_point in WATCHED else "unwatched")
    if entry_point not in WATCHED:
        heartbeat.detach()
    try:
        _find(entry_point)(recipe, dict(options))
    except SystemExit as ending:
        if entry_point not in WATCHED or not is_well(ending):
            raise
        raise _left_early(ending, entry_point) from ending


def _left_early(ending: SystemExit, entry_point: str) -> JobError:
    """Returns the error for sys.exit(0) during the work: without it, the job would look done."""
    frames = traceback.extract_tb(ending.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}"
    done = f" after step {heartbeat.step}" if heartbeat.step else ""
    return JobError(
        f"sys.exit({'' if ending.code is None else ending.code}) at {where} ended this rank{done}, before "
        f"'{entry_point}' was done. A callback that wants to end a training early calls moment.trainer.stop(reason)."
    )


def _find(entry_point: str) -> Callable[[Any, dict[str, Any]], None]:
    target = ENTRY_POINTS.get(entry_point, entry_point)
    module, _, function = target.partition(":")
    if not function:
        raise UsageError(f"there is no entry point '{entry_point}'.{did_you_mean(entry_point, ENTRY_POINTS)}")
    return getattr(import_module(module), function)


def guarded(call: Callable[[], None], folder: Path | None) -> Failure | None:
    """Calls `call`; if it fails, writes the failure to `folder` and returns it. sys.exit(0) is no failure."""
    try:
        call()
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the supervisor needs to know any error
        return None if is_well(error) else Failure.recorded(error, _rank(), folder)
    return None


def _rank() -> int:
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def main(entry_point: str = "train", argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a rank, under the launcher or started by hand, and exits with its status."""
    open_standard_files()
    with steady_screen():
        _main(entry_point, argv)


def _main(entry_point: str, argv: Sequence[str] | None) -> NoReturn:
    job = _read(entry_point, argv)
    if "PADDLE_DP_JOB" in os.environ:  # paddle-dp has replaced numbers that depend on the ranks
        _, folder = become_rank()
        options = json.loads(os.environ.get("PADDLE_DP_OPTIONS", "{}"))
        failure = guarded(lambda: _work(job, options), folder)
    else:
        _prepare_process(job)
        failure = guarded(lambda: _work(_with_batch_numbers(job), job.options), log_folder())
    if failure is None:
        leave(None)
    leave(failure, failure.frames or (failure.message if failure.expected else failure.traceback))


def _work(job: Job, options: Mapping[str, Any]) -> None:
    work(job.entry_point, job.recipe, job.all_overrides, options)


def _with_batch_numbers(job: Job) -> Job:
    """The job with numbers over all ranks in place of those that depend on them (launch/batch_numbers.py)."""
    from paddle_dp.launch.batch_numbers import with_batch_numbers_in_rank

    import_paddle()
    job, remarks = with_batch_numbers_in_rank(job, os.environ)
    if _rank() == 0:
        print(*(f"{remark}\n" for remark in remarks), sep="", end="", flush=True)
    return job


def _read(entry_point: str, argv: Sequence[str] | None) -> Job:
    description = f"One rank that does: {entry_point}. See also paddle-dp {entry_point} --help."
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("-c", "--recipe", required=True, type=Path, metavar="RECIPE")
    add("-o", "--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    add("--resume", nargs="?", const="newest", metavar="CHECKPOINT")
    add("--accept", metavar="KEY,…", help="settings that may differ at --resume: loss,optimizer.clip")
    add("--checkpoint", metavar="CHECKPOINT", help="the one to evaluate: newest, best or a path")
    add("--output-dir", "--out", metavar="DIR", help="the run folder, instead of the recipe's")
    add("--entry-point", default=entry_point, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    return Job(
        recipe=options.recipe, entry_point=options.entry_point, overrides=tuple(options.override),
        output_dir=options.output_dir, resume=options.resume, extra={
            **({} if options.checkpoint is None else {"checkpoint": options.checkpoint}),
            **({"accept": options.accept.split(",")} if options.accept else {}),
        },
    )  # fmt: skip


def _prepare_process(job: Job) -> None:
    """Ties this rank to its launcher, and sets the variables that MKL and OpenMP read when paddle is imported."""
    if "PADDLE_RANK_IN_NODE" in os.environ:
        die_with_parent()
    here = Machine.here()
    ranks, nodes = int(os.environ.get("PADDLE_LOCAL_SIZE", "1")), int(os.environ.get("PADDLE_NNODES", "1"))
    plan = LaunchPlan(job=job, machine=here, ranks=ranks, nodes=nodes, devices=here.devices[:ranks])
    os.environ.update(settings(plan, os.environ))
    if _rank() == 0:
        print(headline(plan, os.environ, job.recipe), flush=True)


if __name__ == "__main__":
    main()
