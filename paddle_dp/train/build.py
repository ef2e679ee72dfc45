"""From a recipe to a trainer: the one place where parts meet."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader, Share
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.seed import part_ways
from paddle_dp.parallel import Learner, Task
from paddle_dp.recipe import Recipe
from paddle_dp.train.run import Run
from paddle_dp.train.trainer import Trainer


def build(recipe: Recipe, mesh: Mesh, resume: str | None = None) -> Trainer:
    """A trainer that is ready to fit, at its beginning or where a checkpoint left off. Collective.

    `resume` is None, "newest", or a checkpoint's path. Raises UsageError or CheckpointError when there is nothing
    fitting to resume.
    """
    strategy = recipe.strategy.build(mesh)
    mesh = strategy.mesh  # as the strategy sees it: which ranks read the same samples
    train_loader = loader(recipe, mesh, "train")
    found = find_checkpoint(recipe, resume, mesh) if resume else None
    if found is not None:
        _check_same_run(found, train_loader, recipe)
    steps = recipe.train.length.steps(train_loader.batches)
    run = Run(
        name=recipe.name,
        folder=recipe.folder,
        mesh=mesh,
        train_loader=train_loader,
        test_loader=loader(recipe, mesh, "test"),
        recipe=recipe,
        resumed=found,
        total_steps=steps,
    )
    learner = strategy.place(task(recipe, steps, train_loader.batches))
    part_ways(recipe.train.seed, mesh)
    trainer = Trainer(
        learner,
        train_loader,
        [part.build(run) for part in recipe.callbacks],
        run=run,
        check_every=getattr(strategy, "check_every", None),
    )
    if found is not None:
        trainer.restore(found)
    return trainer


def task(recipe: Recipe, steps: int, steps_per_epoch: int) -> Task:
    """The recipe's model, loss, optimizer and schedule, for a training of `steps` updates.

    The model's weights are drawn from the recipe's seed, on every rank alike.
    """
    paddle.seed(recipe.train.seed)
    model = recipe.model.build()
    schedule = recipe.schedule.build(steps=steps, steps_per_epoch=steps_per_epoch, batch=recipe.train.batch)
    return Task(
        model=model,
        loss=_loss(recipe, model),
        optimizer=recipe.optimizer.build,
        schedule=schedule,
        precision=recipe.train.precision,
    )


def loader(recipe: Recipe, mesh: Mesh, split: str) -> Loader:
    """The loader of "train" (shuffled, in micros) or "test" (in order, every sample once)."""
    dataset = recipe.dataset.build(split)
    settings: dict[str, Any] = {"seed": recipe.train.seed, "shuffle": False}
    if split == "train":
        settings |= {"shuffle": True, "last": recipe.train.last, "micros": recipe.train.micros}
    return Loader(
        dataset,
        Share.of(len(dataset), recipe.train.batch, mesh, **settings),
        workers=recipe.loader.workers,
        prefetch=recipe.loader.prefetch,
        timeout=recipe.loader.timeout.seconds,
    )


def learner_of(recipe: Recipe, mesh: Mesh) -> Learner:
    """The recipe's learner alone, for evaluating: no callbacks, no progress. Its mesh is the strategy's. Collective."""
    return recipe.strategy.build(mesh).place(task(recipe, 1, 1))


def find_checkpoint(recipe: Recipe, which: str, mesh: Mesh) -> checkpoints.Checkpoint:
    """The checkpoint of the recipe's run that `which` means: "newest", "best" or a path. Verified. Collective."""
    return checkpoints.load(checkpoints.find(which, recipe.folder / "checkpoints", mesh), mesh)


def _loss(recipe: Recipe, model: Any) -> Any:
    if recipe.loss is not None:
        return recipe.loss.build()
    if callable(getattr(model, "loss", None)):
        return model.loss
    raise UsageError(
        f"model {recipe.model.name} has no method loss(outputs, targets), so the recipe must name one: "
        "loss: {use: cross_entropy}, for a classifier."
    )


def _check_same_run(found: checkpoints.Checkpoint, train_loader: Loader, recipe: Recipe) -> None:
    """A resumed run goes on with the same global batches; what would change them is refused."""
    share, saved = train_loader.share, found.state["data"]
    now = {"samples": share.samples, "batch": share.batch, "seed": share.seed}
    words = {"samples": "samples in the data set", "batch": "train.batch", "seed": "train.seed"}
    changed = [f"{words[key]} was {saved[key]} and is {now[key]}" for key in now if now[key] != saved[key]]
    if changed:
        raise UsageError(
            f"{found.folder} cannot be resumed as the same run: {'; '.join(changed)}. Give the old value, or start a "
            f"new run with --out DIR (recipe {recipe.name})."
        )
