"""Runs a job. At its end the cause of a failure is last on the screen, and no process is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch import attempts, console, logs, stacks
from paddle_dp.launch.command import Job, LaunchPlan, Limits, environment
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.initial import check_load
from paddle_dp.launch.machine import Machine, available_memory
from paddle_dp.launch.memory import memory_folder
from paddle_dp.launch.network import check_loopback
from paddle_dp.launch.plan import RankDevices, check_memory, plan_of, recipe_plan
from paddle_dp.launch.prepared_ranks import PreparedLauncher, Spares, WaitingRanks
from paddle_dp.launch.processes import ignore_end_signals
from paddle_dp.launch.rank_monitor import PreparedRanks
from paddle_dp.launch.rank_supply import RankSupply
from paddle_dp.launch.restarts import AttemptResult
from paddle_dp.launch.silence import ignore_ccache, import_paddle
from paddle_dp.launch.standstill import watched_inside
from paddle_dp.launch.steady import steady_screen

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

# Entry points that read the recipe in a run's folder, perhaps another's.
RUN_ENTRY_POINTS = ("evaluate", "generate", "predict", "export", "export_weights")
FALLBACK = "strategy.use=data_parallel"  # takes any number of ranks; on one it is the plain model
SAMPLE = 120.0  # seconds that one sample of a script may take, the default of a recipe's loader.timeout


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
    ignore_ccache()
    if job.script:
        return _run_script(job, machine, inherited)
    plan = plan_of(job, machine, each=RankDevices(known=False))
    if plan.alone:
        # This process will be the rank; MKL and OpenMP read their variables when paddle is imported.
        _become(environment(plan, inherited))
        import_paddle()
    elif waiting is None:
        with PreparedLauncher(plan, inherited, renews=not job.spares) as prepared:
            if not job.spares:
                return _run_recipe(job, machine, inherited, prepared)
            with Spares(prepared) as spares:
                return _run_recipe(job, machine, inherited, spares)
    return _run_recipe(job, machine, inherited, waiting)


def _become(variables: dict[str, str]) -> None:
    """Gives this process the environment of a rank."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _run_script(job: Job, machine: Machine, inherited: Mapping[str, str]) -> int:
    """Runs any script for paddle.distributed.launch as a supervised job: `paddle-dp launch`."""
    from paddle_dp.recipe.schema import WatchSettings

    name = _name_of(job.script)
    plan = replace(plan_of(job, machine), limits=Limits(watch=WatchSettings(), sample_seconds=SAMPLE))
    _check_machine(plan)
    # Not runs/<script>: a Trainer in the script may have its run there, and move an older one aside.
    folder = Path(job.output_dir or Path("runs") / f"{name}.launch")
    supply = RankSupply(plan=plan, run=folder, obstacle=lambda ranks: "")
    with PreparedLauncher(plan, inherited) as prepared:
        return _run_plan(supply, lambda goes_on: _with_logs(plan, folder), inherited, prepared=prepared)


def _name_of(arguments: tuple[str, ...]) -> str:
    """Returns the name of a script's run folder. Raises UsageError if there is no such script or module."""
    if arguments[0] != "-m":
        path = Path(arguments[0])
        if not path.is_file():
            raise UsageError(f"{path}: there is no such script.")
        if path.suffix in (".yaml", ".yml"):
            raise UsageError(f"{path} is a recipe, not a script: paddle-dp train {path}")
        return path.stem
    top, *_, last = [*arguments[1].split("."), arguments[1].rpartition(".")[2]]
    if find_spec(top) is None and not Path(top).is_dir() and not Path(f"{top}.py").is_file():
        raise UsageError(f"-m {arguments[1]}: there is no module '{top}' here, and none is installed.")
    return last


