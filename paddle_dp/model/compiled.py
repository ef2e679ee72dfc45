"""A model's forward as one program (paddle.jit.to_static): `train.compile`. On GPUs Paddle's compiler CINN fuses it.

Python code and hooks within the program run only while it is traced, once per shape and mode. So layouts that exchange
within the forward are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import call, leaves
from paddle_dp.core.batch_norm import SyncBatchNorm, is_local, local_norms
from paddle_dp.core.extra_forwards import extra_forwards, random_state
from paddle_dp.core.lora import adapted_layers
from paddle_dp.core.programs import layers_in_programs
from paddle_dp.errors import TracingError, UsageError, gist
from paddle_dp.units import Recompute

if TYPE_CHECKING:
    from paddle_dp.plan.layout import Layout
    from paddle_dp.recipe import Recipe


_SYNCHRONIZED = "BatchNorm over all ranks exchanges within the forward: set strategy.sync_batch_norm=false"
_HOOKED = "an adapter works by hooks on its layers, which a program does not run: leave out the adapter"


def check_compiles(recipe: Recipe, layout: Layout, model: nn.Layer | None = None) -> None:
    """Raises UsageError for a recipe with `train.compile` in a layout that exchanges within the forward. Without the
    `model`, `compiled` checks its BatchNorms."""
    if not recipe.train.compile:
        return
    cut = [axis for axis, degree in layout.degrees.as_dict().items() if degree > 1 and axis != "data"]
    sync = recipe.strategy.config.sync_batch_norm and layout.degrees.ranks > 1
    if cut:
        _refuse(
            f"the ranks of the {cut[0]} axis meet within the forward: use axis data alone, data_parallel or single"
        )
    if "adapter" in recipe.model_fields_set and recipe.adapter is not None:
        _refuse(_HOOKED)
    if layout.recompute != Recompute():
        _refuse(
            "a program decides itself which activations it keeps for backward: set strategy.recompute=none"
        )
    if sync and model is not None and local_norms(model):
        _refuse(_SYNCHRONIZED)


def check_programs(model: nn.Layer, layout: Layout, sync: bool) -> None:
    """Raises UsageError for a model in which a forward is a program (paddle.jit.to_static) in a layout that exchanges
    within it. `sync`: a BatchNorm normalizes over all ranks."""
    inside, degrees = layers_in_programs(model), layout.degrees
    if not inside:
        return
    reason = ""
    learns = any(is_local(layer) or isinstance(layer, SyncBatchNorm) for layer in inside)
    if sync and learns and degrees.data * degrees.sharding > 1:
        reason = "BatchNorm over all ranks exchanges within it: set strategy.sync_batch_norm=false"
    for axis in ("tensor", "sequence"):
        if degrees.as_dict()[axis] > 1:
            reason = f"the ranks of the {axis} axis meet within it: use another axis"
    if degrees.sharding > 1 and layout.sharding_stage == 3:
        reason = "stage 3 gathers weights within it: use strategy.sharding_stage=2"
    if reason:
        raise UsageError(
            f"paddle.jit.to_static: the forward of {type(model).__name__}, or of a layer in it, is a program, and "
            f"{reason}, or leave out paddle.jit.to_static."
        )


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"train.compile: {why}, or train.compile=false.")


def compiled(
    model: nn.Layer, samples: Callable[[], Any] | None, emulated: bool = False, ranks: int = 1
) -> None:
    """Makes the model's forward a program, in place, and traces it with `samples`, which gives a batch of inputs, if
    given.

    Raises TracingError if it cannot be traced or the program's results differ from the layers'; UsageError if its low
    precision is `emulated`.
    """
    if emulated:
        _refuse("on CPUs low precision is emulated by hooks on layers: set train.precision=float32")
    if any(adapted_layers(model)):
        _refuse(_HOOKED)
    if ranks > 1 and any(isinstance(layer, SyncBatchNorm) for layer in model.sublayers(include_self=True)):
        _refuse(_SYNCHRONIZED)
    model.forward = Program(model.forward)
    if samples is None:
        return
    try:
        with extra_forwards(model), paddle.enable_grad():
            inputs = samples()
            call(model, inputs, plain_forward(model))
        _compare_with_layers(model, inputs)
    except UsageError as error:  # after a trace its message contains the program's frames
        raise TracingError(str(error).rpartition("UsageError: ")[2].strip()) from None
    except Exception as error:
        raise TracingError(
            f"train.compile: paddle.jit.to_static cannot trace {type(model).__name__}: {type(error).__name__}: "
            f"{gist(error)} Change the code that it cannot trace, or set train.compile=false."
        ) from error


def _compare_with_layers(model: nn.Layer, inputs: Any) -> None:
    """Raises UsageError if the traced program, called again, has other outputs or fewer gradients than the layers:
    values computed in Python stay as they were traced, and Paddle's while loop gives no gradients (3.3.1)."""
    before = random_state()
    with extra_forwards(model), paddle.enable_grad():  # both start from the same buffers and random numbers
        program, learned = _outputs_and_gradients(model, inputs)
    with extra_forwards(model), paddle.enable_grad(), layer_by_layer(model):
        layers, layer_gradients = _outputs_and_gradients(model, inputs)
        draws = random_state() != before
    if lacking := [name for name in layer_gradients if name not in learned]:
        _refuse(
            f"the program of {type(model).__name__} gives no gradient to {lacking[0]}: take a loop out of its forward"
        )
    if draws:
        return  # the two may draw differently
    for left, right in zip(program, layers, strict=True):
        largest = float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
        if not np.allclose(left, right, rtol=1e-2, atol=1e-2 * largest, equal_nan=True):
            _refuse(
                f"the program of {type(model).__name__}, called a second time, has other outputs than its layers: a "
                "number that Python computes in the forward, such as a count of calls, stays as it was traced"
            )


