"""Verbs that look and start no training: runs in the browser, parts, recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddle_dp.cli.options import recipes_and_settings
from paddle_dp.errors import UsageError

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the folder of all runs.")],
    port: Annotated[int, typer.Option(metavar="PORT")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)


def parts(
    shelf: Annotated[str | None, typer.Argument(metavar="SHELF", help="models, datasets, losses, …")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One part of the shelf.")] = None,
) -> None:
    """List the shelves, the parts of one shelf with their settings, or one part."""
    from rich.console import Console

    from paddle_dp.recipe import listing

    Console().print(listing.listing(shelf, name))


def check(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE… [KEY=VALUE…]", help="Recipes to check, and other settings."),
    ],
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Also say what a rank of N would hold.")
    ] = None,
    build: Annotated[
        int | None, typer.Option(metavar="RANK", help="Also build what this rank of --ranks would hold.")
    ] = None,
) -> None:
    """Check recipes without starting anything: every mistake with its file and line; and plan what each rank holds."""
    from paddle_dp.recipe.check import check_all

    raise typer.Exit(check_all(*recipes_and_settings(words), _forecast(ranks, build)))


def _forecast(ranks: int | None, build: int | None) -> Callable[[Recipe], Iterator[str]] | None:
    """What `check --ranks` adds to a recipe's line; None without --ranks."""
    if ranks is None:
        if build is not None:
            raise UsageError(f"--build {build} needs --ranks N: how many ranks there are.")
        return None
    from paddle_dp.launch.plan import check_ranks
    from paddle_dp.launch.silence import import_paddle

    check_ranks(ranks)
    import_paddle()
    from paddle_dp.train.forecast import forecast

    return lambda recipe: forecast(recipe, ranks, build)


def schema() -> None:
    """Print the JSON schema of a recipe, for editors that know the YAML language server."""
    import json

    from paddle_dp.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))
