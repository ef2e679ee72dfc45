"""Recognizes an error for lack of memory, and reads the size that could not be allocated."""

from __future__ import annotations

import re

from paddle_dp.errors import message_of
from paddle_dp.text import amount

_MEMORY = re.compile(r"MemoryError|ResourceExhausted|Out of memory error")
_SIZE = re.compile(r"alloc memory of (\d+) size|[Aa]llocate ([\d.]+) ?([kKMGT]?i?B)")


def memory_error(error: BaseException | None) -> BaseException | None:
    """`error` if it is one for lack of memory, or the one that its SystemError hides; else None.

    Paddle (3.3.1) raises a MemoryError, in a Python backward an OSError with its text, and a SystemError where a hook
    of a backward has raised one. Other errors are no lack of memory, even if they were raised while one was handled.
    """
    while error is not None and not _MEMORY.search(f"{type(error).__name__}: {message_of(error)}"):
        error = error.__cause__ or error.__context__ if isinstance(error, SystemError) else None
    return error


def unallocated(error: BaseException) -> str:
    """ "3.2 GB": the size that an error for lack of memory names; "" if it names none."""
    found = _SIZE.search(message_of(error))
    if found is None:
        return ""
    return amount(float(found[1])) if found[1] else f"{float(found[2]):g} {found[3]}"
