"""One replaced attribute of Paddle as a fact: where it stands, what stands there now, what went wrong before."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paddle_dp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Patch:
    """`owner.name` becomes `value`, because of `symptom` (seen on Paddle 3.3.1 unless it says otherwise).

    `missing` says what a Paddle without that name means: "refuse" it is not the Paddle we know, "add" the name is new
    on a CPU build, "skip" this version has no use for it.
    """

    owner: str
    name: str
    value: Any
    symptom: str
    missing: Literal["refuse", "add", "skip"] = "refuse"

    @property
    def target(self) -> str:
        return f"{self.owner}.{self.name}"


def apply(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Puts every patch in its place and returns the dotted names that were changed.

    Nothing is changed before all owners are found. Raises UsageError on a Paddle that lacks a name we replace.
    """
    found = [(patch, owner) for patch in patches if (owner := _owner(patch)) is not None]
    for patch, owner in found:
        setattr(owner, patch.name, patch.value)
    return tuple(patch.target for patch, _ in found)


def _owner(patch: Patch) -> Any | None:
    """The module or class that holds the name, or None where this Paddle has no use for the patch."""
    owner = look_up(patch.owner)
    if owner is not None and (patch.missing == "add" or hasattr(owner, patch.name)):
        return owner
    if patch.missing == "skip":
        return None
    raise UsageError(
        f"this Paddle has no {patch.target}, which must be replaced ({patch.symptom}). "
        "Install a version that it knows: pip install 'paddlepaddle==3.3.1'."
    )


def look_up(dotted: str) -> Any | None:
    """The module, class or function called `dotted`, or None."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None
