"""Replaces, once per process, the functions with which Paddle draws dropout masks: they use a scope's masks.

Outside a learner's forward each calls the original. Inside:

| in a model                                               | goes through                          | becomes          |
|----------------------------------------------------------|---------------------------------------|------------------|
| F.dropout, nn.Dropout, attention and Transformer layers  | _C_ops.dropout, dropout_              | `dropout`        |
| fleet's dropout (mpu.random)                             | _legacy_C_ops.dropout                 | `fleet_dropout`  |
| dropout with an axis, dropout2d, dropout3d               | functional.common.dropout             | `along_axes`     |
| alpha_dropout, feature_alpha_dropout                     | common._feature_alpha_dropout_impl    | `alpha`          |
| LSTM, GRU, SimpleRNN of several layers                   | _C_ops.rnn                            | `rnn`            |
| paddle.rand, paddle.uniform: one number for each sample  | _C_ops.uniform                        | `uniform`        |
| paddle.bernoulli: the same                               | _C_ops.bernoulli                      | `bernoulli`      |
| fused kernels on GPUs, which draw masks internally       | many                                  | an error, or     |
|                                                          |                                       | plain operations |

One number for each sample is a tensor [n, 1, …] for a micro-batch of n samples, as in drop path (stochastic depth). A
draw of another shape may be for a slice or for the whole batch, so Paddle's generator makes it, and `uncaught` reports
it.

A model may import its functions in any way, except dropout with an axis by name, which `uncaught` detects.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paddle
from paddle.base.framework import EagerParamBase as Parameter
from paddle.nn import functional as F

from paddle_dp.core.dropout import masks, scope, uncaught
from paddle_dp.core.dropout.scope import Scope, current, scope_of
from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import Patch, apply, look_up
from paddle_dp.mesh.copies import copies_to

_OPS, _LEGACY_OPS = "paddle._C_ops", "paddle._legacy_C_ops"
_COMMON, _SDPA = "paddle.nn.functional.common", "paddle.nn.functional.sdpa"


# Paddle's functions by the dotted names that are replaced; filled by `install`.
_originals: dict[str, Any] = {}


def install() -> None:
    """Replaces Paddle's functions, on every device; does nothing from the second call on.

    Raises UsageError if Paddle lacks a name that exact dropout needs.
    """
    if _originals:
        return
    replacements = list(patches())
    before = {patch.target: look_up(patch.target) for patch in replacements}
    try:
        apply(replacements)
    except UsageError as error:
        raise UsageError(f"{error} Or set train.dropout=own: each rank then draws its own masks.") from None
    _originals.update(before)


def original(target: str) -> Any:
    """Paddle's original function at this dotted name."""
    return _originals[target]


def patches() -> Iterator[Patch]:
    """Yields all replacements in this file."""
    drawn = "each rank draws its own masks"
    yield Patch(owner=_OPS, name="dropout", value=dropout, symptom=drawn)
    yield Patch(owner=_OPS, name="dropout_", value=dropout_in_place, symptom=drawn, missing="skip")
    yield Patch(owner=_LEGACY_OPS, name="dropout", value=fleet_dropout, symptom=drawn, missing="skip")
    yield Patch(owner=_OPS, name="rnn", value=rnn, symptom=drawn)
    for name, value in (("uniform", uniform), ("bernoulli", bernoulli)):
        yield Patch(
            owner=_OPS, name=name, value=value, symptom="each rank draws its own paths", missing="skip"
        )
    along = along_axes(look_up(_COMMON).dropout)  # type: ignore[union-attr]
    for owner in (_COMMON, "paddle.nn.functional"):
        yield Patch(owner=owner, name="dropout", value=along, symptom=drawn)
    name = "_feature_alpha_dropout_impl"
    yield Patch(owner=_COMMON, name=name, value=alpha, symptom=drawn, missing="skip")
    # Recompute saves this state at the first forward and restores it for the second, like the generators' states.
    states = "paddle.distributed.fleet.recompute.recompute.custom_state_manager"
    redrawn = "a second forward in backward draws another mask"
    yield Patch(owner=states, name="custom_get_state_func", value=scope.save, symptom=redrawn)
    yield Patch(owner=states, name="custom_set_state_func", value=scope.restore, symptom=redrawn)
    inside = "a fused kernel draws masks inside itself"
    name = "select_sdp_for_sdpa"
    yield Patch(owner=_SDPA, name=name, value=plain_if_dropped, symptom=inside, missing="skip")
    yield Patch(owner=_OPS, name="flash_attn", value=flash_attention, symptom=inside, missing="skip")
    for name, (probability, test) in _ARGUMENTS.items():
        call = refusing(f"{_OPS}.{name}", _at(probability, test))
        yield Patch(owner=_OPS, name=name, value=call, symptom=inside, missing="skip")
    for name, names in _NAMES.items():
        call = refusing(f"{_LEGACY_OPS}.{name}", _named(names))
        yield Patch(owner=_LEGACY_OPS, name=name, value=call, symptom=inside, missing="skip")


