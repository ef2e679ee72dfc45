"""How many floating-point operations a model needs for one sample: counted on its own graph, without computing it.

The count is of *model* FLOPs, as in PaLM (arXiv:2204.02311, appendix B): the products of matrices and the convolutions
of forward and backward, a multiply and an add being two. What is computed again (recompute) does not count, nor does
what is not a product; attention counts whole, also where it is causal. For a decoder that is the paper's 6N + 12LHQT
per token, N being the weights that multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle import nn

BACKWARD = 2  # each product of the forward has two in the backward: for its input and for its weight


def training_flops(build: Callable[[], nn.Layer], shape: Sequence[int], dtype: str) -> int:
    """The FLOPs of one sample's forward and backward; `shape` is an input's, without the batch.

    The model is built without memory for its weights and traced once, never run; names and random generators stay as
    they were. Raises whatever building or tracing raises.
    """
    import paddle

    kept = paddle.get_rng_state()
    try:
        with paddle.LazyGuard(), paddle.utils.unique_name.guard():
            model = build()
        model.eval()  # dropout is nothing to count
        spec = [paddle.static.InputSpec([1, *shape], dtype)]
        traced = paddle.jit.to_static(model.forward, input_spec=spec, full_graph=True)
        program = traced.concrete_program.main_program  # its operations live no longer than it does
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
