"""Tries a recipe on one process of the CPU, for `paddle-dp check`: all that `train` does before its first update.

It uses the ranks' assembly, with strategy `single` and two samples, and ends where a training would begin to write
(`TrainingLoop.begin_run`), so it finds the errors that `train` would raise. `explained` makes a sentence of the
commonest mistakes of shapes, here and in a training's first update.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from paddle_dp.assembly.sample_trial import first_samples
from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.checks.preflight import built_without_memory
from paddle_dp.core.derivatives import DerivativeError
from paddle_dp.data.arrays import describe
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import class_names, name, read_sample
from paddle_dp.data.scatter import is_in_order
from paddle_dp.data.stream import Stream
from paddle_dp.errors import PaddleDPError, TargetError, UsageError, gist, near
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part
from paddle_dp.plan.layout import total_parameters
from paddle_dp.recipe import Recipe, read_recipe

MAX_PARAMETERS = 30_000_000  # parameters of a model that is built and run: 120 MB in float32
SECONDS = 30  # for one recipe, its data set included
_TOKEN = re.compile(r"expected >= 0 and < (\d+), but got (-?\d+)")
_DICT = re.compile(r"got dict|'dict' object")
_KEYWORD = re.compile(r"unexpected keyword argument '(\w+)'")


class _TooLongError(BaseException):
    """A recipe takes longer than `SECONDS`. No `except Exception` around a model takes it for the model's error."""


def tried(recipe: Recipe) -> list[str]:
    """Returns lines on steps that were not tried; [] if all were. Raises UsageError, or another PaddleDPError, for an
    error that `train` would raise."""
    from paddle_dp.assembly.assemble import TrainerBuilder
    from paddle_dp.assembly.build import setup
    from paddle_dp.assembly.trainer import Trainer
    from paddle_dp.train.evaluate import names_of_numbers

    model = built_without_memory(partial(recipe.build_model))
    small = replace(recipe.train, batch=2, batch_ramp=None, micro_batches=1, device="cpu", compile=False)
    single = read_part("strategies", {"use": "single"})
    every = replace(recipe.evaluation, batch=None)
    callbacks = tuple(each for each in recipe.callbacks if not each.needs_job)
    alone = recipe.model_copy(
        update={"train": small, "evaluation": every, "strategy": single, "load": None, "callbacks": callbacks}
    )
    described = replace(setup(alone), loader=replace(recipe.loader, num_workers=0))
    assembly = TrainerBuilder(described, Mesh.alone())
    loader = assembly.train_loader
    replace(loader.sampler, batch=recipe.train.batch)  # raises DataError for fewer samples than a batch
    if model is not None and (count := total_parameters(describe_weights(model))) > MAX_PARAMETERS:
        return [f"not run, only read: the model has {count:,} parameters, more than {MAX_PARAMETERS:,}"]
    sample = _sample(loader.dataset)
    notes = [f"callback {x.name} works only in a job: not tried" for x in recipe.callbacks if x.needs_job]
    if recipe.train.device not in ("auto", "cpu"):
        notes.append(f"train.device={recipe.train.device} is not looked for here: it was tried on the CPU")
    _refuse_vocab(loader.dataset, recipe)
    try:
        trainer = assembly.trainer(Trainer)
        names = trainer.evaluation_names() if trainer.run.test_loader is not None else set()
        if not names:  # no evaluation has computed a loss
            names_of_numbers(trainer.learner, trainer.loader, trainer.mesh)
        _refuse_classes(loader.dataset, recipe)
        trainer.refuse_schedule()
        trainer.tell_refuse()
        _refuse_targets(trainer, recipe.train.seed)  # the last: a sample may be slow to read
    except DerivativeError as error:
        if any(callback.name == "evaluate" for callback in recipe.callbacks):
            raise
        notes.append(f"an evaluation would end with this: {error}")
    except PaddleDPError:
        raise
    except Exception as error:
        raise UsageError(explained(error, recipe, sample)) from error
    return notes


def _refuse_vocab(dataset: Any, recipe: Recipe) -> None:
    """Raises UsageError if the model's embedding has fewer rows than the data set's tokenizer has tokens."""
    rows = getattr(recipe.model.config, "vocab", None)
    tokens = getattr(getattr(getattr(dataset, "texts", dataset), "tokenizer", None), "vocab", None)
    tokens = max(tokens, getattr(dataset, "mask", -1) + 1) if isinstance(tokens, int) else None
    if isinstance(rows, int) and isinstance(tokens, int) and rows < tokens:
        raise UsageError(
            f"model.vocab is {rows}, and the tokens of dataset {recipe.dataset.name} are {tokens}: set "
            f"model.vocab={tokens}, or take the tokenizer that belongs to the model (dataset.tokenizer)."
        )


def _refuse_classes(dataset: Any, recipe: Recipe) -> None:
    """Raises UsageError if a classifier has fewer outputs than the data set has names of classes."""
    classes = 0 if isinstance(dataset, Stream) else len(class_names(dataset))
    size = getattr(recipe.model.config, "classes", None)
    if not classes or not isinstance(size, int) or size >= classes:
        return
    which = f"dataset {recipe.dataset.name} has {classes} classes"
    remedy = f"set model.classes={classes}"
    labels = _labels(dataset)
    if labels is not None and (count := int((labels >= size).sum())) > 0:
        first = int((labels >= size).argmax())
        which += (
            f", and {count} of {len(labels)} samples have one that the model lacks: "
            f"{name(dataset, first)} has class {labels[first]}"
        )
        remedy += ", or correct the labels"
    raise UsageError(f"model.classes is {size}, and {which}: {remedy}.")


