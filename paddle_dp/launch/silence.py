"""Keeps what Paddle says of itself while it is imported off the screen; whatever goes wrong is still raised."""

from __future__ import annotations

import contextlib
import io
import os
import warnings


def ignore_ccache() -> None:
    """Leaves out the warning that ccache is missing, which matters only to those who compile operators."""
    warnings.filterwarnings("ignore", message="No ccache found")


def import_paddle() -> None:
    """Imports paddle without its warning against OMP_NUM_THREADS over 1: the number is ours, and was printed.

    PYTHONWARNINGS=ignore, set after this process began, is made to work as if it had been set before.
    """
    ignore_ccache()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401
