"""Branches of a layer that do not depend on one another, dealt to the ranks of a group; outputs meet at its join.

A layer's `branches` table names them: each a chain of its sublayers, which begins with one of the layer's inputs. At
the layer's call a rank computes its own chains, gets the outputs of the others from those who have them, and runs the
layer's own forward with these outputs in place of the chains. So all ranks of the group compute what comes before and
behind, the same on each: every rank has the gradient of every branch's output itself, and backward only adds up the
gradients of the layer's inputs. A weight is kept by the rank of its branch alone; one that several branches share is
kept by each, and its gradients are added up.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.errors import UsageError
from paddle_dp.mesh.messages import Messages
from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.data_group import Ranks
from paddle_dp.parallel.dropout import install
from paddle_dp.parallel.dropout.scope import Scope
from paddle_dp.parallel.hybrid import HybridLearner
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.precision.amp import cast, default_dtype, read_by
from paddle_dp.parallel.trial import trial
from paddle_dp.structure import call

Chain = tuple[str, ...]
_DOCS = "docs/parallelism.md"
_CLOSE = 1e-4  # relative, of outputs: what comes in another order of sums


def chains_of(layer: nn.Layer) -> tuple[Chain, ...]:
    """A layer's table: for each branch the names of its sublayers, in their order."""
    return tuple(tuple(chain) for chain in getattr(layer, "branches", ()) or ())


def tables_of(model: nn.Layer) -> dict[str, nn.Layer]:
    """The layers with a table, by name, but for those within a branch of another."""
    found: dict[str, nn.Layer] = {}
    within: list[str] = []
    for name, layer in model.named_sublayers(include_self=True):
        if any(name == inner or name.startswith(f"{inner}.") for inner in within):
            continue
        if chains := chains_of(layer):
            found[name] = layer
            within += [f"{name}.{word}".lstrip(".") for chain in chains for word in chain]
    return found


@dataclass
class Seen:
    """A layer with a table in a forward of the whole model: the input of each chain, the calls of its chains' layers in
    their order, (name, what it stands for: an input that passes, or the output of a branch), and each chain's work."""

    name: str
    layer: nn.Layer
    chains: tuple[Chain, ...]
    sources: list[int] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # by branch: a rank of the group


