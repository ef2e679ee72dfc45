"""Entry points of the ranks' processes: train a recipe, or evaluate a run's checkpoint and write evaluation.json."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import NotFiniteError, PaddleDPError, UsageError
from paddle_dp.files import remove_partials, replacing
from paddle_dp.mesh import Mesh, join, transport
from paddle_dp.mesh.heartbeat import VARIABLE, heartbeat
from paddle_dp.recipe import Recipe, code, write_recipe
from paddle_dp.tensors import dtype_of
from paddle_dp.train.evaluation import Evaluation, as_json

if TYPE_CHECKING:
    from paddle_dp.assembly.trainer import Trainer


def report(
    result: Evaluation, checkpoint: Path, step: int, folder: Path, ranks: int, ema: bool = False
) -> None:
    """Prints the held-out numbers and the table per class, and writes them, with the confusion matrix, to
    <run>/evaluation.json. `ema`: they are of the averaged weights, and both say so."""
    numbers = "  ".join(f"{name} {value:.6g}" for name, value in result.numbers.items())
    print(f"{checkpoint}{', averaged weights (ema)' if ema else ''}: {numbers}", flush=True)
    on = f"{ranks} ranks" if ranks > 1 else "1 process"
    print(f"{result.counted}, on {on}", flush=True)
    if rows := result.per_class():
        print(f"{'class':>12}  precision  recall      f1  support")
    for row in rows:
        name, support = row["class"], row["support"]
        print(f"{name:>12}  {row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {support:7d}")
    weights = {"weights": "ema"} if ema else {}
    content = {
        "checkpoint": checkpoint.name, "step": step, **weights, **result.content, "per_class": rows
    }  # fmt: skip
    if result.confusion is not None:
        content["confusion"] = result.confusion.tolist()
    with replacing(folder / "evaluation.json") as partial:
        partial.write_text(as_json(content, to_read=True))
    print(f"written to {folder / 'evaluation.json'}", flush=True)


BEYOND = 60.0  # seconds after the watch's longest limit, for a busy machine


def train(recipe: Recipe, options: dict[str, Any]) -> None:
    """Trains the recipe in its run folder, from the beginning or, with options["resume"], from a checkpoint, from which
    the settings in options["accept"] may differ. options["why"] shows where the time of the steps goes."""
    from paddle_dp import checkpoint
    from paddle_dp.assembly.build import build
    from paddle_dp.recipe.folder import claim, holds

    mesh, recipe = _joined(recipe)
    resume = options.get("resume")
    if mesh.is_main:
        if not options.get("claimed"):  # started without paddle-dp, which claims it before the ranks start
            code.check_copies(recipe.folder, resume)
            options = {**options, "older": claim(recipe.folder, resume)}
        if not holds(recipe.folder, options.get("older")):
            remove_partials(recipe.folder)
            checkpoint.clean(recipe.folder / "checkpoints")
    mesh.wait("run folder claimed")
    trainer = build(recipe, mesh, resume, options.get("accept") or ())
    trainer.begin_run = partial(_begin_run, trainer, recipe, options)
    if options.get("why"):
        trainer.measurements.watch()
    first = trainer.progress.step
    try:
        trainer.fit(recipe.train.length)
    except ValueError as error:
        from paddle_dp.assembly.first_forward import explained, misfits

        if trainer.progress.step > first or isinstance(error, PaddleDPError) or not misfits(error):
            raise
        raise PaddleDPError(explained(error, recipe)) from error
    if trainer.mesh.lost:
        atexit.register(_leave)


def _begin_run(trainer: Trainer, recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Moves an older run out of the folder, and writes the files that describe this one. Collective."""
    from paddle_dp.assembly.inputs import Inputs
    from paddle_dp.recipe.folder import move_aside

    if trainer.mesh.is_main:
        logs = os.environ.get("PADDLE_LOG_DIR") or options.get("logs")
        moved = move_aside(recipe.folder, options.get("older"), Path(logs) if logs else None)
        if moved is not None:
            print(f"the earlier run is now {moved}", flush=True)
        write_recipe(recipe, recipe.folder / "recipe.yaml")
        inputs = Inputs.from_dataset(trainer.loader.dataset, varies=recipe.loader.collate == "batch")
        inputs.write(recipe.folder)
        code.keep(recipe.folder)
    trainer.mesh.wait("run folder ready")