def _outputs_and_gradients(model: nn.Layer, inputs: Any) -> tuple[list[Any], list[str]]:
    """Float outputs of the training model, and the names of parameters that get a gradient from them."""
    outputs = call(model, inputs, plain_forward(model))
    tensors = [
        t for t in paddle.utils.flatten(outputs) if isinstance(t, paddle.Tensor) and t.is_floating_point()
    ]
    if learning := [t.astype("float32").square().sum() for t in tensors if not t.stop_gradient]:
        paddle.add_n(learning).backward()
    named = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for parameter in model.parameters():
        parameter.clear_gradient(False)
    return [t.detach().astype("float32").numpy() for t in tensors], named


class Program:
    """A model's forward: a program while gradients are recorded, layer by layer otherwise.

    Paddle 3.3.1 traces once for both: after a first call without gradients a program never gives any. A trace, one per
    shape, clears the gradients of earlier micro-batches: they are restored.
    """

    def __init__(self, plain: Callable[..., Any]):
        self.plain = plain
        self._traced: Callable[..., Any] | None = None  # a copy of a model calls this before it has layers
        self._shapes: set[Any] = set()  # traced ones

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not paddle.is_grad_enabled():
            return self.plain(*inputs, **named)
        if self._traced is None:
            self._traced = paddle.jit.to_static(self.plain, full_graph=True)
        tensors = [x for x in leaves((inputs, named)) if isinstance(x, paddle.Tensor)]
        shapes = tuple((*x.shape, x.dtype) for x in tensors)
        if shapes in self._shapes:
            return self._traced(*inputs, **named)
        self._shapes.add(shapes)
        model = getattr(self.plain, "__self__", None)
        parameters = model.parameters() if isinstance(model, nn.Layer) else []
        gradients_before = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
        outputs = self._traced(*inputs, **named)
        for parameter, gradient in gradients_before:
            parameter.grad = gradient
        return outputs

    def __deepcopy__(self, copies: dict[int, Any]) -> Program:
        return Program(copy.deepcopy(self.plain, copies))

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self.plain,)


def plain_forward(model: nn.Layer) -> Callable[..., Any]:
    """The model's original forward; its signature names the inputs."""
    forward: Callable[..., Any] = model.forward
    return forward.plain if isinstance(forward, Program) else forward


def is_compiled(model: nn.Layer) -> bool:
    return isinstance(model.forward, Program)


@contextmanager
def layer_by_layer(model: nn.Layer) -> Iterator[None]:
    """Within the block, the forward of a compiled model calls its layers one after another, with their hooks."""
    program = model.forward
    if not isinstance(program, Program):
        yield
        return
    model.forward = program.plain
    try:
        yield
    finally:
        model.forward = program
