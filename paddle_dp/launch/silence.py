"""Imports paddle without its warnings and without garbage collection; errors are still raised."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
import warnings
from collections.abc import Iterator


def ignore_ccache() -> None:
    """Hides the warning that ccache is missing, which matters only when operators are compiled."""
    warnings.filterwarnings("ignore", message="No ccache found")


def import_paddle() -> None:
    """Imports paddle without its warning against OMP_NUM_THREADS over 1: the job has chosen and printed the number.

    PYTHONWARNINGS=ignore takes effect here, too, if it was set after this process began.
    """
    ignore_ccache()
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if "paddle" in sys.modules:
        return
    with contextlib.redirect_stderr(io.StringIO()), nothing_collected():
        import paddle  # noqa: F401


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Stops garbage collection within the context, for imports, and exempts all objects made so far from it for ever.

    Paddle makes so many objects that Python would scan them several times: 0.17 of the 1.05 s of processor time until a
    rank has imported its modules.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
