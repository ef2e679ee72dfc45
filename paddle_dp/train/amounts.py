"""Bytes and seconds on the screen, in three digits."""

from __future__ import annotations

from collections.abc import Mapping


def amount(size: float) -> str:
    """«25.2 MB», in powers of 1000."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    unit, name = next(((u, n) for u, n in units if size >= u), (1, "bytes"))
    return f"{_digits(size / unit)} {name}"


def summed(sizes: Mapping[str, float]) -> str:
    """«weights 128 MB, gradients 128 MB: 256 MB in all»."""
    parts = ", ".join(f"{name} {amount(size)}" for name, size in sizes.items())
    return f"{parts}: {amount(sum(sizes.values()))} in all"


def time(seconds: float) -> str:
    """«1.25 s», «12.5 ms»."""
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(1e3 * seconds)} ms"


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"
