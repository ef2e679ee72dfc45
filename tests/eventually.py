"""Waits for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 5.0, pause: float = 0.02) -> None:
    """Returns as soon as `condition()` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(pause)
