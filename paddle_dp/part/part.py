"""A part of a recipe: the file (or class) that `use` names, with its settings, ready to build."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from paddle_dp.errors import InstallError, Mistake, RecipeError, UsageError, did_you_mean, near
from paddle_dp.part.aliases import PARTS
from paddle_dp.part.annotation import Annotation, annotate, named_in
from paddle_dp.part.call import Call, config_of, is_standard_library, resolve, validate_callable
from paddle_dp.part.config import adapter, fields_of
from paddle_dp.part.groups import KEY, Groups, ParameterGroup
from paddle_dp.part.settings import ErrorContext, read_settings
from paddle_dp.part.shelf import SHELVES, copied_code, folders, has_config, load, names, shipped, summary

READING = "reading"
Readers = Literal["each", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The additional key of every data set."""

    reading: Readers = "each"
    """`each`: every rank reads its samples. `scatter`: rank 0 reads all samples and sends each rank its part, for data
    that only one machine can see ([parallelism.md](parallelism.md#who-reads-the-data))."""


# By shelf: the key of all its parts, and its Config, whose field is a Part's, too.
_ADDITIONAL: dict[str, tuple[str, type[Any]]] = {"optimizers": (KEY, Groups), "datasets": (READING, Reading)}


@dataclass(frozen=True)
class Part:
    """A part of a shelf with its settings; `build(…)` makes the object from the arguments of its shelf.

    `annotation`: the recipe's tables for a model, which build() sets on its layers. `groups`: the parameter groups of
    any optimizer. `reading`: which ranks read a data set.
    """

    shelf: str
    name: str
    config: Any
    annotation: Annotation | None = None
    groups: tuple[ParameterGroup, ...] = ()
    reading: Readers = "each"

    @property
    def settings(self) -> dict[str, Any]:
        """The recipe's settings for this part, defaults included, as JSON and YAML values."""
        given_only = isinstance(self.config, Call)  # a class's defaults may be of any type
        config = adapter(type(self.config))
        written = config.dump_python(self.config, mode="json", exclude_unset=given_only, by_alias=True)
        if self.annotation is not None:
            tables = adapter(Annotation).dump_python(self.annotation, mode="json")
            written |= {key: value for key, value in tables.items() if value}
        if self.groups:
            groups = adapter(tuple[ParameterGroup, ...])
            written |= {KEY: groups.dump_python(self.groups, mode="json", exclude_none=True)}
        if self.shelf == "datasets" and READING not in written:
            written |= {READING: self.reading}
        return {"use": self.name, **written}

    def refuse(self, recipe: Any, ranks: int, device: str) -> None:
        """Raises UsageError if the part does not support the recipe on `ranks` ranks of "cpu" or "gpu".

        A Config without a method `refuse` supports everything.
        """
        if hasattr(self.config, "refuse"):
            self.config.refuse(recipe, ranks, device)

    @property
    def needs_job(self) -> bool:
        """Whether a callback works only in a job (`Callback.needs_job`): by the Config, or class, that `use` names."""
        return bool(getattr(getattr(self.config, "called", self.config), "needs_job", False))

    def prepare(self, model: Any) -> list[str]:
        """Lets an optimizer see the whole model before it is placed (its Config's `prepare`); returns its remarks."""
        return list(self.config.prepare(model)) if hasattr(self.config, "prepare") else []

    def build(self, *arguments: Any, **named: Any) -> Any:
        """Builds the object. Raises RecipeError if a model's annotation does not fit it.

        Paddle accepts fixed parameter names (`ParamAttr(name=…)`) once per process; here each build may use them again.
        Generated names continue, so that no two parameters of an optimizer share one.
        """
        if self.shelf == "models":
            _free_fixed_names()
        product = self.config.build(*arguments, **named)
        return product if self.annotation is None else annotate(product, self.annotation)


def _free_fixed_names() -> None:
    """Makes Paddle forget the fixed parameter names used in this process."""
    if "paddle" not in sys.modules:
        return  # a test's model without Paddle
    from paddle.utils import unique_name

    generator, _ = unique_name.switch()
    unique_name.switch(generator)


