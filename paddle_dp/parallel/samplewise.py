"""Is what is learned from some samples the sum of what is learned from each? Only then may ranks share them.

A loss that compares the samples of a batch (contrastive ones do), or a model that subtracts their mean, computes
something else from a rank's share than from the whole batch, and nothing in the arithmetic of totals and counts shows
it. So each is tried once, on samples of the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import LossError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.loss import Loss, number
from paddle_dp.parallel.precision.amp import cast, default_dtype, read_by

CLOSE = 1e-3  # relative: rounding stays far below, and one sample that looks at another far above
_SAME = 1e-5  # the same function of the same numbers


class Samplewise:
    """Tries a loss on the first micro-batch of several samples: as a whole, again, and in two parts.

    A loss of this package is known, and not tried. `model` is what may keep state for the loss.
    """

    def __init__(self, loss: Loss, model: nn.Layer):
        self._loss = loss
        self._owner = getattr(loss.given, "__self__", loss.given)
        self._wanted = not type(loss.given).__module__.startswith("paddle_dp.") and loss.given is not None
        own = {id(buffer) for buffer in self._buffers()}
        self._kept_by_model = bool(own) and not own.isdisjoint(id(buffer) for buffer in model.buffers())
        self._mixes = ""
        self._drew = False  # random numbers, which are others in each call

    def look(self, outputs: Any, targets: paddle.Tensor, total: paddle.Tensor) -> None:
        """Once, for outputs and targets [n, …] of n > 1 samples, of which the loss has just given `total`.

        Raises LossError for one whose counts do not add up, or that remembers what it was called with before.
        """
        samples = int(targets.shape[0])
        if not self._wanted or samples < 2 or not isinstance(outputs, paddle.Tensor):
            return
        if not outputs.ndim or outputs.shape[0] != samples:
            return
        self._wanted, half, outputs = False, samples // 2, outputs.detach()
        parts = [(outputs[:half], targets[:half]), (outputs[half:], targets[half:])]
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
                "computes it over its own samples only"
            )

    def differences(self, mesh: Mesh) -> list[str]:
        """What was found on the first rank that found something. Collective."""
        return [found for found in mesh.gather(self._mixes) if found][:1]

    def _numbers(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[float, float]:
        with self._as_it_is():
            before = _drawn()
            total, count = self._loss(outputs, targets)
            self._drew = self._drew or _drawn() != before
        return number(total), number(count)

    def _refuse_counts(
        self, outputs: paddle.Tensor, targets: paddle.Tensor, whole: float, parts: list[float]
    ) -> None:
        if abs(whole - sum(parts)) <= CLOSE * max(abs(whole), 1.0):
            return
        samples = int(targets.shape[0])
        if whole == parts[0] == parts[1]:
            hint = "Return the sum over the samples and their number, not a mean and a constant."
        elif outputs.ndim != targets.ndim:
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

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Around calls that must leave no trace: in the loss's buffers and attributes, and in Paddle's generator."""
        held = vars(self._owner) if hasattr(self._owner, "__dict__") else {}
        attributes = dict(held)
        with paddle.no_grad():
            buffers, drawn = _copies(self._buffers()), paddle.get_rng_state()
            try:
                yield
            finally:
                held.update(attributes)
                for tensor, value in buffers:
                    tensor.set_value(value)
                paddle.set_rng_state(drawn)


def mixing(model: nn.Layer, samples: Callable[[], Any] | None) -> list[str]:
    """A sentence for a model whose output for a sample depends on the other samples of its batch; else nothing.

    Two samples are computed together and alone, in evaluation: BatchNorm, which mixes them in training, is looked at
    elsewhere. What cannot be computed so is not judged. The model is left as it was.
    """
    if samples is None or len(pair := cast(samples(), read_by(model))) != 2:
        return []
    modes = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    with paddle.no_grad(), default_dtype(read_by(model)):
        buffers, drawn = _copies(model.buffers()), paddle.get_rng_state()
        try:
            model.eval()
            before = _drawn()
            together, *alone = [_answers(model(part)) for part in (pair, pair[:1], pair[1:])]
            drew = _drawn() != before
        except Exception:  # noqa: BLE001 - the first update will tell
            return []
        finally:
            for tensor, value in buffers:
                tensor.set_value(value)
            for layer, training in modes:
                layer.training = training
            paddle.set_rng_state(drawn)
        if drew or not all(_close(both, alone) for both, alone in _matched(together, alone)):
            return [] if drew else [_MIXES.format(type(model).__name__)]
    return []


_MIXES = (
    "the outputs of {} for a sample depend on the other samples in its batch, also in evaluation: each rank computes "
    "them from its own samples, and held-out numbers depend on how samples meet"
)


def _answers(outputs: Any) -> list[paddle.Tensor]:
    return [
        x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor) and x.is_floating_point()
    ]


def _matched(
    together: list[paddle.Tensor], alone: list[list[paddle.Tensor]]
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor]]:
    """Each output of both samples [2, …], beside those of each; others have no samples to compare."""
    for both, first, second in zip(together, *alone, strict=False):
        if both.ndim and both.shape[0] == 2 and first.shape == second.shape == [1, *both.shape[1:]]:
            yield both, paddle.concat([first, second])


def _close(a: paddle.Tensor, b: paddle.Tensor) -> bool:
    apart, largest = float((a - b).abs().max().item()), float(b.abs().max().item())
    return not apart > CLOSE * largest  # NaN is another's to judge


def _copies(tensors: Iterable[paddle.Tensor]) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
    """Each with its values of now; but `_dropout_state` of Paddle's LSTM and GRU, which has no memory on a CPU."""
    return [(tensor, tensor.clone()) for tensor in tensors if tensor._is_initialized()]


def _drawn() -> list[Any]:
    return [state.__getstate__() for state in paddle.get_rng_state()]
