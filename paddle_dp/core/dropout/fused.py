"""Fused kernels that draw dropout internally and take no mask (GPUs).

Attention with dropout uses plain operations instead; other kernels raise an error with their name. Without dropout, and
outside a learner's forward, the original kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle

from paddle_dp.core.dropout.originals import original
from paddle_dp.core.dropout.scope import current, scope_of
from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import Patch

_OPS, _LEGACY_OPS, _SDPA = "paddle._C_ops", "paddle._legacy_C_ops", "paddle.nn.functional.sdpa"
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


def patches() -> Iterator[Patch]:
    """Yields all replacements in this file."""
    drawn = "a fused kernel draws masks inside itself"
    name = "select_sdp_for_sdpa"
    yield Patch(owner=_SDPA, name=name, value=plain_if_dropped, symptom=drawn, missing="skip")
    yield Patch(owner=_OPS, name="flash_attn", value=flash_attention, symptom=drawn, missing="skip")
    for name, (probability, test) in _ARGUMENTS.items():
        call = refusing(f"{_OPS}.{name}", _at(probability, test))
        yield Patch(owner=_OPS, name=name, value=call, symptom=drawn, missing="skip")
    for name, names in _NAMES.items():
        call = refusing(f"{_LEGACY_OPS}.{name}", _named(names))
        yield Patch(owner=_LEGACY_OPS, name=name, value=call, symptom=drawn, missing="skip")


def plain_if_dropped(param: Any) -> str:
    """Replaces `select_sdp_for_sdpa`: attention with dropout takes the plain path, where dropout is replaced."""
    if current() is not None and param.dropout:
        return "math"
    return str(original(f"{_SDPA}.select_sdp_for_sdpa")(param))


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
