"""Makes a part of any importable class or function: `use: package.module.Class`; its parameters are its settings.

A recipe is a program (SECURITY.md): this module cannot know the effects of imports or of a user's function. But
`use: os.system` is never a part, nor is a class of another kind than the shelf's: these are refused before a call.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import isbuiltin, isfunction
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.errors import PydanticUserError

# The arguments with which the training calls build(), by shelf: by position, or by name for schedules. (Paddle's
# optimizers are called by name, too: OptimizerCall.)
TRAINING_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "datasets": ("split",), "optimizers": ("learning_rate", "named_parameters"), "strategies": ("mesh",),
    "callbacks": ("run",), "adapters": ("model", "seed"),
}  # fmt: skip
_PROVIDED = {"datasets": "the split, 'train' or 'test',", "callbacks": "the run"}  # in messages
SCHEDULE_ARGUMENTS = ("steps", "steps_per_epoch", "batch")

# Each shelf's base class: its name, its package, and its name in messages. Names are compared, so that nothing is
# imported. METHODS: shelves on which a class needs one of some methods instead.
BASES = {
    "models": ("Layer", "paddle", "paddle.nn.Layer"),
    "adapters": ("Layer", "paddle", "paddle.nn.Layer"),
    "optimizers": ("Optimizer", "paddle", "paddle.optimizer.Optimizer"),
    "schedules": ("LRScheduler", "paddle", "paddle.optimizer.lr.LRScheduler"),
    "callbacks": ("Callback", "paddle_dp", "paddle_dp.Callback"),
    "strategies": ("StrategyConfig", "paddle_dp", "paddle_dp.strategies.StrategyConfig"),
}
METHODS = {
    "datasets": ("__getitem__", "__iter__"),
    "losses": ("__call__",),
    "metrics": ("__call__", "sums", "compute"),
}
# The modules of Paddle with functions that are or make parts; its other functions load files, start processes …
_OPERATIONS = (
    "paddle.nn.functional", "paddle.tensor", "paddle.incubate.nn.functional",
    "paddle.base.dygraph.generated_tensor_methods_patch",  # has gelu, tanh, abs …, made when Paddle is imported
)  # fmt: skip
PADDLE_MODULES = {"models": ("paddle.vision.models",), "losses": _OPERATIONS, "blocks": _OPERATIONS}

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Call(BaseModel):
    """The Config of a part that is a plain class or function: the recipe's settings are its keyword arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
    called: ClassVar[Callable[..., Any]]
    # Parameters that the training provides; they are no settings.
    training_arguments: ClassVar[tuple[str, ...]] = ()

    def recipe_settings(self) -> dict[str, Any]:
        """The settings in the recipe, without defaults."""
        return {name: value for name, value in self if name in self.model_fields_set}

    def build(self, *arguments: Any, **named: Any) -> Any:
        settings = {name: _copied(value) for name, value in self.recipe_settings().items()}
        return type(self).called(*arguments, **named, **settings)


def _copied(value: Any) -> Any:
    """A setting with its own dicts and lists: functions take entries out of them, and a part is built repeatedly."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


class NamedCall(Call):
    """The Config of a part that takes the training's arguments by name, or none of them, as a callback without a
    run."""

    def build(self, *arguments: Any, **named: Any) -> Any:
        return super().build(**dict(zip(type(self).training_arguments, arguments, strict=False)), **named)


class ScheduleCall(Call):
    """The Config of a schedule such as paddle.optimizer.lr.StepDecay, which need not take the training's length."""

    def build(self, *arguments: Any, **named: Any) -> Any:
        taken = {name: named[name] for name in type(self).training_arguments if name in named}
        return super().build(*arguments, **taken)


class LossCall(Call):
    """The Config of a loss or metric that is a function of (outputs, targets, …): build() returns that itself."""

    def build(self, *arguments: Any, **named: Any) -> Any:
        called, settings = type(self).called, self.recipe_settings()
        return functools.update_wrapper(functools.partial(called, **settings), called) if settings else called


