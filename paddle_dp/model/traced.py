"""Reads the operators of a model's forward, with their sizes, from its traced program: nothing is run.

Paddle traces the forward of a training step for one sample, without memory for weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import _dygraph_guard

from paddle_dp.core.blocks import blocks_of, elements_of, outside
from paddle_dp.part import lazily, undisturbed
from paddle_dp.plan.traced_model import Operator, TracedModel

# Operators, by the first letters of their names, whose result is another view of their first input's memory.
_VIEWS = ("reshape", "flatten", "squeeze", "unsqueeze", "share_data", "view")
# Views without an order of their own in memory: a kernel that reads one copies it first, and so takes time.
_STRIDED_VIEWS = ("transpose", "slice", "strided_slice", "unbind", "diagonal")
_CONSTANTS = ("full", "shape", "arange", "assign_value", "constant", "range", "gaussian", "uniform")
_LOOKUPS = ("embedding", "gather")  # they read some of a parameter's rows
_BATCH_NORMS = ("batch_norm", "sync_batch_norm")
_ATTENTION = ("flash_attn", "memory_efficient_attention")
# Products whose number does not follow from the operators' shapes alone.
_UNKNOWN = re.compile(
    "(rnn|lstm|gru|cudnn|deformable|fused|einsum|addmm|baddbmm|batched_gemm|batch_fc|bilinear$|mv|dot|multi_dot|kron"
    "|svd|eig|qr|lu|det|slogdet|inverse|solve|triangular_solve|lstsq|matrix_|cholesky|fft|correlation|sparse"
    "|sequence_conv|weight_quantize|weight_only|llm_int8)|.*(attn|attention)"
)


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
            concrete = traced.concrete_program  # keeps the program alive; its operations do not
            values = [
                each for each in paddle.utils.flatten(concrete.outputs) if isinstance(each, paddle.pir.Value)
            ]
            forward, backward = _operations(concrete, values)
    except Exception as error:  # tracing may fail in any way, for a model that trains well
        lines = str(error).strip().splitlines() or [""]
        reason = lines[-1 if lines[0].startswith("In transformed code") else 0].strip()  # below a traceback
        raise UncountedError(f"Paddle cannot trace its forward: {type(error).__name__}: {reason}") from error
    finally:
        marks.remove()
    described = ", ".join(f"{dtype}{[*shape]}" for shape, dtype in inputs)
    operators = _read(forward, _needed(backward), marks)
    return TracedModel(
        operators=operators, handed=marks.handed, weights=marks.weights, outputs=sum(map(_numbers, values)),
        inputs=described,
    )  # fmt: skip


def _operations(concrete: Any, values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The operations of the program's forward, which gives these values, and of its backward, which Paddle appends."""
    block = concrete.main_program.global_block()
    forward = list(block.ops)
    outputs = [value for value in values if not value.stop_gradient]
    trained = [value for value in concrete.parameters[1] if not value.stop_gradient]
    if outputs and trained:
        # Not `enable_static`: after it a training would go on with a new tracer, which forgets the old one's modes.
        with _dygraph_guard(None), paddle.static.program_guard(concrete.main_program):
            paddle.static.gradients(outputs, trained)
    known = {operation.id() for operation in forward}
    return forward, [operation for operation in block.ops if operation.id() not in known]


def _needed(backward: Iterable[Any]) -> dict[str, set[str]]:
    """The values whose numbers the backward reads, with the names of the operators whose gradients do."""
    needed: dict[str, set[str]] = {}
    lists: dict[str, list[str]] = {}
    for operation in backward:
        name = _name(operation)
        values = [value for value in operation.operands_source() if value.initialized()]
        if name == "combine":
            lists[operation.result(0).id] = [value.id for value in values]
        elif not name.startswith(_CONSTANTS):
            for value in (value for value in values if not operation.is_no_need_buffer(value)):
                for each in lists.get(value.id, [value.id]):
                    needed.setdefault(each, set()).add(name.removesuffix("_grad"))
    return needed


def _name(operation: Any) -> str:
    """The operation's name without its dialect and the sign of one in place."""
    return str(operation.name()).rpartition(".")[2].rstrip("_")


