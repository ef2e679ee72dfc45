"""A training described in Python instead of YAML: your model, data and loss, and everything else as in a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly import script_arguments as arguments
from paddle_dp.assembly.argument_types import check_layers
from paddle_dp.assembly.assemble import TrainerBuilder, TrainerSpec
from paddle_dp.assembly.script_arguments import OWNER, NameOrSettings
from paddle_dp.core.parameter_groups import base_of, group
from paddle_dp.core.turns import make_turns
from paddle_dp.data.prepared import prepared
from paddle_dp.data.sample import Dataset
from paddle_dp.data.stream import as_dataset
from paddle_dp.errors import UsageError
from paddle_dp.files import remove_partials
from paddle_dp.identity.consistency import agreed_folder
from paddle_dp.learner import Dropout, Task
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.allocation import refuse_parallel_tasks
from paddle_dp.part import Part, Readers, Reading, adapted, read_settings
from paddle_dp.part.groups import turns_of
from paddle_dp.recipe import (
    BatchRamp,
    Ema,
    EvaluationSettings,
    Guard,
    Load,
    LoaderSettings,
    Mix,
    Precision,
    Recipe,
    Train,
    check_callbacks,
    check_turns,
)
from paddle_dp.recipe.folder import claim, holds, move_aside
from paddle_dp.recipe.schema import CALLBACKS, DEFAULTS
from paddle_dp.recipe.train_schema import read_precision
from paddle_dp.train.callback import Callback
from paddle_dp.train.overrides import refuse_overrides
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Length

if TYPE_CHECKING:
    import paddle

_OPTIONS = ("resume", "folder=…")  # of errors about a run's folder
_UNKNOWN_LENGTH = Length(1, "epochs")  # a placeholder in the made-up recipe if only `fit` will get a length
T = TypeVar("T", bound=TrainingState)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """A run's folder, and the checkpoint to resume in it."""

    folder: str
    resume: bool | str = False
    accept: tuple[str, ...] | str = ()

    @property
    def accepted(self) -> Sequence[str]:
        return [self.accept] if isinstance(self.accept, str) else self.accept


