"""Verbs that look and start no training: runs in the browser, parts, recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="Recipes to check.")],
) -> None:
    """Check recipes without starting anything: every mistake with its file and line."""
    from paddle_dp.recipe.check import check_all

    raise typer.Exit(check_all(recipes))


def schema() -> None:
    """Print the JSON schema of a recipe, for editors that know the YAML language server."""
    import json

    from paddle_dp.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))
