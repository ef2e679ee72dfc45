"""Prints `--help`: the usage line, the description, and a row for each argument, option and verb.

Typer's page breaks lines where the docstring's source does, and shows Python annotations, differently in each version.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from paddle_dp.part.aliases import OPTIONS, VERBS

WIDEST = 100  # columns; a longer line is hard to read


def usage(parameters: Iterable[Any]) -> list[str]:
    """Returns the usage line after the verb: "[OPTIONS]", "RECIPE", "[KEY=VALUE]..."."""
    pieces = ["[OPTIONS]"]
    for each in parameters:
        if each.param_type_name == "argument":
            more = "..." if each.nargs != 1 else ""
            name = f"{each.metavar}{more}" if each.required else f"[{each.metavar}]{more}"
            pieces.append(str(each.metavar) if " " in each.metavar else name)
    return pieces


def paragraphs(text: str | None) -> list[str]:
    """Returns a docstring's paragraphs, each as one line."""
    return [" ".join(each.split()) for each in inspect.cleandoc(text or "").split("\n\n")]


def page(command: Any, context: Any) -> Group:
    """Returns the complete page of `--help`."""
    parameters = [each for each in command.get_params(context) if not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    usage_line = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    blocks: list[RenderableType] = [Text.assemble(("Usage: ", "bold"), usage_line)]
    blocks += [Text(each) for each in paragraphs(command.help)]
    blocks += _section("Arguments", [(each.metavar, each.help or "") for each in arguments])
    blocks += _section("Options", [(_name(each), _meaning(each)) for each in options])
    if isinstance(command, TyperGroup):
        verbs = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        blocks += _section("Commands", [(name, paragraphs(verb.help)[0]) for name, verb in verbs if verb])
    return Group(blocks[0], *(line for block in blocks[1:] for line in (Text(), block)))


def _section(title: str, rows: list[tuple[str, str]]) -> Iterator[RenderableType]:
    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    for name, meaning in rows:
        table.add_row(Text(f"  {name}"), Text(meaning))
    yield Group(Text(f"{title}:", style="bold"), table)


def _name(option: Any) -> str:
    """Returns an option's names and metavar, "--output-dir, --out DIR"; a flag has only names, "--run, --no-run"."""
    short_last = sorted([*option.opts, *option.secondary_opts], key=lambda name: not name.startswith("--"))
    names = ", ".join(short_last)
    return names if option.is_flag else f"{names} {option.metavar}"


def _meaning(option: Any) -> str:
    """Returns an option's help text, with "[required]" or its default."""
    if option.required:
        return f"{option.help} [required]"
    if option.default is None or option.is_flag:
        return str(option.help)
    value = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    return f"{option.help} [default: {value!r}]" if " " in value else f"{option.help} [default: {value}]"


class _Page:
    """A command whose `--help` is a page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console()
        console.print(page(self, ctx), width=min(console.width, WIDEST))


class Verb(_Page, TyperCommand):
    """One verb of `paddle-dp`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        foreign = ["[ARGUMENTS]..."] if self.context_settings.get("allow_extra_args") else []
        return [*usage(self.get_params(ctx)), *foreign]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; for an option of another launcher or command line, the error names ours."""
        try:
            return list(super().parse_args(ctx, args))
        except Exception as error:  # click's NoSuchOption, whose module differs between versions of typer
            name = getattr(error, "option_name", None)
            if type(error).__name__ == "NoSuchOption" and name in OPTIONS:
                ctx.fail(f"No such option: {name}. Here that is {OPTIONS[name]}.")
            raise


class Verbs(_Page, TyperGroup):
    """`paddle-dp` itself."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "COMMAND", "[ARGS]..."]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolves a verb; for a verb of another command line, the error names ours."""
        name = args[0]
        if self.get_command(ctx, name) is None and (here := VERBS.get(name.lower())):
            ctx.fail(f"No such command '{name}'. Here that is paddle-dp {here}.")
        return super().resolve_command(ctx, args)
