"""Computes a gallery of held-out samples on one rank: the worst predictions of a classifier, or continued texts.

Nothing here is collective, draws from a generator of the training, or changes the model: modes, buffers and random
states are restored.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.batch import leaves, mapped
from paddle_dp.callbacks._pictures import picture, png
from paddle_dp.checkpoint.rng import restoring_rng_state
from paddle_dp.data import Loader
from paddle_dp.data.sample import class_names, name, read_seeded
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.stream import Stream
from paddle_dp.figures import new_figure, png_of
from paddle_dp.mesh.degrees import GRADIENT_AXES, MODEL_AXES
from paddle_dp.train import Run
from paddle_dp.train.gallery import Gallery, PredictedSample, WrittenText

_BATCH = 32  # samples of a forward, at most; an evaluation's, where that has fewer
_SIDE = 128  # pixels of a picture, at most
_PROMPT = 48  # tokens of a text, at most


@runtime_checkable
class Writes(Protocol):
    """A model with `generate(tokens [1, n], steps)` → tokens [1, n + steps], the likeliest ones."""

    def generate(self, *args: Any) -> Any: ...


def cut_weights(run: Run, learner: Any) -> str:
    """The reason for which a rank's weights are parts of the model's; "" if they are whole. The same on every rank."""
    degrees = run.layout.degrees
    axes = [axis for axis in MODEL_AXES if axis not in GRADIENT_AXES and degrees[axis] > 1]
    if axes:
        return f"the weights are split over ranks ({', '.join(f'{axis} {degrees[axis]}' for axis in axes)})"
    if learner.weights.collective_forward:
        return "each rank has a part of the weights (sharding in stage 3)"
    return ""


def obstacle(run: Run, learner: Any) -> str:
    """Why no gallery can be computed on one rank, as a sentence; "" if it can. The same on every rank."""
    if run.test_loader is None:
        return "there are no held-out samples"
    if isinstance(run.test_loader.dataset, Stream):
        return "the held-out samples are a stream, which is not read by number"
    degrees = run.layout.degrees
    if not degrees.reads(0):
        return "rank 0 is a server, which computes nothing"
    tokens = f"the tokens are split over ranks (sequence {degrees.sequence})" if degrees.sequence > 1 else ""
    if reason := cut_weights(run, learner) or tokens:
        return f"{reason}, and rank 0 alone computes samples"
    if learner.loss.compares:
        return "the loss compares samples with each other"
    return ""


def gallery(run: Run, learner: Any, count: int, scan: int, tokens: int) -> Gallery | None:
    """`count` held-out samples: texts with `tokens` more, or the worst predictions of `scan` samples by their loss.
    None if the model neither writes texts nor classifies."""
    assert run.test_loader is not None
    with _unchanged(learner):
        tokenizer = getattr(run.test_loader.dataset, "tokenizer", None)
        if tokenizer is not None and isinstance(learner.model, Writes):
            return _texts(run.test_loader, learner, tokenizer, count, tokens)
        return _worst(run.test_loader, learner, count, scan)


@contextmanager
def _unchanged(learner: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, in the recipe's precision; afterwards all modes and states are as before."""
    from paddle_dp.core.extra_forwards import extra_forwards

    with extra_forwards(learner.model, learner.loss.owner), restoring_rng_state():
        learner.model.eval()
        with learner.weights.forward_only(), learner.mixed.context():
            yield


def _spread(loader: Loader, count: int, batch: int) -> tuple[Sampler, Sequence[int]]:
    """A sampler of `count` held-out samples at equal distances, and their numbers."""
    available, seed = len(loader.dataset), loader.sampler.seed
    sampler = Sampler(min(count, available), batch, shuffle=False, dataset_samples=available, seed=seed)
    return sampler, sampler.order(0).tolist()


# A classifier's worst predictions -------------------------------------------------------------------------------------


