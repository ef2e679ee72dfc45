"""Predicts files with a run's model of any layout, in one process: `paddle-dp predict`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.assembly.build import example_dataset
from paddle_dp.assembly.inputs import Inputs
from paddle_dp.batch import call, mapped
from paddle_dp.core.loss import Loss, as_loss, number
from paddle_dp.core.precision import narrowed
from paddle_dp.core.turns import loss_of_recipe
from paddle_dp.data.arrays import Array, Arrays, describe
from paddle_dp.errors import DataError, UsageError
from paddle_dp.files import replacing
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.recipe import Recipe
from paddle_dp.verbs.array_files import SUFFIXES, samples_of


@runtime_checkable
class ReadsFiles(Protocol):
    """The settings of a data set that reads a file as its held-out samples."""

    def read_file(self, path: Path) -> Iterable[tuple[Arrays, Array | None]]:
        """Yields (input, target or None) of the file's samples. Raises DataError with the path."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sample `row` of `file`; `target` is None if the file has none."""

    file: Path
    row: int
    input: Arrays
    target: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sample's outputs, and the `probabilities` of classes or labels, [0] if outputs [classes] score none; `total`
    and `count` of its loss if it has a target."""

    sample: Sample
    outputs: Array
    probabilities: Array
    total: float | None = None
    count: float = 0.0


def predict(recipe: Recipe, options: dict[str, Any]) -> None:
    """Prints the predictions of the model of options["checkpoint"] for each file of options["files"].

    For a classifier these are the `top` likeliest classes with their probabilities; for yes-or-no labels those with a
    probability of 0.5 or more; for files with targets, such as texts, the mean loss; otherwise the outputs. `csv`:
    prints a table with all outputs. `out`: an .npz file for `files` and `rows` [n] and `outputs` [n, …].
    Raises UsageError for a file that cannot be read, DataError for one that does not fit the model.
    """
    files = list(_files(options["files"]))
    out = None if options.get("out") is None else _writable(Path(options["out"]), files)
    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    varies = recipe.loader.collate == "batch"
    inputs = Inputs.read(recipe.folder) or Inputs.from_dataset(example_dataset(recipe), varies)
    model = _trained(recipe, options, mesh)
    loss = as_loss(loss_of_recipe(recipe, model))
    samples = (sample for file in files for sample in _samples(file, recipe, inputs))
    size = min(recipe.evaluation.batch or recipe.train.batch, 32)  # theirs may be shared by many ranks
    answers = (a for batch in _batches(samples, size) for a in _answers(model, loss, batch))
    screen = _Table(loss, sys.stdout) if options.get("csv") else _Lines(loss, options.get("top") or 3)
    saved: list[Answer] = []
    for answer in answers:
        screen.show(answer, _classes(loss, answer, inputs.classes))
        if out:
            saved.append(answer)
    screen.end()
    if out:
        _write(out, saved)


def _trained(recipe: Recipe, options: dict[str, Any], mesh: Any) -> Any:
    """The plain model with a checkpoint's weights, or their averages, in evaluation mode. Needs no data set."""
    import paddle

    from paddle_dp.assembly.assemble import find_checkpoint
    from paddle_dp.assembly.build import plain_learner
    from paddle_dp.checkpoint.source import WeightsOf
    from paddle_dp.checkpoint.tensors import fill
    from paddle_dp.train.state import load_model

    checkpoint = find_checkpoint(recipe.folder, options.get("checkpoint") or "newest", mesh)
    ema = bool(options.get("ema"))
    if recipe.adapter is not None:
        learner = plain_learner(recipe, mesh)
        load_model(checkpoint, learner, ema=ema)
        learner.model.eval()
        return learner.model
    model, weights = recipe.model.build(), WeightsOf(checkpoint, ema=ema)
    with paddle.no_grad():
        for name, tensor in model.state_dict().items():
            fill(tensor, weights, name)
    model.eval()
    return model


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """Yields the files, and the files in folders ordered by name. Raises UsageError for a missing path."""
    for argument in paths:
        path = Path(argument)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not inside:
                raise UsageError(f"{path}: there are no files in this folder.")
            yield from inside
        elif path.exists():
            yield path
        else:
            raise UsageError(f"{path}: there is no such file.")