def _refuse_targets(trainer: Any, seed: int) -> None:
    """Raises UsageError if the loss refuses the target of the sample with the highest label, or of the last one, if
    labels are not known: many data sets are sorted by class."""
    loader, learner = trainer.loader, trainer.learner
    if is_in_order(loader.dataset):
        return
    learner.model.train()  # its outputs may be others in an evaluation, which `names_of_numbers` has tried
    try:
        order, labels = loader.sampler.order(0), _labels(loader.dataset)
        order = order[: loader.sampler.batches * loader.sampler.batch]  # the rest may never be read
        sort_keys = order if labels is None else np.where(labels == learner.loss.ignored, 0, labels)[order]
        indices = [int(order[sort_keys.argmax()]), int(order.min())]  # two: some models fail on one
        learner.runner.score(first_samples(loader.dataset, indices, seed))
    except TargetError as error:
        sample = [f"{name(loader.dataset, index)} of " for index in indices][error.row : error.row + 1]
        raise UsageError(f"{''.join(sample)}the training data: {error}") from None
    except Exception:  # noqa: BLE001 - two samples may be none of the model's or the loss's cases
        return


def _labels(dataset: Any) -> np.ndarray | None:
    """The class of each sample, if the data set has them in an array."""
    labels: Any = getattr(dataset, "labels", None)
    is_array = isinstance(labels, np.ndarray) and labels.shape == (len(dataset),)
    return labels if is_array and labels.dtype.kind in "iu" else None


def _sample(dataset: Any) -> str:
    """ "input float32[64], target int64[]" of the first sample."""
    with restoring_globals():
        inputs, targets = read_sample(dataset, 0)
    return f"input {describe(inputs)}, target {describe(targets)}"


def explained(error: Exception, recipe: Recipe, sample: str = "") -> str:
    """A sentence for an error of a model or a loss: where, what, and what to do next."""
    data, model = f"dataset {recipe.dataset.name}", f"model {recipe.model.name}"
    samples = f" Samples of {data}: {sample}." if sample else ""
    if token := _TOKEN.search(str(error)):
        return (
            f"{model} has an embedding of {token[1]} rows, and {data} has the number {token[2]}: set model.vocab "
            "to the tokenizer's number of tokens or more (masked_texts: one more), or take the one that belongs to "
            f"the model (dataset.tokenizer).{samples}"
        )
    if _DICT.search(str(error)) and "your model returns" not in str(error):
        return (
            f"{model} takes one array, and each sample of {data} has several by name: take a model whose forward has "
            "parameters of these names. The tokens and positions of packed documents are gpt's and llama's."
            f"{samples}"
        )
    if keyword := _KEYWORD.search(str(error)):
        names = _parameters(error)
        meant = near(keyword[1], names)
        hint = f" Did you mean '{meant}'?" if meant else f" It takes {', '.join(names)}." if names else ""
        return f"{model}: '{keyword[1]}' is no argument of the class that it builds.{hint}"
    location = user_frame(error)
    sizes = (
        " Sizes of the model (model.inputs, classes, length …) and of the samples have to fit."
        if misfits(error)
        else ""
    )
    return (
        f"{model} and the loss do not take the first samples of {data}: {type(error).__name__}: "
        f"{gist(error).rstrip('.')}{f' ({location})' if location else ''}.{samples}{sizes}"
    )


def misfits(error: Exception) -> bool:
    """True if Paddle refused the shapes or numbers of its arguments."""
    return isinstance(error, ValueError) and "(InvalidArgument)" in str(error)


def _parameters(error: Exception) -> list[str]:
    """The parameters of the class or function that refused a keyword, from the message that names it."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    name = str(error).partition("(")[0].split(".")[0]
    for frame in reversed(frames):
        kind = {**frame.frame.f_globals, **frame.frame.f_locals}.get(name)
        if callable(kind):
            return [
                key for key in inspect.signature(kind).parameters if key not in ("self", "args", "kwargs")
            ]
    return []


def user_frame(error: BaseException) -> str:
    """ "loss.py, line 12, in forward: return x / y": the innermost frame of a user's code, outside this package and
    libraries; "" if there is none."""
    from paddle_dp.identity.user_frames import location, user_frames

    frames = [*user_frames(traceback.walk_tb(error.__traceback__))]
    return ": ".join(filter(None, location(*frames[-1]))) if frames else ""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(file: str, overrides: list[str]) -> dict[str, Any]:
    """{"lines": […]} of a recipe, or {"error": message, "status": …}."""
    try:
        with _limited(SECONDS):
            return {"lines": tried(read_recipe(Path(file), overrides))}
    except _TooLongError:
        return {"lines": [f"not tried to the end: it took more than {SECONDS} s"]}
    except PaddleDPError as error:
        return {"error": str(error), "status": 2}
    except Exception as error:  # noqa: BLE001 - a model or a data set may raise anything while it is built
        return {"error": explained(error, read_recipe(Path(file), overrides)), "status": 2}


def main() -> None:
    """Answers each line of standard input, a recipe and its overrides as JSON, with one line on standard output."""
    screen, sys.stdout = sys.stdout, sys.stderr  # a user's code may print, and that is no answer
    for line in sys.stdin:
        file, overrides = json.loads(line)
        print(json.dumps(answer(file, overrides)), file=screen, flush=True)


if __name__ == "__main__":
    main()