class _Marks:
    """Where each block begins in the program that is traced, and the numbers that it gets."""

    def __init__(self, model: nn.Layer) -> None:
        blocks = blocks_of(model)
        self.is_chain = bool(blocks) and not outside(model, blocks)
        units = blocks if self.is_chain else [model]
        counted: set[int] = set()
        self.weights = tuple(sum(self._trained(unit, counted)) for unit in units)
        self.before: dict[int, int] = {}  # by the identity of the operation before the block, its number
        self.inputs: dict[int, float] = {}
        uses: dict[nn.Layer, list[int]] = {}  # the blocks of each layer; a shared one has several
        for number, layer in elements_of(model) if self.is_chain else []:
            uses.setdefault(layer, []).append(number)
        self._hooks = [
            layer.register_forward_pre_hook(self._mark(numbers)) for layer, numbers in uses.items()
        ]

    @staticmethod
    def _trained(unit: nn.Layer, counted: set[int]) -> Iterator[int]:
        """The sizes of the trained parameters that were not counted before, and which are from now on."""
        for parameter in unit.parameters():
            if not parameter.stop_gradient and id(parameter) not in counted:
                counted.add(id(parameter))
                yield int(parameter.size)

    def _mark(self, numbers: Sequence[int]) -> Callable[[nn.Layer, Any], None]:
        """A hook that marks where these blocks begin, one at each call."""
        order = iter(numbers)

        def mark(layer: nn.Layer, inputs: Any) -> None:
            number = next(order, numbers[-1])
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
        """The numbers that each block hands to the next; a function is taken to pass its inputs on."""
        handed: list[float] = []
        for number in range(1, len(self.weights)):
            handed.append(self.inputs.get(number, handed[-1] if handed else 0.0))
        return tuple(handed)


def _read(operations: Iterable[Any], needed: Mapping[str, set[str]], marks: _Marks) -> tuple[Operator, ...]:
    operators: list[Operator] = []
    touched: list[set[str]] = []  # the values that each operator reads or gives
    values = _Values()
    block = 0
    for operation in operations:
        name = _name(operation)
        if operation.num_regions() > 0:
            raise UncountedError(f"its forward branches on what it computes ({name})")
        if _UNKNOWN.match(name) and name not in _ATTENTION:
            raise UncountedError(f"the products of its operator {name} are not counted")
        read, results = values.add(operation, name)
        if values.unknown & {*read, *results[:1]}:  # further results may be a kernel's workspace
            raise UncountedError(f"the sizes in its forward depend on what it computes ({name})")
        is_free = name in ("data", "parameter") or name.startswith(_VIEWS) or {*results} <= values.constants
        if not (is_free or operation.name().startswith("builtin.")):  # which makes a list, or takes one apart
            operators.append(_operator(name, block, operation, values, read, results))
            touched.append({*map(values.root, (*read, *results))})
        block = marks.before.get(operation.id(), block)
    values.keep(operators, touched, needed)
    return tuple(operators)


