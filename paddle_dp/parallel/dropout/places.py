"""Puts the functions of `calls` and `fused` into their places in Paddle, once a process, and keeps what stood there."""

from __future__ import annotations

from paddle_dp.errors import UsageError
from paddle_dp.gloo.patch import apply, look_up
from paddle_dp.parallel.dropout import calls, fused
from paddle_dp.parallel.dropout.originals import kept


def install() -> None:
    """Puts the functions into their places; from the second call on, does nothing. On every device.

    Raises UsageError on a Paddle that lacks a name without which dropout cannot be exact.
    """
    if kept:
        return
    patches = [*calls.patches(), *fused.patches()]
    originals = {patch.target: getattr(look_up(patch.owner), patch.name, None) for patch in patches}
    try:
        apply(patches)
    except UsageError as error:
        raise UsageError(f"{error} Or set train.dropout=own: each rank then draws its own masks.") from None
    kept.update(originals)
