"""Is what is learned from some samples the sum of what is learned from each? Only then may ranks share them.

A loss that compares the samples of a batch (contrastive ones do), or a model that subtracts their mean, computes
something else from a rank's share than from the whole batch, and nothing in the arithmetic of totals and counts shows
it. So each is tried once: the loss on outputs of the first micro-batch, the model on two samples before it is placed,
both together, forward and loss, on the first micro-batch, and their backward: it may mix samples where the forward does
not. How far totals and gradients may be apart is measured: by a run whose weights differ in their last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import MicroBatch
from paddle_dp.errors import LossError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.batch_norm import is_batch_norm
from paddle_dp.parallel.compiled import plain_forward
from paddle_dp.parallel.consistency import Digest, digests
from paddle_dp.parallel.dropout import Scope, install
from paddle_dp.parallel.dropout.uncaught import Watch
from paddle_dp.parallel.gradient_sketch import Sketches, farthest
from paddle_dp.parallel.loss import Count, Loss, number
from paddle_dp.parallel.precision.amp import cast, default_dtype, read_by
from paddle_dp.parallel.trial import random_state, restored
from paddle_dp.structure import call, leaves

Forward = Callable[[MicroBatch], tuple[paddle.Tensor, Count]]
Backward = Callable[[paddle.Tensor], Sketches]
Tried = tuple[float, Sketches]  # a total, and its gradients

CLOSE = 1e-3  # relative: rounding stays far below, and one sample that looks at another far above
# That forward and loss together are tried on: at least, and at most, of a micro-batch of so many bytes.
SAMPLES, MOST, BYTES = 8, 64, 2**26
# Of a gradient, and of the largest one: a ReLU that turns over for the last place of its input is far below.
SLOPES, SLIGHT = 0.01, 1e-3
_SAME = 1e-5  # the same function of the same numbers


class EachOutput(Loss):
    """A number for each sample's outputs, in place of a loss that is meant to compare samples: their sum."""

    name, counted = "of each output", "samples"

    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, Count]:
        """(total, count): outputs with unequal weights, so that they do not cancel, and no two are alike."""
        total: paddle.Tensor = paddle.zeros([])
        for output in _answers(outputs):
            row = output.reshape([output.shape[0], -1]).astype("float32")
            total = total + (row * paddle.arange(1, row.shape[1] + 1, dtype="float32").cos()).sum()
        return total, int(leaves(targets)[0].shape[0])


