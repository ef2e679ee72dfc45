"""A training described in Python instead of YAML: your model, data and loss, and everything else as in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data.sample import Dataset
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Dropout, Task
from paddle_dp.part import Annotation, Owner, Part, annotate, read_part, read_settings
from paddle_dp.recipe import LoaderSettings, Precision, Recipe
from paddle_dp.recipe.folder import claim
from paddle_dp.recipe.precision import read_precision
from paddle_dp.recipe.schema import CALLBACKS
from paddle_dp.train.assemble import Assembly
from paddle_dp.train.callback import Callback
from paddle_dp.train.consistency import one_folder
from paddle_dp.train.keywords import check_collections, read_place, read_train, todays_names
from paddle_dp.train.loop import TrainingLoop
from paddle_dp.train.overrides import refuse_overrides
from paddle_dp.train.setup import Setup
from paddle_dp.units import Length

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

_SOME = Length(1, "epochs")  # for those who ask how long a training is, of which nobody has said so yet
Words = str | Mapping[str, Any]
"""A part as a recipe names it: "adamw", or {"use": "adamw", "clip": 1.0}."""


class Trainer(TrainingLoop):
    """Trains a learner on a loader's batches.

        Trainer.of(model=model, loss=loss, optimizer="adamw", train=dataset, batch=64, length="3 epochs").fit()
        Trainer(learner, loader, callbacks).fit("3 epochs")

    The first way makes everything else as a recipe would; the second takes a learner that is placed already.
    """

    @classmethod
    @todays_names
    def of(  # noqa: PLR0913 - a recipe's keys, as keywords
        cls,
        *,
        model: paddle.nn.Layer,
        loss: Callable[[Any, Any], Any] | Words,
        optimizer: paddle.optimizer.Optimizer | Callable[[Any, list[tuple[str, Any]]], Any] | Words,
        train: Dataset,
        batch: int,
        test: Dataset | None = None,
        length: Length | str | None = None,
        micro_batches: int = 1,
        drop_last: bool = False,
        schedule: paddle.optimizer.lr.LRScheduler | Words | None = None,
        precision: Precision | Words = "float32",
        dropout: Dropout = "exact",
        strategy: Words = "data_parallel",
        callbacks: Sequence[Words | Callback] = CALLBACKS,
        folder: str | Path = "runs/script",
        seed: int = 0,
        resume: bool | str = False,
        accept: Sequence[str] | str = (),
        loader: LoaderSettings | Mapping[str, Any] | None = None,
        cuts: Mapping[str, str] | None = None,
        attention_methods: Mapping[str, str] | None = None,
        blocks: Sequence[Any] = (),
    ) -> Self:
        """A trainer from your own model, data and loss, without YAML, ready to fit. Collective.

        `train` and `test` are data sets with `len(d)` and `d[i] → (input, target)`. `batch` is the global batch;
        `micro_batches` cuts it in time. `loss(outputs, targets)` gives one number per sample, or (total, count).
        `optimizer` is finished, or a function of (learning rate, named parameters). `length` ("3 epochs") is what
        `fit()` trains and what a schedule is stretched over. `resume` goes on from the newest checkpoint in `folder`
        (True), from "best", or from a path; `accept` names what may be otherwise than in that checkpoint, such as
        ["loss"] (docs/checks.md). `dropout`: `exact` is the same on any number of ranks,
        `own` each rank's own. Parts may be words, as in a recipe: "adamw", or
        {"use": "adamw", "clip": 1.0}. `cuts`, `attention_methods` and `blocks` say how a model that nobody
        prepared can be split: patterns of layers, as in a recipe, and in `blocks` also layers and functions themselves
        (docs/add-a-part.md).

        Raises UsageError where these do not fit each other, the ranks, or the run in `folder` that is resumed.
        """
        check_collections(
            {"callbacks": callbacks, "blocks": blocks},
            {"cuts": cuts or {}, "attention_methods": attention_methods or {}},
        )
        place = read_place(folder=folder, resume=resume, accept=accept)
        how = read_train(
            read_precision(precision),
            length=str(_SOME if length is None else length),
            batch=batch,
            micro_batches=micro_batches,
            drop_last=drop_last,
            seed=seed,
            dropout=dropout,
        )
        until = None if length is None else how.length
        mesh = join()
        home = one_folder(Path(place.folder), mesh)
        told = [_part("callbacks", c) if isinstance(c, (str, Mapping)) else c for c in callbacks]
        for made in told:
            if not isinstance(made, Part):
                refuse_overrides(made)
        if test is None:  # there is nothing for it to do
            told = [c for c in told if not (isinstance(c, Part) and c.name == "evaluate")]
        given_loss = _loss(loss)
        _annotate(
            model, cuts=dict(cuts or {}), attention_methods=dict(attention_methods or {}), blocks=blocks
        )

        def task(steps: int, steps_per_epoch: int) -> Task:
            return Task(
                model=model,
                loss=given_loss,
                optimizer=_optimizer(optimizer),
                schedule=_schedule(schedule, steps, steps_per_epoch, how.batch),
                precision=how.precision,
                dropout=how.dropout,
            )

        asked = Recipe.model_construct(
            model=_made("models", model),
            dataset=_made("datasets", train),
            loss=_made("losses", given_loss),
            strategy=_part("strategies", strategy),
            train=how,
            callbacks=tuple(c for c in told if isinstance(c, Part)),
        )
        setup = Setup(
            name=home.name,
            folder=home,
            strategy=asked.strategy,
            asked=asked,
            dataset=lambda split: train if split == "train" else test,
            task=task,
            batch=how.batch,
            micro_batches=how.micro_batches,
            drop_last=how.drop_last,
            seed=how.seed,
            length=until,
            loader=_loader_settings(loader),
            words={
                word: _part(shelf, given).settings
                for word, shelf, given in (
                    ("loss", "losses", loss),
                    ("optimizer", "optimizers", optimizer),
                    ("schedule", "schedules", schedule),
                )
                if isinstance(given, (str, Mapping))
            },
            callbacks=lambda run: [c.build(run) if isinstance(c, Part) else c for c in told],
        )
        _open(home, mesh, bool(place.resume))
        which = "newest" if place.resume is True else place.resume or None
        return Assembly(setup, mesh).trainer(cls, which, place.accepted)


@dataclass(frozen=True)
class Made:
    """What was made in Python, where a recipe has the Config of a part: all that a strategy asks of it."""

    made: Any

    def build(self) -> Any:
        return self.made

    @property
    def heads(self) -> int:
        return self._size("heads")

    @property
    def kv_heads(self) -> int:
        return self._size("kv_heads")

    @property
    def length(self) -> int:
        return self._size("length")

    def _size(self, name: str) -> int:
        size = getattr(self.made, name, 0)
        return size if isinstance(size, int) else 0


def _made(shelf: str, thing: Any) -> Part:
    return Part(shelf, type(thing).__name__, Made(thing))


def _annotate(model: Any, *, blocks: Sequence[Any], **tables: dict[str, str]) -> None:
    """Raises RecipeError for a pattern that means no layer, or a way that there is not."""
    if blocks or any(tables.values()):
        said = read_settings(Annotation, tables, Owner(subject="Trainer.of"))
        annotate(model, replace(said, blocks=tuple(blocks)), "Trainer.of")


def _open(folder: Path, mesh: Mesh, resume: bool) -> None:
    """Claims the run's folder, once for all ranks. Collective."""
    if mesh.is_main:
        claim(folder, resume)
        checkpoints.clean(folder / "checkpoints")
    mesh.wait("run folder ready")


