"""Paddle's own functions at the names that are replaced for exact dropout."""

from __future__ import annotations

from typing import Any

originals: dict[str, Any] = {}  # by dotted name; filled by `patching.install`


def original(target: str) -> Any:
    """Paddle's own function at this dotted name."""
    return originals[target]