def _samples(file: Path, recipe: Recipe, inputs: Inputs) -> Iterator[Sample]:
    config = recipe.dataset.config
    reads_file = isinstance(config, ReadsFiles)
    if file.suffix.lower() in SUFFIXES and not (reads_file and _holds_documents(file, config)):
        for row, sample_input in enumerate(samples_of(file, inputs, recipe.loader.pad)):
            yield Sample(file=file, row=row, input=sample_input)
        return
    if not reads_file:
        raise UsageError(
            f"{file}: dataset {recipe.dataset.name} reads no files, so give arrays, {', '.join(SUFFIXES)}, with "
            f"samples of {inputs}. (A data set reads files by a method read_file(path) of its Config.)"
        )
    for row, (sample_input, target) in enumerate(config.read_file(file)):
        yield Sample(file=file, row=row, input=sample_input, target=target)


def _holds_documents(file: Path, config: Any) -> bool:
    """Whether the first line of a .jsonl file is an object with the `field` that the data set reads."""
    if file.suffix.lower() != ".jsonl":
        return False
    try:
        with file.open("rb") as lines:
            record = json.loads(next((line for line in lines if line.strip()), b"0"))
    except (OSError, ValueError, RecursionError):  # samples_of names it
        return False
    return isinstance(record, dict) and getattr(config, "field", None) in record


