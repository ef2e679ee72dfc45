"""Counts the floating-point operations of a model per sample, on its traced graph, without running it.

These are *model* FLOPs, as in PaLM (arXiv:2204.02311, appendix B): matrix products and convolutions of forward and
backward, a multiply and an add counting as two. Recomputation and other operations do not count; attention counts in
full, causal or not. For a decoder that is the paper's 6N + 12LHQT per token, N being the weights of its products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle import nn

BACKWARD = 2  # products in backward for each of forward: for the gradients of its input and of its weight


def training_flops(build: Callable[[], nn.Layer], shape: Sequence[int], dtype: str) -> int:
    """The FLOPs of one sample's forward and backward; `shape`: of an input, without the batch dim.

    The model is built without memory for its weights and traced once, never run; Paddle's unique names and random
    generators are restored. Raises whatever building or tracing raises.
    """
    import paddle

    kept = paddle.get_rng_state()
    try:
        with paddle.LazyGuard(), paddle.utils.unique_name.guard():
            model = build()
        model.eval()  # without dropout, which has no products
        spec = [paddle.static.InputSpec([1, *shape], dtype)]
        traced = paddle.jit.to_static(model.forward, input_spec=spec, full_graph=True)
        # Kept in a variable: a program's operations do not keep it alive.
        program = traced.concrete_program.main_program
        return (1 + BACKWARD) * sum(map(_flops, program.global_block().ops))
    finally:
        paddle.set_rng_state(kept)


def _flops(operation: Any) -> int:
    name = operation.name()
    if name == "pd_op.matmul":
        left, out = operation.operand_source(0).shape, operation.result(0).shape
        inner = left[-2] if operation.attrs().get("transpose_x") else left[-1]
        return 2 * math.prod(out) * inner
    if name.startswith(("pd_op.conv", "pd_op.depthwise_conv")):
        weight, out = operation.operand_source(1).shape, operation.result(0).shape
        return 2 * math.prod(out) * math.prod(weight[1:])
    if name in ("pd_op.flash_attn", "pd_op.memory_efficient_attention"):  # q [n, t, heads, head], k [n, s, …]
        queries, keys = operation.operand_source(0).shape, operation.operand_source(1).shape
        return 4 * math.prod(queries) * keys[1]
    return 0
