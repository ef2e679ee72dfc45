"""Distributes a model's branches among ranks, in place, and removes the layers of other ranks' branches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.data_group import PaddleGroup
from paddle_dp.core.extra_forwards import how_different
from paddle_dp.core.loss import Count
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.placement import Placements
from paddle_dp.core.precision import cast, read_by
from paddle_dp.errors import UsageError
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.strategies.branches.branch_exchange import BranchExchange, OutputSpecs
from paddle_dp.strategies.branches.branch_trace import (
    DOCS,
    BranchTrace,
    Chain,
    holder,
    in_order,
    observed,
    outputs_of,
)

# The forward of a layer with branches, on one rank of their group -----------------------------------------------------


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


_CLOSE = 1e-4  # relative tolerance of outputs: sums are in another order


@dataclass(frozen=True, kw_only=True)
class Branched:
    """The result for a model. `shared`: names of weights that branches of several ranks share. `exchanges_back`: joins
    also exchange in backward. `layers`: the ids of the layers in this rank's branches."""

    shared: tuple[str, ...]
    exchanges_back: bool
    layers: frozenset[int] = field(default=frozenset(), compare=False)


def branched(
    model: nn.Layer,
    samples: Callable[[], Any] | None,
    exchange: BranchExchange,
    placements: Placements,
    compare: bool,
) -> Branched:
    """Distributes the branches of a model, in place. Collective.

    Raises UsageError if a table does not match a forward of `samples()`, and, with `compare`, if the outputs change.
    """
    ranks = exchange.ranks
    if samples is None:
        raise UsageError("strategy.branches: there are no samples on which to try the tables.")
    inputs = cast(samples(), read_by(model))
    traces, before = observed(model, inputs)
    spread_over(traces, len(ranks.ranks))
    shared = drop_remote(model, traces, ranks, placements)
    turns = CollectiveOrder(model)
    joins = [BranchForward(trace, exchange, turns) for trace in traces]
    for trace, join in zip(traces, joins, strict=True):
        trace.layer.forward = join
    after = outputs_of(model, inputs, [])
    for expected, actual in zip(before, after, strict=True):
        if compare and (how := how_different(expected, actual, _CLOSE)):
            raise UsageError(
                f"strategy.branches: with its branches on {len(ranks.ranks)} ranks {type(model).__name__} gives "
                f"outputs that {how}: something outside its chains reads or changes tensors within a branch ({DOCS})."
            )
    for join in joins:
        join.forms.forget()
    layers = [
        layer for layer, having in ranks_of_layers(traces, len(ranks.ranks)) if ranks.group_rank in having
    ]
    return Branched(
        shared=tuple(shared),
        exchanges_back=any(trace.learned for trace in traces),
        layers=frozenset(id(layer) for root in layers for layer in root.sublayers(include_self=True)),
    )


def spread_over(traces: list[BranchTrace], ranks: int) -> None:
    """Gives each branch its owner. Raises UsageError if a rank gets none."""
    for trace in traces:
        trace.owners = assign(trace.work, ranks)
    if len({owner for trace in traces for owner in trace.owners}) < ranks:
        raise UsageError(too_few([len(trace.chains) for trace in traces], ranks))


def too_few(branches: list[int], ranks: int) -> str:
    """The message for tables that name fewer `branches` each than there are ranks."""
    most = max(branches, default=0)
    if most < 2:
        return (
            "strategy.branches: each `branches` table of the model names only one branch, so there is nothing to "
            f"deal to {ranks} ranks: name two or more branches in one table ({DOCS})."
        )
    return (
        f"strategy.over={ranks}: there are branches for {most} ranks, for no table of the model names more than "
        f"{most}: set strategy.over={most}, and start a multiple of it; more ranks share the data."
    )


# The exchange of gradients of a model whose branches are on different ranks -------------------------------------------


class CompositeExchange(GradientExchange):
    """Several exchanges, each with the indices of its parameters among all. No parameter is in two of them."""

    def __init__(self, members: Sequence[tuple[GradientExchange, Sequence[int]]]):
        self._members = [(exchange, sorted(indices)) for exchange, indices in members]

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        with ExitStack() as stack:
            for exchange, _ in self._members:
                stack.enter_context(exchange.backward(last, counted))
            yield

    def finish(self) -> list[int]:
        return sorted(indices[index] for exchange, indices in self._members for index in exchange.finish())


