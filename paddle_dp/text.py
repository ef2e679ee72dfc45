"""Numbers and lists in messages: "3 ranks", "ranks 0, 2", "a and 3 more", "twice", "12.5 ms", "1.2 GB", "25 MB"."""

from __future__ import annotations

from collections.abc import Iterable, Sized

CAN_DIFFER = "; the training can differ"  # ends a sentence on state that forward reads, or does not
FIRST_SAMPLES = "with the first samples"  # in a sentence on a trial that failed, as the training may


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """ "1 batch", "3 batches"; `nouns` is the plural unless it is noun + s."""
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def numbered(noun: str, numbers: Iterable[object], shown: int | None = None) -> str:
    """ "rank 2", "ranks 0, 2"; if there are more than `shown`, "ranks 0, 1, … (64 of them)"."""
    listed = list(numbers)
    cut = and_more(listed, shown, f", … ({len(listed)} of them)") if shown else ""
    return f"{noun}{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:shown]))}{cut}"


def few(items: Iterable[object], shown: int = 6) -> str:
    """ "3, 17, 42, …": the first `shown` items."""
    listed = list(items)
    return ", ".join(map(str, listed[:shown])) + and_more(listed, shown, ", …")


def and_more(items: Sized, shown: int = 1, phrase: str = " and {} more") -> str:
    """ " and 2 more" after the first `shown` items, or "" if that is all."""
    return phrase.format(len(items) - shown) if len(items) > shown else ""


def times(count: int) -> str:
    return {2: "twice", 3: "three times"}.get(count, f"{count} times")


def digits(number: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"  # .3g of 999.5 is 1e+03


def duration(seconds: float) -> str:
    """ "1.25 s", "12.5 ms"."""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(1e3 * seconds)} ms"


def gigabytes(size: float) -> str:
    """ "1.2 GB", of 2**30 bytes."""
    return f"{size / 2**30:.1f} GB"


def amount(size: float) -> str:
    power = min(len(f"{size:.0f}") - 1, 12) // 3  # of 1000
    return f"{digits(size / 1000**power)} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
