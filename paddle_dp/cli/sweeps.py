"""The verb that trains one recipe under many settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paddle_dp.cli.options import OutputDir, RecipeFile, argument, flag, option, require

if TYPE_CHECKING:
    from paddle_dp.sweep.request import SweepPlan
    from paddle_dp.sweep.trial import Executor


def sweep(
    recipe: RecipeFile,
    axes: Annotated[
        list[str],
        argument(
            "KEY=VALUES…",
            "Settings to search: KEY=[a, b], uniform(a, b), loguniform(a, b), int(a, b) or logint(a, b). A plain "
            "KEY=VALUE is for all trials.",
        ),
    ],
    trials: Annotated[int, option("N", "Trainings in all; fewer if there are fewer settings.")] = 20,
    jobs: Annotated[int, option("N", "Trials at a time.")] = 1,
    ranks: Annotated[int, option("N", "Processes of each trial.")] = 1,
    score: Annotated[
        str,
        option(
            "NAME",
            "The number of the evaluations to improve, such as acc1 or loss; without it, "
            "callbacks.checkpoint.best.",
        ),
    ] = "",
    search: Annotated[
        str, option("tpe|random", "How settings are drawn: from the results, or at random.")
    ] = "tpe",
    prune: Annotated[
        str, option("median|none", "End a trial early that is worse than the median of others, or none.")
    ] = "median",
    seed: Annotated[int, option("N", "Equal seeds draw equal settings.")] = 0,
    ray: Annotated[
        bool, flag("Trials on the machines of a Ray cluster that share this folder's path.", "--ray")
    ] = False,
    output_dir: OutputDir = None,
    resume: Annotated[bool, flag("Go on with a sweep that was stopped or killed.", "--resume")] = False,
) -> None:
    """Train a recipe under many settings, and compare the trials (docs/how-to/sweep.md).

    Every setting is checked before the first trial starts. Each trial is a run in the sweep's folder,
    runs/<name>.sweep. At the end there are a table, a picture, and a page that compares the trials.
    """
    require("sweep", "sweep", "optuna")
    from paddle_dp.sweep.request import SweepRequest
    from paddle_dp.sweep.sweep import run

    request = SweepRequest(
        recipe=recipe, texts=tuple(axes), folder=output_dir, trials=trials, jobs=jobs, ranks=ranks, score=score,
        seed=seed, search=search, prune=prune, resume=resume, elsewhere=ray,
    )  # fmt: skip
    raise typer.Exit(run(request, _ray_executor if ray else None))


def _ray_executor(plan: SweepPlan) -> Executor:
    from paddle_dp.ray import RayExecutor

    return RayExecutor(plan.request.ranks, 0 if plan.device == "cpu" else plan.accelerators)
