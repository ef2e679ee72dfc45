"""Annotations, with which a recipe or a script describes how a model can be split.

A prepared model has tables (`cuts`, `attention_methods`, `blocks`: docs/add-a-part.md) as attributes of its layers. An
annotation selects layers by pattern and sets the same attributes. This module does not import paddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeVar

from paddle_dp.errors import Mistake, RecipeError, UsageError, did_you_mean, similar
from paddle_dp.part.call import is_standard_library, resolve, validate_callable
from paddle_dp.part.config import Keys, show
from paddle_dp.text import and_more

Model = TypeVar("Model")
Way = Literal["colwise", "heads", "per_head", "rowwise", "channels", "vocab", "classes"]
CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")
# Layers that treat each channel separately, by the name of their class or a base class.
CHANNELWISE = (
    "BatchNorm", "BatchNorm1D", "BatchNorm2D", "BatchNorm3D", "SyncBatchNorm",
    "Dropout", "Dropout2D", "Dropout3D", "AlphaDropout", "FeatureAlphaDropout",
)  # fmt: skip
# The layers that can be cut in each way, by the name of their class or a base class; (): any layer with parameters.
CUTTABLE: dict[str, tuple[str, ...]] = {
    "colwise": ("Linear", "Dropout", "AlphaDropout"), "heads": ("Linear",), "per_head": (),
    "rowwise": ("Linear", *CONVOLUTIONS), "channels": (*CONVOLUTIONS, *CHANNELWISE), "vocab": (), "classes": (),
}  # fmt: skip
COUNTED = ("colwise", "heads")  # ways that also divide a whole number, which counts columns or heads
LISTS = ("LayerList", "LayerDict", "ParameterList", "ParameterDict")  # they hold layers, and have no forward


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A recipe's description of how a model's layers can be split. A function of `blocks` is written with its settings:
    `{use: paddle.flatten, start_axis: 1}`."""

    cuts: dict[str, Way] = field(default_factory=dict)
    """Pattern of layers, or of a number that counts heads or columns (`….num_heads`), to the way to cut them."""

    attention_methods: dict[str, str] = field(default_factory=dict)
    """Pattern of layers to their method that mixes tokens."""

    blocks: tuple[Any, ...] = ()
    """The layers whose chain is the forward: patterns, functions, and lists of these that stay together. Patterns alone
    may leave out layers, for recompute."""

    branches: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """Pattern of layers to their branches: each lists the names of its layers in order."""


KEYS = ("cuts", "attention_methods", "blocks", "branches")


def annotate(model: Model, annotation: Annotation, prefix: str = "model") -> Model:
    """Sets the annotation's tables on the model's layers, and returns the model.

    Raises RecipeError with every pattern that matches no layer, or one that cannot be cut this way.
    """
    layers = _Layers(model, prefix)
    layers.cut(annotation.cuts)
    layers.attend(annotation.attention_methods)
    layers.branch(annotation.branches)
    blocks = layers.chain(annotation.blocks)
    if layers.mistakes:
        raise RecipeError(layers.mistakes)
    if blocks:
        model.annotated_blocks = blocks  # type: ignore[attr-defined]
    return model


def cuts_of(layer: Any) -> dict[str, str]:
    """A layer's `cuts` table, from its class or the recipe: attribute (a layer, or a number that counts) → way."""
    return dict(getattr(layer, "cuts", {}))


@dataclass(frozen=True)
class Cut:
    """An entry of a layer's `cuts` table: the attribute, the way to cut it, and its value (a layer, or a count)."""

    name: str
    way: str
    value: Any


def cut_entries(layer: Any) -> list[Cut]:
    """A layer's `cuts` table. Raises UsageError for an unknown way, and for an attribute that the layer lacks."""
    table, kind = cuts_of(layer), type(layer).__name__
    for name, way in table.items():
        if way not in CUTTABLE:
            hint = did_you_mean(str(way), CUTTABLE, "The ways are")
            raise UsageError(f"{kind}.cuts: {way!r}, of {name}, is no way to cut a layer.{hint}")
        if not hasattr(layer, name):
            raise UsageError(f"{kind}.cuts: {kind} has no attribute {name!r} to cut.")
    return [Cut(name, way, getattr(layer, name)) for name, way in table.items()]


