"""How a training goes on that ended too early: the very command, or that there is nothing yet to go on from."""

from __future__ import annotations

import shlex
from pathlib import Path

from paddle_dp.checkpoint import UnusableError, checkpoints, step_of
from paddle_dp.checkpoint.manifest import read_manifest
from paddle_dp.errors import CheckpointError
from paddle_dp.launch.command import Job


def how_to_resume(job: Job, folder: Path) -> str | None:
    """The last line on the screen of a job that failed or was ended; `folder` is the run's.

    None where there is nothing to say: the job does not train, or this is not the node that keeps the checkpoints.
    """
    if job.task != "train" or job.node_rank:
        return None
    try:
        newest = _newest(folder / "checkpoints")
    except CheckpointError:  # the folder cannot be read, and this is not the moment for one more failure
        return None
    if newest is None:
        return f"nothing to go on from: there is no usable checkpoint in {folder / 'checkpoints'} yet"
    nodes = ", with its --node-rank on each node" if job.nodes and job.nodes > 1 else ""
    return f"go on from step {step_of(newest)}{nodes}: {command(job)}"


def command(job: Job) -> str:
    """What somebody types to go on with the job from its newest checkpoint, quoted for a shell."""
    given = {
        "--ranks": job.ranks,
        "--devices": None if job.devices is None else ",".join(map(str, job.devices)),
        "--nodes": job.nodes,
        "--master": job.master,
        "--node-rank": job.node_rank,
        "--output-dir": job.output_dir,
    }
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return shlex.join(["paddle-dp", "train", str(job.recipe), *job.overrides, *options, "--resume"])


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint that says of itself that it is good. Its bytes are not read: `--resume` does that, and
    steps over one that is damaged."""
    return next(filter(_is_usable, reversed(checkpoints(folder))), None)


def _is_usable(checkpoint: Path) -> bool:
    try:
        checks = read_manifest(checkpoint).checks
    except UnusableError:
        return False
    return checks is None or checks.fault is None
