"""Applies the groups of a recipe's optimizer to a whole model: frozen parameters, learning-rate factors, weight decays.

Each setting is an attribute of a parameter, which its slices inherit (`tensor.layers`) in every layout. Paddle's
parameter groups are not used: each is clipped by a separate norm, and sharding cannot distribute them to owners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.regularizer import L2Decay

from paddle_dp.core.blocks import blocks_of
from paddle_dp.core.optimizer import groups_of, parameters_of
from paddle_dp.core.turns import TurnOptimizers
from paddle_dp.core.updates import DECAY_KEY, ByParameter
from paddle_dp.part.groups import (
    ParameterGroup,
    choose,
    depth_scales,
    freeze,
    is_match,
    keeps_statistics,
    named_parameters,
)

# What a parameter or a BatchNorm was before a group changed it; of a rate also what the group has set. Two underscores:
# no setting of the model (`identity.walk`).
_RATE_KEY, _FROZEN_KEY, _STATISTICS_KEY = "given_learning_rate", "given_frozen", "__given_use_global_stats"


def group(
    model: nn.Layer,
    groups: Sequence[ParameterGroup],
    frozen_names: Collection[str] = (),
    optimizer: Any = None,
) -> None:
    """Applies the groups' settings to the parameters of a whole model, before it is placed; `frozen_names` are frozen
    unless a group says otherwise. What the groups of an earlier training of the same model have set is undone first;
    but a finished `optimizer` keeps the rates of its parameter groups, and a parameter that it lacks stays frozen.

    Raises RecipeError for a pattern that matches nothing, or sets nothing, and for `decay_by_depth` outside blocks.
    """
    _ungroup(model, optimizer if isinstance(optimizer, paddle.optimizer.Optimizer) else None)
    norms = [(n, n._use_global_stats) for n in model.sublayers(include_self=True) if keeps_statistics(n)]
    frozen_before = [(names[0], p, p.stop_gradient) for names, p in named_parameters(model)]
    freeze(model, groups, frozen_names)
    for name, parameter, frozen in frozen_before:
        if parameter.stop_gradient != frozen and name not in frozen_names:
            parameter.optimize_attr = {**parameter.optimize_attr, _FROZEN_KEY: frozen}
    for norm, used in norms if not frozen_names else ():
        if norm._use_global_stats != used:
            vars(norm)[_STATISTICS_KEY] = used
    for parameter, scale, decay in _settings(model, groups):
        attributes = parameter.optimize_attr = dict(parameter.optimize_attr)
        rate = float(attributes["learning_rate"] or 0.0)
        attributes["learning_rate"] = rate * scale
        attributes[_RATE_KEY] = (rate, rate * scale)
        if decay is not None:
            attributes[DECAY_KEY] = decay


def _ungroup(model: nn.Layer, finished: Any) -> None:
    """Gives parameters the rates, decays and gradients that they had before `group`, and BatchNorms their statistics.
    An adapter's base stays frozen, and so does a parameter that a `finished` optimizer was made without."""
    parameters = model.parameters() if finished is None else parameters_of(finished)
    learning = {id(parameter) for parameter in parameters}
    has_rates = finished is not None and groups_of(finished) is not None
    for parameter in model.parameters():
        attributes = parameter.optimize_attr = dict(parameter.optimize_attr)
        given, scaled = attributes.pop(_RATE_KEY, (None, None))
        if given is not None and attributes["learning_rate"] == scaled and not has_rates:
            attributes["learning_rate"] = given
        attributes.pop(DECAY_KEY, None)
        if id(parameter) in learning:
            parameter.stop_gradient = attributes.pop(_FROZEN_KEY, parameter.stop_gradient)
        if hasattr(parameter.regularizer, "from_recipe"):
            parameter.regularizer = None
    for layer in model.sublayers(include_self=True):
        if _STATISTICS_KEY not in vars(layer):
            continue
        if all(parameter is None or id(parameter) in learning for parameter in (layer.weight, layer.bias)):
            layer._use_global_stats = vars(layer).pop(_STATISTICS_KEY)


def _settings(
    model: nn.Layer, groups: Sequence[ParameterGroup]
) -> Iterator[tuple[paddle.Tensor, float, float | None]]:
    """Yields the trained parameters with a learning-rate factor or a weight decay, and both values."""
    named, blocks = named_parameters(model), blocks_of(model)
    choices = choose(groups, [names for names, _ in named])
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    block_of: dict[int, int] = {}
    for position, block in enumerate(blocks):
        for parameter in block.parameters():
            block_of.setdefault(numbers.get(id(parameter), -1), position)
    scales = depth_scales(choices, block_of, len(blocks))
    for (_, parameter), choice, by_depth in zip(named, choices, scales, strict=True):
        factors = (choice.lr_scale, by_depth, choice.weight_decay)
        if parameter.stop_gradient or all(value is None for value in factors):
            continue
        yield (
            parameter,
            (choice.lr_scale or 1.0) * (1.0 if by_depth is None else by_depth),
            choice.weight_decay,
        )