def _batches(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Up to `size` consecutive samples of equal shapes, with targets or without."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) == size or _kind(sample) != _kind(batch[0])):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _kind(sample: Sample) -> tuple[Any, ...]:
    return describe(sample.input), sample.target is None


def _answers(model: Any, loss: Loss, batch: list[Sample]) -> Iterator[Answer]:
    import paddle

    from paddle_dp.core.derivatives import derivatives_need_gradients

    with paddle.no_grad(), derivatives_need_gradients():
        inputs = mapped(
            lambda *arrays: paddle.to_tensor(narrowed(np.stack(arrays), model)),
            *(sample.input for sample in batch),
        )
        outputs = call(model, inputs, model.forward)
        if not isinstance(outputs, paddle.Tensor):
            raise UsageError(
                f"the model gives {type(outputs).__name__}, not one tensor of outputs: predict cannot show it. Use "
                "`paddle-dp export`, or the model itself."
            )
        scores, shares = outputs.astype("float32"), np.empty((len(batch), 0), np.float32)
        if outputs.ndim == 2 and loss.num_classes(outputs):
            shares = loss.probabilities(scores).numpy()
        for row, sample in enumerate(batch):
            total, count = None, 0.0
            if sample.target is not None:
                target = paddle.to_tensor(narrowed(sample.target, model)[None])
                summed, counted = loss(outputs[row : row + 1], target)
                total, count = float(summed), number(counted)
                if loss.counted == "samples":  # a mean over its targets: a text's last window has fewer
                    total, count = total * sample.target.size, float(sample.target.size)
            yield Answer(
                sample=sample, outputs=scores[row].numpy(), probabilities=shares[row], total=total, count=count,
            )  # fmt: skip


def _classes(loss: Loss, answer: Answer, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes that the outputs [classes] score; () if they are no scores of classes."""
    if (count := len(answer.probabilities)) == len(names):
        return names
    are_classes = (loss.splits_outputs and count > 1) or (loss.multi_label and count > 0)
    return tuple(map(str, range(count))) if are_classes else ()


def _writable(out: Path, files: Sequence[Path]) -> Path:
    """Returns `out` if it can be written later. Raises UsageError otherwise, and if it is one of `files`."""
    if out.suffix != ".npz":
        raise UsageError(f"--out {out}: outputs are written as .npz: --out {out.with_suffix('.npz')}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}.")
    if out.is_dir() or any(out.exists() and out.samefile(file) for file in files):
        obstacle = "a folder" if out.is_dir() else "one of the files to predict, and would be lost"
        raise UsageError(f"--out {out}: that is {obstacle}. Give another name.")
    return out


def _write(out: Path, answers: list[Answer]) -> None:
    shapes = {answer.outputs.shape for answer in answers}
    if len(shapes) > 1:
        raise DataError(
            f"{out}: outputs have {len(shapes)} shapes, and an array has one. Predict these files apart."
        )
    if not answers:
        raise DataError(f"{out}: the files have no samples, and nothing is written.")
    try:
        with replacing(out) as partial, partial.open("wb") as file:
            files = np.array([str(answer.sample.file) for answer in answers])
            rows = np.array([answer.sample.row for answer in answers])
            np.savez(file, files=files, rows=rows, outputs=np.stack([answer.outputs for answer in answers]))
    except OSError as error:
        raise DataError(f"{out} was not written: {error.strerror}.") from error


def _perplexity(loss: Loss, mean: float) -> str:
    """The perplexity of a text with this mean loss; "" if the metric refuses the loss, whose power is none."""
    metric = read_part("metrics", {"use": "perplexity"}).build()
    try:
        return f", perplexity {metric.with_loss(loss.function).compute({'loss': mean})['perplexity']:.4g}"
    except UsageError:
        return ""


class _Lines:
    """Prints a line per sample; for a file with targets one line, with the mean loss over all of its samples."""

    def __init__(self, loss: Loss, top: int):
        self.loss, self.top = loss, top
        self._file: Path | None = None
        self._total = self._count = 0.0

    def show(self, answer: Answer, classes: tuple[str, ...]) -> None:
        sample = answer.sample
        if sample.file != self._file:
            self.end()
            self._file = sample.file
        if answer.total is not None:
            self._total, self._count = self._total + answer.total, self._count + answer.count
            return
        where = f"{sample.file}" + (f"[{sample.row}]" if sample.file.suffix.lower() in SUFFIXES else "")
        print(f"{where}: {self._summary(answer, classes)}", flush=True)

    def _summary(self, answer: Answer, classes: tuple[str, ...]) -> str:
        outputs, shares = answer.outputs, answer.probabilities
        if classes:
            words = [f"{classes[k]} {shares[k]:.4f}" for k in np.argsort(-shares, kind="stable")]
            count = int((shares >= 0.5).sum()) if self.loss.multi_label else self.top
            return "  ".join(words[:count]) or f"no label has a probability of 0.5; the likeliest: {words[0]}"
        if outputs.size <= 16:
            return " ".join(f"{value:.6g}" for value in outputs.reshape(-1))
        low, high = float(outputs.min()), float(outputs.max())
        return f"{describe(outputs)} from {low:.4g} to {high:.4g} (--csv or --out FILE.npz has all)"

    def end(self) -> None:
        if self._count:
            mean = self._total / self._count
            perplexity = _perplexity(self.loss, mean)
            print(f"{self._file}: loss {mean:.4f} over {self._count:g} targets{perplexity}")
        self._total = self._count = 0.0


class _Table:
    """Writes a CSV table: file, row, the likeliest class with its probability, or each label's, the loss, and all
    outputs."""

    def __init__(self, loss: Loss, stream: Any):
        self.loss, self._writer = loss, csv.writer(stream, lineterminator="\n")
        self._header: list[str] | None = None

    def show(self, answer: Answer, classes: tuple[str, ...]) -> None:
        flat = answer.outputs.reshape(-1)
        row: dict[str, Any] = {"file": str(answer.sample.file), "row": answer.sample.row}
        if answer.total is not None:
            row |= {"loss": f"{answer.total / max(answer.count, 1):.7g}", "targets": f"{answer.count:g}"}
        if classes and self.loss.multi_label:
            pairs = zip(classes, answer.probabilities, strict=True)
            row |= {f"probability {name}": f"{share:.7g}" for name, share in pairs}
        elif classes:
            best = int(flat.argmax())
            row |= {"class": classes[best], "probability": f"{answer.probabilities[best]:.7g}"}
        if answer.total is None:
            scored = [f"score {name}" for name in classes]
            names = scored or [f"output_{index}" for index in range(flat.size)]
            row |= {name: f"{value:.7g}" for name, value in zip(names, flat, strict=True)}
        if self._header is None:
            self._header = list(row)
            self._writer.writerow(self._header)
        if list(row) != self._header:
            raise DataError(
                f"{answer.sample.file} gives other columns than the files before it: predict it in a separate call."
            )
        self._writer.writerow(list(row.values()))

    def end(self) -> None:
        pass
