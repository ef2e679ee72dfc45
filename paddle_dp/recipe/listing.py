"""Tables of the shelves, their parts and the parts' settings, for `paddle-dp parts`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.part import SHELVES, Annotation, find, names, settings_of, summary
from paddle_dp.recipe import hf_config


def listing(shelf_name: str | None, part_name: str | None) -> Group:
    """Lists all shelves, one shelf, or one part. Raises UsageError for an unknown name."""
    if shelf_name is None:
        return shelves()
    return shelf(shelf_name) if part_name is None else part(shelf_name, part_name)


def shelves() -> Group:
    """Every shelf and the first docstring line of each part on it. Imports no part."""
    return Group(*(_summaries(shelf) for shelf in SHELVES))


def shelf(name: str) -> Group:
    """Every part of one shelf with its settings. Imports them."""
    entries = [part(name, each) for each in names(name)]
    return Group(*entries) if entries else Group(_summaries(name))


def part(shelf: str, name: str) -> Group:
    """One part: its first docstring line, its Config's docstring, and its settings. Raises UsageError if unknown."""
    known = names(shelf)
    if "." not in name and name not in known:
        hint = did_you_mean(name, known, f"On the shelf {shelf}:")
        raise UsageError(f"There is no {SHELVES[shelf]} '{name}'.{hint}")
    config = find(shelf, name)
    help_line = summary(shelf, name) if name in known else (config.__doc__ or "").split("\n")[0]
    use = f"{{use: {name}}}"
    key = f"{shelf}: [{use}]" if shelf in ("metrics", "callbacks") else f"{SHELVES[shelf]}: {use}"
    title = Text.assemble((key, "bold"), f"  {help_line}")
    return Group(title, *_notes(config), _settings(config), *_annotations(shelf, config), "")


def _summaries(name: str) -> Table:
    table = Table(box=None, title=f"{name}", title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True, min_width=22)
    table.add_column()
    for each in names(name):
        table.add_row(each, escape(summary(name, each)))
    return table


def _notes(config: type[Any]) -> Iterator[Padding]:
    """The Config's docstring, unless dataclass wrote it."""
    text = inspect.cleandoc(config.__doc__ or "")
    if text and is_dataclass(config) and not text.startswith(f"{config.__name__}("):
        yield Padding(Text(text, style="italic"), (0, 0, 0, 2))


def _annotations(shelf: str, config: type[Any]) -> Iterator[Padding]:
    """The keys that a recipe may give for this part in addition to its settings."""
    setting_names = {setting.name for setting in settings_of(config)}
    keys = [setting.name for setting in settings_of(Annotation) if setting.name not in setting_names]
    notes = {
        "models": [f"{', '.join(keys)}: how its layers can be split (docs/add-a-part.md)"] * bool(keys),
        "optimizers": [
            "groups: parameters by name that are frozen, or have another rate or decay (docs/fine-tuning.md)"
        ],
        "datasets": ["reading: each, or scatter where only rank 0 can read the data (docs/parallelism.md)"],
    }  # fmt: skip
    if hf_config.has_table(config):
        notes["models"].append(f"{hf_config.KEY}: {hf_config.MEANING}")
    for note in notes.get(shelf, ()):
        yield Padding(Text(f"and {note}", style="dim"), (0, 0, 0, 2))


def _settings(config: type[Any]) -> Padding:
    table = Table(box=None, show_header=True, header_style="dim")
    table.add_column("setting", style="cyan")
    table.add_column("default")
    table.add_column("type")
    table.add_column("meaning", ratio=3)
    for setting in settings_of(config):
        default = "[red]must be given[/red]" if setting.default is None else escape(setting.default)
        table.add_row(setting.name, default, escape(setting.type), escape(setting.meaning))
    return Padding(table if table.rows else Text("no settings", style="dim"), (0, 0, 0, 2))
