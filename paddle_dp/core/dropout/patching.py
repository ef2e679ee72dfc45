"""Installs the functions of `calls` and `fused` in Paddle, once per process, and saves the originals."""

from __future__ import annotations

from paddle_dp.core.dropout import calls, fused
from paddle_dp.core.dropout.originals import originals
from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import apply, look_up


def install() -> None:
    """Replaces Paddle's functions, on every device; does nothing from the second call on.

    Raises UsageError if Paddle lacks a name that exact dropout needs.
    """
    if originals:
        return
    patches = [*calls.patches(), *fused.patches()]
    before = {patch.target: look_up(patch.target) for patch in patches}
    try:
        apply(patches)
    except UsageError as error:
        raise UsageError(f"{error} Or set train.dropout=own: each rank then draws its own masks.") from None
    originals.update(before)
