"""Groups of a model's parameters by name, which are frozen or have another learning rate or weight decay.

Groups are the key `optimizer.groups` of a recipe. Names are the one-process model's in every layout. This module does
not import paddle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from paddle_dp.errors import Mistake, RecipeError, similar
from paddle_dp.text import and_more, few
from paddle_dp.units import AboveZero, Fraction, Rate

KEY = "groups"
_SHOWN = 4  # names in a message
_SETTINGS = ("frozen", "lr_scale", "weight_decay", "decay_by_depth")


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Settings for the parameters with a name that matches a pattern. The first group that matches a parameter and has
    a setting determines that setting."""

    match: str
    """Pattern of parameter names: `*` matches anything (`body.0.*`, `*.bias`); or a layer's name, for all in it."""

    frozen: bool | None = None
    """Exclude from training: no gradient, no optimizer state. A BatchNorm with frozen weight and bias keeps its
    statistics, too. `false` exempts from a later group."""

    lr_scale: AboveZero | None = None
    """Factor of the schedule's learning rate."""

    weight_decay: Rate | None = None
    """Replacement of the optimizer's weight decay, also for biases and norms."""

    decay_by_depth: Fraction | None = None
    """Layer-wise decay: another factor of the rate, this number to the power of how many of the model's blocks follow
    the parameter's (1 for the last block), as in ELECTRA (arXiv:2003.10555) and BEiT (arXiv:2106.08254)."""

    def __post_init__(self) -> None:
        settings = [name for name in _SETTINGS if getattr(self, name) is not None]
        if not settings:
            raise ValueError(f"match: nothing is set for '{self.match}': give {', '.join(_SETTINGS)}")
        if self.frozen and len(settings) > 1:
            raise ValueError(f"frozen: frozen parameters have no {settings[1]}: leave out one of them")


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The additional key of every optimizer."""

    groups: tuple[ParameterGroup, ...] = ()
    """Parameters by pattern: frozen, with another learning rate or decay ([fine-tuning.md](fine-tuning.md))."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The groups' settings for one parameter; None if no group sets it."""

    frozen: bool | None = None
    lr_scale: float | None = None
    weight_decay: float | None = None
    decay_by_depth: float | None = None


