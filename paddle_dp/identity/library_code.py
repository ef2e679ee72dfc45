"""Distinguishes user code from libraries, which are identified by their versions."""

from __future__ import annotations

import sys


def is_library(module: str | None) -> bool:
    """Whether a module is of Paddle, NumPy, this package or Python itself."""
    top = (module or "").partition(".")[0]
    return top in ("paddle", "paddle_dp", "numpy") or (top in sys.stdlib_module_names and top != "__main__")
