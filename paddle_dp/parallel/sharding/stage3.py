"""ZeRO-3: a parameter is stored on its owner only, and gathered around its layer's forward and backward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import paddle
from paddle import nn

from paddle_dp.parallel.exchange.memory import nbytes
from paddle_dp.parallel.hcg import Group
from paddle_dp.parallel.sharding.prefetch_trace import FetchList, PrefetchTrace, TraceRecorder

MAX_BACKOFF = 64  # passes in which an order that was left is not offered again, at most


class ParamProvider(Protocol):
    """How parameters come from their owners, and gradients go there, by place."""

    strict: bool  # whether all ranks must follow one order: then one that leaves it serves the others to their end

    def begin(self, order: PrefetchTrace | None, need: FetchList) -> bool:
        """At the first event of a pass: whether this rank follows its order. If not, and all ranks must, those of the
        `need` with which the pass begins are under way."""
        ...

    def ask(self, indices: FetchList) -> None:
        """Following the order: has these under way."""
        ...

    def fetch(self, indices: FetchList) -> None:
        """Outside of an order: has these under way."""
        ...

    def take(self, index: int) -> paddle.Tensor:
        """The values of a parameter that is under way; waits for them."""
        ...

    def gradient(self, index: int, follows: bool) -> None:
        """A gradient is there."""
        ...

    def abandon(self, order: PrefetchTrace, requested: int, gradients: int, midway: bool) -> None:
        """This rank goes on without the order, of which it has asked for so many needs and sent so many gradients."""
        ...

    def finish(self) -> None:
        """At the end of a pass: gradients are at their owners, and no rank needs anything more. Collective."""
        ...

    def meet(self) -> None:
        """Before a layer exchanges with all ranks, where `strict`: the same without an end. Collective."""
        ...


@dataclass
class _Backward:
    """The backward of one call of a layer, which reads these `frozen` parameters until it has computed what it still
    `waits_for`: gradients of inputs (by their id(), negative) and of trained parameters of the layer (by place).

    Where it does not compute all of them, the parameters stay until the pass ends.
    """

    frozen: list[int]
    waits_for: set[int]
    begun: bool = False


def _learning(data: Any) -> list[paddle.Tensor]:
    """The tensors in there that have gradients."""
    return [x for x in paddle.utils.flatten(data) if isinstance(x, paddle.Tensor) and not x.stop_gradient]


class Stage3:
    """Frees every parameter that another rank owns, and gathers it around its layer's forward and backward.

    A layer's forward, and again its backward, begin with what it needs. It is released after the forward of the last
    layer that uses it, and after its gradient is computed; a frozen one, when its layers' backwards are done
    (`_Backward`). Autograd keeps a reference to the parameter, not to its
    values, so it reads those that are gathered before the backward. (`_clear_data` and `_share_buffer_to` are private
    to Paddle; fleet's GroupShardedStage3 uses them in the same way.)

    A *pass* goes on until `finish`. What it needs, and when, is written down; the next pass that begins in the same way
    follows that order: with the needs of one layer those of `prefetch` chunks more are asked for (`PrefetchTrace`), and
    a parameter whose next need is within them is not given away. A pass that leaves its order fetches what it needs
    when it needs it, and writes a new one. `most` is the bytes of other ranks' parameters that were here or under way
    at once. Parameters are called by their place in `parameters`; `owners` are ranks of the group.
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
        # Gathered for layers at work; also own ones, so that ranks note the same needs.
        self._here: set[int] = set()
        self._users: Counter[int] = Counter()
        self._retained: set[int] = set()  # not at work, but to be needed again soon
        self._on_way: Counter[int] = Counter()
        self._bytes = self.most = 0
        self._orders: dict[Any, PrefetchTrace] = {}
        # After an order was left: passes without it, and those to come.
        self._backoff: dict[Any, tuple[int, int]] = {}
        self._diary = TraceRecorder()
        self.sends = True  # whether a gradient that is there goes to its owner
        self._begun = self._followed = False
        self._key: Any = None
        self._order: PrefetchTrace | None = None  # the one that is followed
        self._at = self._requested = 0  # the next need in it, and the first that is not asked for
        # By a place whose gradient ends them.
        self._backwards: defaultdict[int, list[_Backward]] = defaultdict(list)
        self._hooks: list[Any] = []  # on inputs that may outlive a pass
        self._since: dict[int, int] = {}  # by place: which of the order's needs it was gathered for
        for layer in model.sublayers(include_self=True):
            indices = [
                self._index_of[id(p)]
                for p in layer.parameters(include_sublayers=False)
                if id(p) in self._index_of
            ]
            if indices:
                self._hook(layer, indices)
        for index, parameter in enumerate(parameters):
            if not self._is_local[index]:
                parameter._clear_data()
            if not parameter.stop_gradient:
                parameter._register_backward_hook(partial(self._after_gradient, index))

    def _hook(self, layer: nn.Layer, indices: list[int]) -> None:
        hook = layer.register_forward_pre_hook(partial(self._before, indices))
        # Before all other hooks: those of emulated low precision read the weights.
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
        """When a layer does not use these any more."""
        for index in indices:
            self._users[index] -= 1
            if not self._users[index]:
                self._release(index)

    def _backward_of(self, indices: list[int], inputs: list[paddle.Tensor]) -> _Backward | None:
        """The backward that ends with the gradients of these inputs and of a layer's own parameters; None where none of
        those is frozen."""
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
        """Runs when the gradient of a layer's output is computed, before the layer's own gradients are."""
        if backward is not None and not backward.begun:
            backward.begun = True
            self._users.update(backward.frozen)
        self._gather(indices)

    def _ends(self, backward: _Backward, event: int, *_: Any) -> None:
        """When one of the gradients that a backward ends with is computed."""
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
        """At the first event of a pass: chooses the order of the last one that began with it. Returns whether the need
        was asked for: once more would be a round that an owner is in alone."""
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
        """Asks for what the order says at this need, and the chunks after it; False if it is another need."""
        at = self._at
        if not self._provider.strict:  # a layer may have been left out
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
        self._fetch(need)  # what this rank did not keep, because it came here by another way
        return True

    def _fetch(self, need: FetchList) -> None:
        lacking = tuple(index for index in need if index not in self._retained and not self._on_way[index])
        if lacking:
            self._provider.fetch(lacking)
            self._note_on_way(lacking)

    def _note_on_way(self, indices: FetchList) -> None:
        others = [index for index in indices if not self._is_local[index]]
        self._on_way.update(others)
        self._count(sum(self._sizes[index] for index in others))

    def _count(self, added: int) -> None:
        self._bytes += added
        self.most = max(self.most, self._bytes)

    def _fill(self, index: int) -> None:
        """Gives a parameter its values: those that have stayed, or those that come."""
        if index in self._retained:
            self._retained.discard(index)
            return
        self._on_way[index] -= 1
        self._provider.take(index)._share_buffer_to(self._parameters[index])

    def _release(self, index: int) -> None:
        """After a parameter's use: frees it, unless the order needs it again soon. Does nothing where it is freed."""
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
        """When backward has computed a gradient: it goes to its owner."""
        for backward in [one for one in self._backwards[index] if one.begun]:
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
        """Leaves the order, for the rest of the pass and, where that costs the others, for some passes more."""
        order, self._order, self._followed = self._order, None, False
        if order is None:
            return
        if self._provider.strict:
            rest = min(2 * self._backoff.get(self._key, (0, 0))[1] or 1, MAX_BACKOFF)
            self._backoff[self._key] = rest, rest
        self._provider.abandon(order, self._requested, len(self._diary.gradients), midway)

    def meet(self, *_: Any) -> None:
        """Before a layer exchanges with all ranks: where all must follow one order, a pass ends here. Collective."""
        if self._provider.strict:
            self._end()
            self._provider.meet()

    def finish(self) -> None:
        """After the backwards of an update, or a forward without one: gradients are at their owners, and everything
        gathered is freed. Collective, whatever layers each rank ran."""
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
        """Ends a pass: keeps the order that it had, if it was a new one."""
        if not self._begun:
            return
        order, diary = self._order, self._diary
        if order is not None and (self._at, len(diary.gradients)) != (len(order.needs), len(order.gradients)):
            self._leave(midway=False)
        if not self._followed:
            self._orders[self._key] = diary.order(self._loads, self._prefetch)
        self._order, self._begun = None, False
