"""What Paddle itself has at the names that are replaced for exact dropout."""

from __future__ import annotations

from typing import Any

kept: dict[str, Any] = {}  # by dotted name; filled by `places.install`


def own(target: str) -> Any:
    """What Paddle itself has at this dotted name."""
    return kept[target]