def dropout(x: paddle.Tensor, seed: Any, p: Any, is_test: bool, mode: str, *rest: Any) -> paddle.Tensor:
    """Replaces `_C_ops.dropout`: zeroes each element of x with probability `p` and scales the others according to
    `mode`."""
    here = scope_of(x)
    if here is None and current() is not None and not is_test:
        raise UsageError(
            "train.dropout: a program draws its masks by Paddle's kernels. Set train.dropout=own (each rank draws its "
            "own masks), or leave out the program: train.compile=false, and no paddle.jit.to_static in the model."
        )
    if here is None or is_test:
        return original(f"{_OPS}.dropout")(x, seed, p, is_test, mode, *rest)
    p = float(p)
    if p >= 1:
        return paddle.scale(x, 0.0)
    masked = paddle.masked_fill(x, dropped(here, x, p), 0.0)
    return masked.scale(1 / (1 - p)) if mode == "upscale_in_train" else masked


def dropout_in_place(
    x: paddle.Tensor, seed: Any, p: Any, is_test: bool, mode: str, *rest: Any
) -> paddle.Tensor:
    """Replaces `_C_ops.dropout_`, which writes into `x`."""
    here = scope_of(x)
    if here is None or is_test:
        return original(f"{_OPS}.dropout_")(x, seed, p, is_test, mode, *rest)
    p = float(p)
    if p >= 1:
        return x.scale_(0.0)
    x.masked_fill_(dropped(here, x, p), 0.0)
    return x.scale_(1 / (1 - p)) if mode == "upscale_in_train" else x


def fleet_dropout(x: paddle.Tensor, *names_and_values: Any) -> Any:
    """Replaces `_legacy_C_ops.dropout`, which fleet's dropout calls; returns (out, mask)."""
    named = dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))
    if scope_of(x) is None or named.get("is_test"):
        return original(f"{_LEGACY_OPS}.dropout")(x, *names_and_values)
    mode = named.get("dropout_implementation", "upscale_in_train")
    return dropout(x, None, named["dropout_prob"], False, mode), None


