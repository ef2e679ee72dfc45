"""The shelves as folders: where each is, the parts in it, and how one is imported."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from paddle_dp.errors import UsageError, did_you_mean

# The shelf and the noun of one part of it; every shelf but models/ is a folder of this package.
SHELVES: dict[str, str] = {
    "models": "model",
    "datasets": "dataset",
    "losses": "loss",
    "optimizers": "optimizer",
    "schedules": "schedule",
    "strategies": "strategy",
    "callbacks": "callback",
}
_PACKAGE = Path(__file__).resolve().parent.parent


def folder(shelf: str, home: Path | None = None) -> Path | None:
    """The shelf's folder; models/ is in the working folder, or beside or above the recipe file `home`."""
    if shelf != "models":
        return _PACKAGE / shelf
    places = [Path.cwd(), *(home.resolve().parents if home else ())]
    return next((p / "models" for p in places if any((p / "models").glob("*.py"))), None)


def names(shelf: str, home: Path | None = None) -> list[str]:
    """The parts on a shelf, sorted. Imports none of them. Raises UsageError if there is no such shelf."""
    if shelf not in SHELVES:
        raise UsageError(f"There is no shelf '{shelf}'.{did_you_mean(shelf, SHELVES, 'The shelves are')}")
    where = folder(shelf, home)
    found = [module.name for module in iter_modules([str(where)])] if where else []
    return sorted(name for name in found if not name.startswith("_"))


def summary(shelf: str, name: str, home: Path | None = None) -> str:
    """The first docstring line of a part, read without importing it."""
    where = folder(shelf, home) or Path()
    file = where / f"{name}.py"
    tree = ast.parse((file if file.exists() else where / name / "__init__.py").read_text("utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0]


def load(shelf: str, name: str, home: Path | None = None) -> ModuleType:
    """Imports one file of a shelf."""
    if shelf != "models":
        return import_module(f"paddle_dp.{shelf}.{name}")
    where = folder(shelf, home)
    assert where is not None, "names() found it"
    _make_importable(where)
    return import_module(f"models.{name}")


def _make_importable(where: Path) -> None:
    """Makes the package `models` this folder, whatever sys.path says, and even if another `models` was imported."""
    known = sys.modules.get("models")
    if known is not None and [str(where)] == list(getattr(known, "__path__", [])):
        return
    for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
        del sys.modules[name]
    init, places = where / "__init__.py", [str(where)]
    if init.exists():
        spec = spec_from_file_location("models", init, submodule_search_locations=places)
    else:
        spec = ModuleSpec("models", None, is_package=True)
        spec.submodule_search_locations = places
    assert spec is not None, "a file ending in .py has a loader"
    package = sys.modules["models"] = module_from_spec(spec)
    if spec.loader:
        spec.loader.exec_module(package)
