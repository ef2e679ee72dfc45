"""ZeRO-3: a parameter is stored on its owner only, and gathered around its layer's forward and backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import paddle
from paddle import nn

from paddle_dp.axes.sharding.prefetch_trace import FetchList, PrefetchTrace, TraceRecorder
from paddle_dp.core.data_group import Group
from paddle_dp.tensors import nbytes

MAX_BACKOFF = 64  # most passes for which an order that was left is not offered again


class ParamProvider(Protocol):
    """Moves parameters from their owners, and gradients to them, by index."""

    strict: bool  # whether all ranks must follow one order; one that leaves it then serves the others to their end

    def begin(self, order: PrefetchTrace | None, need: FetchList) -> bool:
        """Called at the first event of a pass. True if the recorded order will be followed. Otherwise, if `strict`, the
        parameters of the first `need` have been requested."""
        ...

    def ask(self, indices: FetchList) -> None:
        """Requests these parameters in the recorded order."""
        ...

    def fetch(self, indices: FetchList) -> None:
        """Requests these parameters outside the order."""
        ...

    def take(self, index: int) -> paddle.Tensor:
        """Waits for the values of a requested parameter."""
        ...

    def gradient(self, index: int, follows: bool) -> None:
        """Sends a gradient that backward has computed; `follows`: within the order."""
        ...

    def abandon(self, order: PrefetchTrace, requested: int, gradients: int, midway: bool) -> None:
        """Leaves the order, of which this rank has `requested` so many needs and sent so many gradients."""
        ...

    def finish(self) -> None:
        """Ends a pass: gradients are at their owners, and no rank needs anything more. Collective."""
        ...

    def meet(self) -> None:
        """Called before a layer exchanges with all ranks, if `strict`: as `finish`, but the pass does not end.
        Collective."""
        ...


@dataclass
class _Backward:
    """The backward of one call of a layer, which reads the `frozen` parameters until all gradients in `waits_for` are
    computed.

    `waits_for`: gradients of inputs (by their id(), negative) and of the layer's trained parameters (by index). If some
    are never computed, the parameters stay until the pass ends.
    """

    frozen: list[int]
    waits_for: set[int]
    begun: bool = False


def _is_list(layer: nn.Layer) -> bool:
    """Whether a layer has no forward, like a ParameterList."""
    forward = getattr(layer.forward, "__func__", None)
    return forward is nn.Layer.forward and type(layer).__call__ is nn.Layer.__call__


def parameters_by_layer(model: nn.Layer) -> Iterator[tuple[nn.Layer, list[paddle.Tensor]]]:
    """Each layer with the parameters that its forward reads itself: directly in it, or in a list in it. Without values
    a bias counts as none in F.linear, silently; a matrix of another layer is an error, and stays with that layer."""
    layers = [layer for layer in model.sublayers(include_self=True) if not _is_list(layer)]
    direct = [layer.parameters(include_sublayers=False) for layer in layers]
    lent = {id(parameter) for parameters in direct for parameter in parameters}
    for layer, parameters in zip(layers, direct, strict=True):
        listed = [p for p in _in_lists(layer) if id(p) not in lent or len(p.shape) == 1]
        yield layer, [*{id(p): p for p in (*parameters, *listed)}.values()]


def _in_lists(layer: nn.Layer) -> Iterator[paddle.Tensor]:
    for child in layer.children():
        if _is_list(child):
            yield from child.parameters(include_sublayers=False)
            yield from _in_lists(child)


def _learning(data: Any) -> list[paddle.Tensor]:
    """The tensors in a structure that need gradients."""
    return [x for x in paddle.utils.flatten(data) if isinstance(x, paddle.Tensor) and not x.stop_gradient]


class Stage3:
    """Frees every parameter that another rank owns, and gathers it around its layer's forward and backward.

    A parameter is released after the forward of the last layer that uses it, and again after its gradient is computed;
    a frozen one, when its layers' backwards are done (`_Backward`). Autograd keeps a reference to the parameter, not to
    its values, so it reads the values gathered before the backward. (`_clear_data` and `_share_buffer_to` are private
    to Paddle; fleet's GroupShardedStage3 uses them in the same way.)

    A *pass* lasts until `finish`. Its needs are recorded in order; the next pass that begins in the same way follows
    that order: with a layer's needs it requests the next `prefetch` chunks (`PrefetchTrace`) and retains parameters
    that they need. A pass that leaves its order fetches parameters on demand and records a new order. `most` is the
    peak bytes of other ranks' parameters, gathered or in flight. Parameters are named by their index in `parameters`;
    `owners` are ranks of the group.
    """

    def __init__(
        self,
        model: nn.Layer,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        group: Group,
        provider: ParamProvider,
        prefetch: int = 1,
    ):
        self._model, self._parameters, self._provider, self._prefetch = model, parameters, provider, prefetch
        self._is_local = [owner == group.rank for owner in owners]
        self._sizes = [nbytes(parameter) for parameter in parameters]
        self._loads = [
            [size if rank == owner else 0 for rank in range(group.nranks)]
            for size, owner in zip(self._sizes, owners, strict=True)
        ]
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        # Gathered for running layers; includes owned ones, so that ranks record the same needs.
        self._here: set[int] = set()
        self._users: Counter[int] = Counter()
        self._retained: set[int] = set()  # not in use, but needed again soon
        self._on_way: Counter[int] = Counter()
        self._bytes = self.most = 0
        self._orders: dict[Any, PrefetchTrace] = {}
        # After an order was left: passes still to run without it, and the length of the backoff.
        self._backoff: dict[Any, tuple[int, int]] = {}
        self._diary = TraceRecorder()
        self.sends = True  # whether computed gradients go to their owners
        self._begun = self._followed = False
        self._key: Any = None
        self._order: PrefetchTrace | None = None  # the followed order
        self._at = self._requested = 0  # the next need in it, and the first that is not requested
        # By the index of a parameter: backwards that wait for its gradient.
        self._backwards: defaultdict[int, list[_Backward]] = defaultdict(list)
        self._hooks: list[Any] = []  # on inputs that may outlive a pass
        self._since: dict[int, int] = {}  # by index: the order's need for which it was gathered
        for layer, gathered in parameters_by_layer(model):
            indices = [self._index_of[id(p)] for p in gathered if id(p) in self._index_of]
            if indices:
                self._hook(layer, indices)
        for index, parameter in enumerate(parameters):
            if not self._is_local[index]:
                parameter._clear_data()
            if not parameter.stop_gradient:
                parameter._register_backward_hook(partial(self._after_gradient, index))

    def _hook(self, layer: nn.Layer, indices: list[int]) -> None:
        hook = layer.register_forward_pre_hook(partial(self._before, indices))
        # Before all other hooks: emulated low precision reads the weights in its hooks.
        layer._forward_pre_hooks.move_to_end(hook._hook_id, last=False)
        layer.register_forward_post_hook(partial(self._after, indices), with_kwargs=True)

    def _before(self, indices: list[int], *_: Any) -> None:
        self._users.update(indices)
        self._gather(indices)

    def _after(self, indices: list[int], layer: nn.Layer, inputs: Any, named: Any, outputs: Any) -> None:
        self._leave_layer(indices)
        learning = _learning(outputs)
        if not learning:
            return
        backward = self._backward_of(indices, _learning((inputs, named)))
        for output in learning:
            output.register_hook(partial(self._backward, indices, backward))

    def _leave_layer(self, indices: Iterable[int]) -> None:
        """Ends a layer's use of these parameters."""
        for index in indices:
            self._users[index] -= 1
            if not self._users[index]:
                self._release(index)

    def _backward_of(self, indices: list[int], inputs: list[paddle.Tensor]) -> _Backward | None:
        """The backward that ends with the gradients of these inputs and of the layer's parameters; None if none is
        frozen."""
        frozen = [index for index in indices if self._parameters[index].stop_gradient]
        if not frozen:
            return None
        trained = set(indices) - set(frozen)
        backward = _Backward(frozen, trained | {-id(x) for x in inputs})
        for index in trained:
            self._backwards[index].append(backward)
        for x in {id(x): x for x in inputs}.values():
            hook = x.register_hook(partial(self._ends, backward, -id(x)))
            if x.is_leaf:
                self._hooks.append(hook)
        return backward

    def _backward(self, indices: list[int], backward: _Backward | None, gradient: paddle.Tensor) -> None:
        """Runs when the gradient of a layer's output is computed, before the layer's backward."""
        if backward is not None and not backward.begun:
            backward.begun = True
            self._users.update(backward.frozen)
        self._gather(indices)

    def _ends(self, backward: _Backward, event: int, *_: Any) -> None:
        """Runs when a gradient that `backward` waits for is computed."""
        backward.waits_for.discard(event)
        if backward.begun and not backward.waits_for:
            backward.begun = False
            self._leave_layer(backward.frozen)

    def _gather(self, indices: list[int]) -> None:
        need = tuple(index for index in indices if index not in self._here)
        if not need:
            return
        self._here.update(need)
        requested = self._begin(need, ())
        self._diary.need(need)
        if self._order is not None and not self._goes_on(self._order, need):
            self._leave(midway=True)
        if self._order is None and not requested:
            self._fetch(need)
        for index in need:
            if not self._is_local[index]:
                self._fill(index)

    def _begin(self, need: FetchList, gradient: FetchList) -> bool:
        """At the first event of a pass, chooses the order of the last pass that began with it. True if the need has
        been requested: a second request would be a round that an owner enters alone."""
        if self._begun:
            return False
        self._begun, self._followed = True, False
        self._diary, self._at, self._requested = TraceRecorder(), 0, 0
        self._since.clear()
        self._key = need, gradient, paddle.is_grad_enabled(), self._model.training
        order = self._orders.get(self._key)
        rest, _ = self._backoff.get(self._key, (0, 0))
        if rest:
            self._backoff[self._key] = rest - 1, self._backoff[self._key][1]
            order = None
        if self._provider.begin(order, need):
            self._order, self._followed = order, True
            return False
        if self._provider.strict:
            self._note_on_way(need)
        return self._provider.strict

    def _goes_on(self, order: PrefetchTrace, need: FetchList) -> bool:
        """Requests the parameters of this need in the order, and of the chunks after it; False if the order has another
        need."""
        at = self._at
        if not self._provider.strict:  # a layer may have been skipped
            while at < len(order.needs) and order.needs[at] != need:
                at += 1
        if at >= len(order.needs) or order.needs[at] != need:
            return False
        self._followed &= at == self._at
        self._at = at + 1
        self._requested = max(self._requested, at)
        while self._requested < order.until(at, self._prefetch):
            chunk = list(order.chunk(self._requested))
            travel = tuple(index for number in chunk for index in order.travels[number])
            if travel:
                self._provider.ask(travel)
            self._note_on_way(travel)
            self._requested = chunk[-1] + 1
        for index in need:
            self._since[index] = at
        if self._provider.strict:
            return True
        self._fetch(need)  # parameters that this rank did not retain, since it skipped a need
        return True

    def _fetch(self, need: FetchList) -> None:
        lacking = tuple(index for index in need if index not in self._retained and not self._on_way[index])
        if lacking:
            self._provider.fetch(lacking)
            self._note_on_way(lacking)

    def _note_on_way(self, indices: FetchList) -> None:
        remote = [index for index in indices if not self._is_local[index]]
        self._on_way.update(remote)
        self._count(sum(self._sizes[index] for index in remote))

    def _count(self, added: int) -> None:
        self._bytes += added
        self.most = max(self.most, self._bytes)

    def _fill(self, index: int) -> None:
        """Gives a parameter its values: the retained ones, or those in flight."""
        if index in self._retained:
            self._retained.discard(index)
            return
        self._on_way[index] -= 1
        self._provider.take(index)._share_buffer_to(self._parameters[index])

    def _release(self, index: int) -> None:
        """Frees a parameter after its use, unless the order needs it again soon. Does nothing if it is freed
        already."""
        if index not in self._here:
            return
        self._here.discard(index)
        self._diary.release(index)
        if self._is_local[index]:
            return
        if self._order is not None and (self._since.get(index, -1), index) in self._order.retained:
            self._retained.add(index)
        else:
            self._free(index)

    def _free(self, index: int) -> None:
        self._parameters[index]._clear_data()
        self._count(-self._sizes[index])

    def _after_gradient(self, index: int, *_: Any) -> None:
        """Sends a computed gradient to its owner."""
        for backward in [candidate for candidate in self._backwards[index] if candidate.begun]:
            self._backwards[index].remove(backward)
            self._ends(backward, index)
        if not self.sends or self._parameters[index].grad is None:
            return
        self._begin((), (index,))
        order, number = self._order, len(self._diary.gradients)
        self._diary.gradient(index)
        if order is not None and self._provider.strict and order.gradients[number : number + 1] != (index,):
            self._diary.gradients.pop()
            self._leave(midway=True)
            self._diary.gradient(index)
        self._provider.gradient(index, follows=self._order is not None)
        self._release(index)

    def _leave(self, midway: bool) -> None:
        """Leaves the order until the pass ends and, where that delays the others, for some further passes."""
        order, self._order, self._followed = self._order, None, False
        if order is None:
            return
        if self._provider.strict:
            rest = min(2 * self._backoff.get(self._key, (0, 0))[1] or 1, MAX_BACKOFF)
            self._backoff[self._key] = rest, rest
        self._provider.abandon(order, self._requested, len(self._diary.gradients), midway)

    def meet(self, *_: Any) -> None:
        """Called before a layer exchanges with all ranks: ends the pass if all must follow one order. Collective."""
        if self._provider.strict:
            self._end()
            self._provider.meet()

    def finish(self) -> None:
        """Called after an update's backwards, or a forward without one: sends gradients to their owners, and frees all
        gathered parameters. Collective, whichever layers each rank ran."""
        self._end()
        for index, count in self._on_way.items():
            for _ in range(count):
                self._provider.take(index)
                self._count(-self._sizes[index])
        self._on_way.clear()
        self._provider.finish()
        for index in [*self._here, *self._retained]:
            if not self._is_local[index]:
                self._free(index)
        self._here.clear()
        self._retained.clear()
        self._users.clear()
        self._backwards.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _end(self) -> None:
        """Ends a pass and records its order if it is new."""
        if not self._begun:
            return
        order, diary = self._order, self._diary
        if order is not None and (self._at, len(diary.gradients)) != (len(order.needs), len(order.gradients)):
            self._leave(midway=False)
        if not self._followed:
            self._orders[self._key] = diary.order(self._loads, self._prefetch)
        self._order, self._begun = None, False
