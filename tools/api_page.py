"""Writes docs/reference/api.md from the public docstrings; --check exits 1 if the page is not up to date."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import paddle_dp
from paddle_dp import errors
from paddle_dp.train.callback import Moment

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/api.md"
GROUPS = {
    "A training": ("Trainer", "Callback", "Moment", "Progress"),
    "A recipe": ("read_recipe", "Recipe", "Precision"),
    "The processes": ("join", "Mesh"),
    "Data": ("Sampler", "Loader", "Batch"),
    "Updates": ("Learner",),
}
HEAD = """# Python API

Which classes and functions of paddle_dp may a script of mine import, and what do they take?

`from paddle_dp import Trainer` and so on: these names are public, all others may change. All ranks call a *collective*
method, in the same order. A callback gets a `Moment`; no script makes one. [Your script](../start/your-script.md)
is the introduction, [recipes.md](../recipes.md) has the keys of a recipe. <!-- Written by `make docs`. -->
"""


def page() -> Iterator[str]:
    listed = {name for names in GROUPS.values() for name in names}
    assert listed == {*paddle_dp.__all__, "Moment"} - {"__version__"}, (
        "GROUPS is not the list of public names"
    )
    yield HEAD
    for group, names in GROUPS.items():
        yield f"## {group}\n"
        for name in names:
            yield from of_name(name, Moment if name == "Moment" else getattr(paddle_dp, name))
    yield "## Errors\n\nThey are in `paddle_dp.errors`.\n\n| error | meaning |\n|---|---|"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            yield f"| `{name}` | {prose(kind).splitlines()[0]} |"


def of_name(name: str, public: Any) -> Iterator[str]:
    """A class with its methods and properties, or a function."""
    yield f"### {name}\n"
    if name not in ("Recipe", "Callback"):  # keys of YAML; a base class without arguments
        yield f"```python\n{signature(name, public)}\n```\n"
    yield prose(public) + "\n"
    for member, kind in vars(public).items() if inspect.isclass(public) else ():
        method = getattr(kind, "__func__", getattr(kind, "fget", getattr(kind, "func", kind)))
        if member.startswith("_") or not inspect.isfunction(method) or not method.__doc__:
            continue
        if isinstance(kind, property | cached_property):
            yield f"**`{name}.{member}`**: {prose(method)}\n"
        else:
            called = signature(member, getattr(public, member))
            yield f"#### {name}.{member}\n\n```python\n{called}\n```\n\n{prose(method)}\n"


def signature(name: str, function: Any) -> str:
    """`name(argument: type = default) -> type`, on several lines if it is long."""
    form = inspect.signature(function)
    words: list[str] = []
    for each in (argument for argument in form.parameters.values() if argument.name != "self"):
        star = ["*"] if each.kind is each.KEYWORD_ONLY and "*" not in words else []
        default = "" if each.default is each.empty else re.sub("<.*", "…", f" = {each.default!r}")
        words += [*star, f"{each.name}: {getattr(each.annotation, '__name__', each.annotation)}{default}"]
    result = "Trainer" if form.return_annotation == "T" else form.return_annotation
    end = "" if result in (form.empty, None, "None") else f" -> {getattr(result, '__name__', result)}"
    line = f"{name}({', '.join(words)}){end}"
    return (
        line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    )


def prose(documented: Any) -> str:
    """The docstring as Markdown: arguments as a list, pages as links, < escaped outside `code`."""
    text = inspect.cleandoc(documented.__doc__ or "")
    if "\nArgs:\n" in text:
        text = re.sub(r"^    (\w[\w, ]*):", r"- `\1`:", text, flags=re.M).replace("\n        ", "\n  ")
    spans = text.replace("\nArgs:\n", "\n").split("`")
    text = "`".join(span if number % 2 else span.replace("<", "\\<") for number, span in enumerate(spans))
    return re.sub(r"\(docs/([\w-]+)\.md\)", r"([\1](../\1.md))", text)


if __name__ == "__main__":
    written = "\n".join(page()).rstrip() + "\n"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(written, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != written:
        sys.exit("docs/reference/api.md is not what the docstrings say: run `make docs`.")
