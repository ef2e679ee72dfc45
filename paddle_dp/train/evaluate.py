"""How good is it: sums and counts over every held-out sample, once, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from paddle_dp.batch import Micro
from paddle_dp.data import Loader
from paddle_dp.data.sample import class_names
from paddle_dp.errors import DataError, TargetError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel import Learner
from paddle_dp.parallel.loss import Loss
from paddle_dp.train.blame import of_target
from paddle_dp.train.evaluation import Evaluation

CONFUSABLE = 2000  # classes: a confusion matrix of more has too many numbers to count, to send and to look at


@dataclass
class _Tally:
    """One rank's sums so far."""

    sums: dict[str, float] = field(default_factory=dict)
    count: float = 0.0
    samples: int = 0
    confusion: np.ndarray | None = None

    def add(self, learner: Learner, micro_batch: Micro) -> None:
        score = learner.score(micro_batch)
        if score is None:
            return
        said, classes = _answers(learner.loss, score.outputs, score.targets)
        if not learner.mesh.is_loss_rank:  # another rank of this reader has the same sums
            return
        for name, value in score.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count, self.samples = self.count + score.count, self.samples + score.samples
        if said is not None:
            self._confuse(said.numpy(), score.targets.numpy().reshape(-1), classes)

    def _confuse(self, said: np.ndarray, true: np.ndarray, classes: int) -> None:
        known = (true >= 0) & (true < classes)  # what a loss leaves out may be the number of no class
        pairs = np.bincount(true[known] * classes + said[known], minlength=classes * classes)
        pairs = pairs.reshape(classes, classes)
        self.confusion = pairs if self.confusion is None else self.confusion + pairs


def _answers(loss: Loss, outputs: Any, targets: Any) -> tuple[Any, int]:
    """The classes [n] that outputs [n, classes] name for whole-number targets [n], and how many classes there are.

    None, where outputs are nothing of the kind, or of more classes than a matrix of them is for. A loss that knows its
    classes is asked, because its outputs may hold some of them only; all ranks of a reader ask together.
    """
    if not isinstance(outputs, paddle.Tensor) or outputs.ndim != 2:
        return None, 0
    if targets.is_floating_point() or targets.size != outputs.shape[0]:
        return None, 0
    classes = loss.num_classes(outputs)
    if not 1 < classes <= CONFUSABLE:
        return None, classes
    return loss.predictions(outputs), classes


def evaluate(learner: Learner, loader: Loader, mesh: Mesh) -> Evaluation:
    """Evaluates the learner's model on every sample of `loader`, once, over all ranks. Collective.

    Raises DataError if the samples counted are not the samples there are, which would make every number wrong; or if
    the loss counted nothing in all of them.
    """
    learner.sync_buffers()
    modes = [(layer, layer.training) for layer in learner.model.sublayers(include_self=True)]
    learner.model.eval()
    tally = _Tally()
    try:
        with paddle.no_grad():
            for batch in loader.read(0):
                for micro_batch in batch.micro_batches:
                    if learner.predict_is_collective or not micro_batch.is_dummy:
                        tally.add(learner, micro_batch)
    except TargetError as error:
        raise of_target(loader, batch.epoch, batch.index, error, "held-out") from None
    finally:
        for layer, training in modes:  # not train(): a layer that is frozen stays in its evaluation mode
            layer.training = training
    rows = mesh.gather([tally.sums, tally.count, tally.samples, None if tally.confusion is None else True])
    samples, count = sum(row[2] for row in rows), sum(row[1] for row in rows)
    if samples != loader.sampler.samples:
        raise DataError(
            f"the evaluation counted {samples} samples, but the data set has {loader.sampler.samples}."
        )
    if count == 0:
        raise DataError(
            f"not one target of the {samples} held-out samples counts, so there is no loss: look at the data set's "
            "test split, and at what the loss leaves out (loss.ignore_index)."
        )
    names = list(dict.fromkeys(name for row in rows for name in row[0]))
    numbers = {name: sum(row[0].get(name, 0.0) for row in rows) / count for name in names}
    confusion = _confusion(tally, mesh) if any(row[3] for row in rows) else None
    if confusion is not None and confusion.any():  # a loss without scores of its own: the counts know
        numbers.setdefault("acc1", float(np.trace(confusion) / confusion.sum()))
    classes = class_names(loader.dataset) or None
    return Evaluation(numbers=numbers, samples=samples, confusion=confusion, classes=classes)


def _confusion(tally: _Tally, mesh: Mesh) -> np.ndarray:
    """The ranks' confusion counts, added up; a rank without samples brings zeros of the right shape."""
    side = max(mesh.gather(0 if tally.confusion is None else len(tally.confusion)))
    mine = tally.confusion if tally.confusion is not None else np.zeros((side, side), "int64")
    return mesh.sum_tensor(paddle.to_tensor(mine.astype("int64"))).numpy()