class Samplewise:
    """Tries a loss on the first micro-batch of several samples: as a whole, again, and in two parts.

    A loss of this package is known, and not tried. `model` is what may keep state for the loss. `wanted`: it was not
    looked at yet.
    """

    def __init__(self, loss: Loss, model: nn.Layer):
        self._loss = loss
        self._owner = loss.owner
        self._model = model
        self._kept: MicroBatch | None = None  # the first samples
        self._full = False
        self._modes: list[tuple[nn.Layer, bool]] = []  # of the layers in that update
        own = type(loss.given).__module__.startswith("paddle_dp.") or loss.given is None
        self._known = own or bool(loss.compares)  # that it compares samples is meant
        self.wanted = not self._known
        buffers = {id(buffer) for buffer in self._buffers()}
        self._kept_by_model = bool(buffers) and not buffers.isdisjoint(
            id(buffer) for buffer in model.buffers()
        )
        self._mixes = ""
        self._drew = False  # random numbers, which are others in each call

    def look(self, outputs: Any, targets: paddle.Tensor, total: paddle.Tensor) -> None:
        """Once, for outputs and targets [n, …] of n > 1 samples, of which the loss has just given `total`.

        Raises LossError for one whose counts do not add up, or that remembers what it was called with before.
        """
        if not self.wanted or (samples := int(leaves(targets)[0].shape[0])) < 2:
            return
        cuttable = paddle.utils.flatten(outputs)
        if not all(isinstance(x, paddle.Tensor) and x.ndim and x.shape[0] == samples for x in cuttable):
            return  # what cannot be cut is tried with the model, in `differences`
        self.wanted, half = False, samples // 2
        outputs = paddle.utils.map_structure(paddle.Tensor.detach, outputs)
        parts = [(_rows(outputs, cut), _rows(targets, cut)) for cut in (slice(half), slice(half, None))]
        try:
            again, *halves = [self._numbers(*part) for part in [(outputs, targets), *parts]]
        except Exception:  # noqa: BLE001 - it cannot be tried so; its own calls will tell what is wrong, if anything
            return
        self._refuse_counts(outputs, targets, again[1], [count for _, count in halves])
        if self._drew:
            return
        if not self._kept_by_model and abs(again[0] - number(total)) > _SAME * abs(again[0]):
            raise LossError(
                f"the loss {self._loss.name} gives {number(total):.6g} and then {again[0]:.6g} for the same outputs "
                "and targets: it remembers something, which no checkpoint holds and ranks do not share. "
                "Keep it in a buffer of the model, and make the loss a method or a sublayer of the model."
            )
        added, size = sum(part[0] for part in halves), sum(abs(part[0]) for part in halves)
        if abs(again[0] - added) > CLOSE * max(size, abs(again[0])):
            self._mixes = (
                f"the loss {self._loss.name} is {again[0]:.4g} for {samples} samples together and {added:.4g} for "
                f"{half} and {samples - half} of them, added up: it compares samples, or is a mean, and each rank "
                "computes it over its own samples only (one that is to compare those of all ranks has a method across: "
                "docs/add-a-part.md)"
            )

    def keep(self, micro_batch: MicroBatch) -> bool:
        """Keeps the first micro-batch that is learned from, and more until there are SAMPLES samples. True for the very
        first."""
        if self._full or micro_batch.is_dummy:
            return False
        began = self._kept is None
        if self._kept is None:
            self._modes = [(layer, layer.training) for layer in self._model.sublayers(include_self=True)]
            self._kept = _part(micro_batch, slice(MOST if _bytes(micro_batch) <= BYTES else SAMPLES))
        else:
            try:
                self._kept = _joined(self._kept, _part(micro_batch, slice(SAMPLES - self._kept.samples)))
            except Exception:  # noqa: BLE001 - of another shape: one sample waits for one that fits
                self._full = self._kept.samples > 1
        self._full = self._full or self._kept.samples >= SAMPLES
        return began

    def differences(
        self,
        mesh: Mesh,
        forward: Forward | None = None,
        close: float = CLOSE,
        backward: Backward | None = None,
    ) -> list[str]:
        """What was found on the first rank that found something. Collective.

        Where `look` found nothing, `forward`, of some samples the total and the count of their loss, is called with the
        samples that were kept, and with each half of them; then `backward`, if any, with the total. `close`, relative,
        is as far as totals may be apart in any case; else they may by 8 × the noise.
        """
        found = [said for said in mesh.gather(self._mixes) if said][:1]
        if found:
            return found
        if forward is None:
            untried = not self._known and all(mesh.gather(self.wanted))
            return (
                [_UNTRIED.format(self._loss.name, "its outputs cannot be cut into samples")]
                if untried
                else []
            )
        kept = mesh.gather([self._kept.samples if self._kept is not None else 0] if mesh.reads else [])
        if min(samples for of_rank in kept for samples in of_rank) < 2:
            return (
                []
                if self._known
                else [_UNTRIED.format(self._loss.name, "no rank had two samples to compare")]
            )
        mine = self._whole_and_halves(forward, close, backward) if mesh.reads else ""
        return [said for said in mesh.gather(mine) if said][:1]

    def _whole_and_halves(self, forward: Forward, close: float, backward: Backward | None) -> str:
        """What is wrong with the sum of the losses, or of the gradients, of two halves, each with a forward of its own;
        else nothing."""
        assert self._kept is not None
        whole, half, watch = self._kept, self._kept.samples // 2, Watch()
        parts = (whole, _part(whole, slice(half)), _part(whole, slice(half, None)))
        tried, errors = [], []
        for noise, part in ((False, whole), (True, whole), (False, parts[1]), (False, parts[2])):
            try:  # each of them, for other ranks wait in its forward
                tried.append(self._try(forward, backward, part, watch, noise))
            except MemoryError:  # of this rank alone, in whose forward the others may wait
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, on every rank alike: nothing is known then
                errors.append(error)
        if errors:
            said = f"with fewer samples there is {type(errors[0]).__name__}: {errors[0]}"
            return _UNTRIED.format(self._loss.name, said)
        if watch.found or watch.doubted:
            return ""  # random numbers, or masks of nobody's: the learner's draws are named
        return self._total_apart(tried, half, close) or self._gradients_apart(tried, half)

    def _total_apart(self, tried: Sequence[Tried], half: int, close: float) -> str:
        (total, _), (noisy, _), *halves = tried
        samples = self._kept.samples if self._kept is not None else 0
        added, size = sum(part[0] for part in halves), max(sum(abs(part[0]) for part in halves), abs(total))
        if total != total or added != added:
            return _UNTRIED.format(self._loss.name, "it is not a number")
        if abs(total - added) <= max(8 * abs(total - noisy), close * size):
            return ""
        return (
            f"the loss {self._loss.name} is {total:.6g} for {samples} samples in one forward and {added:.6g} for "
            f"{half} and {samples - half} of them in their own, added up: the model, or what the loss "
            "takes from its forward, mixes samples, and each rank has only its own"
        )

    def _gradients_apart(self, tried: Sequence[Tried], half: int) -> str:
        whole, noisy, *halves = (sketched for _, sketched in tried)
        found = farthest(whole, noisy, halves, SLOPES, SLIGHT)
        if found is None:
            return ""
        samples = self._kept.samples if self._kept is not None else 0
        return (
            f"the gradient of {found[0]} from {samples} samples in one backward is {found[1]:.0%} off the sum of those "
            f"from {half} and from {samples - half} of them: the backward mixes samples, and each rank has only its own"
        )

    def _try(
        self, forward: Forward, backward: Backward | None, part: MicroBatch, watch: Watch, noise: bool
    ) -> Tried:
        with restored(self._model, self._owner):
            for layer, training in self._modes:
                layer.training = training and not is_batch_norm(layer)
            if noise:
                _nudge(self._model)
            with watch.on([]), nullcontext() if backward else paddle.no_grad():
                total, _ = forward(part)
                return number(total), backward(total) if backward else {}

    def _numbers(self, outputs: Any, targets: paddle.Tensor) -> tuple[float, float]:
        with restored(self._owner), paddle.no_grad():
            before = random_state()
            total, count = self._loss(outputs, targets)
            self._drew = self._drew or random_state() != before
        return number(total), number(count)

    def _refuse_counts(self, outputs: Any, targets: paddle.Tensor, whole: float, parts: list[float]) -> None:
        if abs(whole - sum(parts)) <= CLOSE * max(abs(whole), 1.0):
            return
        samples = int(leaves(targets)[0].shape[0])
        if whole == parts[0] == parts[1]:
            hint = "Return the sum over the samples and their number, not a mean and a constant."
        elif (
            isinstance(outputs, paddle.Tensor)
            and isinstance(targets, paddle.Tensor)
            and outputs.ndim != targets.ndim
        ):
            hint = (
                f"Outputs {list(outputs.shape)} and targets {list(targets.shape)} are probably broadcast, each "
                "sample's output against every target: give them one shape, with squeeze(-1) or unsqueeze(-1)."
            )
        else:
            hint = "What a loss is over has to be counted sample by sample."
        raise LossError(
            f"the loss {self._loss.name} is over {whole:g} things for {samples} samples together, and over "
            f"{parts[0]:g} and {parts[1]:g} for {samples // 2} and {samples - samples // 2} of them: "
            f"on another number of ranks, or of micro-batches, it would be another loss. {hint}"
        )

    def _buffers(self) -> list[paddle.Tensor]:
        return list(self._owner.buffers()) if isinstance(self._owner, nn.Layer) else []


