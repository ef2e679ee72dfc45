"""A model's ordered blocks, the units of pipeline stages, of recompute and of sequence sharding.

| a model                                   | its blocks                                                        |
|-------------------------------------------|-------------------------------------------------------------------|
| with `blocks`, a list of layers           | those layers                                                      |
| with a table: `blocks = ("stem.*", …)`, or| the layers that have these names *now*, some of which may have    |
| annotated by a recipe (part/annotation)   | been replaced; a tuple is a group that stays together             |
| `nn.Sequential`                           | its children                                                      |
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import call
from paddle_dp.core.extra_forwards import extra_forwards, how_different, random_state
from paddle_dp.core.precision import cast, default_dtype, read_by
from paddle_dp.core.process_runner import ProcessRunner, in_this_process
from paddle_dp.errors import UsageError
from paddle_dp.part.annotation import block_table_of, matching

# Relative to the largest output. On a CPU the same operations in the same order give the same bits.
TOLERANCE = 1e-5
_settled: WeakKeyDictionary[nn.Layer, tuple[nn.Layer, ...]] = WeakKeyDictionary()  # the blocks of a model
_chains: WeakSet[nn.Layer] = WeakSet()  # models whose forward runs their blocks


class Function(nn.Layer):
    """A function as a block."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class BlockGroup(nn.Sequential):
    """Layers of a model, and functions between them, that form one block."""


class _Use(BlockGroup):
    """One of several uses of a layer among the blocks."""


def blocks_of(model: nn.Layer) -> list[nn.Layer]:
    """The ordered blocks of a model; none if it does not name them.

    Groups and functions of a table become new layers at every call until `settle`. A repeated layer is put into a new
    group each time, a use of it, so that no two blocks are the same object.
    """
    if model in _settled:
        return list(_settled[model])
    named = dict(model.named_sublayers(remove_duplicate=False))
    blocks = [block for entry in _entries(model) for block in _layers_of(entry, named)]
    uses = Counter(map(id, blocks))
    return [block if uses[id(block)] == 1 else _Use(block) for block in blocks]


def _entries(model: nn.Layer) -> list[Any]:
    """The entries of a model's list or table of blocks; an attribute `blocks` of another type is neither."""
    table = model if _is_its_children(model) else block_table_of(model)
    if isinstance(table, nn.Layer):
        return list(table._sub_layers.values())  # `children` omits a layer's second use
    return list(table) if isinstance(table, (list, tuple)) else []


def _is_its_children(model: nn.Layer) -> bool:
    """Whether the model is an nn.Sequential without annotation: the chain of its children."""
    return type(model).forward is nn.Sequential.forward and block_table_of(model) is None


def _layers_of(entry: Any, named: dict[str, nn.Layer]) -> list[nn.Layer]:
    if isinstance(entry, str):
        return [named[name] for name in matching(entry, named)]
    if isinstance(entry, tuple):
        return [BlockGroup(*(layer for each in entry for layer in _layers_of(each, named)))]
    return [entry if isinstance(entry, nn.Layer) else Function(entry)]


def is_table(model: nn.Layer) -> bool:
    """Whether the blocks are a table of names, groups and functions."""
    return any(not isinstance(entry, nn.Layer) for entry in _entries(model))


def has_groups(model: nn.Layer) -> bool:
    """Whether some blocks are groups or functions, which the model's own forward does not run: `settle` then makes
    forward the chain of the blocks. Where all are layers, forward runs them, and others between them."""
    return any(isinstance(used_layer(block), (BlockGroup, Function)) for block in blocks_of(model))


def used_layer(block: nn.Layer) -> nn.Layer:
    """The model's layer of which `block` is one of several uses; any other block itself."""
    return block[0] if isinstance(block, _Use) else block


def settle(model: nn.Layer, *, chain: bool = False) -> list[nn.Layer]:
    """Fixes and returns the blocks, and makes forward run them one after another if some are groups or functions.

    `chain`: also if all are layers, named in a table or several times. Between blocks there are slices of sequences
    then, for which forward's own code is not written. Call it after the last layer was replaced, and before a block's
    forward is changed.
    """
    if model not in _settled:
        _settled[model] = tuple(blocks_of(model))
    layers_only = not (is_table(model) or any(isinstance(block, _Use) for block in blocks_of(model)))
    if model not in _chains and (has_groups(model) or (chain and not layers_only)):
        model.forward = _as_chain(model, blocks_of(model))
        _chains.add(model)
    return blocks_of(model)


def _as_chain(model: nn.Layer, blocks: Sequence[nn.Layer]) -> Callable[..., Any]:
    """A forward that runs the blocks one after another, with the signature of the model's forward."""
    model_forward = model.forward

    @wraps(model_forward)
    def forward(*inputs: Any, **named: Any) -> Any:
        if named:
            arguments: Any = {**inspect.signature(model_forward).bind_partial(*inputs).arguments, **named}
        else:
            arguments = inputs[0] if len(inputs) == 1 else inputs
        first, *following = blocks
        outputs = call(first, arguments, first.forward)
        for block in following:
            outputs = block(outputs)
        return outputs

    return forward


def elements_of(model: nn.Layer) -> list[tuple[int, nn.Layer]]:
    """The layers that a whole model's forward runs for each of its blocks, with the block's number: the block itself
    or, for a group where forward is not the chain of the blocks, the layers in it."""
    runs_groups = model in _chains
    return [
        (number, layer)
        for number, block in enumerate(blocks_of(model))
        for layer in (
            block._sub_layers.values() if isinstance(block, BlockGroup) and not runs_groups else [block]
        )
    ]