class _Values:
    """The values of a program by name: `numbers` of each, `bytes` of each that has no floating-point numbers, and the
    `roots` whose memory views show. `weights`: parameters, and values that are computed of these alone, once for
    all samples."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.bytes: dict[str, float] = {}
        self.roots: dict[str, str] = {}
        self.strided: set[str] = set()
        self.weights: set[str] = set()
        self.constants: set[str] = set()
        self.unknown: set[str] = set()  # in their size

    def root(self, name: str) -> str:
        """The value whose memory the named one shows."""
        return self.roots.get(name, name)

    def add(self, operation: Any, name: str) -> tuple[list[str], list[str]]:
        """The names of an operation's inputs, and of its results."""
        read = [value.id for value in operation.operands_source() if value.initialized()]
        results = [value.id for value in operation.results()]
        parts = [self.numbers[each] for each in read if each not in self.constants]
        for value in operation.results():
            is_tensor = value.is_dense_tensor_type() or value.is_selected_row_type()
            self.numbers[value.id] = _numbers(value) if is_tensor else sum(parts)
            kind = str(value.dtype).rpartition(".")[2] if is_tensor else ""
            if kind.startswith(("bool", "int", "uint")):
                self.bytes[value.id] = self.numbers[value.id] * np.dtype(kind).itemsize
            if is_tensor and min(value.shape, default=0) < 0:
                self.unknown.add(value.id)
        if name.startswith(_CONSTANTS) or (read and {*read} <= self.constants):
            self.constants.update(results)
            self.unknown.difference_update(results)
            return read, results
        if name == "parameter" or (read and {*read} <= self.weights | self.constants):
            self.weights.update(results)
        if name.startswith(_BATCH_NORMS):  # statistics
            self.weights.update(results[1:])
        is_strided = name.startswith(_STRIDED_VIEWS) or bool({*read[:1]} & self.strided)
        is_copy = is_strided and name.startswith(("reshape", "flatten"))  # in another order
        is_part = operation.name() == "builtin.split" and self.root(read[0]) != read[0]
        if is_part or (name.startswith((*_STRIDED_VIEWS, *_VIEWS)) and not is_copy):
            self.roots |= dict.fromkeys(results, self.root(read[0]))
            self.strided.update(results if is_strided else ())
        return read, results

    def keep(
        self, operators: list[Operator], touched: Sequence[set[str]], needed: Mapping[str, set[str]]
    ) -> None:
        """Adds the values that backward needs to the operators whose gradients need them, to the first of several."""
        assigned = self.weights | self.constants
        for value, names in needed.items():
            root = self.root(value)
            if value not in self.numbers or assigned & {value, root}:
                continue
            assigned.add(root)
            touching = [number for number, each in enumerate(touched) if root in each]
            number = next((each for each in touching if operators[each].name in names), [*touching, 0][0])
            kind, sizes = ("masks", self.bytes) if root in self.bytes else ("saved", self.numbers)
            more = getattr(operators[number], kind) + sizes[root]
            operators[number] = replace(operators[number], **{kind: more})


def _operator(
    name: str, block: int, operation: Any, values: _Values, names: Sequence[str], results: Sequence[str]
) -> Operator:
    """The operation, with the `names` of its inputs and of its `results`, as an operator of that block."""
    read = [each for each in names if each not in values.weights | values.constants]
    weights = sum(values.numbers[each] for each in names if each in values.weights)
    written = values.numbers[results[0]]
    gradients = [not value.stop_gradient for value in operation.operands_source()[:2] if value.initialized()]
    is_norm = name.startswith(_BATCH_NORMS)
    product, count = _product(name, operation, any(each in values.weights for each in names[:2]))
    is_once = results[0] in values.weights  # for all samples
    return Operator(
        name=name, block=block, read=sum(values.numbers[each] for each in read), written=0.0 if is_once else written,
        weights=0.0 if is_norm or name.startswith(_LOOKUPS) else weights + is_once * written,
        product=product, count=count,
        channels=int(operation.operand_source(1).shape[0]) if is_norm else 0,
        gradients=0 if operation.result(0).stop_gradient else sum(gradients),
    )  # fmt: skip


def _numbers(value: Any) -> float:
    """The elements of a value; 0 if a dim is not known, as of a kernel's workspace."""
    return float(prod(value.shape)) if all(dim >= 0 for dim in value.shape) else 0.0


def _product(
    name: str, operation: Any, with_weights: bool
) -> tuple[tuple[float, float, float] | None, float]:
    """The product (m, n, k) of an operator, and how many of it there are."""
    if name in ("matmul", "bmm"):
        left, out = operation.operand_source(0).shape, operation.result(0).shape
        out = [1] * (2 - len(out)) + [*out]  # of vectors
        is_turned = name == "matmul" and operation.attrs().get("transpose_x") and len(left) > 1
        inner = left[-2] if is_turned else left[-1]
        if with_weights or len(out) < 3:
            return (prod(out[:-1]), out[-1], inner), 1.0
        return (out[-2], out[-1], inner), float(prod(out[:-2]))
    if name.startswith(("conv", "depthwise_conv")):
        read, weight = operation.operand_source(0).shape, operation.operand_source(1).shape
        if "transpose" in name:  # each number of the input is multiplied with a kernel of each output
            return (prod(read) / weight[0], prod(weight[1:]), weight[0]), 1.0
        return (prod(operation.result(0).shape) / weight[0], weight[0], prod(weight[1:])), 1.0
    if name in _ATTENTION:  # q [n, t, heads, head], k [n, s, …]
        queries, keys = operation.operand_source(0).shape, operation.operand_source(1).shape
        return (queries[1], keys[1], queries[3]), 2.0 * queries[0] * queries[2]
    return None, 1.0
