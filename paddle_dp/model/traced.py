"""Reads the operators of a model's forward, with their sizes, from its traced program: nothing is run.

Paddle traces the forward of a training step for one sample, without memory for weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core.blocks import blocks_of, elements_of, outside
from paddle_dp.part import lazily, undisturbed
from paddle_dp.plan.traced_model import Operator, TracedModel

# Operators, by the first letters of their names, that keep their inputs for backward, their outputs, or nothing. All
# others are taken to keep both.
_SAVE_INPUTS = (
    "matmul", "bmm", "conv", "depthwise_conv", "batch_norm", "layer_norm", "rms_norm", "group_norm", "instance_norm",
    "gelu", "silu", "swish", "hardswish", "leaky_relu", "mish", "softplus", "multiply", "divide", "elementwise_pow",
    "pow", "log", "square", "abs", "pool", "cross_entropy",
)  # fmt: skip
_SAVE_OUTPUTS = ("relu", "softmax", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "dropout")
_SAVE_NOTHING = (
    "add", "subtract", "scale", "cast", "concat", "split", "slice", "strided_slice", "mean", "sum", "transpose",
    "stack", "expand", "tile", "pad", "gather", "embedding", "bilinear_interp", "nearest_interp", "one_hot", "unbind",
    "flip", "roll",
)  # fmt: skip
_VIEWS = ("reshape", "flatten", "squeeze", "unsqueeze", "share_data", "assign", "view")
_CONSTANTS = ("full", "shape", "arange", "constant", "range", "gaussian", "uniform")
_LOOKUPS = ("embedding", "gather")  # they read some of a parameter's rows
# Products whose number does not follow from the operators' shapes alone.
_UNKNOWN = (
    "rnn", "lstm", "gru", "cudnn", "deformable", "fused", "einsum", "addmm", "baddbmm", "mv", "dot", "kron", "svd",
    "eig", "qr", "inverse", "solve", "cholesky", "fft", "correlation", "sparse", "weight_quantize", "llm_int8",
)  # fmt: skip


class UncountedError(Exception):
    """A model's operators cannot be counted; the message is the end of a sentence."""


def traced_model(build: Callable[[], nn.Layer], inputs: Sequence[tuple[Sequence[int], str]]) -> TracedModel:
    """The model that `build` gives, as operators. `inputs`: the shape, without the batch, and the dtype of each of its
    inputs, in the order of its forward's parameters.

    Raises UncountedError with the reason, and any error of building.
    """
    with lazily():
        model = build()
    marks = _Marks(model)
    specs = [paddle.static.InputSpec([1, *shape], dtype, stop_gradient=True) for shape, dtype in inputs]
    try:
        with undisturbed():
            traced = paddle.jit.to_static(model.forward, input_spec=specs, full_graph=True)
            # The variable saves the program alive; its operations do not.
            program = traced.concrete_program.main_program
    except Exception as error:  # tracing may fail in any way, for a model that trains well
        first_line = next(iter(str(error).strip().splitlines()), "")
        raise UncountedError(
            f"Paddle cannot trace its forward: {type(error).__name__}: {first_line}"
        ) from error
    finally:
        marks.remove()
    described = ", ".join(f"{dtype}{[*shape]}" for shape, dtype in inputs)
    return _read(program.global_block().ops, marks, described)


class _Marks:
    """Where each block begins in the program that is traced, and the numbers that it gets."""

    def __init__(self, model: nn.Layer) -> None:
        blocks = blocks_of(model)
        self.is_chain = bool(blocks) and not outside(model, blocks)
        units = blocks if self.is_chain else [model]
        self.weights = tuple(
            sum(int(p.size) for p in unit.parameters() if not p.stop_gradient) for unit in units
        )
        self.before: dict[int, int] = {}  # by the identity of the operation before the block, its number
        self.inputs: dict[int, float] = {}
        self._hooks = [
            layer.register_forward_pre_hook(self._mark(number))
            for number, layer in (elements_of(model) if self.is_chain else [])
        ]

    def _mark(self, number: int) -> Callable[[nn.Layer, Any], None]:
        def mark(layer: nn.Layer, inputs: Any) -> None:
            *_, last = paddle.static.default_main_program().global_block().ops
            self.before[last.id()] = number
            tensors = [value for value in paddle.utils.flatten(inputs) if hasattr(value, "shape")]
            self.inputs.setdefault(number, float(sum(map(_numbers, tensors))))

        return mark

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def handed(self) -> tuple[float, ...]:
        """The numbers that each block hands to the next; a function is taken to pass on what it got."""
        handed: list[float] = []
        for number in range(1, len(self.weights)):
            handed.append(self.inputs.get(number, handed[-1] if handed else 0.0))
        return tuple(handed)