def _run_recipe(job: Job, machine: Machine, inherited: dict[str, str], prepared: PreparedRanks | None) -> int:
    """Reads the recipe, which imports the code that it names; runs it after all checks that need no written file."""
    from paddle_dp.recipe import foreign_code
    from paddle_dp.recipe.code import changed
    from paddle_dp.recipe.folder import has_run, release

    if job.entry_point in RUN_ENTRY_POINTS:
        if foreign := foreign_code(job.recipe, job.all_overrides):
            modules = ", ".join(foreign)
            console.write(f"{job.recipe} imports, and so runs, code that is not paddle_dp's: {modules}")
        for file, copy in changed(job.recipe):
            console.write(
                f"{file} differs from the run's copy, {copy}, and runs now in its place. The copy runs where there is "
                "no other file of its name."
            )
    recipe, plan = (evaluation if job.entry_point == "evaluate" else _read)(job, machine)
    if isinstance(prepared, PreparedLauncher) and (plan.alone or plan.launches_ranks):
        prepared.drop()
    if job.spares:
        _refuse_spares(plan)
    supply = RankSupply(plan=plan, run=recipe.folder, obstacle=partial(_obstacle, recipe, plan.kind))
    if not job.elastic:
        _refuse(recipe, plan.all_ranks, plan.kind)
    elif plan.nodes == 1:
        supply.next()  # raises UsageError if too few ranks are available
    _check_machine(plan)
    _check_resume(job)
    check_load(job, recipe)

    def opened(goes_on: bool) -> tuple[LaunchPlan, Path]:
        resume = "newest" if goes_on and has_run(recipe.folder) else job.resume
        return _claimed(supply.plan, recipe.folder, resume)

    strategy, spare = recipe.strategy.config, None
    if strategy.may_lose_ranks:  # nodes with servers must not be lost
        spare = -(-strategy.servers // plan.ranks)
    try:
        with memory_folder(recipe, plan) as memory:
            supply.plan = replace(supply.plan, memory=memory)
            return _run_plan(supply, opened, inherited, spare, prepared)
    finally:
        release(recipe.folder)


def _read(job: Job, machine: Machine) -> tuple[Recipe, LaunchPlan]:
    """Returns the job's recipe, and its plan with devices for the recipe's strategy.

    Raises UsageError if they are missing.
    """
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(job.recipe, job.all_overrides)
    limits = Limits(watch=recipe.watch, sample_seconds=recipe.loader.timeout.seconds)
    return recipe, replace(recipe_plan(job, machine, recipe), limits=limits)


def evaluation(job: Job, machine: Machine) -> tuple[Recipe, LaunchPlan]:
    """Returns the recipe and the plan of an evaluation; with `FALLBACK` if the run's strategy does not take its ranks.

    A checkpoint of any strategy fits any other. Raises UsageError if `FALLBACK` is refused, too, or if the job itself
    overrides the strategy.
    """
    try:
        recipe, plan = _read(job, machine)
        _refuse(recipe, plan.all_ranks, plan.kind)
    except UsageError as refused:
        choice = any(text.partition("=")[0].partition(".")[0].strip() == "strategy" for text in job.overrides)
        if choice or type(refused) is not UsageError:  # a mistake in the recipe, a package that is missing
            raise
    else:
        return recipe, plan
    recipe, plan = _read(replace(job, overrides=(*job.overrides, FALLBACK)), machine)
    _refuse(recipe, plan.all_ranks, plan.kind)
    ranks = f"{plan.ranks} ranks" if plan.ranks > 1 else "1 process"
    console.write(
        f"evaluated on {ranks} with {FALLBACK}: the run's strategy needs other ranks, its checkpoints do not"
    )
    return recipe, plan


def _refuse(recipe: Recipe, ranks: int, kind: str) -> None:
    for component in (recipe.strategy, *recipe.callbacks):
        component.refuse(recipe, ranks, kind)


def _refuse_spares(plan: LaunchPlan) -> None:
    """Raises UsageError for ranks that no waiting process could become."""
    reason = (
        "these ranks compute on accelerators, whose drivers survive no fork" if plan.devices
        else "on several nodes each waits for the others' ranks" if plan.nodes > 1
        else "servers and workers are started one by one" if plan.launches_ranks
        else ""
    )  # fmt: skip
    if reason:
        raise UsageError(f"--spares: {reason}: leave it out; --restarts works without it.")


def _obstacle(recipe: Recipe, kind: str, ranks: int) -> str:
    """Returns why the recipe cannot be trained on `ranks` ranks; "" if it can."""
    try:
        _refuse(recipe, ranks, kind)
    except UsageError as error:
        return str(error)
    return ""


def _check_machine(plan: LaunchPlan) -> None:
    check_memory(plan, available_memory())
    if plan.nodes == 1 and not plan.alone:
        check_loopback()


def _check_resume(job: Job) -> None:
    if job.resume in (None, "newest", "best") or job.resume.isdecimal():  # found, or not, in the run's folder
        return
    if not Path(job.resume).exists():
        raise UsageError(
            f"--resume {job.resume}: there is no such checkpoint. Leave the path out for the newest one, or give best "
            "or a step."
        )


def _claimed(plan: LaunchPlan, folder: Path, resume: str | None) -> tuple[LaunchPlan, Path]:
    """Claims the run's folder; returns the plan with it, and a new folder for the first attempt's logs.

    Rank 0 moves an older run in it aside after all checks.
    """
    from paddle_dp.recipe.code import check_copies
    from paddle_dp.recipe.folder import check_files, claim

    check_files(folder)
    job, older = plan.job, None
    if job.entry_point == "train" and not job.node_rank:
        check_copies(folder, resume)
        older = claim(folder, resume, recipe=job.recipe)
    job = replace(job, resume=resume, extra={**job.extra, "claimed": True, "older": older})
    return _with_logs(replace(plan, job=job), folder)


def _with_logs(plan: LaunchPlan, folder: Path) -> tuple[LaunchPlan, Path]:
    """Returns the plan with the time of its start, and a new folder for the first attempt's logs.

    Later nodes write their logs to a folder next to the run's, since the disk may be shared.
    """
    node = plan.job.node_rank
    attempt = logs.fresh(folder.with_name(f"{folder.name}.node-{node}") if node else folder)
    return replace(plan, began=attempt.stat().st_mtime), attempt


def _run_plan(
    supply: RankSupply,
    opened: Callable[[bool], tuple[LaunchPlan, Path]],
    inherited: Mapping[str, str],
    spare: int | None = None,
    prepared: PreparedRanks | None = None,
) -> int:
    """Runs the plan of `supply` on this machine, or as one of several nodes, which meet before anything is written.

    `opened`: as `nodes.run`'s; `spare`: NodeLimits.spare.
    """
    plan = supply.plan
    if plan.nodes > 1:
        from paddle_dp.launch.nodes import job as nodes
        from paddle_dp.launch.nodes.rendezvous import NodeLimits

        assert plan.limits is not None
        watch = plan.limits.watch
        limits = NodeLimits(
            least=plan.job.least_nodes or plan.nodes, most=plan.nodes, silence=watch.node.seconds,
            gather=watch.start.seconds, rejoin=watch.rejoin.seconds, spare=spare,
        )  # fmt: skip
        return nodes.run(supply, limits, opened, inherited, prepared)
    supply.plan, attempt = opened(False)
    if plan.alone:
        return _alone(supply.plan, attempt)
    ends = plan.job.ends_process
    return attempts.run(supply.announce_next, attempt, inherited, supply.resize, prepared, ends)


def _alone(plan: LaunchPlan, attempt: Path) -> int:
    """Runs the only rank in this process: no launcher, no process group, no start-up cost."""
    from paddle_dp.launch.recipe_rank import guarded, work

    job = plan.job
    job = replace(job, extra={**job.extra, "logs": str(attempt)})
    console.announce(plan, dict(os.environ), attempt)

    def show(failure: Failure) -> int:
        return console.show_end(
            AttemptResult(attempt=attempt, status=failure.exit_status, cause=failure), plan
        )

    def only_rank() -> None:
        try:
            work(job.entry_point, job.recipe, job.all_overrides, job.options)
        finally:
            if job.ends_process:
                ignore_end_signals()

    failure: Failure | None = None

    def show_standstill(standstill: Failure) -> int:
        return failure.exit_status if failure else show(standstill)  # its failure is on the screen

    if job.ends_process:
        stacks.offer(attempt, 0)
    with watched_inside(plan.limits, attempt, show_standstill, job.ends_process):
        failure = guarded(only_rank, attempt)
    return show(failure) if failure else 0
