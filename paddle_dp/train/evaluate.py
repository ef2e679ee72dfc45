"""Evaluation: sums and counts over every held-out sample, each once, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import paddle

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.checkpoint.rng import restoring_rng_state
from paddle_dp.core.derivatives import derivatives_need_gradients
from paddle_dp.core.extra_forwards import extra_forwards
from paddle_dp.core.loss import Loss
from paddle_dp.core.metric import Collected, Metric
from paddle_dp.data import Loader
from paddle_dp.data.sample import class_names
from paddle_dp.errors import DataError, TargetError, UsageError
from paddle_dp.learner import Learner
from paddle_dp.mesh import Mesh
from paddle_dp.train.blame import bad_target
from paddle_dp.train.evaluation import Evaluation

MOST_CLASSES = 2000  # a confusion matrix of more is too large to count, to send and to read


class NoTargetError(DataError):
    """No target of the held-out samples counts: on every rank."""


@dataclass
class _Tally:
    """The sums and counts of one rank."""

    sums: dict[str, float] = field(default_factory=dict)
    count: float = 0.0
    samples: int = 0
    confusion: np.ndarray | None = None
    collected: Sequence[Collected] = ()

    def add(self, learner: Learner, batch: Batch, micro_batch: MicroBatch) -> None:
        score = learner.runner.score(micro_batch)
        if score is None:
            return
        predicted, classes = predictions(learner.loss, score.outputs, score.targets)
        collecting = [each for each in self.collected if not each.metric.derives]
        outputs = learner.loss.full_outputs(score.outputs) if collecting else None
        if not learner.mesh.is_loss_rank:  # the loss rank of the same dp_rank has the same sums
            return
        for name, value in score.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count, self.samples = self.count + score.count, self.samples + score.samples
        if predicted is not None:
            true = score.targets.numpy().reshape(-1).astype("int64")  # the data set's dtype may hold no pair
            self._add_confusion(predicted.numpy(), true, classes, learner.loss.ignored)
        for each in collecting:
            each.add(batch, micro_batch, outputs, score.targets)

    def _add_confusion(
        self, predicted: np.ndarray, true: np.ndarray, classes: int, ignored: int | None
    ) -> None:
        known = (true >= 0) & (true < classes) & (true != ignored)
        pairs = np.bincount(true[known] * classes + predicted[known], minlength=classes * classes)
        pairs = pairs.reshape(classes, classes)
        self.confusion = pairs if self.confusion is None else self.confusion + pairs


def predictions(loss: Loss, outputs: Any, targets: Any, most: float = MOST_CLASSES) -> tuple[Any, int]:
    """The predicted classes [n] of outputs [n, classes] with integer targets [n], and the number of classes.

    None for outputs of another kind, or with more than `most` classes. The loss computes both, since under
    tensor parallelism this rank's outputs hold some of the classes only; collective over the ranks with one dp_rank.
    """
    if not isinstance(outputs, paddle.Tensor) or not isinstance(targets, paddle.Tensor) or outputs.ndim != 2:
        return None, 0
    if targets.is_floating_point() or targets.size != outputs.shape[0]:
        return None, 0
    classes = loss.num_classes(outputs)
    return (loss.predictions(outputs) if 1 < classes <= most else None), classes


# A resumed run makes other evaluations between two updates than the undisturbed one: they draw no number of these.
@restoring_rng_state()
def evaluate(learner: Learner, loader: Loader, mesh: Mesh, metrics: Sequence[Metric] = ()) -> Evaluation:
    """Evaluates the learner's model on every sample of `loader`, once, over all ranks. Collective.

    Raises DataError if the number of samples counted differs from the data set's, since then every result would be
    wrong, NoTargetError if no target counted. The numbers of a metric that fails are NaN, and `failure` says why.
    """
    learner.statistics.sync()
    while True:
        lost = len(mesh.lost)
        tally = _tallied(learner, loader, loader.batches, metrics)
        confuses, draws = None if tally.confusion is None else True, learner.runner.draws.evaluation_draws()
        rows = mesh.gather([tally.sums, tally.count, tally.samples, confuses, draws])
        confusion = _confusion(tally, mesh) if any(row[3] for row in rows) else None
        gathered = [each.gathered(mesh) for each in tally.collected]
        if len(mesh.lost) == lost:
            break  # else a rank was lost meanwhile, and its samples were not counted
    learner.runner.draws.add(row[4] for row in rows)
    samples, count = sum(row[2] for row in rows), sum(row[1] for row in rows)
    if samples != loader.sampler.samples:
        raise DataError(f"the evaluation counted {samples} samples instead of {loader.sampler.samples}.")
    if count == 0:
        raise NoTargetError(
            f"not one target of the {samples} held-out samples counts, so there is no loss: look at the data set's "
            "test split, and at the targets that the loss ignores (loss.ignore_index)."
        )
    names = dict.fromkeys(name for row in rows for name in row[0])
    numbers = {name: sum(row[0].get(name, 0.0) for row in rows) / count for name in names}
    if confusion is not None and confusion.any():  # the accuracy, for a loss without scores
        numbers.setdefault("acc1", float(np.trace(confusion) / confusion.sum()))
    failure = ""
    for collected, of_all in zip(tally.collected, gathered, strict=True):
        _refuse_twice(collected.metric, numbers)
        try:
            numbers |= collected.scores(mesh, of_all, numbers)
        except UsageError as error:  # on every rank
            numbers |= dict.fromkeys(collected.metric.names, math.nan)
            failure = failure or str(error)
    return Evaluation(
        numbers=numbers, samples=samples, available=loader.sampler.dataset_samples, confusion=confusion,
        classes=class_names(loader.dataset) or None, failure=failure,
    )  # fmt: skip


@restoring_rng_state()
def names_of_numbers(
    learner: Learner, loader: Loader, mesh: Mesh, metrics: Sequence[Metric] = ()
) -> set[str]:
    """The names of the numbers that `evaluate` will give, from the first batch of `loader`. Collective.

    Raises UsageError, on every rank, for a metric that fails there, and for a function whose result for the first share
    of it is no score.
    """
    tally = _tallied(learner, loader, 1, metrics)
    for collected in tally.collected:
        collected.refuse_failed(mesh)
    wrong = [each.wrong_result() for each in tally.collected] if mesh.dp_rank == 0 else []
    if sentences := [sentence for row in mesh.gather(wrong) for sentence in row if sentence]:
        raise UsageError(sentences[0])
    rows = mesh.gather([*tally.sums, *(["acc1"] if tally.confusion is not None else [])])
    names = {name for row in rows for name in row}
    for metric in metrics:
        _refuse_twice(metric, names)
        names.update(metric.names)
    return names


def _refuse_twice(metric: Metric, names: Iterable[str]) -> None:
    """Raises UsageError for a metric with the name of another number."""
    if twice := sorted({*metric.names} & {*names}):
        raise UsageError(
            f"{metric.setting} gives {twice[0]}, and the evaluation has it already: leave it out of the metric."
        )


def _tallied(learner: Learner, loader: Loader, batches: int, metrics: Sequence[Metric] = ()) -> _Tally:
    """This rank's sums over the first `batches` batches, with the model in evaluation mode. Modes, and buffers that
    these forwards change, are restored."""
    tally = _Tally(collected=[Collected(metric, loader.sampler.samples) for metric in metrics])
    draws, size = learner.runner.draws, loader.sampler.batch
    try:
        with extra_forwards(learner.model, learner.loss.owner), derivatives_need_gradients():
            learner.model.eval()
            for batch in _read(loader, batches, learner.mesh):
                for micro_batch in batch.micro_batches:
                    with draws.around_evaluation(batch, micro_batch, size, learner.placed.named_layers):
                        tally.add(learner, batch, micro_batch)
    except TargetError as error:
        raise bad_target(loader, batch.epoch, batch.index, error, "held-out") from None
    return tally


def _read(loader: Loader, batches: int, mesh: Mesh) -> Iterator[Batch]:
    """Yields this rank's shares of the first `batches` batches; the others divide the shares of lost ranks."""
    if not mesh.lost or not mesh.reads:
        return islice(loader.read(0), batches)
    readers, me = mesh.readers, mesh.readers.index(mesh.rank)
    shares = [mesh.dp_rank, *sorted(mesh.axes.dp_rank(rank) for rank in mesh.lost)[me :: len(readers)]]
    return loader.read_shares(0, ((number, share) for number in range(batches) for share in shares))


def _confusion(tally: _Tally, mesh: Mesh) -> np.ndarray:
    """The sum of all ranks' confusion counts; a rank without samples contributes zeros of the same shape."""
    side = max(mesh.gather(0 if tally.confusion is None else len(tally.confusion)))
    confusion = tally.confusion if tally.confusion is not None else np.zeros((side, side), "int64")
    return mesh.sum_tensor(paddle.to_tensor(confusion.astype("int64"))).numpy()