def is_match(pattern: str, names: Iterable[str]) -> bool:
    """True if a pattern, or a layer's name, matches one of a parameter's names: a shared weight has several."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name in names)


def is_any_match(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """True if one of several patterns, or layers' names, matches one of a parameter's names."""
    return any(is_match(pattern, names) for pattern in patterns)


def named_parameters(model: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Each parameter once, as (all its names, parameter), without BatchNorm's running statistics."""
    running = {
        id(tensor)
        for layer in model.sublayers(include_self=True)
        if keeps_statistics(layer)
        for tensor in (layer._mean, layer._variance)
    }
    names_by_parameter: dict[int, tuple[list[str], Any]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in running:
            names_by_parameter.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [(tuple(names), parameter) for names, parameter in names_by_parameter.values()]


def choose(groups: Sequence[ParameterGroup], named: Sequence[Sequence[str]]) -> list[Choice]:
    """The settings of each parameter, given by all its names.

    Raises RecipeError for a group that matches no parameter, and if earlier groups set all settings of a group.
    """
    chosen: list[dict[str, Any]] = [{} for _ in named]
    mistakes: list[Mistake] = []
    for number, group in enumerate(groups):
        inside = [at for at, names in enumerate(named) if is_match(group.match, names)]
        settings = {name: value for name in _SETTINGS if (value := getattr(group, name)) is not None}
        news = [(at, name) for at in inside for name in settings if name not in chosen[at]]
        if not news:
            wrong = (
                f"sets nothing: groups before it set {', '.join(settings)} for all the {len(inside)} parameters that "
                "it matches. The first one counts: put the narrower pattern first."
                if inside
                else f"matches no parameter.{known_names(group.match, named)}"
            )
            message = f"optimizer.groups.{number}.match: '{group.match}' {wrong}"
            mistakes.append(Mistake(where="", message=message, path=("optimizer", KEY, number, "match")))
        for at, name in news:
            chosen[at][name] = settings[name]
    if mistakes:
        raise RecipeError(mistakes)
    return [Choice(**fields) for fields in chosen]


def known_names(pattern: str, named: Sequence[Sequence[str]]) -> str:
    """A hint with some existing names, and the name that was probably meant."""
    names = [name for parameter_names in named for name in parameter_names]
    layers = {name.rpartition(".")[0] for name in names} - {""}
    guess = similar(pattern.strip(".*"), sorted({*names, *layers}))
    return (f" Did you mean '{guess}'?" if guess else "") + f" Some are {few(names, _SHOWN)}."


class Adapter(Protocol):
    """A part of the shelf `adapters`, which adds parameters to a model."""

    def build(self, *arguments: Any) -> Any: ...


def adapted(model: Any, adapter: Adapter | None, seed: int) -> tuple[Any, frozenset[str]]:
    """The model with the adapter built in, and the names of its earlier parameters; without an adapter, none."""
    if adapter is None:
        return model, frozenset()
    before = frozenset(name for names, _ in named_parameters(model) for name in names)
    return adapter.build(model, seed), before


def freeze(model: Any, groups: Sequence[ParameterGroup], frozen_names: Collection[str] = ()) -> None:
    """Freezes in place the parameters that the groups freeze, and the statistics of BatchNorms whose parameters are all
    frozen. `frozen_names`: parameters that are frozen unless a group exempts them. Raises RecipeError as `choose` does,
    and if every parameter is frozen."""
    named = named_parameters(model)
    for (names, parameter), choice in zip(named, choose(groups, [names for names, _ in named]), strict=True):
        frozen = choice.frozen if choice.frozen is not None else (names[0] in frozen_names or None)
        if frozen is not None:
            parameter.stop_gradient = frozen
    if not groups and not frozen_names:
        return
    if all(parameter.stop_gradient for _, parameter in named):
        message = "optimizer.groups: every parameter is frozen, and nothing is left to train"
        raise RecipeError([Mistake(where="", message=message, path=("optimizer", KEY))])
    for name, layer in model.named_sublayers(include_self=True):
        if keeps_statistics(layer) and _is_frozen(name, layer, groups, bool(frozen_names)):
            layer._use_global_stats = True


def _is_frozen(name: str, layer: Any, groups: Sequence[ParameterGroup], default: bool) -> bool:
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    if parameters:
        return all(p.stop_gradient for p in parameters)
    mean = [f"{name}._mean"]
    return next((g.frozen for g in groups if g.frozen is not None and is_match(g.match, mean)), default)


def keeps_statistics(layer: Any) -> bool:
    """True if a layer is one of Paddle's BatchNorms, by its attributes."""
    return all(hasattr(layer, attribute) for attribute in ("_mean", "_variance", "_use_global_stats"))


def turns_of(turns: Mapping[str, Sequence[str]], model: Any) -> dict[str, list[Any]]:
    """The trained parameters of each turn, of which `turns` has the patterns, for the first name of a shared weight.

    Raises RecipeError for a pattern that matches no trained parameter, for trained parameters in no turn, which nothing
    would train, and for one in two turns, whose optimizer state would mix both.
    """
    named = [(names[:1], p) for names, p in named_parameters(model) if not p.stop_gradient]
    mistakes: list[Mistake] = []
    for turn, patterns in turns.items():
        for pattern in patterns:
            if not any(is_match(pattern, names) for names, _ in named):
                hint = known_names(pattern, [names for names, _ in named])
                mistakes.append(_turn_mistake(turn, f"'{pattern}' matches no trained parameter.{hint}"))
    by_turn: dict[str, list[Any]] = {turn: [] for turn in turns}
    absent: list[str] = []
    twice: dict[tuple[str, str], list[str]] = {}
    for names, parameter in named:
        owners = [turn for turn, patterns in turns.items() if is_any_match(patterns, names)]
        if not owners:
            absent.append(names[0])
            continue
        by_turn[owners[0]].append(parameter)
        if len(owners) > 1:
            twice.setdefault((owners[0], owners[1]), []).append(names[0])
    for (first, second), shared in twice.items():
        mistakes.append(_turn_mistake(second, f"turn {first} trains '{shared[0]}'{and_more(shared)}, too"))
    if absent:
        text = f"none trains '{absent[0]}'{and_more(absent)}: add a turn, or freeze by optimizer.groups"
        mistakes.append(_turn_mistake("", text))
    if mistakes:
        raise RecipeError(mistakes)
    return by_turn


def _turn_mistake(turn: str, text: str) -> Mistake:
    path = ("turns", turn, "match") if turn else ("turns",)
    return Mistake(where="", message=f"{'.'.join(path)}: {text}", path=path)


def depth_scales(groups: Sequence[Choice], block_of: Mapping[int, int], blocks: int) -> list[float | None]:
    """Each parameter's factor of layer-wise decay, or None if no group asks for it. `block_of`: the parameter's index →
    the first block that uses it. Raises RecipeError if the block is unknown."""
    scales: list[float | None] = []
    for number, choice in enumerate(groups):
        if choice.decay_by_depth is None:
            scales.append(None)
            continue
        if number not in block_of:
            message = (
                "optimizer.groups: decay_by_depth needs the order of the model's blocks, and a parameter that it "
                "matches is in none. Name the blocks (model.blocks, docs/add-a-part.md), or set lr_scale."
            )
            raise RecipeError([Mistake(where="", message=message, path=("optimizer", KEY))])
        scales.append(choice.decay_by_depth ** (blocks - 1 - block_of[number]))
    return scales
