"""A recipe's settings, flattened for VisualDL's table of runs."""

from __future__ import annotations

from typing import Any


def settings(recipe: dict[str, Any]) -> dict[str, int | float | str]:
    """Flattens a recipe's settings to the types of VisualDL's table: `model: mlp`, `model/width: 64`.

    Names are joined by / because a column with a dot in its name stays empty there.
    """
    flat: dict[str, int | float | str] = {}
    for name, value in recipe.items():
        if name in ("callbacks", "name", "output_dir", "loader"):
            continue
        for key, leaf in _leaves(name, value):
            if isinstance(leaf, bool):
                leaf = "yes" if leaf else "no"
            flat[key] = leaf if isinstance(leaf, int | float | str) else "none" if leaf is None else str(leaf)
    return flat


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, [*value] if isinstance(value, tuple) else value)]
    pairs = [(name if key == "use" else f"{name}/{key}", leaf) for key, leaf in value.items()]
    return [row for key, leaf in pairs for row in _leaves(key, leaf)]
