"""Initial weights of a model that no process holds whole: the bits of one process, drawn one parameter at a time.

A model is built without memory for its weights (`without_memory`), cut, and distributed to stages and owners, all by
shapes. Then `InitialWeights.draw` runs the initializers in the order of one process, from the same state of Paddle's
generator, and keeps this rank's share: it needs memory for that, and for one parameter.

A model must be built whole if its constructor reads or sets a weight, draws random numbers itself, copies a parameter,
or has an initializer that is not Paddle's: it might not get one process's bits.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase as Parameter
from paddle.utils import unique_name

from paddle_dp.batch import call
from paddle_dp.core.blocks import elements_of
from paddle_dp.core.extra_forwards import extra_forwards, random_state
from paddle_dp.core.placement import Shard
from paddle_dp.core.precision import cast, default_dtype, read_by
from paddle_dp.errors import PaddleDPError

Initializer = Callable[[Any, Any], Any]

# Attributes that may be read from a parameter without values.
_DESCRIBES = {
    "shape", "ndim", "size", "dtype", "name", "type", "persistable", "stop_gradient", "trainable", "need_clip",
    "optimize_attr", "regularizer", "do_model_average", "is_distributed", "is_dist", "element_size", "is_leaf",
    "is_floating_point", "is_complex", "grad", "set_init_func", "initialize", "__class__", "__dict__", "__hash__",
    "_is_initialized", "_init_func", "_init_op_creator",
}  # fmt: skip
_CONSTANT = nn.initializer.Constant
_RANDOM = (
    nn.initializer.Normal, nn.initializer.TruncatedNormal, nn.initializer.Uniform, nn.initializer.XavierNormal,
    nn.initializer.XavierUniform, nn.initializer.KaimingNormal, nn.initializer.KaimingUniform,
)  # fmt: skip
_PATTERN = 65537


class _ReadError(Exception):
    """A constructor read values of a parameter that has none yet."""


@dataclass(frozen=True)
class Draw:
    """One call of an initializer; a parameter may have several, of which the last one counts.

    `dtype`: in which the values are drawn; the parameter may have been cast since.
    """

    parameter: Any
    initializer: Initializer
    dtype: Any

    @property
    def takes_numbers(self) -> bool:
        return not isinstance(_owner(self.initializer), _CONSTANT)

    def run(self) -> None:
        full = self.parameter
        if full.dtype == self.dtype:
            self.initializer(full, None)
            return
        drawn = Parameter(full.shape, self.dtype, name=full.name)
        self.initializer(drawn, None)
        drawn.astype(full.dtype)._share_underline_tensor_to(full)


class InitialWeights:
    """The initial values of weights without memory; useless after they are drawn."""

    def __init__(self, draws: Iterable[Draw], state: list[Any]):
        self.draws, self._state = list(draws), state
        self._slices: dict[int, list[tuple[paddle.Tensor, Shard]]] = defaultdict(list)
        self._full_of: dict[int, tuple[paddle.Tensor, Shard]] = {}
        self._draw_of = {id(draw.parameter): number for number, draw in enumerate(self.draws)}
        self._patterns: dict[str, paddle.Tensor] = {}  # some values of large parameters, for trials

    def has(self, parameter: paddle.Tensor) -> bool:
        """Whether this object has the values of this (unsharded) parameter."""
        return id(parameter) in self._draw_of

    def cut(self, sliced: paddle.Tensor, full: paddle.Tensor, shard: Shard) -> None:
        """Registers `sliced`, which has no memory yet, as a slice of an unsharded parameter."""
        self._slices[id(full)].append((sliced, shard))
        self._full_of[id(sliced)] = full, shard

    @paddle.no_grad()
    def draw(self, keep: Iterable[paddle.Tensor]) -> None:
        """Gives the parameters `keep`, and slices, their values; all others stay without memory. Restores Paddle's
        generators."""
        keep_ids = {id(parameter) for parameter in keep}
        uses = [self._is_needed(draw.parameter, keep_ids) for draw in self.draws]
        last = max((number for number, used in enumerate(uses) if used), default=-1)
        state = paddle.get_rng_state()
        paddle.set_rng_state(self._state)
        try:
            for draw, used in zip(self.draws[: last + 1], uses, strict=False):
                # Draws that this rank does not need still advance the generator.
                if used or draw.takes_numbers:
                    draw.run()
                    self._deal(draw.parameter, keep_ids)
        finally:
            paddle.set_rng_state(state)

    def draw_all(self) -> None:
        """Gives every parameter its values."""
        self.draw([draw.parameter for draw in self.draws])

    def _is_needed(self, full: paddle.Tensor, keep_ids: set[int]) -> bool:
        return id(full) in keep_ids or any(id(sliced) in keep_ids for sliced, _ in self._slices[id(full)])

    def _deal(self, full: paddle.Tensor, keep_ids: set[int]) -> None:
        for sliced, shard in self._slices[id(full)]:
            if id(sliced) in keep_ids:
                shard.cut(full)._share_underline_tensor_to(sliced)
        if id(full) not in keep_ids:
            full._clear_data()

    @paddle.no_grad()
    def materialize(self, parameter: paddle.Tensor) -> bool:
        """Gives a parameter, or a slice, trial values of its distribution, the same at every call and on every rank.
        Returns whether it had none."""
        full, shard = self._full_of.get(id(parameter), (parameter, None))
        if parameter._is_initialized() or not self.has(full):
            return False
        self._try_out(full)
        if shard is not None:
            shard.cut(full)._share_underline_tensor_to(parameter)
            full._clear_data()
        return True

    def _try_out(self, full: Any) -> None:
        """Fills a parameter. Large random ones repeat a drawn pattern of prime length, each from another offset:
        drawing takes ten times as long."""
        number = self._draw_of[id(full)]
        owner = _owner(self.draws[number].initializer)
        repeats = full.size > 16 * _PATTERN and isinstance(owner, _RANDOM)
        key = f"{type(owner)} {sorted(vars(owner).items())} {full.shape} {full.dtype}"
        if not repeats or key not in self._patterns:
            state = paddle.get_rng_state()
            paddle.seed(number)
            self.draws[number].run()
            paddle.set_rng_state(state)
            if repeats:
                self._patterns[key] = full.flatten()[:_PATTERN].clone()
        if repeats:
            start = number * 7919 % _PATTERN
            values = paddle.tile(self._patterns[key], [(start + full.size) // _PATTERN + 1])
            values[start : start + full.size].reshape(full.shape)._share_underline_tensor_to(full)


_pending: WeakKeyDictionary[nn.Layer, InitialWeights] = WeakKeyDictionary()  # by model without memory


def initial_weights(model: nn.Layer) -> InitialWeights | None:
    """The object that gives a model its initial values; None if it has them."""
    return _pending.get(model)


def draw(model: nn.Layer, keep: Iterable[paddle.Tensor] | None = None) -> None:
    """Gives a model's parameters, by default all of them, their initial values, unless it has them."""
    initial = _pending.pop(model, None)
    if initial is not None and keep is None:
        initial.draw_all()
    elif initial is not None and keep is not None:
        initial.draw(keep)


