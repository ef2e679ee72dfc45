"""Runs a job. At its end the cause of a failure is last on the screen, and no process is left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch import attempts, console, logs, script
from paddle_dp.launch.command import Job, Limits, Plan, environment
from paddle_dp.launch.initial import check_load
from paddle_dp.launch.inside import watched_inside
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.network import check_loopback
from paddle_dp.launch.plan import RankDevices, check_memory, on_any_ranks, plan_of
from paddle_dp.launch.prelaunch import PreparedLauncher
from paddle_dp.launch.silence import ignore_ccache, import_paddle
from paddle_dp.launch.sizes import ElasticSize, Offer, choose, equal
from paddle_dp.launch.steady import steady_screen
from paddle_dp.launch.waiting import WaitingRanks
from paddle_dp.launch.watch import PreparedRanks

# Entry points that read the recipe in a run's folder, perhaps another's.
RUN_ENTRY_POINTS = ("evaluate", "generate", "predict", "export", "export_weights")

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe


def run(job: Job, waiting: WaitingRanks | None = None) -> int:
    """Runs the job and returns its exit status. A usage error is shown as one message, a failure with its cause.

    `waiting`: processes whose forks become the ranks, where possible.

    0: done. 2: a usage error. 1 and others: the status of the rank that failed first. 128 + n: ended by signal n.
    """
    with steady_screen():
        try:
            return _run(job, waiting)
        except PaddleDPError as error:
            console.write(str(error))
            return error.exit_status
        except KeyboardInterrupt:  # while the recipe was read, before any process was started
            console.write("interrupted.")
            return 130


def _run(job: Job, waiting: WaitingRanks | None) -> int:
    # Read now: importing paddle changes OMP_NUM_THREADS.
    machine, inherited = Machine.here(), dict(os.environ)
    if job.script:
        ignore_ccache()
        return script.run(job, machine, inherited)
    plan = plan_of(job, machine, each=RankDevices(servers=None))
    ignore_ccache()
    if plan.alone:
        # This process will be the rank; MKL and OpenMP read their variables when paddle is imported.
        _become(environment(plan, inherited))
        import_paddle()
    elif waiting is None and plan.nodes == 1:
        with PreparedLauncher(plan, inherited) as prepared:
            return _read(job, machine, inherited, prepared)
    return _read(job, machine, inherited, waiting)


def _read(
    job: Job, machine: Machine, inherited: dict[str, str], prepared: PreparedLauncher | WaitingRanks | None
) -> int:
    """Reads the recipe, which imports the code that it names, and runs it."""
    from paddle_dp.recipe import foreign_code, read_recipe
    from paddle_dp.recipe.code import changed

    if job.entry_point in RUN_ENTRY_POINTS and (foreign := foreign_code(job.recipe, job.all_overrides)):
        console.write(
            f"{job.recipe} imports, and so runs, code that is not paddle_dp's: {', '.join(foreign)}"
        )
    for file, copy in changed(job.recipe) if job.entry_point in RUN_ENTRY_POINTS else ():
        console.write(
            f"{file} differs from the run's copy, {copy}, and runs now in its place. The copy runs where there is no "
            "other file of its name."
        )
    if job.entry_point == "evaluate":
        recipe, plan = on_any_ranks(job, partial(_read_and_plan, machine=machine), console.write)
    else:
        recipe = read_recipe(job.recipe, job.all_overrides)
        plan = _planned(job, recipe, machine)
    if not isinstance(prepared, PreparedLauncher):
        return _checked(plan, recipe, inherited, prepared)
    if plan.alone or plan.servers:
        prepared.drop()
    return _checked(plan, recipe, inherited, prepared)


def _planned(job: Job, recipe: Recipe, machine: Machine) -> Plan:
    """Returns the job's plan with devices for the recipe's strategy. Raises UsageError if they are missing."""
    strategy = recipe.strategy.config
    each = RankDevices(servers=strategy.servers)
    if strategy.accelerators > 1:
        each = RankDevices(strategy.accelerators, strategy.with_fewer)
    elif strategy.servers:
        each = replace(each, fewer="each worker takes one")
    plan = plan_of(job, machine, recipe.train.device, each)
    limits = Limits(watch=recipe.watch, sample=recipe.loader.timeout.seconds, nodes=plan.nodes)
    return replace(plan, limits=limits)


def _read_and_plan(job: Job, machine: Machine) -> tuple[Recipe, Plan]:
    """Returns the job's recipe and plan. Raises UsageError if its strategy does not take these ranks."""
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(job.recipe, job.all_overrides)
    plan = _planned(job, recipe, machine)
    _refuse(recipe, plan.ranks * plan.nodes, plan.kind)
    return recipe, plan


