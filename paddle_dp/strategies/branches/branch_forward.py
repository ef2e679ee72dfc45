"""The forward of a layer with branches, on one rank of their group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.strategies.branches.branch_exchange import BranchExchange, OutputSpecs
from paddle_dp.strategies.branches.branch_trace import BranchTrace, Chain, holder, in_order

Learned = Mapping[int, paddle.Tensor]  # inputs of a layer that have a gradient, by index


class CollectiveOrder:
    """Enforces one order of a model's joins on all ranks, in backward too.

    Ranks compute different branches, so backward could reach two independent joins in a different order on each rank,
    and mix up their collectives. Therefore each join depends on the previous one of the same forward through `token`, a
    meaningless number.
    """

    def __init__(self, model: nn.Layer):
        self.token: paddle.Tensor | None = None
        model.register_forward_pre_hook(self._begin)
        model.register_forward_post_hook(self._begin)

    def _begin(self, *_: Any) -> None:
        self.token = None

    def take(self) -> paddle.Tensor:
        """The token for the next join."""
        if self.token is None:
            self.token = paddle.zeros([1])
            self.token.stop_gradient = False
        return self.token


class _Fork(PyLayer):
    """The inputs of a layer with branches; backward sums their gradients over the ranks' branches."""

    @staticmethod
    def forward(ctx: Any, exchange: BranchExchange, token: paddle.Tensor, *inputs: paddle.Tensor) -> Any:
        ctx.wires = exchange
        return tuple(x.clone() for x in (token, *inputs))

    @staticmethod
    def backward(ctx: Any, token: paddle.Tensor, *grads: paddle.Tensor) -> Any:
        return (token, *(ctx.wires.sum(grad) for grad in grads))


class _Meet(PyLayer):
    """The outputs of all branches, on every rank. All ranks compute the same from here on, so each has the gradient of
    every output, and passes it on to its local branches."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Iterator[paddle.Tensor], local: Sequence[int], *tensors: paddle.Tensor
    ) -> Any:
        """`outputs` is an iterator because Paddle would take a list's tensors for inputs. `tensors`: the token, those
        outputs of the `local` branches that have a gradient, and this rank's anchors."""
        ctx.local, ctx.anchors = list(local), tensors[1 + len(local) :]
        return (tensors[0].clone(), *outputs)

    @staticmethod
    def backward(ctx: Any, token: paddle.Tensor, *grads: paddle.Tensor) -> Any:
        return (token, *(grads[branch] for branch in ctx.local), *(paddle.zeros_like(x) for x in ctx.anchors))


class _Replay(nn.Layer):
    """Stands for a chain's layer in the layer's forward: returns its input, or a branch's output."""

    def __init__(self, answers: Sequence[paddle.Tensor | None]):
        super().__init__()
        self._answers = deque(answers)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        answer = self._answers.popleft()
        return x if answer is None else answer


class BranchForward:
    """The forward of a layer with branches. Collective over the ranks of `exchange`.

    The same tensors have gradients on all ranks, even if a rank has no branch of the layer, or a frozen one.
    """

    def __init__(self, trace: BranchTrace, exchange: BranchExchange, turns: CollectiveOrder):
        self._trace, self._exchange, self._turns, self._forward = trace, exchange, turns, trace.layer.forward
        self._local = [
            branch for branch, owner in enumerate(trace.owners) if owner == exchange.ranks.group_rank
        ]
        self.forms = OutputSpecs(exchange.ranks, trace.name)
        self.__signature__ = signature(self._forward)  # a batch is passed as the layer's forward takes it

    def __call__(self, *positional: Any, **named: Any) -> Any:
        trace, inputs = self._trace, in_order(positional, named)
        learned: Learned = {}
        if paddle.is_grad_enabled():
            tensors = {position: x for position, x in enumerate(inputs) if isinstance(x, paddle.Tensor)}
            learned = self._forked({position: x for position, x in tensors.items() if not x.stop_gradient})
        local = {
            branch: self._run(
                trace.chains[branch], learned.get(trace.sources[branch], inputs[trace.sources[branch]])
            )
            for branch in self._local
        }
        return self._rest(positional, named, self._met(local, inputs, learned))

    def _forked(self, learned: Learned) -> Learned:
        if not learned:
            return {}
        self._turns.token, *forked = _Fork.apply(self._exchange, self._turns.take(), *learned.values())
        return dict(zip(learned, forked, strict=True))

    def _run(self, chain: Chain, x: paddle.Tensor) -> paddle.Tensor:
        for path in chain:
            parent, key = holder(self._trace.layer, path)
            x = parent._sub_layers[key](x)
        return x

    def _met(
        self, local: Mapping[int, paddle.Tensor], inputs: Sequence[Any], learned: Learned
    ) -> list[paddle.Tensor]:
        """Every branch's output."""
        forms = self.forms.gather(local, inputs, self._trace.layer.training)
        outputs = self._exchange.spread(local, forms, self._trace.owners)
        if not paddle.is_grad_enabled() or not any(form.learns for form in forms):
            return outputs
        learning = {branch: x for branch, x in local.items() if not x.stop_gradient}
        self._turns.token, *outputs = _Meet.apply(
            iter(outputs), list(learning), self._turns.take(), *learning.values(), *learned.values()
        )
        return [x if form.learns else x.detach() for x, form in zip(outputs, forms, strict=True)]

    def _rest(
        self, positional: Sequence[Any], named: Mapping[str, Any], results: Sequence[paddle.Tensor]
    ) -> Any:
        """Runs the layer's forward, with these results in place of its chains' outputs."""
        answers: dict[str, list[paddle.Tensor | None]] = {}
        for path, branch in self._trace.calls:
            answers.setdefault(path, []).append(None if branch is None else results[branch])
        before = []
        try:
            for path, results_of in answers.items():
                parent, key = holder(self._trace.layer, path)
                before.append((parent, key, parent._sub_layers[key]))
                parent._sub_layers[key] = _Replay(results_of)
            return self._forward(*positional, **named)
        finally:
            for parent, key, layer in before:
                parent._sub_layers[key] = layer
