"""Finds where an attempt begins, and the command that resumes a training that ended early."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import UnusableError, best, check, checkpoints, step_of
from paddle_dp.checkpoint.manifest import MANIFEST, STEP, read_manifest
from paddle_dp.errors import CheckpointError
from paddle_dp.launch.command import Job, typed
from paddle_dp.launch.memory import newest_generation
from paddle_dp.recipe.folder import has_run, holds


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where an attempt begins: after `step` updates, with `resume` as the argument of --resume.

    `saved` is `step` if the job itself may have saved that checkpoint. `label` describes the point in messages.
    """

    resume: str | None = None
    step: int = 0
    saved: int | None = None
    label: str = "the beginning"


def newest_point(
    job: Job,
    folder: Path,
    began: float,
    report: Callable[[str], object],
    memory: Path | None = None,
    stocks: Iterable[Any] | None = None,
) -> ResumePoint:
    """Returns where the job's next attempt begins: at its newest complete and good checkpoint, in the run's `folder` or
    in memory, else where it began. `memory`: the job's folder in this machine's memory; `stocks`: on several nodes, the
    checkpoints in the memories of those that take part, from `memory.stock`.

    It reads every byte of a checkpoint, and `report`s each that is passed over. If checkpoints exist and none can be
    used, the attempt must fail: that may be the disk's fault, and a new beginning would overwrite them.
    """
    if holds(folder, job.extra.get("older")):  # its checkpoints are another run's
        return ResumePoint()
    try:
        saved = checkpoints(folder / "checkpoints")
        in_memory = checkpoints(memory / "checkpoints") if memory is not None and stocks is None else []
    except CheckpointError as error:
        report(str(error))
        return ResumePoint(resume="newest", label="the newest checkpoint")
    is_new = not has_run(folder)
    generation, reason = (None, "") if stocks is None or is_new else newest_generation(stocks, memory)
    for path in sorted([*_current_checkpoints(job, saved, began), *in_memory], key=step_of, reverse=True):
        if generation is not None and generation.step > step_of(path):
            break
        try:
            check(path)
        except UnusableError as error:
            report(f"passed over the checkpoint {path}: {error.why}.")
        else:
            step, disk_label = step_of(path), f" on disk{reason}" if reason else ""
            label = f"step {step}{' in memory' if path in in_memory else disk_label}"
            return ResumePoint(resume=str(path), step=step, saved=step, label=label)
    if generation is not None:
        step, label = generation.step, f"step {generation.step} in memory{reason}"
        return ResumePoint(resume=generation.spec, step=step, saved=step, label=label)
    resume = job.resume if job.resume not in (None, "newest") else "newest" if saved else None
    return ResumePoint(resume=resume, label=f"--resume {resume}" if resume else f"the beginning{reason}")


SCRIPT = 'started again, a script with Trainer.of(…, resume="auto") goes on from its newest checkpoint'


def how_to_resume(job: Job, folder: Path, began: float = 0.0) -> str | None:
    """Returns the last line on the screen of a job that failed or was ended; `folder` is the run's.

    It names the checkpoint of --resume until the job has saved another: checkpoints from before `began`
    (LaunchPlan.began) then belong to an abandoned training. Returns None if the job does not train, or this node does
    not keep the checkpoints.
    """
    if job.script and not job.node_rank:
        return SCRIPT
    if job.entry_point != "train" or job.node_rank or holds(folder, job.extra.get("older")):
        return None
    try:
        # Only manifests are read here: `--resume` checks every byte.
        saved = [path for path in checkpoints(folder / "checkpoints") if _is_usable(path)]  # oldest first
        checkpoint, resume = _chosen(job, saved, began) or (saved[-1] if saved else None, "newest")
    # An unreadable folder must not hide the failure to show.
    except (CheckpointError, OSError):
        return None
    if checkpoint is None:
        return f"nothing to go on from: there is no usable checkpoint in {folder / 'checkpoints'} yet"
    # An engine, ssh or Ray may have given this node its number: only there a command by hand differs on each node.
    nodes = (
        ", by the job's own command with --resume; where you type it on each node, with its --node-rank"
        if job.nodes and job.nodes > 1
        else ""
    )
    label = f"step {step_of(checkpoint)}" if STEP.fullmatch(checkpoint.name) else f"{checkpoint}"
    return f"go on from {label}{nodes}: {command(job, resume)}"


def command(job: Job, resume: str = "newest") -> str:
    """Returns the command that resumes the job from `resume` ("newest", "best" or a path), quoted for a shell."""
    values = {
        "--ranks": span(job.least_ranks, job.ranks),
        "--devices": None if job.devices is None else ",".join(map(str, job.devices)),
        "--nodes": span(job.least_nodes, job.nodes),
        "--master": job.master,
        "--node-rank": job.node_rank,
        "--output-dir": job.output_dir,
        "--restarts": job.restarts or None,
        "--accept": ",".join(job.extra.get("accept", ())) or None,
    }
    options = [token for name, value in values.items() if value is not None for token in (name, str(value))]
    options += ["--spares"] if job.spares else []
    options += ["--resume"] if resume == "newest" else ["--resume", typed(resume)]
    return shlex.join(["paddle-dp", "train", typed(job.recipe), *job.overrides, *options])


def span(least: int | None, most: int | None) -> str | None:
    """Returns "2:4" for the command line; "4" without `least`, None without `most`."""
    return None if most is None else str(most) if least is None else f"{least}:{most}"


def _chosen(job: Job, saved: list[Path], began: float) -> tuple[Path, str] | None:
    """Returns the checkpoint to resume for a job with `--resume best`, `STEP` or `PATH`, and the new argument.

    Returns None if a bare `--resume` finds it. An abandoned training may have saved later steps than the job.
    """
    if job.resume in (None, "newest"):
        return None
    if current := _current_checkpoints(job, saved, began):
        return None if current[-1] == saved[-1] else (current[-1], str(current[-1]))
    if job.resume == "best":
        path = best(saved[0].parent) if saved else None
        return (path, "best") if path else None
    if job.resume.isdecimal():
        saved_path = next((path for path in saved if step_of(path) == int(job.resume)), None)
        return (saved_path, job.resume) if saved_path else None
    return (Path(job.resume), job.resume) if Path(job.resume).exists() else None


def _current_checkpoints(job: Job, saved: list[Path], began: float) -> list[Path]:
    """Returns the run's checkpoints without an abandoned training's, which a job that resumed a certain one has."""
    if job.resume in (None, "newest"):
        return saved
    return [path for path in saved if _written(path) >= began]


def _written(checkpoint: Path) -> float:
    """Returns when a checkpoint was saved, in seconds by the clock of its disk; 0 without a manifest."""
    try:
        return (checkpoint / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def _is_usable(checkpoint: Path) -> bool:
    """True if the checkpoint has a manifest that reports no fault."""
    try:
        checks = read_manifest(checkpoint).checks
    except UnusableError:
        return False
    return checks is None or checks.fault is None