@arguments.answering_unknown
def trainer_of(  # noqa: PLR0913 - a recipe's keys, as keywords
    kind: Callable[..., T],
    *,
    model: paddle.nn.Layer,
    loss: Callable[[Any, Any], Any] | NameOrSettings | None = None,
    optimizer: paddle.optimizer.Optimizer | Callable[[Any, list[tuple[str, Any]]], Any] | NameOrSettings,
    train: Dataset,
    batch: int,
    test: Dataset | None = None,
    length: Length | str | None = None,
    micro_batches: int = 1,
    batch_ramp: BatchRamp | Mapping[str, Any] | None = None,
    drop_last: bool = False,
    schedule: paddle.optimizer.lr.LRScheduler | NameOrSettings | None = None,
    precision: Precision | NameOrSettings = "float32",
    dropout: Dropout = "exact",
    strategy: NameOrSettings = "data_parallel",
    metrics: Sequence[NameOrSettings | Callable[[Any, Any], Any]] = (),
    callbacks: Sequence[NameOrSettings | Callback] = CALLBACKS,
    folder: str | Path = "runs/script",
    seed: int = 0,
    resume: bool | str = False,
    accept: Sequence[str] | str = (),
    loader: LoaderSettings | Mapping[str, Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    reading: Readers = "each",
    guard: Guard | Mapping[str, Any] | None = None,
    load: Load | Mapping[str, Any] | str | Path | None = None,
    ema: Ema | Mapping[str, Any] | None = None,
    mix: Mix | Mapping[str, Any] | None = None,
    turns: Mapping[str, Mapping[str, Any]] | None = None,
    evaluation: EvaluationSettings | Mapping[str, Any] | None = None,
    adapter: NameOrSettings | None = None,
    cuts: Mapping[str, str] | None = None,
    attention_methods: Mapping[str, str] | None = None,
    blocks: Sequence[Any] = (),
) -> T:
    """A trainer from your own model, data and loss, without YAML, ready to fit. Collective.

    Args:
        train, test: data sets with `len(d)` and `d[i] → (input, target)`.
        batch: the global batch, in samples; `micro_batches` cuts it into passes, one after the other.
        batch_ramp: smaller batches to begin with, {"start": 64, "increment": 64, "every": "100 steps"}.
        reading: `each` rank reads them, or `scatter`: rank 0 reads for all (docs/parallelism.md). Then the other
            ranks' arguments are ignored, and may be anything but None.
        loss: `loss(outputs, targets)` gives one number per sample, or (total, count).
        turns: in place of `loss`, several losses that each train some of the parameters, such as
            {"critic": {"match": ["critic.*"], "loss": …}, "actor": {"match": ["actor.*"], "loss": …}} (docs/turns.md).
        optimizer: a finished one, a class, or a function of (learning rate, named parameters).
        length: "3 epochs"; the default length of `fit()`, over which a schedule is spread.
        dropout: `exact`, the same masks on any number of ranks, or `own`, as each rank's Paddle draws them.
        folder: where logs and checkpoints are written.
        resume: the newest checkpoint in `folder` (True; "auto": if there is one, for a script that may be
            restarted), "best", or a path.
        accept: settings that may differ from that checkpoint's, such as ["loss"] (docs/checks.md).
        collate_fn: makes (inputs, targets) of a list of results of `d[i]`: of one at a time, or, with
            loader={"collate": "batch"}, of a whole global batch (docs/add-a-part.md). Of held-out samples, too: what
            shall change training samples alone, such as Mixup, is a method `collate_fn` of the training data set.
        load: weights to begin with: a path, or {"path": …, "only": ["backbone.*"], "strict": False}.
        adapter: small parameters, trained in place of the model's, such as {"use": "lora", "match": ["*.q"]}. The
            optimizer is then not a finished one.
        ema: an average of the weights, evaluated and saved with them, such as {"decay": 0.999}.
        mix: Mixup and CutMix of the training images, such as {"mixup": 0.2, "cutmix": 1.0} (docs/augmentation.md).
        evaluation: how much of `test` is evaluated, such as {"batch": 256, "samples": 10000}.
        metrics: further scores of evaluations, by name ("auc"), or functions of all (outputs, targets)
            (docs/metrics.md).
        guard: how to handle a loss that is not finite, or spikes, such as {"non_finite": "skip"}.
        cuts, attention_methods, blocks: how to split a model that has no such tables: patterns of layer names, as
            in a recipe; `blocks` also takes layers and functions (docs/add-a-part.md).

    loss, optimizer, schedule, strategy and callbacks may also be given as in a recipe: "adamw", or
    {"use": "adamw", "clip": 1.0}. An optimizer given by word or class has a recipe's default schedule, a constant
    rate of 1e-3.
    Raises UsageError if these do not fit each other, the ranks, or the run in `folder` that is resumed.
    """
    _refuse_finished(model, optimizer, adapter)
    arguments.check_lists(callbacks=callbacks, metrics=metrics, blocks=blocks)
    arguments.check_mappings(cuts=cuts or {}, attention_methods=attention_methods or {})
    if schedule is None and (
        isinstance(optimizer, (str, Mapping)) or arguments.is_optimizer_class(optimizer)
    ):
        schedule = DEFAULTS["schedule"]
    options = arguments.plain(folder=folder, resume=resume, accept=accept)
    resume_options = read_settings(ResumeOptions, options, OWNER)
    train_precision = read_precision(precision)
    train_settings = arguments.plain(
        length=str(_UNKNOWN_LENGTH if length is None else length), batch=batch, micro_batches=micro_batches,
        batch_ramp=arguments.plain_ramp(batch_ramp),
        drop_last=drop_last, seed=seed, dropout=dropout,
    )  # fmt: skip
    settings = replace(read_settings(Train, train_settings, OWNER), precision=train_precision)
    settings_of_loader = arguments.loader_settings(loader)
    mesh = _joined()
    run_folder = agreed_folder(Path(os.path.expanduser(resume_options.folder)), mesh)
    chosen: list[Any] = [arguments.named("callbacks", c) or c for c in callbacks]
    for callback in chosen:
        if not isinstance(callback, Part):
            refuse_overrides(callback)
    if test is None:  # the default callbacks include `evaluate`, which needs held-out data
        chosen = [c for c in chosen if not (isinstance(c, Part) and c.name == "evaluate")]
    turn_settings, turn_losses = arguments.read_turns(turns or {})
    if bool(turn_settings) == (loss is not None):
        raise UsageError("Trainer.of: give a loss, or turns, each of which has a loss.")
    loss_function = (
        arguments.built_loss(loss)
        if loss is not None
        else make_turns(turn_settings, model, type(model).__name__, turn_losses)
    )
    scored = [arguments.named_metric(metric) for metric in metrics]
    arguments.annotate_layers(model, blocks, cuts=cuts or {}, attention_methods=attention_methods or {})

    update = arguments.named("optimizers", optimizer)
    model, before = adapted(
        model, arguments.read_named("adapters", adapter) if adapter else None, settings.seed
    )
    group(model, update.groups if update else (), before, optimizer)
    if update:
        update.prepare(model)
    base, added = base_of(model, before)
    if turn_settings:
        turns_of({name: turn.match for name, turn in turn_settings.items()}, model)

    def task(steps: int, steps_per_epoch: int) -> Task:
        return Task(
            model=model, loss=loss_function, base=base, added=added,
            precision=settings.precision, dropout=settings.dropout,
            optimizer=arguments.optimizer_of_turns(turn_settings, update) or arguments.optimizer_or_maker(optimizer),
            schedule=arguments.built_schedule(schedule, steps, steps_per_epoch, settings),
        )  # fmt: skip

    reader = read_settings(Reading, {"reading": reading}, OWNER).reading
    recipe = Recipe.model_construct(
        model=arguments.wrap_object("models", model),
        dataset=replace(arguments.wrap_object("datasets", train), reading=reader),
        loss=arguments.wrap_object("losses", loss_function),
        guard=arguments.read_group(Guard, guard or {}, "guard"),
        ema=None if ema is None else arguments.read_group(Ema, ema, "ema"),
        mix=None if mix is None else arguments.read_group(Mix, mix, "mix"),
        turns=turn_settings,
        evaluation=arguments.read_group(EvaluationSettings, evaluation or {}, "evaluation"),
        strategy=arguments.read_named("strategies", strategy),
        train=settings,
        callbacks=tuple(c for c in chosen if isinstance(c, Part)),
    )
    try:
        check_callbacks(recipe)
        check_turns(recipe)
    except ValueError as error:
        raise UsageError(f"Trainer.of.{error}.") from None
    setup = TrainerSpec(
        name=run_folder.name,
        folder=run_folder,
        requested=recipe,
        is_script=True,
        dataset=lambda split: prepared(
            as_dataset(
                train if split == "train" else test,
                settings_of_loader.samples if split == "train" else None,
                f"Trainer.of.{split}",
                once=None if split == "test" else reader == "scatter" and not settings_of_loader.num_workers,
            ),
            settings_of_loader,
            collate_fn,
        ),
        task=task,
        drop_last=settings.drop_last,
        length=None if length is None else settings.length,
        loader=settings_of_loader,
        load=arguments.read_load(load),
        named_settings={
            key: component.settings
            for key, shelf, value in (
                ("loss", "losses", loss),
                ("optimizer", "optimizers", optimizer),
                ("schedule", "schedules", schedule),
                ("adapter", "adapters", adapter),
            )
            if (component := arguments.named(shelf, value))
        },
        callbacks=lambda run: [c.build(run) if isinstance(c, Part) else c for c in chosen],
        metrics=scored,
        script_callbacks=[c for c in chosen if not isinstance(c, Part)],
    )
    _desynchronize(model)
    which = _which(resume_options.resume, run_folder, mesh)
    inode = _claim_folder(run_folder, mesh, which)
    trainer = TrainerBuilder(setup, mesh).trainer(kind, which, resume_options.accepted)
    trainer.begin_run = partial(_begin_run, trainer, inode, trainer.starts)
    return trainer


def _joined() -> Mesh:
    """Joins this process to its job. Raises UsageError in a script that an engine starts on several nodes without a
    launcher: each would train alone."""
    if "PADDLE_TRAINERS_NUM" not in os.environ:
        refuse_parallel_tasks(
            os.environ,
            "start the script by `paddle-dp launch --nodes auto`, or set PADDLE_TRAINERS_NUM=1 for separate jobs.",
        )
    return join()


def _refuse_finished(model: Any, optimizer: Any, adapter: Any) -> None:
    """Raises UsageError for a model that exchanges its gradients itself or that an earlier training has split, and for
    a finished optimizer that it has dealt to the ranks, or that was made before the adapter. An earlier training's
    clips are the optimizer's again."""
    import paddle

    from paddle_dp.core.optimizer import renew
    from paddle_dp.core.split_models import check_unsplit

    check_unsplit(model)
    check_layers(model)
    renew(optimizer)
    if adapter and isinstance(optimizer, paddle.optimizer.Optimizer):
        raise UsageError(
            "Trainer.of.optimizer: a finished one does not have the adapter's parameters: give it by word, class or "
            "function."
        )


def _desynchronize(model: Any) -> None:
    """Lets the BatchNorms of an earlier training normalize over one rank's samples again. Called when nothing of the
    arguments is refused any more."""
    from paddle_dp.core.batch_norm import desynchronize

    desynchronize(model)


def _which(resume: bool | str, folder: Path, mesh: Mesh) -> str | None:
    """The checkpoint to resume in the run's folder, as --resume names it; None: none. Collective."""
    if resume != "auto":
        return "newest" if resume is True else os.path.expanduser(resume or "") or None
    saved = bool(mesh.is_main and checkpoints.checkpoints(folder / "checkpoints"))
    return "newest" if any(mesh.gather(saved)) else None


def _claim_folder(folder: Path, mesh: Mesh, resume: str | None) -> int | None:
    """Claims the run's folder, once for all ranks; returns, on rank 0, the folder's inode (`holds`), or None if a run
    in it will move aside. Collective."""
    inode = None
    if mesh.is_main and claim(folder, resume, _OPTIONS) is None:
        remove_partials(folder)
        checkpoints.clean(folder / "checkpoints")
        inode = folder.stat().st_ino
    mesh.wait("run folder claimed")
    return inode


def _begin_run(trainer: TrainingState, inode: int | None, starts: int) -> None:
    """Claims the folder again, which an earlier `fit` has released, and moves any run out of it unless it is the
    trainer's folder, of this `inode`, in which no other training has begun since there were so many `starts`. All
    checks have passed. Collective."""
    folder, mesh = trainer.run.folder, trainer.mesh
    if mesh.is_main:
        stays = holds(folder, inode) and trainer.starts in (starts, trainer.last_start)
        older = claim(folder, "auto" if stays else None, _OPTIONS)
        if moved := move_aside(folder, older, options=_OPTIONS):
            print(f"the earlier run is now {moved}", flush=True)
        inode = folder.stat().st_ino
    trainer.begin_run = partial(_begin_run, trainer, inode, starts)
    mesh.wait("run folder ready")
