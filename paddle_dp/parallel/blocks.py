"""A model's ordered blocks: what a pipeline deals out, recompute computes again, and sequence shards begin behind.

Three kinds of models have them:

| a model                                   | its blocks                                                        |
|-------------------------------------------|-------------------------------------------------------------------|
| with `blocks`, a list of layers           | those layers                                                      |
| with a table: `blocks = ("stem.*", …)`, or| the layers that the names mean *now*, after others have replaced  |
| annotated by a recipe (part/annotation)   | some of them; a tuple is several that stay together               |
| `nn.Sequential`                           | its children                                                      |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.precision.amp import cast, default_dtype, read_by
from paddle_dp.part.annotation import matching

CLOSE = 1e-5  # of the largest output: the same operations in the same order give the same bits on a CPU


class Function(nn.Layer):
    """A function as a block."""

    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Group(nn.Sequential):
    """Layers of a model, and functions between them, that stay together as one block."""


def blocks_of(model: nn.Layer) -> list[nn.Layer]:
    """The ordered blocks of a model; none where it does not say what they are.

    Groups and functions of a table are layers made here, new ones with every call until `settle`. A layer that is a
    block more than once is each time in a group of its own, so that no two blocks are one object.
    """
    settled: tuple[nn.Layer, ...] | None = getattr(model, "settled_blocks", None)
    if settled is not None:
        return list(settled)
    named = dict(model.named_sublayers(remove_duplicate=False))
    blocks = [block for entry in _said(model) for block in _entry(entry, named)]
    times = Counter(map(id, blocks))
    return [block if times[id(block)] == 1 else Group(block) for block in blocks]


def _said(model: nn.Layer) -> list[Any]:
    """The entries of a model's list or table; a number of blocks, say, is neither."""
    said = getattr(model, "annotated_blocks", None) or getattr(model, "blocks", None)
    if said is None and _is_sequence(model):
        said = model
    if isinstance(said, nn.Layer):
        return list(said._sub_layers.values())  # `children` leaves out a layer's second use
    return list(said) if isinstance(said, (list, tuple)) else []


def _is_sequence(model: nn.Layer) -> bool:
    return type(model).forward is nn.Sequential.forward


def _entry(entry: Any, named: dict[str, nn.Layer]) -> list[nn.Layer]:
    if isinstance(entry, str):
        return [named[name] for name in matching(entry, named)]
    if isinstance(entry, tuple):
        return [Group(*(layer for each in entry for layer in _entry(each, named)))]
    return [entry if isinstance(entry, nn.Layer) else Function(entry)]


def tabled(model: nn.Layer) -> bool:
    """Whether the blocks are a table of names, so that forward may know nothing of groups and functions in it."""
    return any(not isinstance(entry, nn.Layer) for entry in _said(model))


def settle(model: nn.Layer) -> list[nn.Layer]:
    """The blocks, the same ones from now on; where they were a table, forward is their chain, and runs no other layer.

    Call it when no layer will be replaced any more, and before the forward of a block is changed.
    """
    if not hasattr(model, "settled_blocks"):
        blocks = blocks_of(model)
        if tabled(model) or any(isinstance(block, Group) for block in blocks):
            model.forward = lambda inputs: chain(blocks, inputs)
        model.settled_blocks = tuple(blocks)
    return blocks_of(model)


def chain(blocks: Iterable[nn.Layer], inputs: Any) -> Any:
    """One block after another, each given what the one before it gave."""
    for block in blocks:
        inputs = block(inputs)
    return inputs


def elements_of(model: nn.Layer) -> list[tuple[int, nn.Layer]]:
    """The layers that a whole model runs for each of its blocks, with the number of the block: the block itself, or
    what it is made of, while forward knows nothing of it."""
    settled = hasattr(model, "settled_blocks")
    return [
        (number, layer)
        for number, block in enumerate(blocks_of(model))
        for layer in (block._sub_layers.values() if isinstance(block, Group) and not settled else [block])
    ]


def sizes_of(blocks: Iterable[nn.Layer]) -> tuple[int, ...]:
    """How many numbers the parameters of each block hold: what `partition: parameters` deals by."""
    return tuple(sum(int(p.size) for p in block.parameters()) for block in blocks)


def learns_of(blocks: Iterable[nn.Layer]) -> tuple[int, ...]:
    """How many parameters of each block learn."""
    return tuple(sum(not p.stop_gradient for p in block.parameters()) for block in blocks)


def outside(model: nn.Layer, blocks: Sequence[nn.Layer]) -> list[str]:
    """The names of parameters and buffers that are in none of the blocks, sorted."""
    inside = {id(tensor) for block in blocks for tensor in block.state_dict().values()}
    return sorted(name for name, tensor in model.state_dict().items() if id(tensor) not in inside)


