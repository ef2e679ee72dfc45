"""Turns a recipe into a TrainerSpec, a Task, a Learner or a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import paddle

from paddle_dp.assembly.assemble import TrainerBuilder, TrainerSpec, begin, find_checkpoint
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import Checkpoint
from paddle_dp.core.parameter_groups import base_of, group
from paddle_dp.core.turns import loss_of_recipe, make_optimizer_of
from paddle_dp.data.prepared import prepared
from paddle_dp.data.stream import as_dataset
from paddle_dp.learner import Learner, Task
from paddle_dp.mesh import Mesh
from paddle_dp.model.initial_weights import draw, without_memory
from paddle_dp.part import adapted, read_part
from paddle_dp.recipe import Recipe
from paddle_dp.train.state import load_model


def build(recipe: Recipe, mesh: Mesh, resume: str | None = None, accept: Sequence[str] = ()) -> Trainer:
    """A trainer ready to fit, new or resumed from a checkpoint. Collective.

    `resume`: None, "newest", "best" or a checkpoint's path. `accept`: settings that may differ from the
    checkpoint's. Raises UsageError or CheckpointError when no checkpoint fits.
    """
    return TrainerBuilder(setup(recipe), mesh).trainer(Trainer, resume, accept)


def setup(recipe: Recipe) -> TrainerSpec:
    """The recipe as the argument of `TrainerBuilder`."""
    return TrainerSpec(
        name=recipe.name,
        folder=recipe.folder,
        dataset=lambda split: dataset(recipe, split),
        task=lambda steps, steps_per_epoch: task(recipe, steps, steps_per_epoch),
        drop_last=recipe.train.drop_last,
        length=recipe.train.length,
        load=recipe.load,
        loader=recipe.loader,
        callbacks=lambda run: [component.build(run) for component in recipe.callbacks],
        metrics=[(f"metrics.{component.name}", component.build()) for component in recipe.metrics],
        requested=recipe,
    )


def dataset(recipe: Recipe, split: str) -> Any:
    """The recipe's data set, or its stream as one, prepared for the loader; None if nothing is held out."""
    build = partial(recipe.dataset.build, split)
    samples = recipe.loader.samples if split == "train" else None
    named = f"dataset {recipe.dataset.name}, {split}"
    return prepared(as_dataset(build(), samples, named, recreate=build), recipe.loader)


def example_dataset(recipe: Recipe) -> Any:
    """The recipe's held-out data set; the training's if nothing is held out."""
    return dataset(recipe, "train") if (samples := dataset(recipe, "test")) is None else samples


def task(recipe: Recipe, steps: int, steps_per_epoch: int) -> Task:
    """The recipe's model, loss, optimizer and schedule, for a training of `steps` updates.

    The initial weights equal one process's draw from the recipe's seed. If each rank will keep a part of the model, the
    weights have no memory yet (`model.initial_weights`), unless only a whole model draws the same.
    """
    finish = partial(_task, recipe, steps=steps, steps_per_epoch=steps_per_epoch)
    paddle.seed(recipe.train.seed)
    if recipe.strategy.config.partitions_model:
        built, reason = without_memory(recipe.model.build, finish)
        return finish(recipe.model.build(), reason=reason) if built is None else built
    return finish(recipe.model.build())


def _task(recipe: Recipe, model: paddle.nn.Layer, steps: int, steps_per_epoch: int, reason: str = "") -> Task:
    model, before = adapted(model, recipe.adapter, recipe.train.seed)
    group(model, recipe.optimizer.groups, before)
    recipe.optimizer.prepare(model)
    base, added = base_of(model, before)
    schedule = recipe.schedule.build(steps=steps, steps_per_epoch=steps_per_epoch, batch=recipe.train.batch)
    return Task(
        model=model,
        loss=loss_of_recipe(recipe, model),
        optimizer=make_optimizer_of(recipe),
        schedule=schedule,
        precision=recipe.train.precision,
        dropout=recipe.train.dropout,
        full_model_reason=reason,
        base=base,
        added=added,
        compile=recipe.train.compile,
    )


def plain_learner(recipe: Recipe, mesh: Mesh) -> Learner:
    """The recipe's model on this process alone, with an adapter's base weights. Opens no data set."""
    plain_task = replace(task(recipe, 1, 1), compile=False)
    draw(plain_task.model)  # if ranks keep parts of the model, `task` has left this to the strategy
    single = read_part("strategies", {"use": "single"}).build(mesh)
    return begin(plain_task, single.place, recipe.load if plain_task.base else None)[0]


def learner_of(recipe: Recipe, mesh: Mesh) -> Learner:
    """The recipe's learner without a trainer, to load a checkpoint into. Its mesh is the strategy's. Collective."""
    return TrainerBuilder(setup(recipe), mesh).learner()


def load_trained(recipe: Recipe, options: Mapping[str, Any], learner: Learner) -> Checkpoint:
    """Loads a checkpoint of the recipe's run into a learner: options["checkpoint"], newest (the default), best or a
    path; with options["ema"] the averages in place of weights. Collective."""
    source = find_checkpoint(recipe.folder, options.get("checkpoint") or "newest", learner.mesh)
    load_model(source, learner, ema=bool(options.get("ema")))
    return source
