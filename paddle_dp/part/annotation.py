"""Annotations: how a recipe, or a script, says that a model without tables of its own can be split.

A model's own tables (`cuts`, `attention_methods`, `blocks`: docs/add-a-part.md) are attributes of its layers. An
annotation selects layers by pattern and sets the same attributes. Of a model it uses `named_sublayers` and
`named_parameters` only, so it does not import paddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeVar

from paddle_dp.errors import Mistake, RecipeError, UsageError, did_you_mean, similar
from paddle_dp.part.call import resolve
from paddle_dp.part.callables import is_standard_library, validate_callable
from paddle_dp.part.messages import Keys, show

Model = TypeVar("Model")
Way = Literal["colwise", "heads", "rowwise", "channels", "vocab", "classes"]
CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")
# Layers that treat each channel by itself, by the name of their class or of one above it.
CHANNELWISE = (
    "BatchNorm", "BatchNorm1D", "BatchNorm2D", "BatchNorm3D", "SyncBatchNorm",
    "Dropout", "Dropout2D", "Dropout3D", "AlphaDropout", "FeatureAlphaDropout",
)  # fmt: skip
# What can be cut this way, by the name of its class or of one above it; any layer with parameters where none stands.
CUTTABLE: dict[str, tuple[str, ...]] = {
    "colwise": ("Linear", "Dropout", "AlphaDropout"),
    "heads": ("Linear",),
    "rowwise": ("Linear", *CONVOLUTIONS),
    "channels": (*CONVOLUTIONS, *CHANNELWISE),
    "vocab": (),
    "classes": (),
}
COUNTED = ("colwise", "heads")  # what a whole number may say how many there are of
LISTS = ("LayerList", "LayerDict", "ParameterList", "ParameterDict")  # they hold layers, and have no forward


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """`cuts`: pattern of a layer (or of a whole number that counts what is cut, as `…self_attn.num_heads`) → way.
    `attention_methods`: pattern of a layer → its method in which tokens meet.
    `blocks`: the layers whose chain is the model's forward, in order: patterns, functions (`{use: paddle.flatten,
    start_axis: 1}`), and lists of them that stay together."""

    cuts: dict[str, Way] = field(default_factory=dict)
    """Pattern of layers, or of a number that counts what is cut (`….num_heads`), to the way to cut it."""

    attention_methods: dict[str, str] = field(default_factory=dict)
    """Pattern of layers to their method in which tokens meet."""

    blocks: tuple[Any, ...] = ()
    """The layers whose chain is the forward: patterns, functions, and lists of them that stay together."""

    branches: dict[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    """Pattern of layers to their branches: each the names of its layers, one behind the other."""


KEYS = ("cuts", "attention_methods", "blocks", "branches")


def annotate(model: Model, annotation: Annotation, prefix: str = "model") -> Model:
    """The model itself, its layers with the tables that the annotation gives them.

    Raises RecipeError with every pattern that means no layer, or one that cannot be cut so.
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
    """A layer's `cuts` table, its own or its recipe's: attribute (a layer, a number that counts them) → way."""
    return dict(getattr(layer, "cuts", {}))


@dataclass(frozen=True)
class Cut:
    """An entry of a layer's `cuts` table: the attribute, the way to cut it, and its value, which is a layer or a number
    that counts what is cut."""

    name: str
    way: str
    value: Any


def cut_entries(layer: Any) -> list[Cut]:
    """The entries of a layer's `cuts` table. Raises UsageError for a way that there is not, and for an attribute that
    the layer has not."""
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
    """What a recipe's annotation, or else the model's own attribute, says its `blocks` are; None where neither does."""
    return getattr(model, "annotated_blocks", None) or getattr(model, "blocks", None)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means, in their order; `*` stands for one word between dots, or a part of one."""
    segments = pattern.split(".")
    return [
        name
        for name in names
        if len(path := name.split(".")) == len(segments) and all(map(fnmatchcase, path, segments))
    ]


class _Layers:
    """A model's layers by name, and the mistakes that were made in naming them."""

    def __init__(self, model: Any, prefix: str):
        self.model, self.prefix, self.mistakes = model, prefix, list[Mistake]()
        self.named: dict[str, Any] = {"": model, **dict(model.named_sublayers(remove_duplicate=False))}

    def cut(self, cuts: Mapping[str, Way]) -> None:
        """Gives the parents of what the patterns mean their `cuts` tables."""
        tables: dict[str, dict[str, str]] = {}
        for pattern, way in cuts.items():
            layer_names = self._layers(pattern) or self._numbers(pattern)
            if not layer_names:
                self._complain(("cuts", pattern), self._nothing(pattern))
            for name in layer_names:
                parent, _, word = name.rpartition(".")
                wrong = self._uncuttable(name, getattr(self.named[parent], word), way)
                before = tables.setdefault(parent, {}).setdefault(word, way)
                if before != way:
                    wrong = f"cuts {name} as {way}, and another pattern as {before}"
                if wrong:
                    self._complain(("cuts", pattern), wrong)
                    break
        for parent, table in tables.items():
            layer = self.named[parent]
            layer.cuts = {**cuts_of(layer), **table}

    def attend(self, attention_methods: Mapping[str, str]) -> None:
        """Gives layers their `attention_methods`."""
        for pattern, method in attention_methods.items():
            layer_names = self._layers(pattern)
            if not layer_names:
                self._complain(("attention_methods", pattern), self._nothing(pattern))
            for name in layer_names:
                layer = self.named[name]
                if not callable(getattr(layer, method, None)):
                    self._complain(
                        ("attention_methods", pattern),
                        f"{name} is a {_kind(layer)}, and has no method '{method}'",
                    )
                    break
                layer.attention_methods = tuple(dict.fromkeys((*attention_methods_of(layer), method)))

    def branch(self, branches: Mapping[str, Sequence[Sequence[str]]]) -> None:
        """Gives layers their `branches`."""
        for pattern, chains in branches.items():
            layer_names = self._layers(pattern)
            if not layer_names:
                self._complain(("branches", pattern), self._nothing(pattern))
            for name in layer_names:
                for word in (word for chain in chains for word in chain):
                    if f"{name}.{word}" not in self.named:
                        self._complain(("branches", pattern), self._nothing(f"{name}.{word}"))
                        return
                self.named[name].branches = tuple(map(tuple, chains))

    def chain(self, blocks: Sequence[Any]) -> tuple[Any, ...]:
        """The blocks with patterns expanded: a layer's name, a function, or a tuple of these."""
        elements: list[Any] = []
        for number, block in enumerate(blocks):
            path: Keys = ("blocks", number)
            if isinstance(block, (list, tuple)):
                together = [each for element in block for each in self._elements(element, path)]
                elements += [tuple(together)] if together else []
            else:
                elements += self._elements(block, path)
        if blocks and not self.mistakes:
            self._all_in(elements)
        return tuple(elements)

    def _elements(self, element: Any, path: Keys) -> list[Any]:
        if isinstance(element, str):
            layer_names = self._layers(element)
            if not layer_names:
                self._complain(path, self._nothing(element))
            for name in layer_names:
                if _kind(self.named[name]) in LISTS:
                    self._complain(
                        path, f"{name} is a {_kind(self.named[name])}, which has no forward: write '{name}.*'"
                    )
            return list(layer_names)
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
            self._complain(
                path, f"a function in blocks is {{use: package.function, …}}, not {show(settings)}"
            )
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
                signature(function).bind(None, **settings)  # what it is given, and these
                block = partial(function, **settings)
        except Exception as error:  # noqa: BLE001 - the user's function, and their arguments
            self._complain(path, f"{use} cannot be used: {error}")
            return []
        if any(True for _ in getattr(block, "parameters", list)()):
            self._complain(
                path, f"{use} has weights of its own, which the model does not know: name its layers"
            )
            return []
        return [block]

    def _all_in(self, blocks: Iterable[Any]) -> None:
        """Complains where a parameter is in no block: its gradient would never be there."""
        names = [e for b in blocks for e in (b if isinstance(b, tuple) else (b,)) if isinstance(e, str)]
        inside = {id(p) for name in names for p in self.named[name].parameters()}
        outside = [name for name, p in self.model.named_parameters() if id(p) not in inside]
        if outside:
            more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
            self._complain(
                ("blocks",), f"'{outside[0]}'{more} is in none of them, and they are the whole model"
            )

    def _layers(self, pattern: str) -> list[str]:
        return matching(pattern, (name for name in self.named if name))

    def _numbers(self, pattern: str) -> list[str]:
        """Whole numbers that a pattern means: attributes of layers."""
        parent, _, word = pattern.rpartition(".")
        owners = self._layers(parent) if parent else [""]
        names = [(owner, vars(self.named[owner]).get(word)) for owner in owners]
        return [f"{owner}.{word}".lstrip(".") for owner, value in names if type(value) is int]

    def _uncuttable(self, name: str, layer: Any, way: Way) -> str | None:
        if isinstance(layer, int):
            return None if way in COUNTED else f"{name} is a number, which {way} does not divide"
        kinds = CUTTABLE[way]
        if kinds and not set(kinds) & {kind.__name__ for kind in type(layer).__mro__}:
            return f"{name} is a {_kind(layer)}, and {way} is for {', '.join(kinds)}"
        return None

    def _nothing(self, pattern: str) -> str:
        """«no layer is called 'a.c': a holds b. Did you mean 'b'?»: where the names part."""
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
        self.mistakes.append(Mistake(where="", what=f"{dotted}: {message}", path=path))


def _kind(layer: Any) -> str:
    return type(layer).__name__


def named_in(settings: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """The settings that are annotations: a model that has a setting of such a name (`fields`) keeps it for itself."""
    taken = set(fields)
    return {key: settings[key] for key in KEYS if key in settings and key not in taken}