def read_part(
    shelf: str, settings: Any, prefix: str | None = None, home: Path | None = None, *, tries: bool = True
) -> Part:
    """Reads a part's `settings`, `use` included. `prefix`: their key in a recipe; `home`: the recipe's file.

    `tries`: checks a model's annotation against its layers, which are built without memory if possible. Imports the
    part's file. Raises RecipeError with every mistake; InstallError if the part needs Paddle and it is not installed.
    """
    noun = SHELVES[shelf]
    prefix = prefix or noun
    if not isinstance(settings, Mapping) or not isinstance(settings.get("use"), str):
        raise RecipeError([Mistake(where="", message=_needs_use(shelf, prefix, settings, home))])
    use = settings["use"]
    kind = find(shelf, use, home)
    tables = named_in(settings, fields_of(kind)) if shelf == "models" else {}
    key, kind_of_key = _ADDITIONAL.get(shelf, ("", type(None)))
    additional = {key: settings[key]} if key in settings and key not in fields_of(kind) else {}
    rest = {name: value for name, value in settings.items() if name not in {"use", *tables, *additional}}
    hint = partial(_hint, shelf, use, kind, prefix, home)
    owner = ErrorContext(subject=f"{noun} {use}", prefix=prefix, hint=hint)
    annotation = read_settings(Annotation, tables, owner) if tables else None
    config = read_settings(kind, rest, owner, home)
    more = {key: getattr(read_settings(kind_of_key, additional, owner), key)} if additional else {}
    part = Part(shelf, use, config, annotation, **more)
    if annotation is not None and tries:
        _try(part.config, annotation)
    return part


def _try(config: Any, annotation: Annotation) -> None:
    """Raises RecipeError if an annotation does not fit the model. If it cannot be built here, a rank will check it."""
    try:
        with lazily():
            model = config.build()
    except Exception:  # noqa: BLE001 - not every model can be built without memory
        return
    annotate(model, annotation)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context on the CPU, after which unique names, random generators and the device are as before."""
    import paddle

    generator_states, device = paddle.get_rng_state(), paddle.get_device()
    try:
        paddle.set_device("cpu")
        with paddle.utils.unique_name.guard():
            yield
    finally:
        paddle.set_device(device)
        paddle.set_rng_state(generator_states)


@contextmanager
def lazily() -> Iterator[None]:
    """An undisturbed context in which models are built without memory for weights.

    A model that computes with its weights while it is built (spectral_norm, an LSTM in Paddle 3.3.1) raises Paddle's
    error.
    """
    import paddle

    with undisturbed(), paddle.LazyGuard():
        yield


def find(shelf: str, use: str, home: Path | None = None) -> type[Any]:
    """The Config of a part, named by a shelf's file or by the dotted name of a module, class or function.

    Raises RecipeError, at the key `use`, if it does not exist, cannot be imported, or cannot be a part of this shelf.
    """
    noun = SHELVES[shelf]
    dotted = "." in use
    if not dotted and use not in (known := names(shelf, home)):
        raise _at_use(_unknown(shelf, use, known, home))
    if dotted and is_standard_library(use):
        raise _at_use(f"{noun} {use} is of Python's standard library, which holds no part of a training")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"paddle\.")  # Paddle's import warns
            target = resolve(use, copied_code(home)) if dotted else load(shelf, use, home)
    except ImportError as error:
        raise _unimported(f"{noun} {use}", error) from error
    except (Exception, SystemExit) as error:  # a user's file may raise anything while it is imported
        raise _at_use(f"{noun} {use} cannot be imported: {type(error).__name__}: {error}") from error
    config = getattr(target, "Config", None) if isinstance(target, ModuleType) else target
    has_build = isinstance(config, type) and is_dataclass(config) and hasattr(config, "build")
    if not callable(config):
        raise _at_use(_without_config(shelf, use, target))
    # A strategy is asked before there are processes, so its Config must be one of ours.
    if not (has_build and shelf != "strategies") and (wrong := validate_callable(config, shelf)):
        raise _at_use(f"{noun} {use} {wrong}")
    if has_build:
        return cast(type[Any], config)
    try:
        return config_of(config, shelf)
    except ValueError as error:  # Python cannot tell the parameters of some functions in C
        raise _at_use(f"{noun} {use} cannot be a part: {error}") from error


def _unimported(part: str, error: ImportError) -> BaseException:
    if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C while a library in C was imported
        return error.__cause__
    if (error.name or "").split(".")[0] == "paddle" and not sys.modules.get("paddle"):
        return InstallError.missing_paddle()
    return _at_use(f"{part} cannot be imported: {error}")


def _without_config(shelf: str, use: str, target: Any) -> str:
    """The error for a file without a Config. A file in the user's models/ may hide a shipped model of that name."""
    noun, file = SHELVES[shelf], getattr(target, "__file__", None)
    if "." in use or file is None:
        return f"{noun} {use} holds no Config: name a class or function in it, or give it one"
    ours, hides = shipped(shelf), ":"
    if ours is not None and not Path(file).is_relative_to(ours) and (ours / f"{use}.py").is_file():
        hides = f", and hides the {noun} {use} that comes with paddle_dp: give the file another name, or"
    return (
        f"{noun} {use} is {file} here, which holds no Config{hides} name a class or function in it (use: "
        f"{shelf}.{use}.CLASS), or give it a Config"
    )