def _checked(plan: Plan, recipe: Recipe, inherited: dict[str, str], prepared: PreparedRanks | None) -> int:
    """Makes the last checks that need no written file, then runs the plan."""
    from paddle_dp.recipe.folder import release

    job = plan.job
    sizes = ElasticSize(plan=plan, run=recipe.folder, refused=partial(_refused, recipe, plan.kind))
    if not job.elastic:
        _refuse(recipe, plan.ranks * plan.nodes, plan.kind)
    elif plan.nodes == 1:
        sizes.next()  # raises UsageError if too few ranks are available
    check_memory(plan, available_memory())
    if plan.nodes == 1 and not plan.alone:
        check_loopback()
    _check_resume(job)
    check_load(job, recipe)
    try:
        if plan.nodes > 1:
            return _on_nodes(sizes, recipe, inherited)
        sizes.plan, attempt = _opened(plan, recipe.folder)
        if plan.alone:
            return _alone(sizes.plan, attempt)
        return attempts.run(sizes.announce_next, attempt, inherited, sizes.resize, prepared)
    finally:
        release(recipe.folder)


def _refuse(recipe: Recipe, ranks: int, kind: str) -> None:
    for component in (recipe.strategy, *recipe.callbacks):
        component.refuse(recipe, ranks, kind)


def _refused(recipe: Recipe, kind: str, ranks: int) -> str:
    """Returns why the recipe cannot be trained on `ranks` ranks; "" if it can."""
    try:
        _refuse(recipe, ranks, kind)
    except UsageError as error:
        return str(error)
    return ""


def _opened(plan: Plan, folder: Path) -> tuple[Plan, Path]:
    """Claims the run's folder; returns the plan with it, and a new folder for the first attempt's logs."""
    folder, older = _claimed(plan.job, folder)
    attempt = logs.fresh(folder)
    job = replace(plan.job, extra={**plan.job.extra, "claimed": True, "older": older})
    return replace(plan, job=job, began=attempt.stat().st_mtime), attempt


def _on_nodes(sizes: ElasticSize, recipe: Recipe, inherited: dict[str, str]) -> int:
    """Runs one of several nodes; they meet before anything is written."""
    from paddle_dp.launch.nodes import job as nodes
    from paddle_dp.launch.nodes.rendezvous import NodeLimits
    from paddle_dp.recipe.folder import SIGNS

    plan = sizes.plan
    job = plan.job

    def opened(goes_on: bool) -> tuple[Plan, Path]:
        there = any((recipe.folder / sign).exists() for sign in SIGNS)
        resume = "newest" if goes_on and there else job.resume
        return _opened(replace(plan, job=replace(job, resume=resume)), recipe.folder)

    least = job.least_nodes or plan.nodes
    strategy, spare = recipe.strategy.config, None
    if strategy.may_lose_ranks:  # nodes with servers must not be lost
        spare = -(-strategy.servers // plan.ranks)
    limits = NodeLimits.from_watch(recipe.watch, least, plan.nodes, spare)

    def chosen(offers: Sequence[Offer]) -> Sequence[Offer]:
        if job.elastic:
            return choose(offers, least, job.least_ranks or plan.ranks, sizes.refused)
        return equal(offers)

    node_job = nodes.NodeJob(
        plan=plan, limits=limits, open=opened, sizes=chosen, offered=sizes.offered, inherited=inherited
    )
    return nodes.run(node_job)


def _claimed(job: Job, folder: Path) -> tuple[Path, int | None]:
    """Claims the run folder. Returns it, and the older run in it that rank 0 moves aside after all checks.

    Later nodes write their logs to a folder next to it, since the disk may be shared.
    """
    from paddle_dp.recipe.folder import check_files, claim

    check_files(folder)
    if job.node_rank:
        return folder.with_name(f"{folder.name}.node-{job.node_rank}"), None
    return folder, claim(folder, job.resume) if job.entry_point == "train" else None


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
    """Runs the only rank in this process: no launcher, no process group, no start-up cost."""
    from paddle_dp.launch.worker import guarded, work

    job = plan.job
    job = replace(job, extra={**job.extra, "logs": str(attempt)})
    console.announce(plan, dict(os.environ), attempt)
    with watched_inside(plan.limits, attempt, lambda failure: console.answer(failure, plan, attempt)):
        failure = guarded(lambda: work(job.entry_point, job.recipe, job.all_overrides, job.options), attempt)
    return console.answer(failure, plan, attempt) if failure else 0