def mixing(model: nn.Layer, samples: Callable[[], Any] | None, exact: bool = True) -> list[str]:
    """A sentence for a model whose output for a sample depends on the other samples of its batch; else nothing.

    Two samples are computed together and alone, in evaluation and in the model's own mode, in which BatchNorm, looked
    at elsewhere, stays in evaluation. The model is left as it was. `exact`: dropout is every sample's own.
    """
    if samples is None or len(leaves(pair := cast(samples(), read_by(model)))[0]) != 2:
        return []
    if exact:
        install()
    for evaluation in (True, False):
        watch, answers = Watch(), []
        for place, cut in ((0, slice(2)), (0, slice(1)), (1, slice(1, 2))):
            try:
                scope = Scope(0, 0, 0, place, cut.stop - place)
                answers.append(_outputs(model, _rows(pair, cut), scope, exact, evaluation, watch))
            except Exception as error:  # noqa: BLE001 - of two, the first update will tell
                said = f"of one sample there is {type(error).__name__}: {error}"
                return [_UNTRIED.format(type(model).__name__, said)] if answers else []
        together, *alone = [of_samples for of_samples, _ in answers]
        # Random numbers, or masks of nobody's: the learner's draws are named.
        if watch.found or watch.doubted:
            continue
        if not all(_close(both, each) for both, each in _matched(together, alone)):
            return [_MIXES.format(type(model).__name__, _ALSO if evaluation else _TRAINING)]
        both, one, other = [buffers for _, buffers in answers]
        # What hangs on the samples themselves the ranks see for themselves: theirs then differ (`buffers`).
        if counts := [name for name in both if both[name] != one.get(name) == other.get(name)]:
            return [_COUNTS.format(counts[0])]
    return []


