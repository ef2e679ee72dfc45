"""Reads YAML as plain values, with the line of every key for messages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from paddle_dp.errors import Mistake, RecipeError, near
from paddle_dp.part.config import Keys
from paddle_dp.part.shelf import shipped
from paddle_dp.recipe.full_width import yaml_hints
from paddle_dp.text import and_more

_NUMBERS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null")}
_KNOWN = _NUMBERS | {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "timestamp", "binary")}


@dataclass
class YamlDocument:
    """The values, the location of each key ("file:line" or "override 'a.b=c'"), and the mistakes so far."""

    name: str
    values: Any = None
    source_lines: dict[Keys, str] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    text: str = ""

    def source_line(self, path: Keys) -> str:
        """The location of this key, or of the nearest enclosing group."""
        while path and path not in self.source_lines:
            path = path[:-1]
        return self.source_lines.get(path, self.name)

    def complain(self, path: Keys, message: str) -> None:
        self.mistakes.append(Mistake(where=self.source_line(path), message=message, path=path))


LARGEST, MOST = 2**17, 50_000  # bytes of a recipe; its values with aliases expanded
MOST_NAMES = 8  # of files that a message lists
DEEPEST = 100  # open brackets; the reader takes seconds for hundreds


class _TooMuchError(Exception):
    """The aliases of a recipe expand to more values than any recipe needs."""


def read_page(path: Path) -> YamlDocument:
    """Reads the recipe file as a page. Raises RecipeError if it is not one group of settings."""
    if path.suffix == ".py":
        raise _error(
            path,
            "is a script, and this command takes a recipe. For scripts there are `paddle-dp launch` and `paddle-dp "
            "audit`; a recipe can name the script's model and data (docs/start/your-model.md)",
        )
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise _error(path, f"is larger than {LARGEST >> 10} KB: that is data, not a recipe")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise _error(path, _unreadable(path, error)) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _error(f"{path}:{line}", "is not text in UTF-8") from None
    page = parse(text, str(path))
    if not page.mistakes and not isinstance(page.values, dict):
        content_kind = "empty" if page.values is None else "not a group of settings"
        raise _error(path, f"is {content_kind}: a recipe begins with `model: {{use: …}}`")
    if not isinstance(page.values, dict):
        raise RecipeError(page.mistakes)
    return page


def parse(text: str, name: str, numbered: bool = True) -> YamlDocument:
    """Parses YAML 1.2 as a page. `numbered`: locations are "name:line", otherwise the name alone."""
    page = YamlDocument(name, text=text)
    if _brackets(text) > DEEPEST:
        page.complain((), f"opens more than {DEEPEST} brackets within each other")
        return page
    reader = YAML(typ="safe", pure=True)
    try:
        page.values = _Walk(page, reader.constructor, numbered).value(reader.compose(text), ())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}" if mark and numbered else name
        message = ", ".join(filter(None, (error.context, error.problem)))
        start = error.context_mark or mark
        if mark and (hints := yaml_hints(text, start.line, mark.line, numbered=numbered)):
            message += f".{hints}"
        page.mistakes.append(Mistake(where=location, message=f"this is not YAML: {message}"))
    except _TooMuchError:
        page.source_lines.clear()
        page.complain(
            (), f"stands for more than {MOST} values, its aliases written out: no recipe needs so many"
        )
    except (YAMLError, RecursionError) as error:
        page.mistakes.append(Mistake(where=name, message=f"this is not YAML: {str(error).splitlines()[0]}"))
    return page


def _brackets(text: str) -> int:
    """The largest number of brackets open at once, including brackets in quotes and comments."""
    deepest = level = 0
    for bracket in re.findall(r"[][{}]", text):
        level = level + 1 if bracket in "[{" else max(0, level - 1)
        deepest = max(deepest, level)
    return deepest


@dataclass
class _Walk:
    """Converts YAML nodes to plain values, records locations, and reports repeated keys."""

    page: YamlDocument
    constructor: Any
    numbered: bool
    above: list[Node] = field(default_factory=list)
    values: int = 0

    def value(self, node: Node | None, path: Keys) -> Any:
        if node is None:
            return None
        self.values += 1
        if self.values > MOST:
            raise _TooMuchError
        self.page.source_lines.setdefault(path, self._source_line(node))
        if str(node.tag) not in _KNOWN or node in self.above:
            odd = f"the tag {node.tag}" if str(node.tag) not in _KNOWN else "an alias of a group around it"
            self.page.complain(path, f"{odd} has no place in a recipe")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self.above.append(node)
        value = self._mapping(node, path) if isinstance(node, MappingNode) else self._sequence(node, path)
        self.above.pop()
        return value

    def _mapping(self, node: MappingNode, path: Keys) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, ScalarNode) else "?"
            here = (*path, name)
            if name in mapping:
                first = self.page.source_line(here).removeprefix(f"{self.page.name}:")
                message = f"'{name}' is set twice" + (f", first on line {first}" if self.numbered else "")
                self.page.mistakes.append(Mistake(where=self._source_line(key), message=message))
                continue
            self.page.source_lines[here] = self._source_line(key)
            mapping[name] = self.value(value, here)
        return mapping

    def _sequence(self, node: Node, path: Keys) -> list[Any]:
        return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]

    def _scalar(self, node: ScalarNode, path: Keys) -> Any:
        if str(node.tag) not in _NUMBERS:  # dates stay text
            return node.value
        try:
            return self.constructor.construct_object(node)
        except ValueError:
            self.page.complain(path, f"'{node.value}' does not fit its tag {node.tag}")
            return None

    def _source_line(self, node: Node) -> str:
        return f"{self.page.name}:{node.start_mark.line + 1}" if self.numbered else self.page.name


def _error(location: object, message: str) -> RecipeError:
    return RecipeError([Mistake(where=str(location), message=message)])


def _meant(typed: str, names: list[str], listed_as: str) -> str:
    """ " Did you mean 'a.yaml'?", or, without a near miss, the first of the names; "" without names."""
    if guess := near(typed, names):
        return f" Did you mean '{guess}'?"
    listed = f"{', '.join(names[:MOST_NAMES])}{and_more(names, MOST_NAMES)}"
    return f" {listed_as} {listed}." if names else ""


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        inside = sorted([*path.glob("*.yaml"), *path.glob("*.yml")])
        return f"is a folder, not a recipe.{f' Did you mean {inside[0]}?' if inside else ''}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if not path.suffix and path.parent == Path():  # the name of a shipped recipe
            known = sorted(file.stem for file in (shipped("configs") or Path()).glob("*.yaml"))
            meant = _meant(path.name, known, "There are")
            return f"there is no such file, and no shipped recipe of that name.{meant}"
        neighbours = sorted(file.name for file in path.parent.glob("[!.]*.y*ml"))
        return f"there is no such file.{_meant(path.name, neighbours, 'Next to it:')}"
    return f"cannot be read: {error.strerror}"
