"""Any importable class or function as a part: `use: package.module.Class`, its parameters are its settings."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.errors import PydanticUserError

# What build() is called with, which a class or function takes itself: by position, or by name for schedules.
GIVEN: dict[str, tuple[str, ...]] = {
    "datasets": ("split",),
    "optimizers": ("learning_rate", "named_parameters"),
    "strategies": ("mesh",),
    "callbacks": ("run",),
}
GIVEN_BY_NAME: dict[str, tuple[str, ...]] = {"schedules": ("steps", "steps_per_epoch", "batch")}


class Call(BaseModel):
    """The Config of a part that is a plain class or function: what the recipe gives goes in as keywords."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
    called: ClassVar[Callable[..., Any]]

    def build(self, *given: Any, **named: Any) -> Any:
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).called(*given, **named, **settings)


def resolve(dotted: str) -> Any:
    """The module, or what stands in a module, under a dotted name. Raises ImportError when there is none.

    The working folder is searched last, so that a file of the user's hides no installed package.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    module, rest = _longest_module(dotted)
    found: Any = module
    for word in rest:
        if not hasattr(found, word):
            raise ImportError(f"{module.__name__} has no '{word}'", name=dotted)
        found = getattr(found, word)
    return found


@cache
def config_of(called: Callable[..., Any], shelf: str) -> type[Call]:
    """A Config whose settings are the parameters of a class or function, less those that build() is given."""
    taken = GIVEN_BY_NAME.get(shelf, ())
    parameters = list(inspect.signature(called).parameters.values())[len(GIVEN.get(shelf, ())) :]
    settings: dict[str, Any] = {
        p.name: (_annotation(p, called), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken and p.name[0] != "_"
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    config = create_model(called.__name__, __base__=Call, __doc__=called.__doc__, **settings)
    config.called = staticmethod(called)
    if open_ended:
        config.model_config["extra"] = "allow"
        config.model_rebuild(force=True)
    return config


def _annotation(parameter: inspect.Parameter, called: Any) -> Any:
    """What the parameter takes, or Any where that cannot be told or cannot come from YAML."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    try:
        if isinstance(annotation, str):
            annotation = eval(annotation, vars(sys.modules[called.__module__]))
        TypeAdapter(annotation)
    except (PydanticUserError, NameError, TypeError, AttributeError, SyntaxError):
        return Any
    return annotation


def _longest_module(dotted: str) -> tuple[Any, list[str]]:
    """The module that the first words name, and the words left over."""
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        name = ".".join(words[:length])
        try:
            return import_module(name), words[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there; what it imports is not
    raise ImportError(f"no package or file '{words[0]}' is installed or stands here", name=words[0])