def _worst(loader: Loader, learner: Any, count: int, scan: int) -> Gallery | None:
    from paddle_dp.train.evaluate import predictions

    sampler, indices = _spread(loader, scan, min(_BATCH, max(loader.sampler.rows, 1)))
    rows: list[tuple[float, int, int, int, float]] = []
    for batch in Loader(loader.dataset, sampler).read(0):
        micro_batch = learner.mixed.cast_micro_batch(batch.micro_batches[0])
        outputs, targets = learner.runner.predict(micro_batch.inputs), micro_batch.targets
        predicted, _ = predictions(learner.loss, outputs, targets, most=math.inf)
        if predicted is None:
            return None
        shares = learner.loss.probabilities(outputs.astype("float32")).numpy()
        true = targets.numpy().reshape(-1).tolist()
        for row, predicted_class in enumerate(predicted.numpy().tolist()):
            loss = _loss_of(learner.loss, outputs, targets, row)
            if loss is not None:
                index = indices[batch.index * sampler.batch + row]
                share = float(shares[row, predicted_class])
                rows.append((loss, index, true[row], predicted_class, share))
    names = class_names(loader.dataset)
    worst = sorted(rows, key=lambda row: (not math.isnan(row[0]), -row[0], row[1]))[:count]
    samples = [
        PredictedSample(
            index=index, name=name(loader.dataset, index), true=_class_name(names, true),
            predicted=_class_name(names, predicted), probability=probability, loss=loss,
            picture=_picture(loader, index),
        )
        for loss, index, true, predicted, probability in worst
    ]  # fmt: skip
    available = len(loader.dataset)
    of = f"{available:,}" if len(indices) == available else f"{len(indices):,} of the {available:,}"
    sentence = f"The {len(samples)} worst of {of} held-out samples, by their loss."
    return Gallery(sentence=sentence, samples=samples, grid=_grid(samples))


def _loss_of(loss: Any, outputs: Any, targets: Any, row: int) -> float | None:
    """The loss of one sample; None if its target does not count."""
    total, count = loss(*(mapped(lambda tensor: tensor[row : row + 1], each) for each in (outputs, targets)))
    count = float(count)
    return float(total) / count if count else None


def _class_name(names: Sequence[str], number: int) -> str:
    return str(names[number]) if 0 <= number < len(names) else str(number)


def _picture(loader: Loader, index: int) -> bytes | None:
    from PIL import Image

    inputs, _ = read_seeded(loader.dataset, loader.sampler.seed, 0, index)
    shown = picture(inputs) if isinstance(inputs, np.ndarray) else None
    if shown is None or max(shown.shape[:2]) <= _SIDE:
        return None if shown is None else png(shown)
    small = Image.fromarray(shown)
    small.thumbnail((_SIDE, _SIDE))
    return png(np.asarray(small))


def _grid(samples: Sequence[PredictedSample]) -> bytes | None:
    """The pictures in rows of four, each with its classes and its loss; None without a picture."""
    from PIL import Image

    shown = [sample for sample in samples if sample.picture]
    if not shown:
        return None
    rows = -(-len(shown) // 4)
    figure = new_figure(8.0, 2.5 * rows, dpi=100, layout="constrained")
    for number, sample in enumerate(shown):
        axes = figure.add_subplot(rows, 4, number + 1)
        axes.imshow(Image.open(io.BytesIO(sample.picture or b"")), interpolation="nearest")
        axes.axis("off")
        is_right = sample.true == sample.predicted
        verdict = f"{sample.true} right" if is_right else f"{sample.true} taken for {sample.predicted}"
        title = f"{verdict} ({sample.probability:.2f})\nloss {sample.loss:.2f}"
        axes.set_title(title, fontsize=9, color="#1a7f47" if is_right else "#b42318")
    return png_of(figure)


# A language model's texts ---------------------------------------------------------------------------------------------


def _texts(loader: Loader, learner: Any, tokenizer: Any, count: int, tokens: int) -> Gallery | None:
    import paddle

    _, indices = _spread(loader, count, 1)
    texts = []
    for index in indices:
        inputs, _ = read_seeded(loader.dataset, loader.sampler.seed, 0, index)
        row = _tokens(inputs)
        if row is None or len(row) < 2:
            return None
        begin = min(_PROMPT, len(row) // 2)
        written = learner.model.generate(paddle.to_tensor(row[None, :begin].astype("int64")), tokens)
        texts.append(
            WrittenText(
                index=index, prompt=_printable(tokenizer.decode(row[:begin])),
                continuation=_printable(tokenizer.decode(written.numpy()[0][begin:])),
                reference=_printable(tokenizer.decode(row[begin : begin + tokens])),
            )
        )  # fmt: skip
    available = len(loader.dataset)
    sentence = f"{len(texts)} of {available:,} held-out texts, continued by the likeliest {tokens} tokens."
    return Gallery(sentence=sentence, texts=texts)


def _tokens(inputs: Any) -> np.ndarray | None:
    """The tokens of a sample; of a window with several documents, whose positions begin with 0, the longest one's.
    None if the sample has no tokens."""
    if isinstance(inputs, dict) and "tokens" in inputs:
        begins = np.flatnonzero(inputs.get("positions", np.zeros(1)) == 0)
        return max(np.split(inputs["tokens"], begins[1:]), key=len)
    return next((leaf for leaf in leaves(inputs) if leaf.ndim == 1 and leaf.dtype.kind in "iu"), None)


def _printable(text: str) -> str:
    """The text with a mark for each control character: pages and terminals may obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