def check_chain(model: nn.Layer, samples: Callable[[], Any] | None, word: str) -> None:
    """Raises UsageError unless the model's forward is its blocks one after another: compared on a few samples.

    Both in evaluation and in training, with the same random numbers, so that a dropout between two blocks is noticed.
    `samples()` gives a batch of inputs; `word` is the setting that wants a chain. The model is left as it was.
    """
    if samples is None or (_is_sequence(model) and not hasattr(model, "annotated_blocks")):
        return
    blocks, dtype = blocks_of(model), read_by(model)
    inputs = cast(samples(), dtype)
    layers = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    running = [*statistics(model).values(), *model.buffers()]
    with paddle.no_grad(), default_dtype(dtype):
        kept = [(tensor, tensor.clone()) for tensor in running if tensor._is_initialized()]
        state, hooks = paddle.get_rng_state(), _check_draws(model, blocks, word)
        try:
            for training in (False, True):
                for layer in [layer for layer, _ in layers] + blocks:
                    layer.training = training
                own = _outputs(model, inputs)
                paddle.set_rng_state(state)
                found = _chained(model, blocks, inputs, word)
                paddle.set_rng_state(state)
                _compare(model, own, found, "in training" if training else "in evaluation", word)
        finally:
            for hook in hooks:
                hook.remove()
            for tensor, value in kept:
                tensor.set_value(value)
            for layer, training in layers:
                layer.training = training


def check_table(model: nn.Layer, samples: Callable[[], Any] | None, word: str) -> None:
    """`check_chain` where the blocks are a table: the blocks of a list are run by the model's own forward."""
    if tabled(model):
        check_chain(model, samples, word)


def _outputs(model: Callable[[Any], Any], inputs: Any) -> list[paddle.Tensor]:
    return [x for x in paddle.utils.flatten(model(inputs)) if isinstance(x, paddle.Tensor)]


def _check_draws(model: nn.Layer, blocks: Iterable[nn.Layer], word: str) -> list[Any]:
    """Hooks by which a layer that is not the model's own, and draws random numbers, is refused.

    One process runs it inside forward, where it has no number of its own, so that its masks would be others there.
    """
    own = set(map(id, model.sublayers(include_self=True)))
    foreign = [
        layer
        for block in blocks
        for layer in block.sublayers(include_self=True)
        if id(layer) not in own and not isinstance(layer, Group)
    ]
    states: list[Any] = []

    def before(layer: nn.Layer, inputs: Any) -> None:
        states.append(_drawn())

    def after(layer: nn.Layer, inputs: Any, outputs: Any) -> None:
        if states.pop() != _drawn():
            function = getattr(layer, "function", layer)
            raise UsageError(
                f"{word}: {getattr(function, 'func', function)!r} among the blocks of {type(model).__name__} draws "
                "random numbers, which would be others on another number of ranks. Make it a layer of the model."
            )

    return [
        hook
        for layer in foreign
        for hook in (layer.register_forward_pre_hook(before), layer.register_forward_post_hook(after))
    ]


def _drawn() -> list[Any]:
    return [state.__getstate__() for state in paddle.get_rng_state()]


def _chained(model: nn.Layer, blocks: list[nn.Layer], inputs: Any, word: str) -> list[paddle.Tensor]:
    number = 0
    try:
        for number, block in enumerate(blocks):  # noqa: B007 - which one failed
            inputs = block(inputs)
    except UsageError:
        raise
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        raise _refused(
            model, f"block {number} cannot take what the one before it gives ({said})", word
        ) from error
    return [x for x in paddle.utils.flatten(inputs) if isinstance(x, paddle.Tensor)]


def _compare(
    model: nn.Layer, own: list[paddle.Tensor], found: list[paddle.Tensor], when: str, word: str
) -> None:
    shapes = [[list(x.shape) for x in each] for each in (own, found)]
    if shapes[0] != shapes[1]:
        raise _refused(model, f"{when} it gives {shapes[0]}, and they give {shapes[1]}", word)
    for a, b in zip(own, found, strict=True):
        if a.is_floating_point() or a.is_complex():
            apart, largest = float((a - b).abs().max().item()), float(a.abs().max().item())
        else:
            apart, largest = float((a != b).astype("float32").max().item()), 1.0
        if not math.isnan(largest) and not apart <= CLOSE * largest:
            said = f"{when} their outputs are up to {apart:.2g} apart, and the largest is {largest:.2g}"
            raise _refused(model, said, word)


def _refused(model: nn.Layer, why: str, word: str) -> UsageError:
    return UsageError(
        f"{word}: the forward of {type(model).__name__} is not its blocks one after another: {why}. Put what forward "
        f"does beside them into blocks (docs/add-a-part.md), or leave {word} out."
    )