def _outputs(
    model: nn.Layer, part: Any, scope: Scope, exact: bool, evaluation: bool, watch: Watch
) -> tuple[list[paddle.Tensor], dict[str, Digest]]:
    """Those for some samples, and what their forward has left in the buffers."""
    drawing = scope if exact else nullcontext()
    with restored(model), paddle.no_grad(), default_dtype(read_by(model)), drawing, watch.on([]):
        for layer in model.sublayers(include_self=True):
            layer.training = layer.training and not evaluation and not is_batch_norm(layer)
        answers = _answers(call(model, part, plain_forward(model)))
        buffers = dict(model.named_buffers())
        return answers, dict(zip(buffers, digests(buffers.values()), strict=True))


_COUNTS = (
    "buffer {} hangs on how many samples forward gets: a rank, or a copy of the model, gets its own only, and one "
    "process gets all"
)
_MIXES = (
    "the outputs of {} for a sample depend on the other samples in its batch, {}: each rank computes them from its "
    "own samples"
)
_ALSO, _TRAINING = "also in evaluation", "in training"
_UNTRIED = "it could not be checked whether {} treats each sample alone: {}"


def is_doubt(difference: str) -> bool:
    """Whether a sentence of `differences` says only what could not be tried."""
    return difference.startswith(_UNTRIED.partition(" {}")[0])


def _rows(data: Any, cut: slice) -> Any:
    return paddle.utils.map_structure(lambda x: x[cut], data)


def _part(whole: MicroBatch, cut: slice) -> MicroBatch:
    """Some of a micro-batch's samples, each in its place in the global batch."""
    places = tuple(range(whole.first, whole.first + whole.samples)) if whole.places is None else whole.places
    mine = places[cut]
    return replace(
        whole,
        inputs=_rows(whole.inputs, cut),
        targets=_rows(whole.targets, cut),
        samples=len(mine),
        first=mine[0],
        places=mine,
    )


def _joined(one: MicroBatch, other: MicroBatch) -> MicroBatch:
    """Two micro-batches as one."""
    assert one.places is not None and other.places is not None
    inputs, targets = (
        paddle.utils.map_structure(lambda *x: paddle.concat(x), *both)
        for both in ((one.inputs, other.inputs), (one.targets, other.targets))
    )
    places = one.places + other.places
    return replace(one, inputs=inputs, targets=targets, samples=len(places), places=places)


def _answers(outputs: Any) -> list[paddle.Tensor]:
    return [
        x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor) and x.is_floating_point()
    ]


def _matched(
    together: list[paddle.Tensor], alone: list[list[paddle.Tensor]]
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor]]:
    """Each output of both samples, [2, …] or with several rows each, beside those of each; others have no samples to
    compare."""
    for both, first, second in zip(together, *alone, strict=False):
        if not both.ndim or not first.shape == second.shape != both.shape:
            continue
        if both.shape == [2 * first.shape[0], *first.shape[1:]]:
            yield both, paddle.concat([first, second])


def _close(a: paddle.Tensor, b: paddle.Tensor) -> bool:
    apart, largest = float((a - b).abs().max().item()), float(b.abs().max().item())
    return not apart > CLOSE * largest  # NaN is another's to judge


def _bytes(micro_batch: MicroBatch) -> int:
    read = leaves((micro_batch.inputs, micro_batch.targets))
    return sum(leaf.size * leaf.element_size() for leaf in read)


@paddle.no_grad()
def _nudge(model: nn.Layer) -> None:
    """Moves every weight that lies here by about one unit in its last place, up or down, in place."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter._is_initialized():
            ulp = 2.0**-52 if parameter.dtype == paddle.float64 else 2.0**-23
            signs = (paddle.arange(parameter.size) % 3 - 1).reshape(parameter.shape).astype(parameter.dtype)
            parameter.set_value(parameter * (1 + ulp * signs))