def attention_methods_of(layer: Any) -> tuple[str, ...]:
    """The methods of a layer that mix tokens, from its own attribute or from the recipe's annotation."""
    return tuple(getattr(layer, "attention_methods", ()))


def block_table_of(model: Any) -> Any:
    """The model's `blocks` from the recipe's annotation, else from its attribute; None without either."""
    return getattr(model, "annotated_blocks", None) or getattr(model, "blocks", None)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, in their order; `*` matches one word between dots, or a part of one."""
    segments, count = pattern.split("."), pattern.count(".")
    alike = (name for name in names if name.count(".") == count)
    return [name for name in alike if all(map(fnmatchcase, name.split("."), segments))]


class _Layers:
    """A model's layers by name, and the mistakes of the annotation so far."""

    def __init__(self, model: Any, prefix: str):
        self.model, self.prefix, self.mistakes = model, prefix, list[Mistake]()
        self.named: dict[str, Any] = {"": model, **dict(model.named_sublayers(remove_duplicate=False))}

    def cut(self, cuts: Mapping[str, Way]) -> None:
        """Sets `cuts` on the parents of the matched layers and numbers."""
        tables: dict[str, dict[str, str]] = {}
        for pattern, way in cuts.items():
            for name in self._matched(("cuts", pattern), pattern, self._numbers(pattern)):
                parent, _, attribute = name.rpartition(".")
                wrong = self._uncuttable(name, getattr(self.named[parent], attribute), way)
                before = tables.setdefault(parent, {}).setdefault(attribute, way)
                if before != way:
                    wrong = f"cuts {name} as {way}, and another pattern as {before}"
                if wrong:
                    self._complain(("cuts", pattern), wrong)
                    break
        for parent, table in tables.items():
            layer = self.named[parent]
            layer.cuts = {**cuts_of(layer), **table}

    def attend(self, attention_methods: Mapping[str, str]) -> None:
        for pattern, method in attention_methods.items():
            path: Keys = ("attention_methods", pattern)
            for name in self._matched(path, pattern):
                layer = self.named[name]
                if not callable(getattr(layer, method, None)):
                    self._complain(path, f"{name} is a {_kind(layer)}, and has no method '{method}'")
                    break
                layer.attention_methods = tuple(dict.fromkeys((*attention_methods_of(layer), method)))

    def branch(self, branches: Mapping[str, Sequence[Sequence[str]]]) -> None:
        for pattern, chains in branches.items():
            path: Keys = ("branches", pattern)
            for name in self._matched(path, pattern):
                for child in (child for chain in chains for child in chain):
                    if f"{name}.{child}" not in self.named:
                        self._complain(path, self._nothing(f"{name}.{child}"))
                        return
                self.named[name].branches = tuple(map(tuple, chains))

    def chain(self, blocks: Sequence[Any]) -> tuple[Any, ...]:
        """The blocks with patterns expanded; each is a layer's name, a function, or a tuple of these."""
        elements: list[Any] = []
        for number, block in enumerate(blocks):
            path: Keys = ("blocks", number)
            if isinstance(block, (list, tuple)):
                together = [each for element in block for each in self._elements(element, path)]
                elements += [tuple(together)] if together else []
            else:
                elements += self._elements(block, path)
        if not all(isinstance(block, str) for block in elements) and not self.mistakes:
            self._all_in(elements)
        return tuple(elements)

    def _elements(self, element: Any, path: Keys) -> list[Any]:
        if isinstance(element, str):
            layer_names = self._matched(path, element)
            for name in layer_names:
                if (kind := _kind(self.named[name])) in LISTS:
                    self._complain(path, f"{name} is a {kind}, which has no forward: write '{name}.*'")
            return layer_names
        if isinstance(element, Mapping):
            return self._function(dict(element), path)
        if callable(element):  # in a script: a layer of the model, or a function
            names = [name for name, layer in self.named.items() if name and layer is element]
            return names[:1] or [element]
        self._complain(path, f"{show(element)} is no layer's name, and no {{use: package.function}}")
        return []

    def _function(self, settings: dict[str, Any], path: Keys) -> list[Any]:
        use = settings.pop("use", None)
        if not isinstance(use, str) or "." not in use:
            shown = show(settings)
            self._complain(path, f"a function in blocks is {{use: package.function, …}}, not {shown}")
            return []
        try:
            if is_standard_library(use):
                raise ImportError("it is of Python's standard library, which holds no part of a model")
            function: Any = resolve(use)
            if wrong := validate_callable(function, "blocks"):
                raise TypeError(f"it {wrong}")
            if isinstance(function, type):
                block = function(**settings)
            else:
                signature(function).bind(None, **settings)  # one input, and the settings
                block = partial(function, **settings)
        except Exception as error:  # noqa: BLE001 - the user's function, and their arguments
            self._complain(path, f"{use} cannot be used: {error}")
            return []
        if any(True for _ in getattr(block, "parameters", list)()):
            self._complain(path, f"{use} has weights, which the model does not know: name its layers")
            return []
        return [block]

    def _all_in(self, blocks: Iterable[Any]) -> None:
        """Complains about a parameter in no block where groups or functions make the chain the forward: it would never
        get a gradient."""
        names = [e for b in blocks for e in (b if isinstance(b, tuple) else (b,)) if isinstance(e, str)]
        inside = {id(p) for name in names for p in self.named[name].parameters()}
        outside = [name for name, p in self.model.named_parameters() if id(p) not in inside]
        if outside:
            absent = f"'{outside[0]}'{and_more(outside, phrase=' (and {} more)')}"
            why = "With lists or functions they are the whole forward; layers alone may be a part of it"
            self._complain(("blocks",), f"{absent} is in none of them. {why}")

    def _matched(self, path: Keys, pattern: str, numbers: Sequence[str] = ()) -> list[str]:
        """The layers that a pattern matches, else `numbers`; complains if there are neither."""
        names = self._layers(pattern) or list(numbers)
        if not names:
            self._complain(path, self._nothing(pattern))
        return names

    def _layers(self, pattern: str) -> list[str]:
        return matching(pattern, (name for name in self.named if name))

    def _numbers(self, pattern: str) -> list[str]:
        """The whole numbers that a pattern matches: attributes of layers."""
        parent, _, attribute = pattern.rpartition(".")
        owners = self._layers(parent) if parent else [""]
        names = [(owner, vars(self.named[owner]).get(attribute)) for owner in owners]
        return [f"{owner}.{attribute}".lstrip(".") for owner, value in names if type(value) is int]

    def _uncuttable(self, name: str, layer: Any, way: Way) -> str | None:
        if isinstance(layer, int):
            return None if way in COUNTED else f"{name} is a number, which {way} does not divide"
        kinds = CUTTABLE[way]
        if kinds and not set(kinds) & {kind.__name__ for kind in type(layer).__mro__}:
            return f"{name} is a {_kind(layer)}, and {way} is for {', '.join(kinds)}"
        return None

    def _nothing(self, pattern: str) -> str:
        """The message "no layer is called 'a.c'. Did you mean 'b'?", with the names where the pattern fails."""
        segments = pattern.split(".")
        for known in range(len(segments) - 1, -1, -1):
            holders = matching(".".join(segments[:known]), self.named) if known else [""]
            holders = [name for name in holders if name or not known]  # `*` is one word, and not the root
            full = (name for name in holders if any(other.startswith(f"{name}.") for other in self.named))
            holder = next(full, holders[0] if holders else None)
            if holder is not None:
                break
        children = dict.fromkeys(
            name[len(holder) + 1 if holder else 0 :].split(".")[0]
            for name in self.named
            if name and (not holder or name.startswith(f"{holder}."))
        )
        where = f"{holder} holds" if holder else f"{_kind(self.model)} holds"
        return f"no layer is called '{pattern}'.{did_you_mean(segments[known], children, where, similar)}"

    def _complain(self, path: Keys, message: str) -> None:
        dotted = ".".join(map(str, (self.prefix, *path)))
        self.mistakes.append(Mistake(where="", message=f"{dotted}: {message}", path=path))


def _kind(layer: Any) -> str:
    return type(layer).__name__


def named_in(settings: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """The settings that are annotations. A key that is also a setting of the model (`fields`) belongs to the model."""
    model_keys = set(fields)
    return {key: settings[key] for key in KEYS if key in settings and key not in model_keys}
