"""The shelves are folders: this module lists their parts and imports them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from paddle_dp.errors import UsageError, did_you_mean

# The shelf and the noun of one part of it; every shelf but models/ is a folder of this package.
SHELVES: dict[str, str] = {
    "models": "model", "datasets": "dataset", "losses": "loss", "optimizers": "optimizer", "schedules": "schedule",
    "strategies": "strategy", "adapters": "adapter", "metrics": "metric", "callbacks": "callback",
}  # fmt: skip
PACKAGE = Path(__file__).resolve().parent.parent
CODE = "code"  # in a run's folder: copies of the recipe's modules that are not installed


def shipped(name: str) -> Path | None:
    """The folder of the models or configs that come with this package: inside an installed package, next to it in a
    clone. None if neither exists."""
    candidates = (PACKAGE / "shipped" / name, PACKAGE.parent / name)
    return next((folder for folder in candidates if folder.is_dir()), None)


def folders(shelf: str, home: Path | None = None) -> list[Path]:
    """The shelf's folders in search order.

    For models: models/ in the working folder, or next to or above the recipe file `home`; then the run's copies; then
    the shipped models.
    """
    if shelf != "models":
        return [PACKAGE / shelf]
    roots = [Path.cwd(), *(home.resolve().parents if home else ())]
    user = next((p / "models" for p in roots if any(iter_modules([str(p / "models")]))), None)
    code = copied_code(home)
    paths = (user, code / "models" if code else None, shipped("models"))
    return list(dict.fromkeys(path.resolve() for path in paths if path is not None and path.is_dir()))


def copied_code(home: Path | None) -> Path | None:
    """The folder of the code that the run with recipe `home` keeps, or None."""
    folder = None if home is None else home.resolve().parent / CODE
    return folder if folder is not None and folder.is_dir() else None


def names(shelf: str, home: Path | None = None) -> list[str]:
    """The parts on a shelf, sorted. Imports none of them. Raises UsageError if there is no such shelf."""
    if shelf not in SHELVES:
        raise UsageError(f"There is no shelf '{shelf}'.{did_you_mean(shelf, SHELVES, 'The shelves are')}")
    module_names = {module.name for module in iter_modules(map(str, folders(shelf, home)))}
    return sorted(name for name in module_names if not name.startswith("_"))


def summary(shelf: str, name: str, home: Path | None = None) -> str:
    """The first docstring line of a part, read without importing it."""
    return (ast.get_docstring(ast.parse(_source(shelf, name, home))) or "").split("\n")[0]


def has_config(shelf: str, name: str, home: Path | None = None) -> bool:
    """True if a file mentions a Config. It is not imported: a user's models/ may hold others, such as a setup.py."""
    try:
        return "Config" in _source(shelf, name, home)
    except (OSError, UnicodeDecodeError):
        return False


def _source(shelf: str, name: str, home: Path | None) -> str:
    files = filter(None, (module_file(folder / name) for folder in folders(shelf, home)))
    return next(files).read_text("utf-8")


def module_file(stem: Path) -> Path | None:
    """The file of the module `stem`, found as Python does: the __init__.py of a folder, or a file."""
    options = (stem / "__init__.py", stem.parent / f"{stem.name}.py")
    return next((option for option in options if os.path.isfile(option)), None)


def load(shelf: str, name: str, home: Path | None = None) -> ModuleType:
    """Imports one file of a shelf."""
    if shelf != "models":
        return import_module(f"paddle_dp.{shelf}.{name}")
    _make_importable(folders(shelf, home))
    return import_module(f"models.{name}")


def _make_importable(paths: Sequence[Path]) -> None:
    """Makes these folders the package `models`, independent of sys.path and of a `models` imported before."""
    known, search_path = sys.modules.get("models"), [str(path) for path in paths]
    if known is not None and search_path == list(getattr(known, "__path__", [])):
        return
    for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
        del sys.modules[name]
    init = paths[0] / "__init__.py"
    if init.exists():
        spec = spec_from_file_location("models", init, submodule_search_locations=search_path)
    else:
        spec = ModuleSpec("models", None, is_package=True)
        spec.submodule_search_locations = search_path
    assert spec is not None, "a file ending in .py has a loader"
    package = sys.modules["models"] = module_from_spec(spec)
    if spec.loader:
        spec.loader.exec_module(package)