def _hint(shelf: str, use: str, kind: type[Any], prefix: str, home: Path | None, name: str) -> str:
    """The hint for a setting that the part `use` lacks: the training provides it, or other parts have it."""
    if issubclass(kind, Call) and name in kind.training_arguments:
        hint = {
            "losses": " A loss factory takes its settings by name: def make(*, …).",
            "datasets": " The first argument of a data set's class or function gets the split, 'train' or 'test'.",
        }.get(shelf, "")
        return f" '{name}' is given by the training.{hint}"
    known = [other for other in names(shelf, home) if other != use and has_config(shelf, other, home)]
    alternatives = [other for other in known if name in _settings(shelf, other, home)]
    if not alternatives:
        return ""
    if len(alternatives) > 1:
        return f" '{name}' is a setting of the {shelf} {', '.join(alternatives[:-1])} and {alternatives[-1]}."
    in_list = prefix.partition(".")[0] == shelf  # one of several of a shelf, as callbacks.evaluate
    how = f"{shelf}.{alternatives[0]}.{name}" if in_list else f"{prefix}.use={alternatives[0]}"
    return f" '{name}' is a setting of {SHELVES[shelf]} {alternatives[0]}: {how}."


def _settings(shelf: str, use: str, home: Path | None) -> dict[str, Any]:
    """The settings of a part by name; empty if it cannot be imported."""
    try:
        return fields_of(find(shelf, use, home))
    except UsageError:
        return {}


def _at_use(message: str) -> RecipeError:
    return RecipeError([Mistake(where="", message=message, path=("use",))])


def _unknown(shelf: str, use: str, known: list[str], home: Path | None) -> str:
    if own_file := _user_file(use, home):
        return f"there is no {SHELVES[shelf]} '{use}' on the shelf {shelf}. {own_file}"
    hint = ""
    if shelf == "models" and len(folders(shelf, home)) == 1:
        hint = " Your own models are files of a folder models/ here or above the recipe, or package.module.Class."
    elif use[:1].isupper():
        hint = f" A class of your own is named with its module: package.module.{use}."
    listed = did_you_mean(use, known, f"On the shelf {shelf}:")
    if elsewhere := PARTS.get(shelf, {}).get(use.lower()):
        meant = f" Here that is {elsewhere}." if elsewhere in known else f" Here{elsewhere}."
        listed = f" On the shelf {shelf}: {', '.join(known)}."
    else:
        meant = "" if near(use, known) else _by_another_name(shelf, use, known, home)
    return f"there is no {SHELVES[shelf]} '{use}'.{meant}{listed}{hint}"


def _by_another_name(shelf: str, use: str, known: list[str], home: Path | None) -> str:
    """The hint for the only part with the word in its summary, as local_sgd's has DiLoCo; else ""."""
    pattern = re.compile(rf"\b{re.escape(use)}\b", re.IGNORECASE)
    suggestions = []
    for name in known:
        with suppress(SyntaxError, ValueError):  # a user's file may be damaged
            if pattern.search(help_line := summary(shelf, name, home)):
                suggestions.append(f" Perhaps '{name}' is meant: {help_line}")
    return suggestions[0] if len(suggestions) == 1 else ""


def _user_file(use: str, home: Path | None) -> str:
    """The hint for a file of that name in the working folder or next to the recipe; "" without one."""
    here, by_recipe = Path(f"{use}.py"), (home or Path()) / f"{use}.py"
    try:
        if not here.is_file() and not by_recipe.is_file():
            return ""
    except OSError:  # the name is too long for a file
        return ""
    text = (here if here.is_file() else by_recipe).read_text("utf-8", errors="replace")
    name = "Config" if "class Config" in text else "CLASS, with the name of a class or function in it"
    where = "" if here.is_file() else f", in the folder {by_recipe.parent}: modules are imported from there"
    return f"A part in {by_recipe if where else here} is named by its module: use: {use}.{name}{where}."


def _needs_use(shelf: str, prefix: str, settings: Any, home: Path | None) -> str:
    known = ", ".join(names(shelf, home)) or "a dotted name"
    if isinstance(settings, str):
        written = f"{{use: {settings}}}"
        written = f"[{written}]" if prefix == shelf else written  # a list of parts, as callbacks
        return f"{prefix}: a part is a group of settings: write {prefix}: {written}"
    typed = ", ".join(map(str, settings)) if isinstance(settings, Mapping) and "use" not in settings else ""
    has = f". It has {typed}" if typed else ""
    return f"{prefix} needs 'use', the name of a part on the shelf {shelf}: {known}{has}"