def _read(operations: Iterable[Any], marks: _Marks, inputs: str) -> TracedModel:
    operators: list[Operator] = []
    values = _Values()
    block = 0
    for operation in operations:
        dialect, _, name = operation.name().rstrip("_").partition(".")
        if operation.num_regions() > 0:
            raise UncountedError(f"its forward branches on what it computes ({name})")
        if name.startswith(_UNKNOWN):
            raise UncountedError(f"the products of its operator {name} are not counted")
        read, results = values.add(operation)
        if name == "parameter":
            values.parameters.update(results)
        elif name.startswith(_CONSTANTS) or (read and {*read} <= values.constants):
            values.constants.update(results)
        elif name.startswith(_VIEWS):
            values.roots |= dict.fromkeys(results, read[0])
        elif (
            dialect != "builtin" and name != "data"
        ):  # which makes a list, or takes one apart; which is the sample
            operators.append(_operator(name, block, operation, values, read, results))
        block = marks.before.get(operation.id(), block)
    return TracedModel(operators=tuple(operators), handed=marks.handed, weights=marks.weights, inputs=inputs)


class _Values:
    """The values of a program by name: `numbers` of each, the `roots` that views show, and those that an operator has
    `saved` for its backward."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.roots: dict[str, str] = {}
        self.parameters: set[str] = set()
        self.constants: set[str] = set()
        self.saved: set[str] = set()

    def add(self, operation: Any) -> tuple[list[str], list[str]]:
        """The names of what an operation reads, behind views, and of its results."""
        read = [
            self.roots.get(value.id, value.id) for value in operation.operands_source() if value.initialized()
        ]
        results = operation.results()
        for value in results:
            is_list = not (value.is_dense_tensor_type() or value.is_selected_row_type())
            parts = [self.numbers[name] for name in read if name not in self.constants]
            self.numbers[value.id] = sum(parts) if is_list else _numbers(value)
        return read, [value.id for value in results]


def _operator(
    name: str, block: int, operation: Any, values: _Values, names: Sequence[str], results: Sequence[str]
) -> Operator:
    """The operation, with the `names` of what it reads and of its `results`, as an operator of that block."""
    read = [each for each in names if each not in values.parameters | values.constants]
    weights = sum(values.numbers[each] for each in names if each in values.parameters)
    gradients = [not value.stop_gradient for value in operation.operands_source()[:2] if value.initialized()]
    is_trained = not operation.result(0).stop_gradient
    saves = {*_saved(name, read, results[0])} - values.saved if is_trained else set()
    values.saved |= saves
    is_norm = name.startswith(("batch_norm", "sync_batch_norm"))
    product, count = _product(name, operation, any(each in values.parameters for each in names[:2]))
    return Operator(
        name=name, block=block, read=sum(values.numbers[each] for each in read), written=values.numbers[results[0]],
        weights=0.0 if is_norm or name.startswith(_LOOKUPS) else weights,
        saved=sum(values.numbers[each] for each in saves), product=product, count=count,
        channels=int(operation.operand_source(1).shape[0]) if is_norm else 0,
        gradients=sum(gradients) if is_trained else 0,
    )  # fmt: skip


def _numbers(value: Any) -> float:
    """The elements of a value; 0 if a dim is not known, as of a kernel's workspace."""
    return float(prod(value.shape)) if all(dim >= 0 for dim in value.shape) else 0.0


def _saved(name: str, read: Sequence[str], result: str) -> Sequence[str]:
    """The values that an operator saves for its backward."""
    if name.startswith(_SAVE_NOTHING):
        return ()
    if name.startswith(_SAVE_OUTPUTS):
        return (result,)
    return read if name.startswith(_SAVE_INPUTS) else (*read, result)


def _product(
    name: str, operation: Any, with_weights: bool
) -> tuple[tuple[float, float, float] | None, float]:
    """The product (m, n, k) of an operator, and how many of it there are."""
    if name in ("matmul", "bmm"):
        left, out = operation.operand_source(0).shape, operation.result(0).shape
        inner = left[-2] if name == "matmul" and operation.attrs().get("transpose_x") else left[-1]
        if with_weights or len(out) < 3:
            return (prod(out[:-1]), out[-1], inner), 1.0
        return (out[-2], out[-1], inner), float(prod(out[:-2]))
    if name.startswith(("conv", "depthwise_conv")):
        read, weight = operation.operand_source(0).shape, operation.operand_source(1).shape
        if "transpose" in name:  # each number of the input is multiplied with a kernel of each output
            return (prod(read) / weight[0], prod(weight[1:]), weight[0]), 1.0
        return (prod(operation.result(0).shape) / weight[0], weight[0], prod(weight[1:])), 1.0
    if name in ("flash_attn", "memory_efficient_attention"):  # q [n, t, heads, head], k [n, s, …]
        queries, keys = operation.operand_source(0).shape, operation.operand_source(1).shape
        return (queries[1], keys[1], queries[3]), 2.0 * queries[0] * queries[2]
    return None, 1.0
