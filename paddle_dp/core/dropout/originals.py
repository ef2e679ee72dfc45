"""Paddle's original functions under the names that exact dropout replaces."""

from __future__ import annotations

from typing import Any

originals: dict[str, Any] = {}  # by dotted name; filled by `patching.install`


def original(target: str) -> Any:
    """Paddle's original function at this dotted name."""
    return originals[target]