class OptimizerCall(Call):
    """The Config of a class such as paddle.optimizer.Adam, which takes the model's parameters without names.
    `training_arguments`: its names for the learning rate and for the parameters."""

    def build(self, *arguments: Any, **named: Any) -> Any:
        learning_rate, named_parameters = arguments
        tensors = [tensor for _, tensor in named_parameters]
        provided = dict(zip(type(self).training_arguments, (learning_rate, tensors), strict=True))
        return super().build(**provided, **named)


def resolve(dotted: str, code_folder: Path | None = None) -> Any:
    """The module, or the object in a module, of a dotted name. Raises ImportError if there is none.

    If a package has a file without a Config and an object of one name (paddle.vision.models.alexnet is a file and a
    function), the object is returned. The working folder is searched last, so that a user's file hides no installed
    package, and after it `code_folder`, the code that a run keeps.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    if code_folder is not None and str(code_folder) not in sys.path:
        sys.path.append(str(code_folder))
    module, rest = _longest_module(dotted)
    target: Any = module
    if setup := _SET_UP.get(dotted.partition(".")[0]):
        setup()
    if not rest and not hasattr(module, "Config"):
        package, _, name = dotted.rpartition(".")
        same = getattr(sys.modules.get(package), name, None)
        return same if callable(same) else module
    for segment in rest:
        if not hasattr(target, segment):
            raise ImportError(f"{module.__name__} has no '{segment}'", name=dotted)
        target = getattr(target, segment)
    return target


@functools.cache
def _paddleclas() -> None:
    """PaddleClas's models write to a logger that its trainer makes: without one, many cannot be built."""
    import_module("ppcls.utils.logger").init_logger(log_level=logging.ERROR)


_SET_UP = {"ppcls": _paddleclas}  # by package: the set-up that its models need