def branch_gradient_exchange(
    placed: PlacedModel, branched: Branched, data_ranks: PaddleGroup, every_rank: PaddleGroup
) -> GradientExchange:
    """Creates the exchange that sums gradients over `data_ranks`, which have the same branches, and over `every_rank`
    for weights that branches of several ranks share (`branched.shared`)."""
    shared = set(branched.shared)
    indices: dict[bool, list[int]] = {False: [], True: []}
    index_of = {id(parameter): index for index, parameter in enumerate(placed.trainable)}
    for name, parameter in placed.named_trainable:
        indices[name in shared].append(index_of[id(parameter)])
    exchanges: list[tuple[GradientExchange, Sequence[int]]] = []
    if len(data_ranks.ranks) > 1:
        local = _over(data_ranks, placed, indices[False], "gradients", overlapped=True)
        exchanges.append((local, indices[False]))
    if shared:
        # Ranks reach joins and shared weights in different orders, so their collectives could deadlock.
        overlapped = not branched.exchanges_back
        exchanges.append((_over(every_rank, placed, indices[True], "shared", overlapped), indices[True]))
    return CompositeExchange(exchanges)


def _over(
    ranks: PaddleGroup, placed: PlacedModel, indices: Sequence[int], channel: str, overlapped: bool
) -> GradientExchange:
    parameters = [placed.trainable[index] for index in sorted(indices)]
    if placed.mesh.device == "cpu":
        destinations = [ranks.ranks] * len(parameters)
        return PushedGradients(ranks.ranks, ranks.rank, parameters, destinations, channel=channel)
    return BucketedGradients(ranks.group, parameters, overlapped=overlapped)


def assign(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each branch: the largest first, each to the rank with the least work so far."""
    loads, owners = [0.0] * ranks, [0] * len(work)
    for branch in sorted(range(len(work)), key=lambda b: (-work[b], b)):
        owners[branch] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[branch]] += work[branch]
    return owners


class AbsentLayer(nn.Layer):
    """Stands for a layer that only other ranks have."""

    def forward(self, *inputs: Any) -> Any:
        raise RuntimeError("this layer is of a branch that another rank computes")


def drop_remote(
    model: nn.Layer, traces: Sequence[BranchTrace], ranks: PaddleGroup, placements: Placements
) -> list[str]:
    """Replaces the layers of other ranks' branches, and records the ranks of each weight and buffer. Returns the names
    of weights that branches of several ranks share."""
    having = ranks_of_layers(traces, len(ranks.ranks))
    _refuse_entangled(model, having)
    names = {id(p): name for name, p in model.named_parameters()}
    shared = set()
    for layer, ranks_with_it in having:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if ranks.group_rank in ranks_with_it:
                placements.record(tensor, only_at=min(ranks_with_it))
            if len(ranks_with_it) > 1 and not tensor.stop_gradient:
                shared.add(names[id(tensor)])
    elsewhere = {id(layer) for layer, ranks_with_it in having if ranks.group_rank not in ranks_with_it}
    for trace in traces:
        for parent, key in (holder(trace.layer, path) for chain in trace.chains for path in chain):
            if id(parent._sub_layers[key]) in elsewhere:
                parent._sub_layers[key] = AbsentLayer()
    return sorted(shared)


def ranks_of_layers(traces: Sequence[BranchTrace], ranks: int) -> list[tuple[nn.Layer, set[int]]]:
    """The branches' layers, each with the ranks of the group that keep it: its branch's rank, or all ranks, to sum its
    gradients, if branches of several ranks share it."""
    by_layer: dict[int, tuple[nn.Layer, set[int]]] = {}
    for trace in traces:
        for chain, owner in zip(trace.chains, trace.owners, strict=True):
            for path in chain:
                parent, key = holder(trace.layer, path)
                layer = parent._sub_layers[key]
                by_layer.setdefault(id(layer), (layer, set()))[1].add(owner)
    return [(layer, owners if len(owners) == 1 else set(range(ranks))) for layer, owners in by_layer.values()]


def _refuse_entangled(model: nn.Layer, layers: Sequence[tuple[nn.Layer, set[int]]]) -> None:
    """Raises UsageError for a weight within and outside a branch or in layers of different ranks, and for a BatchNorm
    of several ranks."""
    names = {id(p): name for name, p in model.named_parameters()}
    outside = _without(model, [layer for layer, _ in layers])
    trace: dict[int, set[int]] = {}
    for layer, owners in layers:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if id(tensor) in outside or trace.setdefault(id(tensor), owners) != owners:
                raise UsageError(
                    f"strategy.branches: {names.get(id(tensor), 'a buffer')} is in a branch and also elsewhere, so its "
                    f"gradient would come from both: leave that branch out of the table ({DOCS})."
                )
        if len(owners) > 1 and statistics(layer):
            raise UsageError(
                "strategy.branches: branches share a BatchNorm, whose running statistics would be those of one "
                "branch's samples on each rank: give each a separate one, or use a norm without statistics."
            )


def _without(model: nn.Layer, branches: Sequence[nn.Layer]) -> set[int]:
    """The ids of weights and buffers outside these layers."""
    within = {id(layer) for branch in branches for layer in branch.sublayers(include_self=True)}
    return {
        id(tensor)
        for layer in model.sublayers(include_self=True)
        if id(layer) not in within
        for tensor in [
            *layer.parameters(include_sublayers=False),
            *layer.buffers(include_sublayers=False),
        ]
    }
