"""A training described in Python instead of YAML: your model, data and loss, and everything else as in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data.sample import Dataset
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Dropout, Task
from paddle_dp.part import Annotation, Owner, Part, annotate, read_part, read_settings
from paddle_dp.recipe import LoaderSettings, Precision
from paddle_dp.recipe.folder import claim
from paddle_dp.recipe.precision import read_precision
from paddle_dp.recipe.schema import CALLBACKS
from paddle_dp.train.assemble import Assembly, Setup
from paddle_dp.train.callback import Callback
from paddle_dp.train.consistency import one_folder
from paddle_dp.train.run import Run
from paddle_dp.units import Length

if TYPE_CHECKING:
    import paddle
    from typing_extensions import Self

Words = str | Mapping[str, Any]
"""A part as a recipe names it: "adamw", or {"use": "adamw", "clip": 1.0}."""


class FromPython:
    """Gives the trainer its `of`."""

    @classmethod
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
        micros: int = 1,
        last: Literal["keep", "drop"] = "keep",
        schedule: paddle.optimizer.lr.LRScheduler | Words | None = None,
        precision: Precision | Words = "float32",
        dropout: Dropout = "exact",
        strategy: Words = "data_parallel",
        callbacks: Sequence[Words | Callback] = CALLBACKS,
        folder: str | Path = "runs/script",
        seed: int = 0,
        resume: bool | str = False,
        loader: LoaderSettings | Mapping[str, Any] | None = None,
        cuts: Mapping[str, str] | None = None,
        attends: Mapping[str, str] | None = None,
        blocks: Sequence[Any] = (),
    ) -> Self:
        """A trainer from your own model, data and loss, without YAML, ready to fit. Collective.

        `train` and `test` are data sets with `len(d)` and `d[i] → (input, target)`. `batch` is the global batch;
        `micros` cuts it in time. `loss(outputs, targets)` gives one number per sample, or (total, count).
        `optimizer` is finished, or a function of (learning rate, named parameters). `length` ("3 epochs") is what
        `fit()` trains and what a schedule is stretched over. `resume` goes on from the newest checkpoint in `folder`
        (True), from "best", or from a path. `dropout`: `exact` is the same on any number of ranks,
        `own` each rank's own. Parts may be words, as in a recipe: "adamw", or
        {"use": "adamw", "clip": 1.0}. `cuts`, `attends` and `blocks` say how a model that nobody prepared can be split:
        patterns of layers, as in a recipe, and in `blocks` also layers and functions themselves (docs/add-a-part.md).

        Raises UsageError where these do not fit each other, the ranks, or the run in `folder` that is resumed.
        """
        mesh = join()
        home = one_folder(Path(folder), mesh)
        computed_in = read_precision(precision)
        _annotate(model, cuts=dict(cuts or {}), attends=dict(attends or {}), blocks=blocks)

        def task(steps: int, steps_per_epoch: int) -> Task:
            return Task(
                model=model,
                loss=_loss(loss),
                optimizer=_optimizer(optimizer),
                schedule=_schedule(schedule, steps, steps_per_epoch, batch),
                precision=computed_in,
                dropout=dropout,
            )

        setup = Setup(
            name=home.name,
            folder=home,
            strategy=_part("strategies", strategy),
            dataset=lambda split: train if split == "train" else test,
            task=task,
            batch=batch,
            micros=micros,
            last=last,
            seed=seed,
            length=Length.parse(length) if isinstance(length, str) else length,
            loader=_loader_settings(loader),
            callbacks=lambda run: _callbacks(callbacks, run),
        )
        _open(home, mesh, bool(resume))
        kind: Any = cls
        made: Self = Assembly(setup, mesh).trainer(kind, "newest" if resume is True else resume or None)
        return made


def _annotate(model: Any, *, blocks: Sequence[Any], **tables: dict[str, str]) -> None:
    """Raises RecipeError for a pattern that means no layer, or a way that there is not."""
    if blocks or any(tables.values()):
        said = read_settings(Annotation, tables, Owner(subject="Trainer.of"))
        annotate(model, replace(said, blocks=tuple(blocks)), "Trainer.of")


def _open(folder: Path, mesh: Mesh, resume: bool) -> None:
    """Claims the run's folder, once for all ranks. Collective."""
    if mesh.is_first:
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


def _callbacks(given: Sequence[Words | Callback], run: Run) -> list[Callback]:
    """Callbacks from words; without held-out data there is nothing for `evaluate` to do."""
    kept = [c for c in given if not (c == "evaluate" and run.test_loader is None)]
    return [c if isinstance(c, Callback) else _part("callbacks", c).build(run) for c in kept]


def _loader_settings(given: LoaderSettings | Mapping[str, Any] | None) -> LoaderSettings:
    """As a recipe's `loader`; a timeout may be a number of seconds."""
    if isinstance(given, LoaderSettings):
        return given
    said = dict(given or {})
    if isinstance(timeout := said.get("timeout"), (int, float)):
        said["timeout"] = f"{timeout} s"
    return read_settings(LoaderSettings, said, Owner(subject="loader", prefix="loader"))