def base_of(model: nn.Layer, before: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The names of an adapter's base (the parameters frozen before it, listed in `before`, and fixed BatchNorm
    statistics), and of the parameters that it added. Both are empty without an adapter."""
    if not before:
        return frozenset(), frozenset()
    norms = [layer for layer in model.sublayers(include_self=True) if keeps_statistics(layer)]
    statistics = {id(t): bool(n._use_global_stats) for n in norms for t in (n._mean, n._variance)}
    named = model.named_parameters(remove_duplicate=False)
    base = {name for name, p in named if p.stop_gradient and statistics.get(id(p), True)}
    known = {name for names, _ in named_parameters(model) for name in names}
    return frozenset(base), frozenset(known - set(before))


def describe_groups(model: nn.Layer, groups: Sequence[ParameterGroup]) -> list[str]:
    """A line per group: the number of parameters that it matches, and their settings."""
    named = named_parameters(model)
    lines = []
    for entry in groups:
        inside = [p for names, p in named if is_match(entry.match, names)]
        count, size = len(inside), sum(int(p.size) for p in inside)
        frozen = sum(p.stop_gradient for p in inside)
        rates = sorted({float(p.optimize_attr["learning_rate"]) for p in inside if not p.stop_gradient})
        clauses = [f"{count} parameter{'s' * (count != 1)}, {size:,} numbers"]
        if frozen:
            clauses.append("frozen" if frozen == count else f"{frozen} of them frozen")
        if (entry.lr_scale or entry.decay_by_depth) and rates:
            span = f"{rates[0]:.3g}" + (f" to {rates[-1]:.3g}" if len(rates) > 1 else "")
            clauses.append(f"learning rate × {span}")
        if entry.weight_decay is not None:
            clauses.append(f"weight decay {entry.weight_decay:g}")
        lines.append(f"{entry.match}: {', '.join(clauses)}")
    trained = [p for _, p in named if not p.stop_gradient]
    total = sum(int(p.size) for _, p in named)
    lines.append(
        f"trained: {len(trained)} of {len(named)}, {sum(int(p.size) for p in trained):,} of {total:,} numbers"
    )
    return lines


def group_decay(parameter: paddle.Tensor) -> float | None:
    """The weight decay that a group has set for a parameter, or a slice of it."""
    decay: float | None = parameter.optimize_attr.get(DECAY_KEY)
    return decay


def use_group_decays(optimizer: Any) -> None:
    """Makes a finished optimizer use the weight decays that groups have set on its parameters.

    AdamW and Lamb have a single decay, which is changed around the update of such a parameter; the optimizers in
    `core.updates` read a parameter's; the others add L2 decay to the gradient, by a parameter's regularizer.
    """
    if isinstance(optimizer, TurnOptimizers):
        for member in optimizer.members:
            use_group_decays(member)
        return
    parameters = parameters_of(optimizer)
    decay_by_name = {p.name: decay for p in parameters if (decay := group_decay(p)) is not None}
    if not decay_by_name or isinstance(optimizer, ByParameter):
        return
    if isinstance(optimizer, paddle.optimizer.AdamW):
        decides = optimizer._apply_decay_param_fun
        optimizer._apply_decay_param_fun = lambda name: (
            decay_by_name[name] > 0 if name in decay_by_name else decides is None or decides(name)
        )
        _around_update(optimizer, decay_by_name, "_weight_decay")
    elif isinstance(optimizer, paddle.optimizer.Lamb):
        leaves_out = optimizer._exclude_from_weight_decay_fn
        optimizer._exclude_from_weight_decay_fn = lambda p: (
            decay_by_name[p.name] == 0
            if p.name in decay_by_name
            else leaves_out is not None and leaves_out(p)
        )
        _around_update(optimizer, decay_by_name, "_lamb_weight_decay")
    else:
        for parameter in parameters:
            if parameter.name in decay_by_name:
                parameter.regularizer = L2Decay(decay_by_name[parameter.name])
                parameter.regularizer.from_recipe = True


def _around_update(optimizer: Any, decay_by_name: dict[str, float], strength: str) -> None:
    """Sets the optimizer's attribute `strength` to a parameter's group decay while that parameter is updated."""
    update, usual = optimizer._append_optimize_op, getattr(optimizer, strength)

    def updated(block: Any, parameter_and_gradient: Any) -> Any:
        decay = decay_by_name.get(parameter_and_gradient[0].name)
        if decay is None:
            return update(block, parameter_and_gradient)
        setattr(optimizer, strength, decay)
        try:
            return update(block, parameter_and_gradient)
        finally:
            setattr(optimizer, strength, usual)

    optimizer._append_optimize_op = updated
