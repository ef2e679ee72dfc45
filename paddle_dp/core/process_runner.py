"""Runs of a function in a separate process: of a user's code, whose effects must not stay in a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
"""JSON values; under "arrays", a list of NumPy arrays."""
ProcessRunner = Callable[[Callable[[], Result]], Result]
"""Runs a function in a separate process, which starts with this one's state, and returns its result
(`assembly.sample_trial.ForkRunner`)."""


def in_this_process(function: Callable[[], Result]) -> Result:
    """Runs the function in this process: a `ProcessRunner` for functions without lasting effects."""
    return function()