def sizes_of(blocks: Iterable[nn.Layer]) -> tuple[int, ...]:
    """The number of parameter elements in each block, for `partition: parameters`."""
    return tuple(sum(int(p.size) for p in block.parameters()) for block in blocks)


def learns_of(blocks: Iterable[nn.Layer]) -> tuple[int, ...]:
    """The number of trainable parameters in each block."""
    return tuple(sum(not p.stop_gradient for p in block.parameters()) for block in blocks)


def outside(model: nn.Layer, blocks: Sequence[nn.Layer]) -> list[str]:
    """The names of parameters and buffers outside the blocks, sorted."""
    inside = {id(tensor) for block in blocks for tensor in block.state_dict().values()}
    return sorted(name for name, tensor in model.state_dict().items() if id(tensor) not in inside)


def check_chain(
    model: nn.Layer,
    samples: Callable[[], Any] | None,
    setting: str,
    run_trial: ProcessRunner = in_this_process,
) -> None:
    """Raises UsageError unless the model's forward equals its blocks one after another, compared on a few samples.

    It compares in evaluation and in training mode, each run by `run_trial` from the same state of blocks and
    generators, so that it finds a dropout between two blocks. `samples()` gives a batch of inputs; `setting` is the
    recipe's key that needs a chain.
    """
    if samples is None or _is_its_children(model):
        return
    blocks, inputs = blocks_of(model), cast(samples(), read_by(model))
    for training in (False, True):
        outputs, chained = (
            run_trial(partial(_outputs_of, model, blocks, inputs, setting, training, alone))["arrays"]
            for alone in (False, True)
        )
        _compare(model, outputs, chained, "in training" if training else "in evaluation", setting)


def _outputs_of(
    model: nn.Layer, blocks: list[nn.Layer], inputs: Any, setting: str, training: bool, alone: bool
) -> dict[str, Any]:
    """The outputs of the model's forward or, with `alone`, of its blocks one after another."""
    with extra_forwards(model, *blocks), default_dtype(read_by(model)):
        hooks = _refuse_draws(model, blocks, setting)
        try:
            for layer in [*model.sublayers(include_self=True), *blocks]:
                layer.training = training
            if alone:
                return {"arrays": _arrays(_run_chain(model, blocks, inputs, setting))}
            return {"arrays": _arrays(call(model, inputs, model.forward))}
        finally:
            for hook in hooks:
                hook.remove()


def _arrays(outputs: Any) -> list[np.ndarray]:
    """The tensors among a forward's outputs; NumPy has no bfloat16."""
    tensors = [x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor)]
    return [(x.astype("float32") if x.dtype == paddle.bfloat16 else x).numpy() for x in tensors]


def _refuse_draws(model: nn.Layer, blocks: Iterable[nn.Layer], setting: str) -> list[Any]:
    """Hooks that raise UsageError if a layer that the model does not contain draws random numbers.

    One process runs it without the block's number, so it would draw other masks than in a pipeline.
    """
    model_layers = set(map(id, model.sublayers(include_self=True)))
    foreign = [
        layer
        for block in blocks
        for layer in block.sublayers(include_self=True)
        if id(layer) not in model_layers and not isinstance(layer, BlockGroup)
    ]
    states: list[Any] = []

    def before(layer: nn.Layer, inputs: Any) -> None:
        states.append(random_state())

    def after(layer: nn.Layer, inputs: Any, outputs: Any) -> None:
        if states.pop() != random_state():
            function = layer.function if isinstance(layer, Function) else layer
            name = function.func if isinstance(function, partial) else function
            raise UsageError(
                f"{setting}: {name!r} among the blocks of {type(model).__name__} draws random numbers, which would "
                "differ on another number of ranks. Make it a layer of the model."
            )

    return [
        hook
        for layer in foreign
        for hook in (layer.register_forward_pre_hook(before), layer.register_forward_post_hook(after))
    ]


def _run_chain(model: nn.Layer, blocks: list[nn.Layer], inputs: Any, setting: str) -> Any:
    number = 0
    try:
        for number, block in enumerate(blocks):
            inputs = block(inputs) if number else call(block, inputs, block.forward)
    except UsageError:
        raise
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        why = f"block {number} fails on the output of the one before it ({first_line})"
        raise _no_chain(model, why, setting) from error
    return inputs


def _compare(
    model: nn.Layer, outputs: list[np.ndarray], chained: list[np.ndarray], mode: str, setting: str
) -> None:
    shapes = [[list(x.shape) for x in tensors] for tensors in (outputs, chained)]
    if shapes[0] != shapes[1]:
        raise _no_chain(model, f"{mode} it gives {shapes[0]}, and they give {shapes[1]}", setting)
    for a, b in zip(outputs, chained, strict=True):
        if how := how_different(a, b, TOLERANCE):
            raise _no_chain(model, f"{mode} their outputs {how}", setting)


def _no_chain(model: nn.Layer, why: str, setting: str) -> UsageError:
    remedy = f"Put all that forward does into the blocks (docs/add-a-part.md), or leave {setting} out."
    if setting == "strategy.recompute":
        remedy = f"Name layers alone, no lists and functions: they may be a part of it. {remedy}"
    return UsageError(
        f"{setting}: the forward of {type(model).__name__} is not its blocks one after another: {why}. {remedy}"
    )