def without_memory(
    build: Callable[[], nn.Layer], finish: Callable[[nn.Layer], Any] = lambda model: model
) -> tuple[Any, str]:
    """Applies `finish` to the model without memory for its weights, to which `draw` gives one process's bits. Returns
    the result, or None and the reason why the model must be built whole; names and generators are then restored."""
    names = unique_name.switch()  # the generator of names, and the check against a name's second use
    unique_name.switch(*copy.deepcopy(names))
    host_states = np.random.get_state(), random.getstate()
    state = paddle.get_rng_state()
    draws: list[Draw] = []
    finished = None
    try:
        with _recorded(draws) as read:
            with paddle.LazyGuard():
                model = build()
            reason = _not_reproducible(model, draws)
            if not reason:
                _pending[model] = InitialWeights(draws, state)
                finished = finish(model)
        reason = read[0] if read else reason
    except PaddleDPError:
        raise
    except Exception as error:  # noqa: BLE001 - it can be built whole, or fails in the same way then
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    if not reason:
        return finished, ""
    unique_name.switch(*names)
    paddle.set_rng_state(state)
    np.random.set_state(host_states[0])
    random.setstate(host_states[1])
    return None, reason


def _not_reproducible(model: nn.Layer, draws: list[Draw]) -> str:
    """The reason why running the initializers in order would not give one process's values, or ""."""
    for draw in draws:
        if draw.parameter._is_initialized():
            return f"it sets the values of '{draw.parameter.name}' itself"
        owner = _owner(draw.initializer)
        if not type(owner).__module__.startswith("paddle."):
            return f"'{draw.parameter.name}' has a custom initializer, {type(owner).__name__}"
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:  # LazyGuard skips that (3.3.1)
            return f"{name} sets its padding row to zeros, where it has values"
    drawn = {id(draw.parameter) for draw in draws}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in drawn and not tensor._is_initialized():
            return f"{name} is a copy of a weight"
    return ""


def _owner(initializer: Initializer) -> Any:
    """The object to which a recorded initializer's method belongs."""
    method = getattr(initializer, "func", initializer)
    return getattr(method, "__self__", method)


def reads_weights(model: nn.Layer, make: Callable[[], Any]) -> bool:
    """Whether `make` reads values of a model that has none yet, or fails otherwise. Its result is dropped."""
    initial = _pending.get(model)
    if initial is None:
        return False
    try:
        with _recorded(initial.draws) as read:
            make()
    except Exception:  # noqa: BLE001 - it works with values, or fails in the same way then
        return True
    return bool(read)


