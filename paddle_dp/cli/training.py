"""Verbs that start ranks: train, evaluate, launch."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paddle_dp.cli.options import (
    Averaged,
    Checkpoint,
    Devices,
    Master,
    NodeRank,
    Nodes,
    NodesOrSpan,
    OutputDir,
    Overrides,
    Ranks,
    RanksOrSpan,
    RecipeFile,
    RunFolder,
    argument,
    flag,
    folder_option,
    node_options,
    numbers,
    option,
    span,
    split_by_comma,
)
from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.launch.command import Job, typed

NOTHING_PROVEN = 3  # of `verify`
# Verbs that do not train use neither; a callback may need more ranks, and a guard may need a callback.
NO_TRAINING = ("callbacks=[]", "guard={}")


def start(job: Job) -> NoReturn:
    """Runs a job, and exits with its status."""
    from paddle_dp.launch.start import run

    began = time.time()
    status = run(replace(job, ends_process=True))
    if status and job.entry_point == "train" and not job.script and not job.node_rank:
        _report_failure(job, began)
    raise typer.Exit(status)


def _report_failure(job: Job, began: float) -> None:
    """Writes the report of a training that began and failed once more: a rank that was killed has written none, and
    the launcher knows the first cause."""
    try:
        from paddle_dp.recipe import read_recipe
        from paddle_dp.report.report import write_report

        folder = read_recipe(job.recipe, job.all_overrides).folder
        if (folder / "certificate.json").stat().st_mtime >= began:  # else an older run is in the folder
            write_report(folder)
    except Exception:  # noqa: BLE001 - the failure of the training is the last on the screen
        pass


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: RanksOrSpan = None,
    devices: Devices = None,
    nodes: NodesOrSpan = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: OutputDir = None,
    resume: Annotated[
        str | None,
        option(
            "[CHECKPOINT]", "Continue from the newest checkpoint, or from this one: best, a step or a path."
        ),
    ] = None,
    restarts: Annotated[
        int,
        option(
            "N",
            "Start again after a failure, from the newest good checkpoint: N times, and N times anew after each "
            "new checkpoint (docs/reliability.md).",
        ),
    ] = 0,
    spares: Annotated[
        bool,
        flag(
            "With --restarts: processes that have imported Paddle wait for a restart, for CPU ranks of one "
            "machine. The callback memory_checkpoint saves steps, too (docs/reliability.md).",
            "--spares",
        ),
    ] = False,
    accept: Annotated[
        str | None,
        option("KEY,…", "Settings that may differ at --resume: loss,optimizer.clip (docs/checks.md)."),
    ] = None,
    why: Annotated[
        bool, flag("Show where the time of the steps goes, and ways to make them shorter.", "--why")
    ] = False,
    verify: Annotated[
        bool,
        flag(
            "First compare the ranks with one process (paddle-dp verify); do not train if they differ, or if "
            "the comparison fails.",
            "--verify",
        ),
    ] = False,
) -> None:
    """Train a recipe on any number of processes."""
    from paddle_dp.launch.batch_numbers import with_batch_numbers

    if accept is not None and resume is None:
        raise UsageError(
            f"--accept {accept} needs --resume: it lists settings that may differ from the run's."
        )
    if spares and not restarts:
        raise UsageError(
            "--spares needs --restarts: spares wait for the ranks of another attempt. Add --restarts 3."
        )
    least_ranks, most_ranks = span("--ranks", ranks)
    job = with_batch_numbers(Job(
        recipe=recipe, overrides=tuple(overrides or ()), ranks=most_ranks, least_ranks=least_ranks,
        devices=numbers(devices), output_dir=output_dir, resume=resume, restarts=restarts, spares=spares,
        **node_options(nodes, master, node_rank, may_shrink=True),
        extra={**({"accept": split_by_comma(accept)} if accept else {}), **({"why": True} if why else {})},
    ))  # fmt: skip
    if verify:
        _verify(job)
    start(job)


def _verify(job: Job) -> None:
    """Runs `paddle-dp verify` in a separate process; exits with its status if the ranks do not learn the same as one
    process. The training finds the verdict."""
    import subprocess
    import sys

    from paddle_dp.launch.machine import Machine, visible_in
    from paddle_dp.launch.plan import recipe_plan
    from paddle_dp.recipe import read_recipe

    recipe = read_recipe(job.recipe, job.all_overrides)
    plan = recipe_plan(job, Machine.here(), recipe)
    if plan.nodes > 1:
        raise UsageError(
            "--verify proves on one machine, and this training is to run on several: run paddle-dp verify there first."
        )
    if plan.ranks * recipe.strategy.config.batch_chunks == 1:
        print(
            "--verify: ranks are compared with one process, so one process has nothing to prove.", flush=True
        )
        return
    command = [sys.executable, "-m", "paddle_dp", "verify", typed(job.recipe), *job.all_overrides]
    devices = {visible_in(plan.kind): ",".join(plan.devices)} if job.devices else {}
    status = subprocess.run([*command, "--ranks", str(plan.ranks)], env=os.environ | devices).returncode
    if status == NOTHING_PROVEN:
        print("--verify proved nothing (see above): the training has no proof.", flush=True)
    elif status:
        print("Nothing was trained: --verify asks for a proof first.", flush=True)
        raise typer.Exit(status if status > 0 else 128 - status)


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
) -> None:
    """Evaluate a run's checkpoint on every held-out sample, each exactly once.

    Any number of ranks will do, independent of the training's: if the strategy cannot use it, each rank has the whole
    model (strategy.use=data_parallel).
    """
    from paddle_dp.mesh.allocation import refuse_parallel_tasks
    from paddle_dp.recipe import resolved

    refuse_parallel_tasks(os.environ, "start it once, on one node.")
    start(Job(
        entry_point="evaluate", recipe=resolved(run), overrides=(*(overrides or ()), *NO_TRAINING), ranks=ranks,
        devices=numbers(devices), output_dir=run, extra={"checkpoint": checkpoint, "ema": ema},
    ))  # fmt: skip


def launch(
    context: typer.Context,
    script: Annotated[str, argument("SCRIPT", "Any script for paddle.distributed.launch.")],
    as_module: Annotated[
        bool, flag("SCRIPT is a module's name, as for python -m.", "-m", "--module")
    ] = False,
    ranks: Ranks = None,
    devices: Devices = None,
    nodes: Nodes = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: Annotated[
        Path | None, folder_option("Where logs go, in place of runs/<script>.launch.")
    ] = None,
    restarts: Annotated[int, option("N", "Start the script again after a failure, N times at most.")] = 0,
    cpu_bridge: Annotated[
        bool,
        flag(
            "On CPUs: fleet's hybrid layouts over gloo (paddle_dp.gloo), with the script unchanged.",
            "--cpu-bridge",
        ),
    ] = False,
) -> None:
    """Run a script that may know nothing of paddle_dp on N ranks, supervised.

    Options of launch stand before SCRIPT; all arguments after SCRIPT are passed to it. When a rank fails, the first
    cause is printed last, with its traceback, and no process is left. A script that is started again must find its
    checkpoint itself.

    Exit status: 0 done; the status of the rank that failed first; 2 something to type differently; 128 + n ended by
    signal n.
    """
    strays = [
        token for token in context.args if token.partition("=")[0] in ("--ranks", "--nodes", "--devices")
    ]
    if strays and (ranks, devices, nodes) == (None, None, None):
        raise UsageError(
            f"{strays[0]} stands after {script}, so the script gets it, and the job would have one rank. Options of "
            f"launch stand before the script: paddle-dp launch --ranks 2 {script} … If the script does take such an "
            "option, give it to launch, too."
        )
    start(Job(
        script=(*(["-m"] if as_module else []), script, *context.args), ranks=ranks, devices=numbers(devices),
        output_dir=output_dir, restarts=restarts, **node_options(nodes, master, node_rank),
        extra={"cpu_bridge": True} if cpu_bridge else {},
    ))  # fmt: skip


def cluster(
    engine: Annotated[str, argument("ENGINE", "slurm, kubernetes, jobset or volcano.")],
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Annotated[int, option("N", "Machines, up to 64.")] = 1,
    ranks: Annotated[
        int | None, option("N", "Processes on each; by default one for each GPU, or one.")
    ] = None,
    gpus: Annotated[int, option("N", "GPUs of each machine.")] = 0,
    cpus: Annotated[
        int | None,
        option("N", "Processors of each machine; by default 4 for each GPU, or one for each process."),
    ] = None,
    memory: Annotated[
        str,
        option("SIZE", "Memory of each machine, such as 64Gi; a pod's is 16Gi without it, and for each GPU."),
    ] = "",
    time: Annotated[
        str, option("HH:MM:SS", "Slurm's time limit of a turn, two minutes or more.")
    ] = "04:00:00",
    output_dir: OutputDir = None,
    name: Annotated[str | None, option("NAME", "The job's; by default the recipe's.")] = None,
    image: Annotated[
        str, option("IMAGE", "The container's image; .devcontainer has a Containerfile.")
    ] = "REGISTRY/paddle-dp:latest",
    claim: Annotated[str, option("NAME", "The volume claim of the run's folder.")] = "runs",
    restarts: Annotated[
        int | None, option("N", "Restarts after a lost pod (train --restarts), by default 3; not for Slurm.")
    ] = None,
) -> None:
    """Print a script or manifest that runs a recipe on a cluster: redirect it into a file, read it, submit it.

    The recipe is read first, and refused with its mistakes, or if its layout does not fit nodes × ranks. The job stops
    with a checkpoint before a time limit or an eviction, is queued again, and goes on (docs/how-to/clusters.md).
    """
    import shlex
    import sys

    from paddle_dp.cluster.kubernetes import jobset, kubernetes, volcano
    from paddle_dp.cluster.request import RESTARTS, ClusterRequest, checked, name_of
    from paddle_dp.cluster.slurm import slurm

    if engine == "ray":
        raise UsageError(
            "cluster ray: Ray needs no script: start it by paddle_dp.ray.RayJob (docs/how-to/ray.md)."
        )
    engines = {"slurm": slurm, "kubernetes": kubernetes, "jobset": jobset, "volcano": volcano}
    if engine not in engines:
        raise UsageError(f"cluster {engine}: there is no such engine.{did_you_mean(engine, engines)}")
    request = ClusterRequest(
        recipe=recipe, settings=tuple(overrides or ()), nodes=nodes, ranks=ranks, gpus=gpus, cpus=cpus, memory=memory,
        time=time, folder=str(output_dir or ""), name=name or "job", image=image, claim=claim, restarts=restarts,
    )  # fmt: skip
    read = checked(request, 0 if engine == "slurm" else RESTARTS)
    request = replace(request, folder=request.folder or read.output_dir or "")
    words = " ".join(shlex.quote(word).replace("\n", " ") for word in sys.argv[1:])
    text = engines[engine](replace(request, name=name or name_of(read)), f"Written by paddle-dp {words}")
    print(text, end="")
