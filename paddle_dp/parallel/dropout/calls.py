"""What stands in the places where Paddle draws random numbers for dropout: the same functions, with masks of a scope.

Outside of a learner's forward each of them is Paddle's own. Inside:

| in a model                                               | goes through                          | becomes          |
|----------------------------------------------------------|---------------------------------------|------------------|
| F.dropout, nn.Dropout, attention and Transformer layers  | _C_ops.dropout, dropout_              | `dropout`        |
| dropout with an axis, dropout2d, dropout3d               | functional.common.dropout             | `along_axes`     |
| alpha_dropout, feature_alpha_dropout                     | common._feature_alpha_dropout_impl    | `alpha`          |
| LSTM, GRU, SimpleRNN of several layers                   | _C_ops.rnn                            | `rnn`            |
| scaled_dot_product_attention, flash_attention on GPUs    | kernels that draw inside themselves   | plain attention  |
| other fused kernels on GPUs                              | the same                              | refused          |

`install` puts them there once a process; a name is looked up when it is called, so it does not matter how a model
imported its functions (but for dropout with an axis imported by its own name, which `unseen` notices).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle.base.framework import EagerParamBase as Parameter
from paddle.nn import functional as F

from paddle_dp.errors import UsageError
from paddle_dp.mesh.bridge.patch import Patch, apply, look_up
from paddle_dp.parallel.dropout import masks, scope
from paddle_dp.parallel.dropout.scope import Scope, current

_OPS = "paddle._C_ops"
_COMMON = "paddle.nn.functional.common"
_SDPA = "paddle.nn.functional.sdpa"
# Fused kernels that draw inside themselves: where their probabilities stand, and what says that they are not training.
_FUSED: dict[str, tuple[tuple[int, ...], int]] = {
    "flash_attn_qkvpacked": ((3,), 6),
    "flash_attn_unpadded": ((10,), 13),
    "flash_attn_varlen_qkvpacked": ((8,), 11),
    "flashmask_attention": ((5,), 8),
    "memory_efficient_attention": ((11,), 13),
    "fused_dot_product_attention": ((7,), -1),
    "fused_bias_dropout_residual_layer_norm": ((5,), 6),
    "fused_attention": ((15, 20), 16),
    "fused_dropout_add": ((3,), 4),
}
_own: dict[str, Any] = {}  # what Paddle has in each place, by its dotted name


def install() -> None:
    """Puts the functions of this file into their places; from the second call on, does nothing.

    Raises UsageError on a Paddle that lacks one of the names.
    """
    if _own:
        return
    patches = list(_patches())
    _own.update({patch.target: getattr(look_up(patch.owner), patch.name, None) for patch in patches})
    apply(patches)


def _patches() -> Iterator[Patch]:
    drawn = "each rank draws masks of its own"
    yield Patch(owner=_OPS, name="dropout", value=dropout, symptom=drawn)
    yield Patch(owner=_OPS, name="dropout_", value=dropout_in_place, symptom=drawn, missing="skip")
    yield Patch(owner=_OPS, name="rnn", value=rnn, symptom=drawn)
    along = along_axes(look_up(_COMMON).dropout)  # type: ignore[union-attr]
    for place in (_COMMON, "paddle.nn.functional"):
        yield Patch(owner=place, name="dropout", value=along, symptom=drawn)
    name = "_feature_alpha_dropout_impl"
    yield Patch(owner=_COMMON, name=name, value=alpha, symptom=drawn, missing="skip")
    chosen = "flash attention draws masks inside itself"
    yield Patch(
        owner=_SDPA, name="select_sdp_for_sdpa", value=plain_if_dropped, symptom=chosen, missing="skip"
    )
    yield Patch(owner=_OPS, name="flash_attn", value=flash_attention, symptom=chosen, missing="skip")
    for name in _FUSED:
        yield Patch(owner=_OPS, name=name, value=refusing(name), symptom=chosen, missing="skip")
    # What recompute remembers of a first forward and puts back for the second, besides the generators' states.
    states = "paddle.distributed.fleet.recompute.recompute.custom_state_manager"
    again = "a second forward in backward draws another mask"
    yield Patch(owner=states, name="custom_get_state_func", value=scope.keep, symptom=again)
    yield Patch(owner=states, name="custom_set_state_func", value=scope.put_back, symptom=again)


def dropout(x: paddle.Tensor, seed: Any, p: Any, is_test: bool, mode: str, *rest: Any) -> paddle.Tensor:
    """In the place of `_C_ops.dropout`: x with each element 0 with probability `p`, others scaled as `mode` says."""
    here = _scope_of(x)
    if here is None or is_test:
        return _own[f"{_OPS}.dropout"](x, seed, p, is_test, mode, *rest)
    p = float(p)
    if p >= 1:
        return paddle.scale(x, 0.0)
    kept = paddle.masked_fill(x, dropped(here, x, p), 0.0)
    return kept.scale(1 / (1 - p)) if mode == "upscale_in_train" else kept


def dropout_in_place(
    x: paddle.Tensor, seed: Any, p: Any, is_test: bool, mode: str, *rest: Any
) -> paddle.Tensor:
    """In the place of `_C_ops.dropout_`, which writes into `x`."""
    here = _scope_of(x)
    if here is None or is_test:
        return _own[f"{_OPS}.dropout_"](x, seed, p, is_test, mode, *rest)
    p = float(p)
    if p >= 1:
        return x.scale_(0.0)
    x.masked_fill_(dropped(here, x, p), 0.0)
    return x.scale_(1 / (1 - p)) if mode == "upscale_in_train" else x


def dropped(here: Scope, x: paddle.Tensor, p: float, axes: Sequence[int] | None = None) -> paddle.Tensor:
    """What of `x` is dropped: bool, of its shape; with `axes`, 1 along all others.

    The samples are dim 0, [n, …] or [k · n, …], each sample's rows together. Where dim 0 is no multiple of n, where
    `axes` leaves it out, and of a parameter, one mask is all samples'.
    """
    shape = tuple(x.shape)
    shared = not shape or bool(shape[0] % here.samples) or isinstance(x, Parameter)
    shared = shared or (axes is not None and 0 not in axes)
    sample = shape if shared else (shape[0] // here.samples, *shape[1:])
    if axes is not None:
        sample = tuple(size if dim in axes else 1 for dim, size in enumerate(sample))
        shape = (1 if 0 not in axes else shape[0], *sample[1:])
    keys = here.next_keys(shared)
    whole, held = (sample, masks.everything(sample)) if shared else here.held(sample)
    if x.place.is_cpu_place():
        found = paddle.to_tensor(masks.dropped(keys, masks.positions(whole, held), p), place=x.place)
    else:
        found = masks.dropped_there(keys, whole, held, p, x.place)
    return found.reshape(shape)


def along_axes(own: Callable[..., Any]) -> Callable[..., Any]:
    """`functional.dropout`, whose masks with an `axis` are of the scope; without one it comes to `dropout` itself."""

    signature = inspect.signature(own)  # the order of its arguments changed between versions

    @functools.wraps(own)
    def drop(*given: Any, **named: Any) -> Any:
        here = current()
        if here is None or (len(given) < 3 and named.get("axis") is None):
            return own(*given, **named)
        if "input" in named:  # newer versions know x under this name too
            named["x"] = named.pop("input")
        said = signature.bind(*given, **named)
        said.apply_defaults()
        x, p, axis = (said.arguments[name] for name in ("x", "p", "axis"))
        axes = [axis] if isinstance(axis, int) else list(axis or ())
        usual = _scope_of(x) is not None and 0 < float(p) < 1 and all(0 <= one < x.ndim for one in axes)
        if not (axes and usual and said.arguments["training"]):
            return own(*given, **named)
        keep = 1 - dropped(here, x, float(p), axes).astype(x.dtype)
        return (x.scale(1 / (1 - float(p))) if said.arguments["mode"] == "upscale_in_train" else x) * keep

    return drop


def alpha(x: Any, feature_dropout: bool, p: float, training: bool = True, name: str | None = None) -> Any:
    """In the place of what both alpha dropouts share: dropped elements (or channels) become SELU's lowest value, and
    a and b keep mean and variance (Klambauer et al., arXiv:1706.02515, section 2)."""
    here = _scope_of(x)
    channels = feature_dropout and x.ndim >= 2
    if here is None or not training or not 0 < p < 1 or (feature_dropout and not channels):
        return _own[f"{_COMMON}._feature_alpha_dropout_impl"](x, feature_dropout, p, training, name)
    lowest = -1.6732632423543772 * 1.0507009873554805
    a = ((1 - p) * (1 + p * lowest**2)) ** -0.5
    gone = dropped(here, x, p, range(2) if channels else None).astype(x.dtype)
    return (x * (1 - gone) + gone * lowest).scale(a, -a * lowest * p)


def rnn(  # noqa: PLR0913 - as Paddle calls it
    inputs: Any, states: Any, weights: Any, lengths: Any, drawn: Any, p: float, both: bool, width: int, hidden: int,
    layers: int, mode: str, seed: int, is_test: bool,
) -> Any:  # fmt: skip
    """In the place of `_C_ops.rnn` [t, n, width], which drops between its layers: layer by layer, and dropout between.

    `weights`: all matrices of all layers and directions, two each, then all biases in the same order.
    """
    run = _own[f"{_OPS}.rnn"]
    if _scope_of(inputs) is None or not p or is_test or layers == 1:
        return run(
            inputs, states, weights, lengths, drawn, p, both, width, hidden, layers, mode, seed, is_test
        )
    ways, x, found = 2 if both else 1, inputs, []
    for layer in range(layers):
        if layer:
            x = F.dropout(x.transpose([1, 0, 2]), p).transpose([1, 0, 2])
        mine = slice(2 * layer * ways, 2 * (layer + 1) * ways)
        of_layer = [*weights[: 2 * layers * ways][mine], *weights[2 * layers * ways :][mine]]
        begin = [state[layer * ways : (layer + 1) * ways] for state in states]
        x, reserve, end = run(
            x, begin, of_layer, lengths, drawn, 0.0, both, x.shape[-1], hidden, 1, mode, seed, is_test
        )
        found.append(end)
    return x, reserve, [paddle.concat(each) for each in zip(*found, strict=True)]


def plain_if_dropped(param: Any) -> str:
    """In the place of `select_sdp_for_sdpa`: attention with dropout is computed step by step, where masks are ours."""
    return "math" if current() is not None and param.dropout else _own[f"{_SDPA}.select_sdp_for_sdpa"](param)


def flash_attention(  # noqa: PLR0913 - as Paddle calls it
    q: Any, k: Any, v: Any, seed: Any, mask: Any, p: float, causal: bool, softmax: bool, is_test: bool, *rest: Any
) -> Any:  # fmt: skip
    """In the place of `_C_ops.flash_attn` [n, t, heads, head]: with dropout, plain attention."""
    if _scope_of(q) is None or is_test or not p:
        return _own[f"{_OPS}.flash_attn"](q, k, v, seed, mask, p, causal, softmax, is_test, *rest)
    from paddle.nn.functional.flash_attention import _math_attention

    if (times := q.shape[2] // k.shape[2]) > 1:
        k, v = (paddle.repeat_interleave(x, times, axis=2) for x in (k, v))
    out, weights = _math_attention(q, k, v, mask, p, causal, softmax, True)
    return out, weights, None, None


def refusing(name: str) -> Callable[..., Any]:
    """In the place of a fused kernel that draws inside itself: itself, unless it would drop in a learner's forward."""
    where, quiet = _FUSED[name]

    def call(*given: Any) -> Any:
        here = _scope_of(given[0])
        training = quiet < 0 or not given[quiet]
        if here is not None and training and any(given[place] for place in where):
            raise UsageError(
                f"{name} draws its dropout inside a kernel, where it cannot be the same on any number of ranks. Use "
                "plain layers (nn.MultiHeadAttention, F.scaled_dot_product_attention), dropout 0, or train.dropout=own."
            )
        return _own[f"{_OPS}.{name}"](*given)

    return call


def _scope_of(x: Any) -> Scope | None:
    """The scope that a call on `x` is in. A program that is being traced (to_static) is in none."""
    return current() if isinstance(x, paddle.Tensor) else None