class _Generator:
    """Paddle's generator while initializers are recorded. Each record moves it, as its draw would, to detect a
    constructor that draws, resets or reseeds it. `sentences`: receives a sentence about that."""

    def __init__(self, sentences: list[str]):
        self._initial_state, self._left, self._sentences = paddle.get_rng_state(), random_state(), sentences

    def move(self) -> None:
        self._look()
        paddle.rand([1], "float32")
        self._left = random_state()

    def restore(self) -> None:
        self._look()
        paddle.set_rng_state(self._initial_state)

    def _look(self) -> None:
        if random_state() != self._left:
            self._sentences.append("random numbers are drawn, or their generator is set, while it is built")


@contextmanager
def _recorded(draws: list[Draw]) -> Iterator[list[str]]:
    """Within the block, records LazyGuard's parameters with their initializers, and raises on reads of their values.
    Yields a list of the reads, for a constructor that continues after the error.

    Paddle itself raises for most operations, but for a few (detach, copy.deepcopy, numpy, `copy_` from such a
    parameter) it returns another tensor without memory, or does nothing.
    """
    original, set_attribute = Parameter.__getattribute__, Parameter.__setattr__
    copy_, set_init_func = paddle.Tensor.copy_, Parameter.set_init_func
    pending = {id(draw.parameter) for draw in draws}
    read: list[str] = []
    generator = _Generator(read)

    def refuse(parameter: Any, how: str) -> None:
        read.append(f"it reads '{original(parameter, 'name')}' ({how}) while it is built")
        raise _ReadError(read[-1])

    def attribute(parameter: Any, name: str) -> Any:
        if (
            name not in _DESCRIBES
            and id(parameter) in pending
            and not original(parameter, "_is_initialized")()
        ):
            refuse(parameter, name)
        return original(parameter, name)

    def copy_from(tensor: Any, source: Any, *more: Any, **named: Any) -> Any:
        if id(source) in pending and not original(source, "_is_initialized")():
            refuse(source, "copy_")
        return copy_(tensor, source, *more, **named)

    def assign(parameter: Any, name: str, value: Any) -> None:
        if name == "data" and id(value) in pending and not original(value, "_is_initialized")():
            refuse(value, name)
        set_attribute(parameter, name, value)

    def record(parameter: Any, initializer: Initializer) -> None:
        generator.move()
        draws.append(Draw(parameter, initializer, original(parameter, "dtype")))
        pending.add(id(parameter))
        set_init_func(parameter, initializer)

    Parameter.__getattribute__, paddle.Tensor.copy_, Parameter.set_init_func = attribute, copy_from, record
    Parameter.__setattr__ = assign
    try:
        yield read
    finally:
        del Parameter.__getattribute__
        Parameter.__setattr__ = set_attribute
        generator.restore()
        paddle.Tensor.copy_, Parameter.set_init_func = copy_, set_init_func


@contextmanager
def trial_weights(model: nn.Layer) -> Iterator[None]:
    """Within the block, the weights of each of the model's blocks have values while that block runs: some of their
    distribution, the same in each forward. Weights outside the blocks have values throughout.

    Does nothing for a model that has its initial values.
    """
    initial = initial_weights(model)
    if initial is None:
        yield
        return
    blocks = list({id(block): block for _, block in elements_of(model)}.values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    materialized: dict[int, list[paddle.Tensor]] = defaultdict(list)
    hooks: list[Any] = []

    def before(block: nn.Layer, inputs: Any) -> None:
        materialized[id(block)] += [p for p in block.parameters() if initial.materialize(p)]

    def after(block: nn.Layer, inputs: Any, outputs: Any) -> None:
        for parameter in materialized.pop(id(block), ()):
            parameter._clear_data()

    outside = [p for p in model.parameters() if id(p) not in inside and initial.materialize(p)]
    for block in blocks:
        hooks.append(block.register_forward_pre_hook(before))
        # Before all other hooks: some of them read weights.
        block._forward_pre_hooks.move_to_end(hooks[-1]._hook_id, last=False)
        hooks.append(block.register_forward_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in (*outside, *(p for parameters in materialized.values() for p in parameters)):
            parameter._clear_data()


def is_lendable(model: nn.Layer, samples: Callable[[], Any] | None) -> bool:
    """False if a model's forward reads a block's weights outside that block's forward, where `trial_weights` provides
    no values: such a model is whole on every rank until it is placed."""
    if initial_weights(model) is None or samples is None:
        return True
    try:
        dtype = read_by(model)
        with trial_weights(model), extra_forwards(model), default_dtype(dtype):
            call(model, cast(samples(), dtype), model.forward)
    except Exception:  # noqa: BLE001 - an error with another cause is raised again later
        return False
    return True


def check_lendable(model: nn.Layer, samples: Callable[[], Any] | None, lendable: bool | None = None) -> None:
    """Gives a model all its initial values if they cannot be lent to it; `lendable`: a trial's result."""
    if not (is_lendable(model, samples) if lendable is None else lendable):
        draw(model)
