"""Runs a job: whatever happens, the cause of a failure is last on the screen, and no process is left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch import attempts, last_words, logs
from paddle_dp.launch.command import Job, Limits, Plan, environment
from paddle_dp.launch.inside import watched_inside
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.plan import check_memory, plan_of
from paddle_dp.launch.silence import ignore_ccache, import_paddle

OF_A_RUN = (
    "evaluate",
    "generate",
    "predict",
    "export",
)  # they read the recipe in a run's folder, perhaps another's


def run(job: Job) -> int:
    """Runs the job and returns its exit status. A usage error is shown as one message, a failure with its cause.

    0: done. 2: a usage error. 1 and others: of the rank that failed first. 128 + n: ended by signal n.
    """
    try:
        return _run(job)
    except PaddleDPError as error:
        last_words.say(str(error))
        return error.exit_status
    except KeyboardInterrupt:  # while the recipe was read, before any process was started
        last_words.say("interrupted.")
        return 130


def _run(job: Job) -> int:
    """Checks everything that can be refused before a process starts or a file is written, then runs the plan."""
    # Read now: importing paddle changes OMP_NUM_THREADS.
    machine, inherited = Machine.here(), dict(os.environ)
    plan = plan_of(job, machine)
    ignore_ccache()
    if plan.alone:
        # This process will be the rank; MKL and OpenMP read their variables when paddle is imported.
        _become(environment(plan, inherited))
        import_paddle()
    from paddle_dp.recipe import foreign_code, read_recipe
    from paddle_dp.recipe.folder import release

    if job.entry_point in OF_A_RUN and (foreign := foreign_code(job.recipe, job.all_overrides)):
        last_words.say(
            f"{job.recipe} imports, and so runs, code that is not paddle_dp's: {', '.join(foreign)}"
        )
    recipe = read_recipe(job.recipe, job.all_overrides)
    plan = plan_of(job, machine, recipe.train.device)
    for part in (recipe.strategy, *recipe.callbacks):
        part.refuse(recipe, plan.ranks * plan.nodes, plan.kind)
    check_memory(plan, available_memory())
    _check_resume(job)
    folder, path = _claimed(job, recipe.folder)
    attempt = logs.fresh(folder)
    job = replace(job, recipe=path, extra={**job.extra, "claimed": True})
    limits = Limits(watch=recipe.watch, sample=recipe.loader.timeout.seconds, nodes=plan.nodes)
    plan = replace(plan, job=job, began=attempt.stat().st_mtime, limits=limits)
    try:
        return _alone(plan, attempt) if plan.alone else attempts.run(lambda history: plan, attempt, inherited)
    finally:
        release(folder)


def _claimed(job: Job, folder: Path) -> tuple[Path, Path]:
    """Claims the run folder. Returns it, and the recipe's path, which changes if it was in an earlier run's folder.

    Nodes other than the first put their logs beside the folder, since the disk may be shared.
    """
    from paddle_dp.recipe.folder import claim

    if job.node_rank:
        return folder.with_name(f"{folder.name}.node-{job.node_rank}"), job.recipe
    moved = claim(folder, job.resume) if job.entry_point == "train" else None
    if moved is None:
        return folder, job.recipe
    if not job.quiet:
        print(f"the earlier run is now {moved}", flush=True)
    inside = job.recipe.resolve().is_relative_to(folder.resolve())
    return folder, moved / job.recipe.resolve().relative_to(folder.resolve()) if inside else job.recipe


def _check_resume(job: Job) -> None:
    if job.resume in (None, "newest", "best") or job.resume.isdecimal():  # found, or not, in the run's folder
        return
    if not Path(job.resume).exists():
        raise UsageError(
            f"--resume {job.resume}: there is no such checkpoint. Leave the path out for the newest one, or give best "
            "or a step."
        )


def _become(variables: dict[str, str]) -> None:
    """Gives this process the environment of a rank."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _alone(plan: Plan, attempt: Path) -> int:
    """One rank, in this process: no launcher, no process group, no start-up cost."""
    from paddle_dp.launch.worker import guarded, work

    job = plan.job
    last_words.announce(plan, dict(os.environ), attempt)
    with watched_inside(plan.limits, attempt, lambda failure: last_words.answer(failure, plan, attempt)):
        failure = guarded(lambda: work(job.entry_point, job.recipe, job.all_overrides, job.options), attempt)
    return last_words.answer(failure, plan, attempt) if failure else 0