def try_recipe() -> None:
    """Tries a recipe's task in this process, which trains nothing, for ranks with accelerators
    (`assembly.sample_trial`).

    Its argument is JSON, [recipe, divided, chained]; the last line of its output has the findings as JSON.
    """
    from paddle_dp.assembly import sample_trial
    from paddle_dp.assembly.build import dataset, task
    from paddle_dp.checks.samplewise import SAMPLES
    from paddle_dp.recipe import read_recipe

    path, divided, chained = json.loads(sys.argv[1])
    recipe = read_recipe(Path(path), ["train.device=cpu"])
    data, most = dataset(recipe, "train"), min(recipe.train.batch, SAMPLES)
    indices, mixes = range(min(len(data), most)), recipe.mix is not None
    first = sample_trial.first_samples(data, indices, recipe.train.seed, mixes)
    answer = sample_trial.answer_of(
        partial(sample_trial.findings_of, task(recipe, 1, 1), first, divided, chained)
    )
    print(f"\n{json.dumps(answer)}", flush=True)


def _leave() -> None:
    """Writes all output and ends this process without Paddle's destructors: after a machine was cut off, rank 0 spent
    more than a minute in them (3.3.1)."""
    transport.endpoint().flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def patience(recipe: Recipe, variables: Mapping[str, str]) -> float:
    """Seconds for which an exchange waits for a late rank; `variables`: this rank's environment.

    If `paddle-dp` watches all ranks, one of them may be late for as long as `watch` allows. Then the watch ends the
    job, and reports more than a waiting rank can know.
    """
    seconds = recipe.train.patience.seconds
    if VARIABLE not in variables or int(variables.get("PADDLE_NNODES", "1")) > 1:
        return seconds
    watch = recipe.watch
    limits = (watch.start, watch.patience, watch.evaluate, watch.checkpoint, watch.callbacks)
    longest = max(limit.seconds for limit in (*limits, recipe.loader.timeout) if limit is not None)
    return max(seconds, longest + BEYOND)


def _joined(recipe: Recipe) -> tuple[Mesh, Recipe]:
    """Joins the recipe's ranks. Returns their mesh, and the recipe with rank 0's run folder. Collective."""
    from paddle_dp.identity.consistency import agreed_folder

    train = recipe.train
    mesh = join(train.seed, train.device, patience(recipe, os.environ), recipe.strategy.config.servers)
    folder = agreed_folder(recipe.folder, mesh)
    return mesh, recipe if folder == recipe.folder else recipe.model_copy(update={"output_dir": str(folder)})


def evaluate(recipe: Recipe, options: dict[str, Any]) -> None:
    """Evaluates a run's checkpoint (options["checkpoint"]: newest, best or a path) on all held-out samples."""
    from paddle_dp.assembly.assemble import TrainerBuilder
    from paddle_dp.assembly.build import load_trained, setup
    from paddle_dp.train.evaluate import evaluate as evaluate_all

    mesh, recipe = _joined(recipe)
    assembly = TrainerBuilder(setup(recipe), mesh)
    learner, test_loader, mesh = assembly.learner(), assembly.test_loader, assembly.mesh
    if test_loader is None:
        raise UsageError(
            f"dataset {recipe.dataset.name} holds nothing out to evaluate on: its test split is None."
        )
    source = load_trained(recipe, options, learner)
    with test_loader, heartbeat.within("evaluate"):
        evaluation = evaluate_all(learner, test_loader, mesh, assembly.metrics)
    if mesh.is_main:
        step, averaged = source.state["progress"]["step"], bool(options.get("ema"))
        report(evaluation, source.folder, step, recipe.folder, mesh.ranks, averaged)
    evaluation.refuse_metric()
    if evaluation.not_finite:
        raise NotFiniteError(
            f"the evaluation of {source.folder} gives {evaluation.bad_numbers}: its weights or the data are broken."
            + f" {evaluation.failure}".rstrip()
        )


def merge(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes the plain model of an adapter's run, with the adapter merged into its base weights, as one safetensors
    file, options["to"]. Raises CheckpointError for a checkpoint that holds NaN."""
    from paddle_dp.assembly.build import load_trained, plain_learner
    from paddle_dp.checkpoint.merge import write_merged
    from paddle_dp.checkpoint.tensors import tensor_shard
    from paddle_dp.core.lora import merge_low_rank

    mesh, out = join(seed=recipe.train.seed, device=recipe.train.device), Path(options["to"])
    learner = plain_learner(recipe, mesh)
    source = load_trained(recipe, options, learner).without_nan()
    adapted = merge_low_rank(learner.model)
    tensors = learner.model.state_dict()
    forms = {name: (dtype_of(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_merged(out, forms, lambda name: tensor_shard(name, tensors[name]).array)
    origin = f"{source.folder}, with {adapted} layers' adapters in them"
    print(f"{out}: {len(tensors)} tensors of {origin}", flush=True)
