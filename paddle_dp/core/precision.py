"""Precision on every device: a context for the forward, loss scaling for float16, or everything in float64.

float64 is for proofs: two layouts that compute the same agree to 1e-13 in it, but in float32 only to 1e-6 in a shallow
model and to 1e-2 in a deep one with BatchNorm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu import ColumnParallelLinear, RowParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    RowSequenceParallelLinear,
)

from paddle_dp.adjoint import Function, WithAdjoint
from paddle_dp.batch import Batch, MicroBatch, leaves
from paddle_dp.errors import UsageError
from paddle_dp.recipe import Precision

NOTHING = nullcontext()  # wraps what needs no context; made once, as every step enters some
GROW_EVERY, GROW, SHRINK = 2000, 2.0, 0.5
_FLOAT32 = ("float32", paddle.float32, np.float32, np.dtype("float32"))
HOPELESS = 50  # consecutive skipped updates; 16 halvings bring the scale from 65536 to 1


@contextmanager
def nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """One context of two."""
    with outer, inner:
        yield


def widen(model: nn.Layer) -> None:
    """Casts a finished model's parameters and floating-point buffers to float64, in place.

    `paddle.set_default_dtype` before construction would draw other initial weights, and leaves `paddle.nn.BatchNorm` in
    float32 (3.3.1). `model.to(dtype=…)` also casts counters and indices.
    """
    with castable(model):
        for layer in model.sublayers(include_self=True):
            layer._to_impl(dtype="float64", include_sublayers=False, floating_only=True)


@contextmanager
def castable(model: nn.Layer) -> Iterator[None]:
    """Within the block, layers with weights without memory (`model.initial_weights`) can be cast; the weights have
    memory only during the cast."""

    def cast_layer(layer: nn.Layer, **how: Any) -> nn.Layer:
        parameters = [p for p in layer.parameters(include_sublayers=False) if not p._is_initialized()]
        for parameter in parameters:
            paddle.empty(parameter.shape, parameter.dtype)._share_underline_tensor_to(parameter)
        type(layer)._to_impl(layer, **how)
        for parameter in parameters:
            parameter._clear_data()
        return layer

    layers = model.sublayers(include_self=True)
    for layer in layers:
        vars(layer)["_to_impl"] = partial(cast_layer, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["_to_impl"]


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """Within the block, tensors created without a dtype (`paddle.zeros`, a layer's parameters) have this one."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)


def read_by(model: nn.Layer) -> str:
    """The dtype of a model's floating-point inputs: float64 only if it has float64 parameters."""
    return "float64" if any(p.dtype == paddle.float64 for p in model.parameters()) else "float32"


def narrowed(array: np.ndarray, model: nn.Layer) -> np.ndarray:
    """A float64 array as float32, unless the model reads float64, as `MixedPrecision` casts tensors in a training."""
    return array.astype("float32") if array.dtype == np.float64 and read_by(model) == "float32" else array


class LossScale:
    """Float16's loss scale: halved, and the update skipped, when a gradient overflows; doubled after 2000 good updates.

    Rule and constants follow Micikevicius et al. 2018 (arXiv:1710.03740) and paddle.amp.GradScaler, which disables
    itself on a CPU. All ranks have the same norm (`GradientNorm.global_norm`), if not the same gradients, and decide
    alike.
    """

    def __init__(self, scale: float):
        self.scale, self.good, self.skipped = scale, 0, 0
        self.running = 0  # updates skipped in a row

    def update(self, finite: bool) -> bool:
        """Updates the scale after an update's gradients. Returns whether the gradients may be used."""
        self.good = self.good + 1 if finite else 0
        self.running = 0 if finite else self.running + 1
        if not finite:
            self.scale, self.skipped = max(self.scale * SHRINK, 1.0), self.skipped + 1
        elif self.good == GROW_EVERY:
            self.scale, self.good = self.scale * GROW, 0
        return finite

    @property
    def hopeless(self) -> bool:
        """Whether so many consecutive updates were skipped that no smaller scale would help."""
        return self.running >= HOPELESS and self.scale == 1.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.good, self.skipped = state["scale"], state["good"], state["skipped"]


def check_autocast(precision: Precision, device: str) -> None:
    """Raises UsageError if Paddle's autocast would compute in float32.

    For an unknown device type or version it only warns, and the run would be reported in the wrong precision.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with paddle.amp.auto_cast(True, level=precision.level, dtype=precision.dtype):
            unit = paddle.ones([1, 1])
            computed = paddle.matmul(unit, unit).dtype
    if computed != getattr(paddle, precision.dtype):
        raise UsageError(
            f"train.precision is {precision.dtype}, and Paddle's autocast leaves it float32 on {device}. "
            "Set train.precision to float32, or to the other 16-bit type."
        )


class MixedPrecision:
    """Runs a model's forward in the recipe's precision. Weights, gradients and optimizer states stay float32; under
    float64 everything is float64.

    O1 casts the operations that benefit; O2 keeps float16/bfloat16 weights (GPU), with float32 master weights in the
    optimizer. On a CPU rounding emulates both (`Rounder`).
    """

    def __init__(self, precision: Precision, model: nn.Layer, device: str):
        self.precision = precision
        self.low, self.double = precision.is_low, precision.dtype == "float64"
        self.reads = read_by(model)
        self.scale = LossScale(precision.scale) if precision.dtype == "float16" else None
        self._rounder = Rounder(model, precision.dtype) if self.low and device == "cpu" else None
        if self.low and self._rounder is None:
            check_autocast(precision, device)

    def include(self, model: nn.Layer) -> None:
        """Also runs the forward of this copy of the model in the recipe's precision; only emulation needs it."""
        if self._rounder is not None:
            self._rounder.watch(model)

    def decorate(self, model: nn.Layer, optimizer: Any) -> tuple[nn.Layer, Any]:
        """O2 on an accelerator casts the model and gives the optimizer float32 master weights. Its clip computes the
        norm in float32, as under hybrid: Paddle's default adds up 16-bit squares, with an error of 0.4 % in bfloat16
        (3.3.1)."""
        if self.precision.level == "O2" and self.low and self._rounder is None:
            paddle.nn.clip._clip_by_global_norm_using_mp_type(True)
            with castable(model):
                return paddle.amp.decorate(model, optimizer, level="O2", dtype=self.precision.dtype)
        return model, optimizer

    def cast_micro_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Casts a micro-batch to the model's dtype: floating-point tensors to float64 under float64; otherwise float64
        to float32 for a model that reads float32."""
        read = micro_batch.inputs, micro_batch.targets
        if not self._casts(read):
            return micro_batch
        inputs, targets = self.cast(read)
        return replace(micro_batch, inputs=inputs, targets=targets)

    def cast(self, read: Any) -> Any:
        """Casts the tensors of any structure likewise."""
        return cast(read, "float64" if self.double else "float32") if self._casts(read) else read

    def cast_batch(self, batch: Batch) -> Batch:
        """Applies `cast_micro_batch` to all micro-batches of a batch."""
        for micro_batch in batch.micro_batches:
            if self._casts((micro_batch.inputs, micro_batch.targets)):
                return replace(batch, micro_batches=tuple(map(self.cast_micro_batch, batch.micro_batches)))
        return batch

    def _casts(self, read: Any) -> bool:
        if self.double or self.reads != "float32":
            return self.double
        return bool([x for x in leaves(read) if x.dtype is paddle.float64])

    def context(self) -> AbstractContextManager[Any]:
        """Wraps every forward, in training and in evaluation."""
        if self.double or self._rounder is not None:
            return nested(SingleForward(), self._emulated())
        if not self.low:
            return SingleForward()
        level, dtype = self.precision.level, self.precision.dtype
        return nested(SingleForward(), paddle.amp.auto_cast(True, level=level, dtype=dtype))

    def around_backward(self, exchange: AbstractContextManager[Any] = NOTHING) -> AbstractContextManager[Any]:
        """Wraps a backward, and within it `exchange`: recompute may repeat forwards, which are rounded like the first
        time.

        fleet's recompute restores autocast itself.
        """
        if self.double or self._rounder is not None:
            return nested(self._emulated(), exchange)
        return exchange

    def _emulated(self) -> AbstractContextManager[Any]:
        return everything_in_float64() if self.double else self._rounding()

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        assert self._rounder is not None
        self._rounder.active = True
        try:
            yield
        finally:
            self._rounder.active = False


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Wraps a forward or a backward in float64: new tensors are float64, and a model's casts of float64 to float32 do
    nothing. In float32 they do nothing either; in float64 they would round, a proof would take that for a fault, and a
    nudge of its weights by 1e-16 would not show it (position embeddings that are resized in float32)."""
    originals = {
        (owner, name): getattr(owner, name)
        for owner, name in ((paddle, "cast"), (paddle.Tensor, "cast"), (paddle.Tensor, "astype"))
    }

    def widened(original: Any) -> Any:
        def convert(x: paddle.Tensor, dtype: Any) -> paddle.Tensor:
            narrows = x.dtype == paddle.float64 and dtype in _FLOAT32
            return x if narrows else original(x, dtype)

        return convert

    for (owner, name), original in originals.items():
        setattr(owner, name, widened(original))
    try:
        with default_dtype("float64"):
            yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def cast(data: Any, dtype: str) -> Any:
    """Casts the floating-point tensors of a structure to `dtype`."""
    return paddle.utils.map_structure(
        lambda x: x.astype(dtype) if isinstance(x, paddle.Tensor) and x.is_floating_point() else x, data
    )


# Low precision on CPUs ------------------------------------------------------------------------------------------------


_CUT = (ColumnParallelLinear, RowParallelLinear, ColumnSequenceParallelLinear, RowSequenceParallelLinear)
ROUNDED = (
    *_CUT,
    nn.Linear,
    nn.Conv1D,
    nn.Conv2D,
    nn.Conv3D,
    nn.Conv1DTranspose,
    nn.Conv2DTranspose,
    nn.Conv3DTranspose,
)


class Rounder:
    """Hooks a model's linear and convolution layers, which round to `dtype` while `active`."""

    def __init__(self, model: nn.Layer, dtype: str):
        self.dtype, self.active = dtype, False
        self.watch(model)

    def watch(self, model: nn.Layer) -> None:
        """Hooks the layers of this model, too."""
        for layer in model.sublayers(include_self=True):
            if isinstance(layer, ROUNDED):
                layer.register_forward_pre_hook(self._before)
                layer.register_forward_post_hook(self._after)

    def _round(self, x: Any) -> Any:
        return WithAdjoint.apply(x, self._to_dtype, self._to_dtype) if _is_float32(x) else x

    def _round_input(self, x: Any) -> Any:
        return shared(x, self._round, ("rounded", self.dtype)) if _is_float32(x) else x

    def _to_dtype(self, x: paddle.Tensor) -> paddle.Tensor:
        """Rounds a tensor, or its gradient, to `dtype` and back."""
        return x.astype(self.dtype).astype("float32")

    def _before(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.active:
            return None
        for name, parameter in layer.named_parameters(include_sublayers=False):
            layer.__dict__[name] = self._round(parameter)  # hides the parameter during this call
        return tuple(map(self._round_input, inputs))

    def _after(self, layer: nn.Layer, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self.active:
            return None
        for name, _ in layer.named_parameters(include_sublayers=False):
            layer.__dict__.pop(name, None)
        return self._round(output)


def _is_float32(x: Any) -> bool:
    return isinstance(x, paddle.Tensor) and x.dtype == paddle.float32


# Shared by the layers that read a tensor ------------------------------------------------------------------------------
# A function of a tensor that is computed once for all layers that read it, such as an exchange or a rounding.

_CACHE_ATTRIBUTE = "shared_by_its_readers"  # an attribute of the tensor, so the cache lives as long as it
_forward: ContextVar[object | None] = ContextVar("forward", default=None)  # the one that runs


class SingleForward:
    """Wraps a model's forward. Without gradients nothing in it may write a tensor between two layers that read it.

    Every step enters it, and a generator's context would take 2.0 µs instead of 0.6.
    """

    def __enter__(self) -> None:
        self._token = _forward.set(_forward.get() or self)

    def __exit__(self, *exception: object) -> None:
        _forward.reset(self._token)


def shared(x: paddle.Tensor, function: Function, key: object) -> paddle.Tensor:
    """`function(x)`, computed once for a tensor as long as it does not change. `key`: identifies the function, and the
    group of an exchange.

    Each reader computes it for a leaf, an input, a buffer or a parameter: it outlives its backward, unlike the cached
    graph, and `set_value` and `copy_` do not count as a change (3.3.1). Without gradients activations are leaves, too:
    their readers share within `SingleForward`.
    """
    forward = None if paddle.is_grad_enabled() else _forward.get()
    if not paddle.in_dynamic_mode() or (x.is_leaf and forward is None):
        return function(x)
    state = key, x.inplace_version, paddle.is_grad_enabled(), forward
    cached = getattr(x, _CACHE_ATTRIBUTE, None)
    if cached is None or cached[0] != state:
        cached = state, function(x)
        setattr(x, _CACHE_ATTRIBUTE, cached)
    output: paddle.Tensor = cached[1]
    return output
