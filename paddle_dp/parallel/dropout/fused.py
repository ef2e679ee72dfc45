"""Fused kernels that draw their dropout inside themselves, where nobody can give them a mask (GPUs).

Attention with dropout is computed step by step instead; what has no plain form here is refused by its name. Without
dropout, and outside of a learner's forward, all of them are Paddle's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle

from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import Patch
from paddle_dp.parallel.dropout.originals import own
from paddle_dp.parallel.dropout.scope import current, scope_of

_OPS, _LEGACY_OPS, _SDPA = "paddle._C_ops", "paddle._legacy_C_ops", "paddle.nn.functional.sdpa"
# Where their probabilities stand among the arguments, and what says that they are not training (3.3.1).
_PLACES: Mapping[str, tuple[int, int | None]] = {
    "flash_attn_qkvpacked": (3, 6),
    "flash_attn_unpadded": (10, 13),
    "flash_attn_varlen_qkvpacked": (8, 11),
    "flashmask_attention": (5, 8),
    "memory_efficient_attention": (11, 13),
    "fused_dot_product_attention": (7, None),
    "fused_bias_dropout_residual_layer_norm": (5, 6),
    "fused_dropout_add": (3, 4),
}
# Those that take settings by name.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "fused_attention": ("dropout_rate", "attn_dropout_rate"),
    "fused_feedforward": ("dropout1_rate", "dropout2_rate"),
    "dropout_nd": ("dropout_prob",),
}


def patches() -> Iterator[Patch]:
    """Every place that is taken by this file."""
    drawn = "a fused kernel draws masks inside itself"
    name = "select_sdp_for_sdpa"
    yield Patch(owner=_SDPA, name=name, value=plain_if_dropped, symptom=drawn, missing="skip")
    yield Patch(owner=_OPS, name="flash_attn", value=flash_attention, symptom=drawn, missing="skip")
    for name, (probability, test) in _PLACES.items():
        call = refusing(f"{_OPS}.{name}", _at(probability, test))
        yield Patch(owner=_OPS, name=name, value=call, symptom=drawn, missing="skip")
    for name, words in _NAMES.items():
        call = refusing(f"{_LEGACY_OPS}.{name}", _named(words))
        yield Patch(owner=_LEGACY_OPS, name=name, value=call, symptom=drawn, missing="skip")


def plain_if_dropped(param: Any) -> str:
    """In the place of `select_sdp_for_sdpa`: attention with dropout is computed step by step, where masks are ours."""
    return "math" if current() is not None and param.dropout else own(f"{_SDPA}.select_sdp_for_sdpa")(param)


def flash_attention(  # noqa: PLR0913 - as Paddle calls it
    q: Any, k: Any, v: Any, seed: Any, mask: Any, p: float, causal: bool, softmax: bool, is_test: bool, *rest: Any
) -> Any:  # fmt: skip
    """In the place of `_C_ops.flash_attn` [n, t, heads, head]: with dropout, plain attention."""
    if scope_of(q) is None or is_test or not p:
        return own(f"{_OPS}.flash_attn")(q, k, v, seed, mask, p, causal, softmax, is_test, *rest)
    from paddle.nn.functional.flash_attention import _math_attention

    if (times := q.shape[2] // k.shape[2]) > 1:
        k, v = (paddle.repeat_interleave(x, times, axis=2) for x in (k, v))
    out, weights = _math_attention(q, k, v, mask, p, causal, softmax, True)
    return out, weights, None, None


def refusing(target: str, drops: Callable[[tuple[Any, ...]], bool]) -> Callable[..., Any]:
    """In the place of a kernel: itself, unless it would drop in a learner's forward: `drops` asks its arguments."""

    def call(*given: Any) -> Any:
        if scope_of(given[0]) is not None and drops(given):
            raise UsageError(
                f"{target.rpartition('.')[2]} draws its dropout inside a kernel, where it cannot be the same on any "
                "number of ranks. Use plain layers (nn.MultiHeadAttention, F.scaled_dot_product_attention), set its "
                "dropout to 0, or train.dropout=own."
            )
        return own(target)(*given)

    return call


def _at(probability: int, test: int | None) -> Callable[[tuple[Any, ...]], bool]:
    return lambda given: bool(given[probability]) and not (test is not None and given[test])


def _named(words: tuple[str, ...]) -> Callable[[tuple[Any, ...]], bool]:
    def drops(given: tuple[Any, ...]) -> bool:
        first = next(place for place, one in enumerate(given) if isinstance(one, str))
        said = dict(zip(given[first::2], given[first + 1 :: 2], strict=True))
        return any(said[word] for word in words) and not said.get("is_test")

    return drops
