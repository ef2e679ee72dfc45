"""Activations that forward does not keep, because backward computes them again: less memory, one more forward.

By fleet's `recompute` (reentrant), which gives the second forward the random state of the first and puts it back where
the first one was (parallel.dropout), so dropout draws the same masks: the gradients are those of the plain run, bit for
bit.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_dp.errors import UsageError
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.blocks import blocks_of, settle
from paddle_dp.parallel.wrapping import Method, wrap
from paddle_dp.part.annotation import attention_methods_of
from paddle_dp.units import Recompute


def recomputed(model: nn.Layer, how: Recompute) -> nn.Layer:
    """The model itself, whose blocks (or whose attention alone) keep their inputs and nothing else for backward.

    `attention` is selective recomputation (Korthikanti et al., arXiv:2205.05198, section 5): what lies between the
    projections is large, [n, heads, t, t], and cheap to compute again. The last block is never computed again:
    backward begins with it, and would find all of it back at the moment when most memory is in use.
    Raises UsageError for a model that does not say where its blocks or its attention are.
    """
    check_recompute(model, how)
    if how.attention:
        for layer in model.sublayers(include_self=True):
            for name in attention_methods_of(layer):
                wrap(layer, name, "recompute", _again)
    if not how.blocks:
        return model
    for block in settle(model)[how.blocks - 1 : -1 : how.blocks]:
        wrap(block, "forward", "recompute", partial(_again, twice=_counted_once(block)))
    return model


def check_recompute(model: nn.Layer, how: Recompute) -> None:
    """Raises UsageError for a model that does not say where its blocks or its attention are, if that is asked for."""
    if how.blocks and not blocks_of(model):
        raise UsageError(
            f"strategy.recompute: {type(model).__name__} has no ordered `blocks`, so nothing can be computed again. "
            "Keep its layers in one (docs/add-a-part.md), or set strategy.recompute=none."
        )
    if how.attention and not any(attention_methods_of(layer) for layer in model.sublayers(include_self=True)):
        raise UsageError(
            f"strategy.recompute: no layer of {type(model).__name__} names its attention in `attention_methods` "
            "(docs/add-a-part.md). Name it, or set strategy.recompute=full or none."
        )


def _again(function: Method, twice: Method | None = None) -> Method:
    """`function`, computed again in backward; plainly where there will be none, or where it reads no gradient.

    `twice` is what to run where it is computed again: `function`, unless a second pass would leave a trace.
    fleet's answer to inputs without a gradient (the tokens of an embedding) is one without a gradient: it would
    silently stop learning.
    """

    def forward(*inputs: Any, **named: Any) -> Any:
        learns = paddle.is_grad_enabled() and any(
            isinstance(x, paddle.Tensor) and not x.stop_gradient for x in (*inputs, *named.values())
        )
        if not learns:
            return function(*inputs, **named)
        return recompute(twice or function, *inputs, **named)

    return forward


def _counted_once(block: nn.Layer) -> Method:
    """The block's forward, in which running statistics (BatchNorm's) are those of the first of the two passes.

    fleet's recompute runs the first pass without gradients and the second, inside backward, with them.
    """
    forward, running = block.forward, list(statistics(block).values())
    if not running:
        return forward

    @wraps(forward)
    def once(*inputs: Any, **named: Any) -> Any:
        again = paddle.is_grad_enabled()
        kept = [(tensor, tensor.clone()) for tensor in running] if again else []
        outputs = forward(*inputs, **named)
        with paddle.no_grad():
            for tensor, value in kept:
                tensor.set_value(value)
        return outputs

    return once