def _part(shelf: str, words: Words) -> Part:
    return read_part(shelf, {"use": words} if isinstance(words, str) else words)


def _loss(given: Any) -> Any:
    return _part("losses", given).build() if isinstance(given, (str, Mapping)) else given


def _optimizer(given: Any) -> Any:
    return _part("optimizers", given).build if isinstance(given, (str, Mapping)) else given


def _schedule(given: Any, steps: int, steps_per_epoch: int, batch: int) -> Any:
    """Raises UsageError for a schedule in words when nobody has said how long the training is."""
    if not isinstance(given, (str, Mapping)):
        return given
    if not steps:
        raise UsageError(
            f'schedule {given}: it is stretched over the whole training: give length="3 epochs", too, and call fit().'
        )
    return _part("schedules", given).build(steps=steps, steps_per_epoch=steps_per_epoch, batch=batch)


def _loader_settings(given: LoaderSettings | Mapping[str, Any] | None) -> LoaderSettings:
    """As a recipe's `loader`; a timeout may be a number of seconds."""
    if isinstance(given, LoaderSettings):
        return given
    said = dict(given or {})
    if isinstance(timeout := said.get("timeout"), (int, float)):
        said["timeout"] = f"{timeout} s"
    return read_settings(LoaderSettings, said, Owner(subject="loader", prefix="loader"))