def dropped(here: Scope, x: paddle.Tensor, p: float, axes: Sequence[int] | None = None) -> paddle.Tensor:
    """Which elements of `x` are dropped: bool, of the shape of `x`, with size 1 along dims that are not in `axes`.

    Dim 0 is the samples, [n, …] or [k · n, …] with each sample's rows together. All samples share one mask if dim 0 is
    not a multiple of n or not in `axes`, and for a parameter.
    """
    if axes is None or 0 in axes:
        uncaught.doubt(x, here.samples)
    uncaught.note(x, here.call, list(here.slices))
    shape = tuple(x.shape)
    shared = not shape or bool(shape[0] % here.samples) or isinstance(x, Parameter)
    shared = shared or (axes is not None and 0 not in axes)
    sample = shape if shared else (shape[0] // here.samples, *shape[1:])
    if axes is not None:
        sample = tuple(size if dim in axes else 1 for dim, size in enumerate(sample))
        shape = (1 if 0 not in axes else shape[0], *sample[1:])
    keys = here.next_keys(shared)
    full_shape, ranges = (sample, masks.everything(sample)) if shared else here.locate_slice(sample)
    if x.place.is_cpu_place():
        mask = paddle.to_tensor(masks.dropped(keys, masks.positions(full_shape, ranges), p), place=x.place)
    else:
        mask = masks.dropped_on_device(keys, full_shape, ranges, p, x.place)
    return mask.reshape(shape)


def along_axes(functional: Callable[..., Any]) -> Callable[..., Any]:
    """`functional.dropout` with an `axis` uses the scope's masks; without one it calls `_C_ops.dropout`."""

    signature = inspect.signature(functional)  # the order of its arguments changed between versions

    @functools.wraps(functional)
    def drop(*args: Any, **named: Any) -> Any:
        here = current()
        if here is None or (len(args) < 3 and named.get("axis") is None):
            return functional(*args, **named)
        if "input" in named:  # newer versions accept x under this name, too
            named["x"] = named.pop("input")
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        x, p, axis = (bound.arguments[name] for name in ("x", "p", "axis"))
        axes = [axis] if isinstance(axis, int) else list(axis or ())
        usual = scope_of(x) is not None and 0 < float(p) < 1 and all(0 <= dim < x.ndim for dim in axes)
        if not (axes and usual and bound.arguments["training"]):
            return functional(*args, **named)
        keep = 1 - dropped(here, x, float(p), axes).astype(x.dtype)
        return (x.scale(1 / (1 - float(p))) if bound.arguments["mode"] == "upscale_in_train" else x) * keep

    return drop


def alpha(x: Any, feature_dropout: bool, p: float, training: bool = True, name: str | None = None) -> Any:
    """Replaces the function of both alpha dropouts: dropped elements (or channels) become SELU's lowest value, and an
    affine map restores mean and variance (Klambauer et al., arXiv:1706.02515, section 2)."""
    here = scope_of(x)
    channels = feature_dropout and x.ndim >= 2
    if here is None or not training or not 0 < p < 1 or (feature_dropout and not channels):
        return original(f"{_COMMON}._feature_alpha_dropout_impl")(x, feature_dropout, p, training, name)
    lowest = -1.6732632423543772 * 1.0507009873554805
    a = ((1 - p) * (1 + p * lowest**2)) ** -0.5
    mask = dropped(here, x, p, range(2) if channels else None).astype(x.dtype)
    return (x * (1 - mask) + mask * lowest).scale(a, -a * lowest * p)


def rnn(  # noqa: PLR0913 - as Paddle calls it
    inputs: Any, states: Any, weights: Any, lengths: Any, mask: Any, p: float, bidirectional: bool, width: int,
    hidden: int, layers: int, mode: str, seed: int, is_test: bool,
) -> Any:  # fmt: skip
    """Replaces `_C_ops.rnn` [t, n, width], which drops between its layers: runs one layer at a time, dropout between.

    `weights`: two matrices per layer and direction, then all biases in the same order.
    """
    run = original(f"{_OPS}.rnn")
    if scope_of(inputs) is None or not p or is_test or layers == 1:
        return run(
            inputs, states, weights, lengths, mask, p, bidirectional, width, hidden, layers, mode, seed, is_test
        )  # fmt: skip
    directions, x, final_states = 2 if bidirectional else 1, inputs, []
    for layer in range(layers):
        if layer:
            x = F.dropout(x.transpose([1, 0, 2]), p).transpose([1, 0, 2])
        span = slice(2 * layer * directions, 2 * (layer + 1) * directions)
        tensors = [*weights[: 2 * layers * directions][span], *weights[2 * layers * directions :][span]]
        initial = [state[layer * directions : (layer + 1) * directions] for state in states]
        x, reserve, final = run(
            x, initial, tensors, lengths, mask, 0.0, bidirectional, x.shape[-1], hidden, 1, mode, seed, is_test
        )  # fmt: skip
        final_states.append(final)
    return x, reserve, [paddle.concat(each) for each in zip(*final_states, strict=True)]


def uniform(
    shape: Any, dtype: Any, low: Any, high: Any, seed: int, place: Any, *rest: Any, **named: Any
) -> Any:
    """Replaces `_C_ops.uniform`: computes one number per sample, from `low` to below `high`.

    Draws in half precision, where a number would often be rounded to `high`, and draws with an explicit seed stay
    Paddle's.
    """
    wide = dtype in (paddle.float32, paddle.float64)
    if not wide or seed or any(rest) or any(named.values()) or not _each_sample(shape):
        return original(f"{_OPS}.uniform")(shape, dtype, low, high, seed, place, *rest, **named)
    return (_numbers(shape, place) * (high - low) + low).astype(dtype)


def bernoulli(x: Any) -> Any:
    """Replaces `_C_ops.bernoulli`: 1 with the sample's probability in `x`, else 0."""
    if scope_of(x) is None or not _each_sample(x.shape):
        return original(f"{_OPS}.bernoulli")(x)
    return (_numbers(x.shape, x.place) < x.detach().astype("float64")).astype(x.dtype)


def _each_sample(shape: Any) -> bool:
    """Whether a draw of this shape, [n, 1, …], is one number per sample of the running micro-batch. [n] is not: it may
    be one number per feature."""
    here = current()
    if here is None or not paddle.in_dynamic_mode() or not isinstance(shape, list | tuple):
        return False
    return len(shape) > 1 and list(shape) == [here.samples, *[1] * (len(shape) - 1)]


def _numbers(shape: Sequence[int], device: Any) -> paddle.Tensor:
    """The next number of each sample of the scope, from 0 to below 1, as float64 in `shape`."""
    here = current()
    assert here is not None  # `_each_sample` has checked it
    return copies_to(device)(masks.numbers(here.next_keys())).reshape(shape)


# Fused kernels that draw dropout internally and take no mask (GPUs) ---------------------------------------------------
# Attention with dropout uses plain operations instead; other kernels raise an error with their name. Without dropout,
# and outside a learner's forward, the original kernels run.

# The positions of the probability and of `is_test` among the arguments (3.3.1).
_ARGUMENTS: Mapping[str, tuple[int, int | None]] = {
    "flash_attn_qkvpacked": (3, 6),
    "flash_attn_unpadded": (10, 13),
    "flash_attn_varlen_qkvpacked": (8, 11),
    "flashmask_attention": (5, 8),
    "memory_efficient_attention": (11, 13),
    "fused_dot_product_attention": (7, None),
    "fused_bias_dropout_residual_layer_norm": (5, 6),
    "fused_dropout_add": (3, 4),
}
# Kernels that take their settings as names and values.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "fused_attention": ("dropout_rate", "attn_dropout_rate"),
    "fused_feedforward": ("dropout1_rate", "dropout2_rate"),
    "dropout_nd": ("dropout_prob",),
}