@contextmanager
def _watched(seen: Seen, events: list[tuple[str, Any, Any]], given: list[Any]) -> Iterator[None]:
    """Notes the layer's inputs, and each call of its chains' layers: name, input, output."""
    handles = [seen.layer.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))]
    layers = dict(seen.layer.named_sublayers())
    for word in dict.fromkeys(word for chain in seen.chains for word in chain):
        if word not in layers:
            raise UsageError(
                f"strategy.branches: {seen.name or 'the model'} has no layer '{word}' ({_DOCS})."
            )

        def note(_: nn.Layer, inputs: Any, output: Any, word: str = word) -> None:
            events.append((word, inputs[0] if len(inputs) == 1 else None, output))

        handles.append(layers[word].register_forward_post_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(seen: Seen, events: list[tuple[str, Any, Any]], given: list[Any]) -> None:
    """Finds each chain in what was called. Raises UsageError where the table says something else."""
    where, left = seen.name or "the model", list(range(len(events)))
    stands_for: dict[int, int | None] = {}
    layers = dict(seen.layer.named_sublayers())
    for branch, chain in enumerate(seen.chains):
        value, work = None, 0.0
        for place, word in enumerate(chain):
            fits = (
                number
                for number in left
                if events[number][0] == word
                and (events[number][1] is value if place else any(events[number][1] is x for x in given))
            )
            number = next(fits, None)
            if number is None:
                before = f"what {chain[place - 1]} gave" if place else f"an input of {where}"
                raise UsageError(
                    f"strategy.branches: branch {branch} of {where} is {' → '.join(chain)}, and {word} is not called "
                    f"with {before} alone: name the layers that follow one another without anything between ({_DOCS})."
                )
            left.remove(number)
            _, source, value = events[number]
            if not place:
                seen.sources.append(next(i for i, x in enumerate(given) if x is source))
            if not isinstance(value, paddle.Tensor):
                raise UsageError(f"strategy.branches: {word} of {where} gives no single tensor ({_DOCS}).")
            stands_for[number] = branch if place == len(chain) - 1 else None
            weights = sum(p.size for p in layers[word].parameters() if p.ndim > 1)
            work += weights * prod(value.shape[2:]) + value.size / max(value.shape[0], 1)
        seen.work.append(work)
    if left:
        word = events[left[0]][0]
        raise UsageError(
            f"strategy.branches: {where} calls {word} more often than its table names it ({_DOCS})."
        )
    seen.calls = [(events[number][0], stands_for[number]) for number in sorted(stands_for)]


def deal(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each branch: the largest first, each to the rank with the least work so far."""
    loads, owners = [0.0] * ranks, [0] * len(work)
    for branch in sorted(range(len(work)), key=lambda b: (-work[b], b)):
        owners[branch] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[branch]] += work[branch]
    return owners


def branched(
    model: nn.Layer, samples: Callable[[], Any] | None, ranks: Ranks, placements: Placements, compare: bool
) -> list[str]:
    """Deals the branches of a model, in place; returns the names of weights that several ranks keep. Collective.

    Raises UsageError where a table is not what the model does in a forward of `samples()`, and, with `compare`, where
    the outputs are others than before.
    """
    tables = tables_of(model)
    if samples is None or not tables:
        raise UsageError(f"strategy.branches: {type(model).__name__} has no `branches` table ({_DOCS}).")
    inputs = cast(samples(), read_by(model))
    found = [Seen(name, layer, chains_of(layer)) for name, layer in tables.items()]
    before = _outputs(model, inputs, found)
    for seen in found:
        seen.owners = deal(seen.work, len(ranks.ranks))
    if len({owner for seen in found for owner in seen.owners}) < len(ranks.ranks):
        most = max(len(seen.chains) for seen in found)
        raise UsageError(f"strategy.over={len(ranks.ranks)}: no layer has more than {most} branches.")
    shared = _drop_others(model, found, ranks, placements)
    for seen in found:
        seen.layer.forward = Join(seen, ranks)
    after = _outputs(model, inputs, [])
    for one, other in zip(before, after, strict=True):
        apart, largest = (float(x.abs().max()) if x.size else 0.0 for x in (other - one, one))
        if compare and apart > _CLOSE * largest:
            raise UsageError(
                f"strategy.branches: with its branches on {len(ranks.ranks)} ranks {type(model).__name__} gives "
                f"outputs that differ by up to {apart:.2g}, of {largest:.2g}: something else than its chains reads or "
                f"changes what is within a branch ({_DOCS})."
            )
    return shared


def _outputs(model: nn.Layer, inputs: Any, found: Sequence[Seen]) -> list[paddle.Tensor]:
    """The outputs in evaluation; `found` gets what is called. In training it is called too, to see what is drawn."""
    install()
    for training in (True, False) if found else (False,):
        with trial(model), default_dtype(read_by(model)):
            for layer in model.sublayers(include_self=True):
                layer.training = layer.training and training
            notes = [(seen, list[Any](), list[Any]()) for seen in found] if not training else []
            with _all(notes), Scope(0, 0, 0, 0, 2) as scope:
                draws = _counted(found, scope) if training else []
                outputs = call(model, inputs, model.forward)
                for remove in draws:
                    remove()
            for seen, events, given in notes:
                _look(seen, events, given)
    return [
        x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor) and x.is_floating_point()
    ]


@contextmanager
def _all(notes: Sequence[tuple[Seen, list[Any], list[Any]]]) -> Iterator[None]:
    if not notes:
        yield
        return
    seen, events, given = notes[0]
    with _watched(seen, events, given), _all(notes[1:]):
        yield


def _counted(found: Sequence[Seen], scope: Scope) -> list[Callable[[], None]]:
    """Hooks that refuse a branch whose layers drop: ranks would count its draws otherwise than one process."""
    removes: list[Callable[[], None]] = []
    for seen in found:
        layers = dict(seen.layer.named_sublayers())
        for word in {word for chain in seen.chains for word in chain if word in layers}:
            counts: list[int] = []

            def enter(_: nn.Layer, inputs: Any, counts: list[int] = counts) -> None:
                counts.append(sum(scope.calls.values()))

            def leave(
                _: nn.Layer, inputs: Any, outputs: Any, counts: list[int] = counts, word: str = word
            ) -> None:
                if sum(scope.calls.values()) != counts.pop():
                    raise UsageError(
                        f"strategy.branches: {word} drops, and it is in a branch: ranks would draw other masks than "
                        "one process. Let the model drop before or behind its branches, or set its dropout to 0."
                    )

            removes += [
                layers[word].register_forward_pre_hook(enter).remove,
                layers[word].register_forward_post_hook(leave).remove,
            ]
    return removes


class Elsewhere(nn.Layer):
    """Stands for a layer that other ranks have."""

    def forward(self, *inputs: Any) -> Any:
        raise RuntimeError("this layer is of a branch that another rank computes")


class _Given(nn.Layer):
    """Stands for a layer of a chain in the layer's own forward: gives what it gets, or what a branch gave."""

    def __init__(self, answers: Sequence[paddle.Tensor | None]):
        super().__init__()
        self._answers = deque(answers)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        answer = self._answers.popleft()
        return x if answer is None else answer


def _drop_others(model: nn.Layer, found: Sequence[Seen], ranks: Ranks, placements: Placements) -> list[str]:
    """Replaces the layers of others' branches, and records where each weight and buffer is. Returns the names of those
    that several ranks keep."""
    owners: dict[int, set[int]] = {}  # the ranks that have a layer, by its id
    layers: dict[int, nn.Layer] = {}
    inside: list[tuple[nn.Layer, str]] = []
    for seen in found:
        for chain, owner in zip(seen.chains, seen.owners, strict=True):
            for word in chain:
                parent, key = _holder(seen.layer, word)
                layer = parent._sub_layers[key]
                owners.setdefault(id(layer), set()).add(owner)
                layers[id(layer)] = layer
                inside.append((parent, key))
    _refuse_entangled(model, [(layer, owners[number]) for number, layer in layers.items()])
    names = {id(p): name for name, p in model.named_parameters()}
    shared = set()
    for number, layer in layers.items():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if ranks.place in owners[number]:
                placements.record(tensor, only_at=min(owners[number]))
            if len(owners[number]) > 1 and not tensor.stop_gradient:
                shared.add(names[id(tensor)])
    for parent, key in inside:
        if ranks.place not in owners.get(id(parent._sub_layers[key]), {ranks.place}):
            parent._sub_layers[key] = Elsewhere()
    return sorted(shared)


def _refuse_entangled(model: nn.Layer, layers: Sequence[tuple[nn.Layer, set[int]]]) -> None:
    """Raises UsageError for a weight that is in a branch and outside of it, or in layers of unequal ranks, and for a
    BatchNorm of several ranks."""
    names = {id(p): name for name, p in model.named_parameters()}
    outside = _without(model, [layer for layer, _ in layers])
    seen: dict[int, set[int]] = {}
    for layer, owners in layers:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if id(tensor) in outside or seen.setdefault(id(tensor), owners) != owners:
                raise UsageError(
                    f"strategy.branches: {names.get(id(tensor), 'a buffer')} is in a branch and also elsewhere, so its "
                    f"gradient would come from both: leave that branch out of the table ({_DOCS})."
                )
        if len(owners) > 1 and statistics(layer):
            raise UsageError(
                "strategy.branches: branches share a BatchNorm, whose running statistics would be those of one "
                "branch's samples on each rank: give each its own, or take a norm without statistics."
            )


def _without(model: nn.Layer, branches: Sequence[nn.Layer]) -> set[int]:
    """The ids of weights and buffers that are in none of these layers."""
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


def _holder(layer: nn.Layer, name: str) -> tuple[nn.Layer, str]:
    """The layer that holds a sublayer, and its key there."""
    *path, key = name.split(".")
    for word in path:
        layer = layer._sub_layers[word]
    return layer, key


class _Fork(PyLayer):
    """The inputs of a layer with branches; each rank's branches add to their gradients, which are summed."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *inputs: paddle.Tensor) -> Any:
        ctx.ranks = ranks
        return tuple(x.clone() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: paddle.Tensor) -> Any:
        return tuple(ctx.ranks.sum_tensor(grad.clone()) for grad in grads)


class _Meet(PyLayer):
    """The outputs of all branches on every rank. Each computes alike from here on, and so has every output's gradient:
    that of its own branches is theirs."""

    @staticmethod
    def forward(ctx: Any, join: Join, own: Sequence[int], *tensors: paddle.Tensor) -> Any:
        ctx.own, ctx.inputs = list(own), tensors[len(own) :]
        return tuple(join.exchange(dict(zip(own, tensors, strict=False)), tensors[len(own) :]))

    @staticmethod
    def backward(ctx: Any, *grads: paddle.Tensor) -> Any:
        return (*(grads[branch] for branch in ctx.own), *(paddle.zeros_like(x) for x in ctx.inputs))


class Join:
    """The forward of a layer with branches, on one rank of their group. Collective over the group."""

    def __init__(self, seen: Seen, ranks: Ranks):
        self._seen, self._ranks, self._forward = seen, ranks, seen.layer.forward
        self._own = [branch for branch, owner in enumerate(seen.owners) if owner == ranks.place]
        self._messages = Messages(ranks.ranks, ranks.rank, "branches")

    def __call__(self, *inputs: paddle.Tensor) -> Any:
        seen = self._seen
        inputs = tuple(inputs)
        if paddle.is_grad_enabled() and (learned := [i for i, x in enumerate(inputs) if not x.stop_gradient]):
            forked = iter(_Fork.apply(self._ranks, *(inputs[i] for i in learned)))
            branches_see = tuple(next(forked) if i in learned else x for i, x in enumerate(inputs))
        else:
            branches_see = inputs
        mine = [self._run(seen.chains[branch], branches_see[seen.sources[branch]]) for branch in self._own]
        anchors = [x for x in branches_see if not x.stop_gradient]
        results = _Meet.apply(self, self._own, *mine, *anchors)
        return self._rest(inputs, list(results))

    def _run(self, chain: Chain, x: paddle.Tensor) -> paddle.Tensor:
        for word in chain:
            parent, key = _holder(self._seen.layer, word)
            x = parent._sub_layers[key](x)
        return x

    @paddle.no_grad()
    def exchange(self, own: dict[int, paddle.Tensor], inputs: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        """Every branch's output, of which this rank has its `own`."""
        forms = self._forms_of(own)
        outputs = []
        for branch, (shape, dtype) in enumerate(forms):
            output = own[branch].clone() if branch in own else paddle.empty(shape, dtype)
            if self._ranks.group is not None:
                dist.broadcast(output, self._ranks.ranks[self._seen.owners[branch]], group=self._ranks.group)
            outputs.append(output)
        return outputs

    def _forms_of(self, own: dict[int, paddle.Tensor]) -> list[Any]:
        """Shapes and dtypes of all outputs, told from host to host."""
        told = {b: [x.shape, str(x.dtype).rpartition(".")[2]] for b, x in own.items()}
        if self._ranks.group is None:
            return [told[branch] for branch in range(len(told))]
        rows = self._messages.gather(json.dumps(told).encode(), "the outputs of branches")
        found = {int(branch): form for row in rows for branch, form in json.loads(row).items()}
        return [found[branch] for branch in range(len(self._seen.chains))]

    def _rest(self, inputs: Sequence[paddle.Tensor], results: Sequence[paddle.Tensor]) -> Any:
        """The layer's own forward, in which the calls of its chains' layers give these results."""
        answers: dict[str, list[paddle.Tensor | None]] = {}
        for word, branch in self._seen.calls:
            answers.setdefault(word, []).append(None if branch is None else results[branch])
        before = []
        try:
            for word, given in answers.items():
                parent, key = _holder(self._seen.layer, word)
                before.append((parent, key, parent._sub_layers[key]))
                parent._sub_layers[key] = _Given(given)
            return self._forward(*inputs)
        finally:
            for parent, key, layer in before:
                parent._sub_layers[key] = layer


@dataclass(kw_only=True)
class BranchesLearner(HybridLearner):
    """A learner for this rank's branches and what all ranks of `branch_ranks` have; `shared`: weights of branches on
    several ranks. Gradients are exchanged along the data axis, and those of shared weights over the branches' ranks."""

    shared: Sequence[str]
    branch_ranks: Ranks
    data_ranks: Ranks

    def _exchange(self) -> None:
        super()._exchange()
        wanted = set(self.shared)
        for name, parameter in self._named_trainable:
            if name in wanted and parameter.grad is not None:
                self.branch_ranks.sum_tensor(parameter.grad)

    def _sum_over_readers(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Over the ranks that have the same branches."""
        return self.data_ranks.sum_tensor(tensor)

    def _same_buffers(self) -> Sequence[Any]:
        return (self.data_ranks.group,) if len(self.data_ranks.ranks) > 1 else ()
