"""Precision, the same word on every device: a context for the forward, loss scaling for float16, or all in float64.

float64 is for proofs: two layouts that compute the same thing agree to 1e-13 there, where float32 agrees to 1e-6 in a
shallow model and to 1e-2 in a deep one with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import Batch, Micro
from paddle_dp.parallel.precision.emulated_amp import Rounder
from paddle_dp.recipe import Precision

GROW_EVERY, GROW, SHRINK = 2000, 2.0, 0.5
HOPELESS = 50  # from 65536, a scale has come down to 1 after 16


def widen(model: nn.Layer) -> None:
    """Casts a finished model's parameters and floating buffers to float64, in place: the same tensors, the same values.

    Not `paddle.set_default_dtype` before the model is built: other numbers would be drawn, and `paddle.nn.BatchNorm`
    stays in float32 (3.3.1). Not `model.to(dtype=…)`, which casts counters and indices, too.
    """
    model._to_impl(dtype="float64", floating_only=True)


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Inside, what is made without a type of its own (`paddle.zeros`, a layer's parameters) has this one."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)


def read_by(model: nn.Layer) -> str:
    """The type in which a model reads numbers: NumPy's own are float64, which a model of float64 takes so."""
    return "float64" if any(p.dtype == paddle.float64 for p in model.parameters()) else "float32"


class LossScale:
    """Float16's loss scale: halved, and the update left out, when a gradient overflows; doubled after 2000 good ones.

    The rule and its constants are those of Micikevicius et al. 2018 (arXiv:1710.03740) and of paddle.amp.GradScaler,
    which switches itself off on a CPU. Every rank sees the same exchanged gradients, so all take the same decision.
    """

    def __init__(self, scale: float):
        self.scale, self.good, self.skipped = scale, 0, 0
        self.running = 0  # updates left out one after another

    def accept(self, finite: bool) -> bool:
        """Takes note of one update's gradients and returns whether they may be used."""
        self.good = self.good + 1 if finite else 0
        self.running = 0 if finite else self.running + 1
        if not finite:
            self.scale, self.skipped = max(self.scale * SHRINK, 1.0), self.skipped + 1
        elif self.good == GROW_EVERY:
            self.scale, self.good = self.scale * GROW, 0
        return finite

    @property
    def hopeless(self) -> bool:
        """Whether so many updates were left out, one after another, that no smaller scale would help."""
        return self.running >= HOPELESS and self.scale == 1.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.good, self.skipped = state["scale"], state["good"], state["skipped"]


class MixedPrecision:
    """Runs a model's forward in the recipe's precision; weights, gradients and the optimizer's state stay float32, or
    are float64 with everything else.

    O1 casts the operations that gain from it; O2 keeps float16/bfloat16 copies of the weights (GPU), with float32
    masters in the optimizer. On a CPU both are carried by rounding (see rounding.py).
    """

    def __init__(self, precision: Precision, model: nn.Layer, device: str):
        self.precision = precision
        self.low, self.double = precision.dtype in ("bfloat16", "float16"), precision.dtype == "float64"
        self.reads = read_by(model)
        self.scale = LossScale(precision.scale) if precision.dtype == "float16" else None
        self._rounder = Rounder(model, precision.dtype) if self.low and device == "cpu" else None

    def place(self, model: nn.Layer, optimizer: Any) -> tuple[nn.Layer, Any]:
        """O2 on an accelerator casts the model and gives the optimizer float32 master weights."""
        if self.precision.level == "O2" and self.low and self._rounder is None:
            return paddle.amp.decorate(model, optimizer, level="O2", dtype=self.precision.dtype)
        return model, optimizer

    def taken(self, micro_batch: Micro) -> Micro:
        """What a loader read, as the model reads it: under float64 its floating-point tensors are float64, else what is
        float64 becomes float32."""
        if self.double:
            return replace(
                micro_batch,
                inputs=cast(micro_batch.inputs, "float64"),
                targets=cast(micro_batch.targets, "float64"),
            )
        if self.reads == "float32" and paddle.float64 in (
            _dtype(micro_batch.inputs),
            _dtype(micro_batch.targets),
        ):
            return replace(
                micro_batch,
                inputs=cast(micro_batch.inputs, "float32"),
                targets=cast(micro_batch.targets, "float32"),
            )
        return micro_batch

    def taken_batch(self, batch: Batch) -> Batch:
        """`taken` for all micro-batches of a batch."""
        micro_batches = tuple(map(self.taken, batch.micro_batches))
        same = all(ours is given for ours, given in zip(micro_batches, batch.micro_batches, strict=True))
        return batch if same else replace(batch, micro_batches=micro_batches)

    def context(self) -> AbstractContextManager[Any]:
        """Around every forward, in training and in evaluation."""
        if self.double:
            return default_dtype("float64")
        if not self.low:
            return nullcontext()
        if self._rounder is not None:
            return self._rounding()
        return paddle.amp.autocast(True, level=self.precision.level, dtype=self.precision.dtype)

    def again(self) -> AbstractContextManager[Any]:
        """Around a backward, in which forwards may be computed again: rounded, as they were the first time.

        fleet's recompute brings autocast back by itself.
        """
        if self.double:
            return default_dtype("float64")
        return self._rounding() if self._rounder is not None else nullcontext()

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        assert self._rounder is not None
        self._rounder.active = True
        try:
            yield
        finally:
            self._rounder.active = False


def cast(data: Any, dtype: str) -> Any:
    """A tensor, or a structure of them, with floating-point numbers in `dtype`."""
    return paddle.utils.map_structure(
        lambda x: x.astype(dtype) if isinstance(x, paddle.Tensor) and x.is_floating_point() else x, data
    )


def _dtype(data: Any) -> Any:
    """That of a tensor, or of the first of a structure of them."""
    return data.dtype if isinstance(data, paddle.Tensor) else paddle.utils.flatten(data)[0].dtype
