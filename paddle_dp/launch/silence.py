"""Imports paddle without the lines that it prints meanwhile; errors are still raised."""

from __future__ import annotations

import contextlib
import io
import os
import warnings


def ignore_ccache() -> None:
    """Hides the warning that ccache is missing, which matters only when operators are compiled."""
    warnings.filterwarnings("ignore", message="No ccache found")


def import_paddle() -> None:
    """Imports paddle without its warning against OMP_NUM_THREADS over 1: `settings` chose the number and printed it.

    PYTHONWARNINGS=ignore takes effect here, too, if it was set after this process began.
    """
    ignore_ccache()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401