def plain_if_dropped(param: Any) -> str:
    """Replaces `select_sdp_for_sdpa`: attention with dropout takes the plain path, where dropout is replaced.

    An evaluation's attention seldom drops, and then keeps its kernel: the caller alone knows whether it drops.
    """
    here = current()
    if here is not None and param.dropout and (not here.in_evaluation or _caller_trains()):
        return "math"
    return str(original(f"{_SDPA}.select_sdp_for_sdpa")(param))


def _caller_trains() -> bool:
    """The argument `training` of the attention that asks `plain_if_dropped` for its kernel."""
    return bool(sys._getframe(2).f_locals.get("training", True))


def flash_attention(  # noqa: PLR0913 - as Paddle calls it
    q: Any, k: Any, v: Any, seed: Any, mask: Any, p: float, causal: bool, softmax: bool, is_test: bool, *rest: Any
) -> Any:  # fmt: skip
    """Replaces `_C_ops.flash_attn` [n, t, heads, head_width]: with dropout, plain attention."""
    if scope_of(q) is None or is_test or not p:
        return original(f"{_OPS}.flash_attn")(q, k, v, seed, mask, p, causal, softmax, is_test, *rest)
    from paddle.nn.functional.flash_attention import _math_attention

    if (times := q.shape[2] // k.shape[2]) > 1:
        k, v = (paddle.repeat_interleave(x, times, axis=2) for x in (k, v))
    out, weights = _math_attention(q, k, v, mask, p, causal, softmax, True)
    return out, weights, None, None


def refusing(target: str, drops: Callable[[tuple[Any, ...]], bool]) -> Callable[..., Any]:
    """Replaces a kernel: within a learner's forward it raises UsageError if `drops` is true of its arguments."""

    def call(*args: Any) -> Any:
        if scope_of(args[0]) is not None and drops(args):
            raise UsageError(
                f"{target.rpartition('.')[2]} draws dropout inside a fused kernel, where masks cannot be the same on "
                "any number of ranks. Use plain layers (nn.MultiHeadAttention, F.scaled_dot_product_attention), set "
                "its dropout to 0, or set train.dropout=own."
            )
        return original(target)(*args)

    return call


def _at(probability: int, test: int | None) -> Callable[[tuple[Any, ...]], bool]:
    return lambda args: bool(args[probability]) and not (test is not None and args[test])


def _named(names: tuple[str, ...]) -> Callable[[tuple[Any, ...]], bool]:
    def drops(args: tuple[Any, ...]) -> bool:
        first = next(index for index, arg in enumerate(args) if isinstance(arg, str))
        settings = dict(zip(args[first::2], args[first + 1 :: 2], strict=True))
        return any(settings[name] for name in names) and not settings.get("is_test")

    return drops
