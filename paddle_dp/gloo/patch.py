"""A replaced attribute of Paddle as data: its owner, the replacement, and the symptom without it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paddle_dp.errors import UsageError

GLOO = "paddle.base.core.ProcessGroupGloo"


@dataclass(frozen=True)
class Patch:
    """Replaces `owner.name` by `value`, because of `symptom` (seen on Paddle 3.3.1 unless stated otherwise).

    `missing` is the action if Paddle lacks the name: "raise" an error, "add" it (CPU builds lack it), or "skip" it
    (that version does not need it).
    """

    owner: str
    name: str
    value: Any
    symptom: str
    missing: Literal["raise", "add", "skip"] = "raise"

    @property
    def target(self) -> str:
        return f"{self.owner}.{self.name}"


def apply(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Applies every patch and returns the dotted names that were changed.

    Nothing changes until all owners are found. Raises UsageError on a Paddle that lacks a name to be replaced.
    """
    with_owners = [(patch, owner) for patch in patches if (owner := _owner(patch)) is not None]
    for patch, owner in with_owners:
        setattr(owner, patch.name, patch.value)
    return tuple(patch.target for patch, _ in with_owners)


def _owner(patch: Patch) -> Any | None:
    """Returns the module or class to change, or None if this version of Paddle does not need the patch."""
    owner = look_up(patch.owner)
    if owner is not None and (patch.missing == "add" or hasattr(owner, patch.name)):
        return owner
    if patch.missing == "skip":
        return None
    raise UsageError(
        f"this Paddle has no {patch.target}, which must be replaced ({patch.symptom}). "
        "Install a version that paddle_dp knows: pip install 'paddlepaddle==3.3.1'."
    )


def look_up(dotted: str) -> Any | None:
    """Returns the module, class or function called `dotted`, or None."""
    try:
        return pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return None