@functools.cache
def config_of(called: Callable[..., Any], shelf: str) -> type[Call]:
    """Makes a Config from the parameters of a class or function, except those that the training provides."""
    parameters = list(inspect.signature(called).parameters.values())
    parameter_names = {p.name for p in parameters}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if shelf in ("losses", "metrics") and _is_loss(called, parameters):
        return _config(called, parameters, tuple(p.name for p in parameters[:2]), LossCall)
    if shelf == "optimizers" and isinstance(called, type):
        tensors = "parameter_list" if "parameter_list" in parameter_names else "parameters"
        if open_ended or {"learning_rate", tensors} <= parameter_names:
            return _config(called, parameters, ("learning_rate", tensors), OptimizerCall)
    if shelf == "schedules":
        taken = tuple(name for name in SCHEDULE_ARGUMENTS if open_ended or name in parameter_names)
        return _config(called, parameters, taken, ScheduleCall)
    provided = TRAINING_ARGUMENTS.get(shelf, ())
    first = [p for p in parameters if p.kind in (*_POSITIONAL, p.VAR_POSITIONAL)][: len(provided)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # A further `split` with a default is a setting: a `which` before it gets the split.
    by_name = {p.name for p in named if p.default is p.empty or len(first) < len(provided)}
    if provided and provided != tuple(p.name for p in first) and by_name.issuperset(provided):
        return _config(called, parameters, provided, NamedCall)
    if shelf == "callbacks" and not first:
        return _config(called, parameters, (), NamedCall)
    if reason := _wrong_first(first, shelf):
        start = "__init__(self, " if isinstance(called, type) else "make("
        if shelf == "optimizers" and isinstance(called, type):
            provided = ("learning_rate", "parameters")
        what = _PROVIDED.get(shelf) or " and ".join(provided)
        raise ValueError(f"it gets {what} first, and {reason}: def {start}{', '.join(provided)}, …)")
    return _config(called, parameters, tuple(p.name for p in first))


def _wrong_first(first: list[inspect.Parameter], shelf: str) -> str:
    """The reason why these first parameters cannot take the shelf's training arguments; "" if they can."""
    if len(first) < len(TRAINING_ARGUMENTS.get(shelf, ())) and all(p.kind in _POSITIONAL for p in first):
        return "it takes too few arguments"
    for p in first if shelf in ("datasets", "callbacks") else ():
        for kind in (int, float, bool):  # neither a split nor a run
            if p.annotation in (kind, kind.__name__) or type(p.default) is kind:
                return f"its first argument is {p.name}: {kind.__name__}"
    return ""


def _is_loss(called: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    """True if `called` is itself a loss or metric: a function with two required parameters, outputs and targets. A
    class, or a function with keyword settings, makes one instead."""
    first = [p for p in parameters[:2] if p.kind in _POSITIONAL and p.default is p.empty]
    return not isinstance(called, type) and len(first) == 2


def _config(
    called: Callable[..., Any],
    parameters: list[inspect.Parameter],
    training_arguments: tuple[str, ...],
    base: Any = Call,
) -> Any:
    settings: dict[str, Any] = {
        p.name: (_annotation(p, called), ... if p.default is p.empty else p.default)
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in training_arguments
        and p.name[0] != "_"
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    name = getattr(called, "__name__", type(called).__name__)
    config = create_model(name, __base__=base, __doc__=called.__doc__, **settings)
    config.called = staticmethod(called)
    config.training_arguments = training_arguments
    if open_ended:
        config.model_config["extra"] = "allow"
        config.model_rebuild(force=True)
    return config


def _annotation(parameter: inspect.Parameter, called: Any) -> Any:
    """The parameter's type, or Any if it is unknown or YAML cannot express it."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return Any
    try:
        if isinstance(annotation, str):
            annotation = _in_module(annotation, called.__module__)
        TypeAdapter(annotation)
    except (PydanticUserError, NameError, TypeError, AttributeError, SyntaxError):
        return Any
    return annotation


def _in_module(annotation: str, module: str) -> Any:
    """Evaluates an annotation given as text in its module. Raises NameError, SyntaxError and the like."""
    holder = type("_Holder", (), {"__annotations__": {"it": annotation}, "__module__": module})
    return get_type_hints(holder, include_extras=True)["it"]


def _longest_module(dotted: str) -> tuple[Any, list[str]]:
    """The module of the longest prefix of the name, and the remaining words."""
    segments = dotted.split(".")
    for length in range(len(segments), 0, -1):
        name = ".".join(segments[:length])
        try:
            return import_module(name), segments[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists; one of its imports does not
    message = f"no package or file '{segments[0]}' is installed, on PYTHONPATH or in {os.getcwd()}"
    raise ImportError(message, name=segments[0])


def validate_callable(called: Any, shelf: str) -> str | None:
    """The reason why `called` cannot be a part of the shelf, as the end of a sentence; None if it can.

    `shelf` is "blocks" for a function or layer in a model's chain.
    """
    while isinstance(called, functools.partial):
        called = called.func
    module = _module_of(called)
    if is_standard_library(module):
        return "is of Python's standard library, which holds no part of a training"
    if isinstance(called, type):
        return _wrong_class(called, shelf)
    if isbuiltin(called):
        return "is a function in C, whose settings cannot be checked"
    is_paddle_function = module.partition(".")[0] == "paddle" and isfunction(called)
    if is_paddle_function and not module.startswith(PADDLE_MODULES.get(shelf, ())):
        modules = " or ".join(PADDLE_MODULES.get(shelf, ())[:3])
        return f"is a function of Paddle's {module}{f'; parts are in {modules}' if modules else ', which makes none'}"
    return f"is no class that is derived from {BASES[shelf][2]}" if shelf == "strategies" else None


def is_standard_library(dotted: str) -> bool:
    """True if a dotted name belongs to Python's standard library."""
    return dotted.partition(".")[0] in sys.stdlib_module_names


def _module_of(called: Any) -> str:
    """The module of a class or function; for another object, of its class."""
    owner = called if isinstance(called, type) or hasattr(called, "__qualname__") else type(called)
    # A function in C, bound to its module or to an object.
    if (module := getattr(owner, "__module__", None)) is None:
        holder = getattr(called, "__self__", None)
        module = holder.__name__ if isinstance(holder, ModuleType) else type(holder).__module__
    return str(module)


def _wrong_class(kind: type[Any], shelf: str) -> str | None:
    name, package, written = BASES.get("models" if shelf == "blocks" else shelf, ("", "", ""))
    bases = [(base.__name__, base.__module__.partition(".")[0]) for base in kind.__mro__]
    if name and (name, package) not in bases:
        return f"is a class that is not derived from {written}"
    methods = METHODS.get(shelf, ())
    if methods and not any(m in vars(base) for m in methods for base in kind.__mro__):
        return f"is a class without the method {' or '.join(methods)}"
    return None
