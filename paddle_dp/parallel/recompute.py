"""Recompute: activations that forward does not keep are computed again in backward; less memory, one more forward.

It uses fleet's `recompute` (reentrant), which restores the random state, and that of exact dropout, for the second
forward: dropout draws the same masks, and the gradients are bit-equal to those of the plain run.
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
    """The model, changed in place: its blocks, or only its attention, keep nothing but their inputs for backward.

    `attention` is selective recomputation (Korthikanti et al., arXiv:2205.05198, section 5): the tensors between the
    projections are large, [n, heads, t, t], and cheap to compute again. The last block is never recomputed: backward
    begins with it, when the memory use is highest, so it would save nothing. Raises UsageError for a model that does
    not name its blocks or its attention.
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
    """Raises UsageError for a model that does not name its blocks or its attention, where `how` needs them."""
    if how.blocks and not blocks_of(model):
        raise UsageError(
            f"strategy.recompute: {type(model).__name__} has no ordered `blocks` to recompute. Name them "
            "(docs/add-a-part.md), or set strategy.recompute=none."
        )
    if how.attention and not any(attention_methods_of(layer) for layer in model.sublayers(include_self=True)):
        raise UsageError(
            f"strategy.recompute: no layer of {type(model).__name__} names its attention in `attention_methods` "
            "(docs/add-a-part.md). Name it, or set strategy.recompute=full or none."
        )


def _again(function: Method, twice: Method | None = None) -> Method:
    """`function`, recomputed in backward; called directly where there is no backward, or no input requires a gradient.

    `twice` is run instead where it is recomputed, if a second pass of `function` would have side effects. For inputs
    that require no gradient (the tokens of an embedding) fleet's recompute returns outputs that require none either, so
    the layer would silently not be trained.
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
    """The block's forward, in which only the first of the two passes updates BatchNorm's running statistics.

    fleet's recompute runs the first pass without gradients, and the second, inside backward, with them.
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
